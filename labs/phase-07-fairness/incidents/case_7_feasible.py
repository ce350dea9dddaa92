# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_7_feasible.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 7, the feasible request: one victim is not enough, so the request is given up. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.OneVictimScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache_course.incidents.bases import EngineScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that gives up no request that fits into its pool, and fail on one that does.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may make room for a request that has waited long, or let it wait until others
            have finished; they may keep a watermark, or preempt by swap: test none of that.

    Raises:
        AssertionError: a request that fits into the pool finishes without its tokens, or never. The message shows it.
    """
    raise NotImplementedError(
        "phase 7, task 7: Given up after one victim; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedFeasibleScheduler(EngineScheduler):
    """Incident 7, fixed: as many requests are evicted as it takes."""

    def make_way(self, request: Request, output: SchedulerOutput) -> bool:
        """Get the blocks for the head of the queue, by evicting others if it has waited too long.

        `can_allocate` returns whether its blocks are free; `has_waited_too_long` counts that it was passed over, and
        returns whether this was too often; `evict_newest` preempts one request.

        Args:
            request: the head of the queue. The pool is large enough for it, once it is empty.
            output: the step so far.

        Returns:
            Whether its blocks are free now. If not, it waits on.
        """
        # phase 7, task 7: Given up after one victim; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is
        # the bug: mend it.
        if self.can_allocate(request) is AllocStatus.LATER and self.has_waited_too_long(request):
            self.evict_newest(output)
            if self.can_allocate(request) is AllocStatus.LATER:
                self.give_up(request, output)
        return self.can_allocate(request) is AllocStatus.OK
