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
    tokens: dict[RequestId, int] = {"slow": 5, "urgent": 6}
    slow, urgent = Request("slow", [1] * 4, 8, priority=1), Request("urgent", [2] * 4, 3, priority=0)
    scheduler = create(num_blocks=16, block_size=4, max_num_seqs=1)
    for _ in overlapped(scheduler, [slow], tokens.__getitem__):
        if slow.num_computed_tokens and urgent.arrival_index < 0:
            scheduler.add_request(urgent)
    for request, token in ((slow, 5), (urgent, 6)):
        strange = [each for each in request.output_token_ids if each != token]
        assert not strange, f"{request!r} has got {strange}, which the model generated for the other one"
        got = len(request.output_token_ids)
        assert got == request.max_tokens, f"{request!r} has {got} tokens of {request.max_tokens}"


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
        return output.scheduled[self.slots_of(output).index(slot)]
