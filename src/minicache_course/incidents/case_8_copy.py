"""Incident 8, the copy: copy-on-write takes a block that was not counted. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.UnbudgetedCopyScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request, RequestStatus
from minicache.scheduler.drive import drive
from minicache_course.incidents.bases import ForkingScheduler


def expose(create: Callable[..., ForkingScheduler]) -> None:
    """Pass on a scheduler that makes room for a copy before it makes the copy, and fail on one that runs out of blocks.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. It has `fork_request(request_id, child_id)`, which needs a request that has generated
            a token. Right ones may keep a watermark, or preempt by swap: test neither.

    Raises:
        OutOfBlocksError: the scheduler ran out of blocks in the middle of a step. There is no need to catch it.
        AssertionError: a request or its child finishes without its tokens, or never.
    """
    scheduler = create(num_blocks=2, block_size=16)
    scheduler.add_request(Request("parent", [1] * 20, 5))
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"parent": 0})
    requests = [*scheduler.running, scheduler.fork_request("parent", "child")]
    drive(scheduler, max_steps=100)
    for request in requests:
        assert request.status is RequestStatus.FINISHED_LENGTH, f"the pool is large enough for {request!r}"


class FixedCopyScheduler(ForkingScheduler):
    """Incident 8, fixed: the block of a copy is counted before any block is taken."""

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request needs before its next tokens can be computed, a copy's block included.

        `writes_shared` returns whether its next token goes into a block that its parent or child reads too, which is
        then copied.
        """
        return -(-request.num_tokens // self.pool.block_size) - len(request.block_ids) + self.writes_shared(request)
