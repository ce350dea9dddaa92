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
    scheduler = create(num_blocks=10, block_size=16)
    tally = drive(scheduler, [Request(number, [1] * 80, 20) for number in range(2)], max_steps=200)
    assert list(tally.finished) == [0, 1], f"requests 0 and 1 arrived in this order, finished as {list(tally.finished)}"


class FixedOrderScheduler(PagedScheduler):
    """Incident 2, fixed: the oldest gets its blocks first, and the newest is preempted first."""

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Put the batch into the order of arrival (`arrival_index`), then do as `PagedScheduler.schedule_running`.

        It gives blocks from the front of `running`, and preempts at its back.

        Args:
            output: the step so far.
        """
        self.running.sort(key=lambda request: request.arrival_index)
        super().schedule_running(output)
