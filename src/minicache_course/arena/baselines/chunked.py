"""One token budget a step, prompts in chunks: Sarathi-Serve (Agrawal et al., OSDI 2024, §4), and vLLM's scheduler."""

from __future__ import annotations

from minicache.scheduler import ChunkedPrefillScheduler, Scheduler
from minicache_course.arena import Arena


def create(arena: Arena) -> Scheduler:
    """The stage with Sarathi's budget of 512 tokens."""
    return ChunkedPrefillScheduler(**(arena.options | {"max_num_batched_tokens": 512}), prefix_caching=True)
