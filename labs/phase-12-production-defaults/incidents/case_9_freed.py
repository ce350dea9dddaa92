# Phase 12, production-defaults: your file. It stands in for minicache_course.incidents.case_9_freed.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 12` grades it, `minicache
# hint 12.K` helps with task K.
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
    raise NotImplementedError(
        "phase 12, task 3: Freed in flight; read docs/en/phase-12-production-defaults/lab/01-three-incidents.md"
    )


class FixedFreedScheduler(FetchingScheduler):
    """Incident 9, fixed: blocks of a request that leaves are held back while a step in flight computes it."""

    def release(self, request: Request) -> None:
        """Give back all that a request holds: it has left the batch.

        If outstanding steps compute it, its blocks are held back (`hold`) until the newest of these is committed. Else
        they are free at once.

        Args:
            request: it has finished, or was preempted; or it waits, and holds nothing.
        """
        # phase 12, task 3: Freed in flight; read docs/en/phase-12-production-defaults/lab/01-three-incidents.md. This
        # is the bug: mend it.
        super().release(request)
