# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_5_ignore.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 5, the sticky flag: one request is ignored, and so are all behind it. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.StickyIgnoreScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache_course.incidents.bases import EngineScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that serves the request behind an impossible one, and fail on one that gives it no blocks.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. It accepts a request that is too large for its pool, and finishes it as
            FINISHED_CAPACITY. Right ones may keep a watermark, preempt by swap, or put prompts and decodes into
            different steps: test none of that.

    Raises:
        AssertionError: a step computes tokens of a request that has no blocks for them, or the requests behind one
            that can never fit do not finish with all of their tokens.
        InvariantError: `Scheduler.check` may say the same.
    """
    raise NotImplementedError(
        "phase 7, task 5: One ignored, all ignored; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedIgnoreScheduler(EngineScheduler):
    """Incident 5, fixed: no request is affected by an impossible one ahead of it."""

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests from the head of the queue while there are a batch slot, token budget, and free blocks.

        `has_slot`, `has_budget` and `make_way` check these; `admit` moves a request into the batch, with its blocks. A
        request that can never fit is finished (`give_up`), and does not affect the next head. After a request for which
        others were evicted (`output.preempted`), no other is admitted in this step or counted as passed over.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        # phase 7, task 5: One ignored, all ignored; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is
        # the bug: mend it.
        did_ignore = False
        while self.has_slot() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                did_ignore = True
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            if not did_ignore:
                self.admit(request, output)
            else:
                self.waiting.remove(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.schedule_tokens(request, output)
            if output.preempted:
                return
