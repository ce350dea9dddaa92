"""Incident 4, the victim: a request is evicted for the head of the queue, and gets its slot. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.VictimHeadScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache_course.incidents.bases import EngineScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that computes tokens only for requests with blocks, and fail on one that runs one without.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, put prompts and decodes into different
            steps, or let the head of the queue wait until others have finished: test none of that.

    Raises:
        AssertionError: a step computes tokens of a request that has no blocks for them, a request that waits holds
            blocks, or one never finishes.
        InvariantError: `Scheduler.check` may say the same.
    """
    scheduler = create(num_blocks=7, block_size=16)
    scheduler.add_request(Request("newest", [1] * 10, 100))
    scheduler.add_request(Request("head", [1] * 112, 1))
    for _ in range(500):
        if not scheduler.has_unfinished:
            return
        output = scheduler.schedule()
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            room = len(request.block_ids) * 16
            assert request.num_computed_tokens + num_new <= room, f"{request!r} computes {num_new}, room is for {room}"
        for request in scheduler.waiting.values():
            assert not request.block_ids, f"{request!r} waits, and holds blocks {request.block_ids}"
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    raise AssertionError("two requests that fit one after the other were not done after 500 steps")


class FixedVictimScheduler(EngineScheduler):
    """Incident 4, fixed: the batch slot goes to the request that the blocks were freed for."""

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """Move `request` from the queue into the batch: it gets its blocks, and the step computes its tokens.

        As `EngineScheduler.admit`, which does all of this, and resets the count of the request's passes.

        Args:
            request: in `waiting`. Its blocks are free. It was the head of the queue; if others were evicted for it,
                they are ahead of it now.
            output: the step so far, to which it is added.
            found: as for `PagedScheduler.admit`.
        """
        super().admit(request, output, found)
