# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_3_thrash.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
#
# Predict, before you write task 7.3. `minicache grade` checks it, without points.
# The broken scheduler, memory for all. Two requests arrive together, prompts of 30 and 20 tokens, 5 new tokens each.
# How many prefill tokens does it compute?
# 7.3a =
# A third one arrives with them, also with a prompt of 20 tokens and 5 new ones. How many steps does it take until all
# have finished?
# 7.3b =
# Two requests only, both with prompts of 30 tokens and 5 new ones. How many preemptions are there?
# 7.3c =
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
    raise NotImplementedError(
        "phase 7, task 3: Bucket thrash; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedThrashScheduler(PhasedScheduler):
    """Incident 3, fixed: requests of different lengths share a step."""

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Which requests compute in this step: all that could. Block tables make requests of any lengths one batch.

        Args:
            candidates: those that could: just admitted with their prompts, or the whole batch in decode.

        Returns:
            Those that do, at least one. A request that is left out is preempted, and its blocks are freed.
        """
        # phase 7, task 3: Bucket thrash; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is the bug: mend
        # it.
        shortest = min(request.num_tokens for request in candidates)
        return [request for request in candidates if request.num_tokens == shortest]
