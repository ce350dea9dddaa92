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
    for num_slots in (1, 4):
        scheduler = create(num_blocks=64, block_size=16, max_num_seqs=num_slots)
        tally = drive(scheduler, [Request(number, [1] * 10, 8) for number in range(num_slots + 2)], max_steps=100)
        most = max(tally.batch_sizes)
        assert most == num_slots, f"{num_slots} batch slots, and at most {most} requests in the batch"


class FixedCapScheduler(EngineScheduler):
    """Incident 1, fixed: the batch fills all of its max_num_seqs slots."""

    def has_slot(self) -> bool:
        """Whether the batch may take one more request: it may hold max_num_seqs, and no more."""
        return len(self.running) < self.max_num_seqs
