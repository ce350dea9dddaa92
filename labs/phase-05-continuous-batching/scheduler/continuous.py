# Phase 5, continuous-batching: your file. It stands in for minicache.scheduler.continuous.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
#
# Predict, before you write task 5.4. `minicache grade` checks it, without points.
# Two batch slots, enough memory, and four requests that wait from the start: P (4 tokens of prompt, 5 to generate), Q
# (2, 2), R (3, 4) and S (1, 3). How many steps does static batching take?
# 5.4a =
# How many steps does continuous batching take?
# 5.4b =
# How many tokens does step 2 of the continuous run compute? The first step is step 0.
# 5.4c =
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
        raise NotImplementedError(
            "phase 5, task 4: Continuous batching; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )
