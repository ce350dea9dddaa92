"""Static batching: a batch runs until its last request has finished. What a model without an engine does (phase 5)."""

from __future__ import annotations

from minicache.scheduler import Scheduler, StaticBatchScheduler
from minicache_course.arena import Arena


def create(arena: Arena) -> Scheduler:
    """The stage as it is."""
    return StaticBatchScheduler(**arena.options)
