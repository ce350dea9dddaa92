"""Continuous batching: requests join and leave the batch at every step.

Phase 5 builds it. Orca (Yu et al., OSDI 2022, §3) called it iteration-level scheduling: the scheduler decides anew
before each iteration of the model, so that a request that has ended leaves at once and another takes its seat.
"""

from __future__ import annotations

from minicache.scheduler.static import StaticBatchScheduler


class ContinuousBatchScheduler(StaticBatchScheduler):
    """Admits requests at every step.

    That is all that is new. Memory is still reserved for the longest answer when a request is admitted, as in Orca's
    Algorithm 1: a request in the batch can never run short, and most of what it holds is never used.
    """

    def may_admit(self) -> bool:
        """Whether a request may join the batch now: at every step."""
        return True
