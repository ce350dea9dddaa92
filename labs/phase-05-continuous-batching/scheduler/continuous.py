# Phase 5, continuous-batching: your file. It stands in for minicache.scheduler.continuous.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
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
        """Whether waiting requests may join the batch in this step: always. `schedule_waiting` checks what fits."""
        raise NotImplementedError(
            "phase 5, task 4: Continuous batching; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )
