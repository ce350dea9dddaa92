"""Incident 9, freed in flight: a request gives its blocks back while a step still writes them. Expose it, and fix it.

Phase 12's lab builds it. The bug is `minicache_course.incidents.async_broken.FreedInFlightScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache_course.incidents.async_bases import FetchingScheduler, overlapped


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that admits no request into a block that a step in flight writes, and fail on one that does.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Correct ones may keep a watermark, cache prefixes, hold back all blocks of a request or
            only those that are written, or admit no request for a step: test none of that.

    Raises:
        AssertionError: a request is admitted into a block that a step in flight writes for another one, or a request
            never finishes. The message gives the number.
    """
    requests = [Request("stops", [1] * 4, 9, stop_token_ids=[3]), Request("next", [2] * 8, 2)]
    in_flight: dict[int, Request] = {}  # blocks that the step before writes
    for output, _ in overlapped(create(num_blocks=2, block_size=4, max_num_seqs=1), requests, lambda _: 3):
        writes: dict[int, Request] = {}
        for request in output.scheduled:
            if not request.num_computed_tokens:
                clash = [block_id for block_id in request.block_ids if in_flight.get(block_id, request) is not request]
                assert not clash, f"{request!r} is admitted into blocks {clash}, which a step in flight writes"
            writes |= dict.fromkeys(request.block_ids[request.num_computed_tokens // 4 :], request)
        in_flight = writes
    unfinished = [request for request in requests if not request.status.is_finished]
    assert not unfinished, f"{unfinished} had not finished after 500 steps"


class FixedFreedScheduler(FetchingScheduler):
    """Incident 9, fixed: blocks of a request that leaves are held back while a step in flight computes it."""

    def release(self, request: Request) -> None:
        """Give back all that a request holds: it has left the batch.

        If outstanding steps compute it, its blocks are held back (`hold`) until the newest of these is committed. Else
        they are free at once.

        Args:
            request: it has finished, or was preempted; or it waits, and holds nothing.
        """
        for step in (self.ahead, self.outstanding):
            if step is not None and any(each is request for each in step.scheduled):
                self.hold(request, step)
                break
        super().release(request)
