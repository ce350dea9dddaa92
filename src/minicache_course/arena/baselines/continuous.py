"""Iteration-level scheduling, with memory reserved for the longest answer: Orca (Yu et al., OSDI 2022, §3)."""

from __future__ import annotations

from minicache.scheduler import ContinuousBatchScheduler, Scheduler
from minicache_course.arena import Arena


def create(arena: Arena) -> Scheduler:
    """The stage as it is."""
    return ContinuousBatchScheduler(**arena.options)
