"""Continuous batching: requests join and leave the batch at every step.

Phase 5 builds it. Orca (Yu et al., OSDI 2022, §3) called it iteration-level scheduling: the scheduler decides before
each iteration of the model, so a finished request leaves at once and another takes its batch slot.
"""

from __future__ import annotations

from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.static import StaticBatchScheduler


class ContinuousBatchScheduler(StaticBatchScheduler):
    """Admits requests at every step.

    Memory is still reserved for the longest answer when a request is admitted, as in Orca's Algorithm 1: a request in
    the batch never runs out of memory, and most of what it holds is never used.
    """

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch in this step. `schedule_waiting` checks what fits."""
        return True
