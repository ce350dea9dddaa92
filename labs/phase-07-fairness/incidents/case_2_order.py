# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_2_order.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 2, the order: first come, last served. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.ReversedScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that serves in the order of arrival, and fail on one that preempts the oldest for the newest.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, or put prompts and decodes into
            different steps: test none of that.

    Raises:
        AssertionError: of two equal requests that do not both fit into memory, the one that arrived first does not
            finish first. The message names the one that did.
    """
    raise NotImplementedError(
        "phase 7, task 2: First come, last served; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedOrderScheduler(PagedScheduler):
    """Incident 2, fixed: the oldest gets its blocks first, and the newest is preempted first."""

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Put the batch into the order of arrival (`arrival_index`), then do as `PagedScheduler.schedule_running`.

        It gives blocks from the front of `running`, and preempts at its back.

        Args:
            output: the step so far.
        """
        # phase 7, task 2: First come, last served; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This is the
        # bug: mend it.
        self.running.sort(key=lambda request: request.arrival_index)
        self.running.reverse()
        super().schedule_running(output)
