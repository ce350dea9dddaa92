# Phase 5, continuous-batching: your file. It stands in for minicache.scheduler.static.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
"""Static batching: a batch is filled, runs until its last request has finished, and only then is the next one filled.

Phase 5 builds it as the baseline: a model without a serving engine takes one rectangle of requests and returns one
rectangle of tokens. Each request's memory is reserved for the most tokens that it may have.
"""

from __future__ import annotations

from minicache.memory.blocks import blocks_for
from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class StaticBatchScheduler(Scheduler):
    """Admits a batch when the one before it has drained.

    Arguments, attributes and errors are `Scheduler`'s. Requests are admitted in the order of their arrival; the one at
    the head of the queue waits for what it needs, and all behind it wait too. Memory for its longest possible answer is
    reserved at admission, so no request ever runs short.
    """

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Schedule the uncomputed tokens of every request in the batch. Their memory was reserved at admission."""
        raise NotImplementedError(
            "phase 5, task 3: Static batches; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch in this step: only if it is empty."""
        raise NotImplementedError(
            "phase 5, task 3: Static batches; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests (`admit`), one after the other, while there is room for the one at the `head` of the queue.

        Room is three things: one of the max_num_seqs batch slots; `token_budget` for all its uncomputed tokens; and
        `blocks_to_admit` free blocks. The loop ends at the first head that lacks one of them: no request behind it is
        admitted before it. In an empty step the budget counts as enough for any request: one that is computed again
        after a failed step (`recover`) may have outgrown max_num_batched_tokens.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        raise NotImplementedError(
            "phase 5, task 3: Static batches; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the prompt and max_tokens more, or for max_model_len tokens if that is less. Changes nothing."""
        raise NotImplementedError(
            "phase 5, task 3: Static batches; read docs/en/phase-05-continuous-batching/lab/02-two-stages.md"
        )
