"""First come, first served, on paged memory, without a prefix cache: the first vLLM (Kwon et al. 2023, §4)."""

from __future__ import annotations

from minicache.scheduler import PagedScheduler, Scheduler
from minicache_course.arena import Arena


def create(arena: Arena) -> Scheduler:
    """The stage as it is."""
    return PagedScheduler(**arena.options)
