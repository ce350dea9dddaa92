# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_6_livelock.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 6, the livelock: a request is put back onto the queue that is being drained. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.LivelockScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler
from collections import deque
from minicache.errors import LivelockError
from minicache_course.incidents.broken import SPIN_LIMIT


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that finishes requests of two compatibility classes, and fail on one that loops forever.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Its batches hold requests of one `group`. Right ones may let a request of the batch's
            class bypass one of another class, or let all wait behind it; they may keep a watermark, or preempt by swap:
            test none of that.

    Raises:
        LivelockError: `schedule()` would never return. The broken scheduler raises it instead; there is no need to
            catch it.
        AssertionError: a request never finishes.
    """
    raise NotImplementedError(
        "phase 7, task 6: The livelock; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedLivelockScheduler(PagedScheduler):
    """Incident 6, fixed: a request that cannot join the batch keeps its position, and is looked at once a step."""

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests of the batch's class while there are a batch slot, token budget, and free blocks.

        A batch holds requests of one compatibility class (`group`), that of its first. Those of another class are
        deferred: they keep their positions in `waiting`, and requests behind them may be admitted. At the first of the
        batch's class that lacks blocks (`can_allocate`) or `token_budget` for its `num_new_tokens`, admission ends. An
        empty batch takes a request of any number of tokens.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        # phase 7, task 6: The livelock; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is the bug: mend
        # it.
        queue = deque(self.waiting.values())
        num_deferred = 0
        while queue and len(self.running) < self.max_num_seqs:
            request = queue.popleft()
            if self.running and self.running[0].group != request.group:
                queue.append(request)
                num_deferred += 1
                if num_deferred > SPIN_LIMIT:
                    raise LivelockError(f"{num_deferred} requests deferred in one step, of {len(self.waiting)} waiting")
                continue
            too_long = self.num_new_tokens(request) > self.token_budget
            if (too_long and self.running) or self.can_allocate(request) is not AllocStatus.OK:
                return
            self.admit(request, output)
