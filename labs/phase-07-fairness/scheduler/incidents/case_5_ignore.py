# Phase 7, fairness: your file. It stands in for minicache.scheduler.incidents.case_5_ignore.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 5, the sticky flag: one request is ignored, and so are all behind it. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache.scheduler.incidents.broken.StickyIgnoreScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.incidents.bases import EngineScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that serves who comes after an impossible request, and fail on one that gives it no blocks.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. It lets a request in that is too large for its pool, and ends it as FINISHED_CAPACITY.
            Right ones may keep a watermark, preempt by swap, or put prompts and decodes into different steps: test
            none of that.

    Raises:
        AssertionError: a step computes tokens of a request that has no blocks for them, or the requests behind one
            that can never fit do not end with all of their tokens.
        InvariantError: `Scheduler.check` may say the same.
    """
    raise NotImplementedError(
        "phase 7, task 5: One ignored, all ignored; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedIgnoreScheduler(EngineScheduler):
    """Incident 5, fixed: what holds of one request is said of that request alone."""

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the head of the line while there are a seat, tokens in the step, and free blocks.

        `has_seat`, `has_budget` and `make_way` say so; `seat` gives a request its blocks and its place. Whoever can
        never fit is ended (`give_up`), and the next one is looked at as if it had not been there. After a request for
        which others were evicted (`output.preempted`) nobody else is admitted in this step, or counted as passed over.

        Args:
            output: the step so far; what is admitted is added to it.
        """
        # phase 7, task 5: One ignored, all ignored; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is
        # the bug: mend it.
        did_ignore = False
        while self.has_seat() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                did_ignore = True
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            if not did_ignore:
                self.seat(request, output)
            else:
                del self.waiting[request.request_id]
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.order(request, output)
            if output.preempted:
                return
