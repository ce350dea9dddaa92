"""The engines that the incidents happened in, without the bugs: what phase 6 built, and one habit more each.

Phase 7 comes with them. They are no stages of the course: each has just the code that a bug needs to live in, on top
of `PagedScheduler`. The habits are those of mistral.rs' paged scheduler, which the incidents are from.
"""

from __future__ import annotations

from typing import Final, Unpack

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedOptions, PagedScheduler

WAITING_PASSES: Final = 64
"""How often `EngineScheduler` passes over the head of its line before it makes room for it by force."""


class EngineScheduler(PagedScheduler):
    """Does not let the head of the line wait for ever: after 64 passes it evicts the newest of the batch for it.

    Two things differ from `PagedScheduler`. A request whose prompt is larger than the whole pool is let in, and ends as
    FINISHED_CAPACITY when its turn comes. And the request at the head of the line that has been looked at more than
    WAITING_PASSES times, and was too large for the free blocks each time, gets the places of the newest of the batch,
    one after the other, until it fits.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self._passes: dict[RequestId, int] = {}  # of those at the head of the line, how often they were passed over

    def check_size(self, request: Request) -> None:
        """As `Scheduler.check_size`, but a request that is too large for the pool is let in."""
        if self.blocks_to_admit(request) <= self.pool.num_blocks:
            super().check_size(request)

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the head of the line while there are a seat, tokens in the step, and free blocks.

        Whoever can never fit is ended (`give_up`). After a request for which others were evicted nobody else is
        admitted in this step.

        Args:
            output: the step so far; what is admitted is added to it.
        """
        while self.has_seat() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            self.seat(request, output)
            if output.preempted:
                return

    def has_seat(self) -> bool:
        """Whether the batch may take one request more: it has at most max_num_seqs."""
        return len(self.running) < self.max_num_seqs

    def has_budget(self, request: Request, output: SchedulerOutput) -> bool:
        """Whether the step has tokens left for all that `request` computes when it is admitted.

        One that has outgrown max_num_batched_tokens since it came is taken as the only one that the step admits, where
        a token is left.
        """
        num_new = request.num_tokens - request.num_computed_tokens
        budget = self.max_num_batched_tokens - output.total_num_scheduled_tokens
        first = all(request.num_computed_tokens for request in output.scheduled)
        return num_new <= budget or (num_new > self.max_num_batched_tokens and first and budget > 0)

    def make_way(self, request: Request, output: SchedulerOutput) -> bool:
        """Have the blocks for the head of the line, by force if it has waited too long.

        Args:
            request: the head of the line. The pool is large enough for it.
            output: the step so far.

        Returns:
            Whether its blocks are free now. If not, it waits on, one pass more.
        """
        if self.can_allocate(request) is AllocStatus.LATER and self.has_waited_too_long(request):
            while self.running and self.can_allocate(request) is AllocStatus.LATER:
                self.evict_newest(output)
        return self.can_allocate(request) is AllocStatus.OK

    def has_waited_too_long(self, request: Request) -> bool:
        """Note that `request` was passed over once more; whether that makes more than WAITING_PASSES times."""
        self._passes[request.request_id] = self._passes.get(request.request_id, 0) + 1
        return self._passes[request.request_id] > WAITING_PASSES

    def evict_newest(self, output: SchedulerOutput) -> None:
        """Preempt the newest of the batch, to the head of the line; what it was to compute in this step is called off.

        Raises:
            IndexError: the batch is empty.
        """
        victim = self.running[-1]
        call_off(victim, output)
        self.preempt(victim, output)

    def seat(self, request: Request, output: SchedulerOutput) -> None:
        """Move `request` from the line into the batch: its blocks are taken, and the step computes its tokens.

        Args:
            request: its blocks are free. It was the head of the line; if others were evicted for it, they stand
                before it now.
            output: the step so far.
        """
        del self.waiting[request.request_id]
        self.enter(request, output)

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.enter`; and the request has waited: its passes are counted from 0 the next time."""
        self._passes.pop(request.request_id, None)
        super().enter(request, output)

    def give_up(self, request: Request, output: SchedulerOutput) -> None:
        """End a request of the line that the whole pool is too small for, as FINISHED_CAPACITY."""
        self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
        output.finished.append(request.request_id)

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """As `Scheduler.finish_request`."""
        self._passes.pop(request_id, None)
        return super().finish_request(request_id, status)


class PhasedScheduler(PagedScheduler):
    """Keeps prompts and decodes apart: a step is all prompts if anybody can be admitted, and all decodes if not.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def schedule(self) -> SchedulerOutput:
        """Whoever can be admitted computes its prompt, and nobody else computes; if nobody can, the batch decodes.

        Of those that could compute, `choose` says who does. The others lose their places, and their blocks.

        Returns:
            The step's work.
        """
        output = SchedulerOutput()
        num_seated = self.num_running
        self.admit(output)
        if output.scheduled:
            self.leave_out(self.running[num_seated:], output)
        else:
            self.leave_out(self.running, output)
            self.grow_batch(output)
        return self.issue(output)

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Who computes in this step, of those that could: all of them.

        Args:
            candidates: at least one: those just admitted, or the whole batch.

        Returns:
            At least one of them.
        """
        return candidates

    def leave_out(self, candidates: list[Request], output: SchedulerOutput) -> None:
        """Preempt those of `candidates` that `choose` does not choose."""
        chosen = {request.request_id for request in self.choose(candidates)} if candidates else set()
        for request in candidates[::-1]:  # the newest first, so that the oldest comes to the head of the line
            if request.request_id not in chosen:
                call_off(request, output)
                self.running.remove(request)
                self.running.append(request)
                self.preempt(request, output)


class ForkingScheduler(PagedScheduler):
    """Lets a request have twins: they share all blocks, and a shared block is copied before it is written.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def fork_request(self, request_id: RequestId, new_id: RequestId) -> Request:
        """Add a twin of a request in the batch: the same tokens, in the same blocks, an id and a future of its own.

        To be called between two steps: not while the tokens of one are awaited.

        Args:
            request_id: who is forked. It is in the batch and has at least one generated token.
            new_id: names the twin.

        Returns:
            The twin. It is in the batch, at its end.

        Raises:
            ValueError: nobody of that name is decoding, the batch is full, or `new_id` is taken. Nothing has changed.
        """
        parent = next((each for each in self.running if each.request_id == request_id), None)
        if parent is None or not parent.output_token_ids:
            raise ValueError(f"request {request_id!r} is not in decode: only such a request can be forked")
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(f"the batch has {self.max_num_seqs} requests already: raise max_num_seqs")
        twin = parent.twin(new_id)
        self.add_request(twin)
        del self.waiting[new_id]
        self.pool.share(parent.block_ids)
        twin.block_ids = parent.block_ids.copy()
        twin.output_token_ids = parent.output_token_ids.copy()
        twin.num_computed_tokens = parent.num_computed_tokens
        twin.status = RequestStatus.RUNNING
        self.running.append(twin)
        return twin

    def grow_batch(self, output: SchedulerOutput) -> None:
        """As `PagedScheduler.grow_batch`; and where a request writes into a shared block, it gets a copy of its own.

        Args:
            output: the step so far. `blocks_to_copy` gets a pair (source block, target block) for every copy.
        """
        turn = 0
        while turn < len(self.running):
            request = self.running[turn]
            if not self.make_room(request, self.blocks_missing(request), output):
                return
            request.block_ids += self.pool.allocate(super().blocks_missing(request))
            if self.writes_shared(request):
                self.copy_block(request, output)
            self.order(request, output)
            turn += 1

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request in the batch must get before its next tokens are computed, a copy's block included."""
        return super().blocks_missing(request) + self.writes_shared(request)

    def make_room(self, request: Request, missing: int, output: SchedulerOutput) -> bool:
        """As `PagedScheduler.make_room`, but who lost its twin to it is asked anew: it may need no copy any more."""
        while self.blocks_missing(request) > self.pool.num_free:
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                return super().make_room(request, missing, output)  # which ends it: the pool is too small for it
            self.preempt(victim, output)
            if victim is request:
                return False
        return True

    def writes_shared(self, request: Request) -> bool:
        """Whether the request's next token goes into a block that another request reads too."""
        index = request.num_computed_tokens // self.pool.block_size
        return index < len(request.block_ids) and self.pool.ref_count(request.block_ids[index]) > 1

    def copy_block(self, request: Request, output: SchedulerOutput) -> None:
        """Replace the block that the request writes into by a new one, and have its contents copied.

        Raises:
            OutOfBlocksError: no block is free.
        """
        index = request.num_computed_tokens // self.pool.block_size
        source, (target,) = request.block_ids[index], self.pool.allocate(1)
        request.block_ids[index] = target
        self.pool.free([source])
        output.blocks_to_copy.append((source, target))


def call_off(request: Request, output: SchedulerOutput) -> None:
    """Take what `request` was to compute out of the step."""
    if request.request_id in output.num_scheduled_tokens:
        del output.num_scheduled_tokens[request.request_id]
        output.scheduled.remove(request)
