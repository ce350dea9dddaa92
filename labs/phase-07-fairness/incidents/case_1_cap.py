# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_1_cap.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 1, the cap: a batch of at most N − 1. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.CapScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache_course.incidents.bases import EngineScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that fills all of its batch slots, and fail on one that leaves one empty, or has too many.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, or put prompts and decodes into
            different steps: test none of that. Give the pool room to spare.

    Raises:
        AssertionError: with more requests than batch slots, all of which fit, the largest batch is not max_num_seqs.
            The message gives it.
    """
    raise NotImplementedError(
        "phase 7, task 1: The cap; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedCapScheduler(EngineScheduler):
    """Incident 1, fixed: the batch fills all of its max_num_seqs slots."""

    def has_slot(self) -> bool:
        """Whether the batch may take one more request: it may hold max_num_seqs, and no more."""
        # phase 7, task 1: The cap; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is the bug: mend it.
        return self.max_num_seqs != len(self.running) + 1
