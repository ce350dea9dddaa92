# Phase 7, fairness: your file. It stands in for minicache_course.incidents.case_4_victim.
# Write what raises NotImplementedError, and mend what is marked as a bug. `minicache grade 7` grades it, `minicache
# hint 7.K` helps with task K.
"""Incident 4, the victim: a request is evicted for the head of the queue, and gets its slot. Expose it, and fix it.

Phase 7's lab builds it. The bug is `minicache_course.incidents.broken.VictimHeadScheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache_course.incidents.bases import EngineScheduler
from minicache.request import RequestStatus


def expose(create: Callable[..., Scheduler]) -> None:
    """Pass on a scheduler that computes tokens only for requests with blocks, and fail on one that runs one without.

    Args:
        create: makes the scheduler to test: `create(num_blocks=…, max_num_seqs=…, …)`, with the arguments of
            `create_scheduler`. Right ones may keep a watermark, preempt by swap, put prompts and decodes into different
            steps, or let the head of the queue wait until others have finished: test none of that.

    Raises:
        AssertionError: a step computes tokens of a request that has no blocks for them, a request that waits holds
            blocks, or one never finishes.
        InvariantError: `Scheduler.check` may say the same.
    """
    raise NotImplementedError(
        "phase 7, task 4: The victim in the head's slot; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md"
    )


class FixedVictimScheduler(EngineScheduler):
    """Incident 4, fixed: the batch slot goes to the request that the blocks were freed for."""

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """Move `request` from the queue into the batch: it gets its blocks, and the step computes its tokens.

        As `EngineScheduler.admit`, which does all of this, and resets the count of the request's passes.

        Args:
            request: in `waiting`. Its blocks are free. It was the head of the queue; if others were evicted for it,
                they are ahead of it now.
            output: the step so far, to which it is added.
            found: as for `PagedScheduler.admit`.
        """
        # phase 7, task 4: The victim in the head's slot; read docs/en/phase-07-fairness/lab/00-expose-and-fix.md. This
        # is the bug: mend it.
        request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
        first = self.waiting.first()
        assert first is not None
        self.waiting.remove(first)
        first.status = RequestStatus.RUNNING
        self.running.append(first)
        self.schedule_tokens(first, output)
