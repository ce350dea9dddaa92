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
    requests = [Request(0, [1] * 10, 5, group="text"), Request(1, [1] * 10, 5, group="image")]
    tally = drive(create(num_blocks=64, block_size=16), requests, max_steps=100)
    assert set(tally.finished) == {0, 1}, f"of requests 0 and 1, {list(tally.finished)} finished within 100 steps"


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
        for request in list(self.waiting.values()):
            if len(self.running) >= self.max_num_seqs:
                return
            if self.running and self.running[0].group != request.group:
                continue
            too_long = self.num_new_tokens(request) > self.token_budget
            if (too_long and self.running) or self.can_allocate(request) is not AllocStatus.OK:
                return
            self.admit(request, output)
