"""Static batching: a batch is filled and runs until its last request has finished; then the next one is filled.

Phase 5 builds it as the baseline: a model without a serving engine takes one rectangle of requests and returns one
rectangle of tokens. Each request's memory is reserved for the most tokens that it may have.
"""

from __future__ import annotations

from minicache.memory.blocks import blocks_for
from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class StaticBatchScheduler(Scheduler):
    """Admits a batch when the previous one has drained.

    Arguments, attributes and errors are `Scheduler`'s. Requests are admitted in the order of their arrival; the head
    of the queue waits until it fits, and all behind it wait too. Memory for the longest possible answer is reserved at
    admission, so no request in the batch runs out of memory.
    """

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Schedule the uncomputed tokens of every request in the batch. Their memory was reserved at admission."""
        for request in self.running:
            self.schedule_tokens(request, output)

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch in this step: only if it is empty."""
        return not self.running

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests (`admit`), one after the other, while the `head` of the queue fits.

        It needs one of the max_num_seqs batch slots, `token_budget` for all its uncomputed tokens, and
        `blocks_to_admit` free blocks. The loop ends at the first head that lacks one of them: no request behind it is
        admitted before it. In an empty step the budget is ignored: a request that is recomputed after a failed step
        (`recover`) may have outgrown max_num_batched_tokens.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        while len(self.running) < self.max_num_seqs and (request := self.head()):
            num_new = request.num_tokens - request.num_computed_tokens
            too_long = num_new > self.token_budget and output.scheduled
            if too_long or self.blocks_to_admit(request) > self.pool.num_free:
                return
            self.admit(request, output)

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the prompt and max_tokens more, or for max_model_len tokens if that is less. Changes nothing."""
        longest = request.num_prompt_tokens + request.max_tokens
        if self.max_model_len is not None:
            longest = min(longest, self.max_model_len)
        return blocks_for(longest, self.pool.block_size)
