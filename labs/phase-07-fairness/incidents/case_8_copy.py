# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_8_copy.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
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
    raise NotImplementedError(
        "phase 7, task 8: The unbudgeted copy; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedCopyScheduler(ForkingScheduler):
    """Incident 8, fixed: the block of a copy is counted before any block is taken."""

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request needs before its next tokens can be computed, a copy's block included.

        `writes_shared` returns whether its next token goes into a block that its parent or child reads too, which is
        then copied.
        """
        # phase 7, task 8: The unbudgeted copy; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is the
        # bug: mend it.
        return -(-request.num_tokens // self.pool.block_size) - len(request.block_ids)
