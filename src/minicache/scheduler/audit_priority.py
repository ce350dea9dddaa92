"""The auditor for vLLM's priorities: a victim may stand anywhere in the batch. Given, not built.

Pure standard library.
"""

from __future__ import annotations

from copy import copy

from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class PriorityAuditor(SharingAuditor):
    """`SharingAuditor`, for a `VllmPriorityScheduler`.

    | rule | after | holds |
    |---|---|---|
    | work | `schedule` | as before; but a step that preempts may leave what its victims return to the budget |
    | victims | `schedule` | those of the highest `priority_key` are preempted, and the highest is named first |
    """

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work"; the budget of a step that preempts is what it has used.

        Raises:
            InvariantError: a part of it does not hold.
        """
        total = output.total_num_scheduled_tokens
        if output.preempted and total < scheduler.max_num_batched_tokens:
            scheduler = copy(scheduler)
            scheduler.max_num_batched_tokens = total
        super().check_work(scheduler, output)

    def check_victims(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "victims", of the batch in the order of its keys.

        Raises:
            InvariantError: a part of it does not hold.
        """
        batch = self.batch
        self.batch = sorted(batch, key=scheduler.priority_key)
        super().check_victims(scheduler, output)
        self.batch = batch
