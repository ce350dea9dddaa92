"""Static batching: a batch is filled, runs until its last request has ended, and only then makes room for the next.

Phase 5 builds it, as the thing to improve on. It is how a model is called that knows nothing of serving: one rectangle
of requests in, one rectangle of tokens out. Each request's memory is reserved for the most tokens that it may have.
"""

from __future__ import annotations

from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class StaticBatchScheduler(Scheduler):
    """Admits a batch when the one before it has drained.

    Arguments, attributes and errors are `Scheduler`'s. Requests are admitted in the order of their arrival; the one at
    the head of the line waits for what it needs, and all behind it wait too. Memory for its longest possible answer is
    taken at admission, so that no request ever runs short.
    """

    def schedule(self) -> SchedulerOutput:
        """Order what the batch has still to compute (`order`); if others may join it (`may_admit`), let them (`admit`).

        A request in decode has one token to compute, its newest. Nobody in the batch is asked whether memory suffices:
        it was reserved.

        Returns:
            The step's work: those that were in the batch first, in order, then those just admitted. Without an
            unfinished request it is empty. It is issued (`issue`).
        """
        output = SchedulerOutput()
        for request in self.running:
            self.order(request, output)
        if self.may_admit():
            self.admit(output)
        return self.issue(output)

    def may_admit(self) -> bool:
        """Whether requests may join the batch now: only an empty batch is filled."""
        return not self.running

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the prompt and max_tokens more, or for max_model_len tokens if that is less. Changes nothing."""
        longest = request.num_prompt_tokens + request.max_tokens
        if self.max_model_len is not None:
            longest = min(longest, self.max_model_len)
        return blocks_for(longest, self.pool.block_size)

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the line, one after the other, while there is room for the one at its `head`.

        Room is three things: a seat, in a batch of at most max_num_seqs; tokens, max_num_batched_tokens in the whole
        step, for all that it has to compute; and `blocks_to_admit` free blocks. At the first head that lacks one of
        them it ends: nobody behind overtakes it. A request that is admitted leaves the line, gets its blocks, is
        RUNNING at the end of the batch, and computes its prompt in this step (`order`).

        Args:
            output: the step so far, whose tokens are spent; what is admitted is added to it.
        """
        budget = self.max_num_batched_tokens - output.total_num_scheduled_tokens
        while len(self.running) < self.max_num_seqs and (request := self.head()):
            num_new = request.num_tokens - request.num_computed_tokens
            needed = self.blocks_to_admit(request)
            if num_new > budget or needed > self.pool.num_free:
                return
            del self.waiting[request.request_id]
            request.block_ids = self.pool.allocate(needed)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.order(request, output)
            budget -= num_new

    def order(self, request: Request, output: SchedulerOutput) -> None:
        """Have the step compute all tokens of the request that are not computed yet, after what it computes so far.

        Args:
            request: of the batch, and not in the step yet.
            output: the step so far: the request joins `scheduled`, and its number of tokens `num_scheduled_tokens`.
        """
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids)  # a property's call would cost as much
        output.num_scheduled_tokens[request.request_id] = num_tokens - request.num_computed_tokens
        output.scheduled.append(request)
