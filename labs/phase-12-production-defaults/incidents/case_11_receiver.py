# Phase 12, production-defaults: your file. It stands in for minicache_course.incidents.case_11_receiver.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 12` grades it, `minicache
# hint 12.K` helps with task K.
"""Incident 11, the wrong receiver: a token goes to the request that took over the slot. Expose it, and fix it.

Phase 12's lab builds it. The bug is `minicache_course.incidents.async_broken.WrongReceiverScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request, RequestId
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache_course.incidents.async_bases import SlottedScheduler, overlapped


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that gives each token to the request that it is for, and fail on one that does not.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Correct ones may preempt a request for an urgent one, or let that one wait; they may
            keep a watermark, cache prefixes, or preempt by swap: test none of that.

    Raises:
        AssertionError: an answer has a token that was generated for another request, or lacks one of its own. The
            message gives the number.
    """
    raise NotImplementedError(
        "phase 12, task 5: The wrong request; read docs/en/phase-12-production-defaults/lab/01-three-incidents.md"
    )


class FixedReceiverScheduler(SlottedScheduler):
    """Incident 11, fixed: a token goes to the request that had the slot when the step was scheduled."""

    def receiver(self, output: SchedulerOutput, slot: int) -> Request | None:
        """The request that gets the token which the model has returned for a slot: the one that it was generated for.

        Args:
            output: the step that has generated it, the oldest outstanding one. Another may have been scheduled since.
            slot: the slot, as it was when that step was scheduled (`slots_of`).

        Returns:
            That request, wherever it is now: in the batch, in the queue or finished.
        """
        # phase 12, task 5: The wrong request; read docs/en/phase-12-production-defaults/lab/01-three-incidents.md. This
        # is the bug: mend it.
        return self.slots.get(slot)
