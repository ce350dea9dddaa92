"""Incident 3, the thrash: only the shortest bucket runs, and all others are preempted. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.ThrashScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache_course.incidents.bases import PhasedScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that keeps what it computed while there is memory for all, and fail on one that does not.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, or put prompts and decodes into
            different steps: test none of that. Give the pool room to spare.

    Raises:
        AssertionError: there is memory for all requests, and one is preempted, or its prompt is computed twice. The
            message gives the number.
    """
    requests = [Request("long", [1] * 120, 100), Request("short", [1] * 50, 100)]
    tally = drive(create(num_blocks=64, block_size=16), requests, max_steps=1000)
    assert not tally.num_preemptions, f"{tally.num_preemptions} preemptions, and there was memory for all"
    assert tally.num_prefill_tokens == 170, f"prompts of 170 tokens took {tally.num_prefill_tokens} to compute"


class FixedThrashScheduler(PhasedScheduler):
    """Incident 3, fixed: requests of different lengths share a step."""

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Which requests compute in this step: all that could. Block tables make requests of any lengths one batch.

        Args:
            candidates: those that could: just admitted with their prompts, or the whole batch in decode.

        Returns:
            Those that do, at least one. A request that is left out is preempted, and its blocks are freed.
        """
        return candidates
