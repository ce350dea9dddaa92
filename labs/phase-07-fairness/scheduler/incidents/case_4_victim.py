# Phase 7, fairness: your file. It stands in for minicache.scheduler.incidents.case_4_victim.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 4, the victim: a request is evicted for the head of the line, and takes the head's seat. Expose it, fix it.

Phase 7's lab builds it. The bug is `minicache.scheduler.incidents.broken.VictimHeadScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.incidents.bases import EngineScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.request import RequestStatus


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler in which only who has blocks computes, and fail on one that runs a request without.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, put prompts and decodes into different
            steps, or let the head of the line wait until others have ended: test none of that.

    Raises:
        AssertionError: a step computes tokens of a request that has no blocks for them, a request that waits holds
            blocks, or one never ends.
        InvariantError: `Scheduler.check` may say the same.
    """
    raise NotImplementedError(
        "phase 7, task 4: The victim in the head's seat; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedVictimScheduler(EngineScheduler):
    """Incident 4, fixed: the seat goes to the request that the blocks were made free for."""

    def seat(self, request: Request, output: SchedulerOutput) -> None:
        """Move `request` from the line into the batch: its blocks are taken, and the step computes its tokens.

        `enter` gives a request that has just left the line its blocks, its status and its place in the batch, orders
        its tokens, and sets the count of its passes back.

        Args:
            request: its blocks are free. It was the head of the line; if others were evicted for it, they stand
                before it now.
            output: the step so far.
        """
        # phase 7, task 4: The victim in the head's seat; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This
        # is the bug: mend it.
        request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
        _, first = self.waiting.popitem(last=False)
        first.status = RequestStatus.RUNNING
        self.running.append(first)
        self.order(first, output)
