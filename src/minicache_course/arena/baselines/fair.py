"""Paged, with a bound on starvation and a prefix cache, prompts in one step: phases 7 and 8 of the course."""

from __future__ import annotations

from minicache.scheduler import Scheduler, SharingScheduler
from minicache_course.arena import Arena


def create(arena: Arena) -> Scheduler:
    """The stage as it is."""
    return SharingScheduler(**arena.options, prefix_caching=True)
