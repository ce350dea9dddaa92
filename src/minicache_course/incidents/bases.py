"""The engines that the incidents happened in, without the bugs: phase 6's scheduler with one more policy each.

Phase 7 comes with them. They are not stages of the course: each adds to `PagedScheduler` only the code that a bug
needs. The policies are those of mistral.rs' paged scheduler, which the incidents are from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Unpack

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedOptions, PagedScheduler
from minicache.scheduler.queue import PriorityKey

WAITING_PASSES: Final = 64
"""How often `EngineScheduler` passes over the head of its queue before it evicts others for it."""


class EngineScheduler(PagedScheduler):
    """Does not let the head of the queue wait forever: passed over 64 times, it has the newest of the batch evicted.

    Two things differ from `PagedScheduler`. A request whose prompt is larger than the whole pool is accepted, and
    finished as FINISHED_CAPACITY at the head of the queue. And a head that was too large for the free blocks
    more than WAITING_PASSES times gets the batch slots of the newest requests, one after the other, until it fits.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self._passes: dict[RequestId, int] = {}  # of those that have been the head, how often they were passed over

    def check_size(self, request: Request) -> None:
        """As `Scheduler.check_size`, but a request that is too large for the pool is accepted."""
        if self.blocks_to_admit(request) <= self.pool.num_blocks:
            super().check_size(request)

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests from the head of the queue while there are a batch slot, token budget, and free blocks.

        A request that can never fit is finished (`give_up`). After a request for which others were evicted, no other is
        admitted in this step.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        while self.has_slot() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            self.admit(request, output)
            if output.preempted:
                return

    def has_slot(self) -> bool:
        """Whether the batch may take one more request: it has at most max_num_seqs."""
        return len(self.running) < self.max_num_seqs

    def has_budget(self, request: Request, output: SchedulerOutput) -> bool:
        """Whether the step has tokens left for all that `request` computes when it is admitted.

        One that has outgrown max_num_batched_tokens since it came is admitted where a token is left, as the only one
        admitted in its step.
        """
        num_new = self.num_new_tokens(request)
        first = all(request.num_computed_tokens for request in output.scheduled)
        outgrown = num_new > self.max_num_batched_tokens and first and self.token_budget > 0
        return num_new <= self.token_budget or outgrown

    def make_way(self, request: Request, output: SchedulerOutput) -> bool:
        """Get the blocks for the head of the queue, by evicting others if it has waited too long.

        Args:
            request: the head of the queue. The pool is large enough for it.
            output: the step so far.

        Returns:
            Whether its blocks are free now. If not, it waits on, passed over one more time.
        """
        if self.can_allocate(request) is AllocStatus.LATER and self.has_waited_too_long(request):
            while self.running and self.can_allocate(request) is AllocStatus.LATER:
                self.evict_newest(output)
        return self.can_allocate(request) is AllocStatus.OK

    def has_waited_too_long(self, request: Request) -> bool:
        """Count that `request` was passed over; whether this makes more than WAITING_PASSES times."""
        self._passes[request.request_id] = self._passes.get(request.request_id, 0) + 1
        return self._passes[request.request_id] > WAITING_PASSES

    def evict_newest(self, output: SchedulerOutput) -> None:
        """Preempt the newest of the batch, which becomes the head of the queue; it computes nothing in this step.

        Raises:
            IndexError: the batch is empty.
        """
        victim = self.running[-1]
        unschedule(self, victim, output)
        self.preempt(victim, output)

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `PagedScheduler.admit`; and the count of the request's passes is reset.

        Args:
            request: in `waiting`. Its blocks are free. It was the head of the queue; if others were evicted for it,
                they are ahead of it now.
            output: the step so far, to which it is added.
            found: as for `PagedScheduler.admit`.
        """
        self._passes.pop(request.request_id, None)
        super().admit(request, output, found)

    def give_up(self, request: Request, output: SchedulerOutput) -> None:
        """Finish a waiting request that the whole pool is too small for, as FINISHED_CAPACITY."""
        self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
        output.finished.append(request.request_id)

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """As `Scheduler.finish_request`."""
        self._passes.pop(request_id, None)
        return super().finish_request(request_id, status)


class DequeScheduler(PagedScheduler):
    """Keeps queue and batch as deques: a victim goes to the front of the queue, an admitted request to the batch's end.

    While every victim is the newest of the batch, this is the order of arrival. With other victims it is not.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    first_come = False

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self._num_victims = 0
        self._fronts: dict[RequestId, int] = {}  # of victims that wait: the later ones ahead of the earlier

    def priority_key(self, request: Request) -> PriorityKey:
        """What `waiting` is ordered by: victims, the last one first, then arrival."""
        return (self._fronts.get(request.request_id, request.arrival_index),)

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.preempt`; the request goes to the front of the queue."""
        self._num_victims += 1
        self._fronts[request.request_id] = -self._num_victims
        super().preempt(request, output)

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `PagedScheduler.admit`; the request goes to the end of the batch."""
        super().admit(request, output, found)
        self._fronts.pop(request.request_id, None)
        self.running.remove(request)
        self.running.append(request)


class PhasedScheduler(DequeScheduler):
    """Keeps prompts and decodes apart: a step is all prompts if any request can be admitted, and all decodes if not.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Admit what can be admitted; only if nothing can, schedule the batch as `PagedScheduler.schedule_running`.

        `choose` selects from the requests that could compute. The others lose their batch slots and their blocks.

        Args:
            output: the step so far, in which nothing is scheduled yet.
        """
        self.schedule_waiting(output)
        self.leave_out(list(output.scheduled or self.running), output)
        if not output.scheduled:
            super().schedule_running(output)

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch now: no, `schedule_running` has admitted them already."""
        return False

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Which requests compute in this step, of those that could: all of them.

        Args:
            candidates: at least one: those just admitted, or the whole batch.

        Returns:
            At least one of them.
        """
        return candidates

    def leave_out(self, candidates: list[Request], output: SchedulerOutput) -> None:
        """Preempt those of `candidates` that `choose` does not choose."""
        chosen = {request.request_id for request in self.choose(candidates)} if candidates else set()
        for request in candidates[::-1]:
            if request.request_id not in chosen:
                unschedule(self, request, output)
                self.running.remove(request)
                self.running.append(request)  # `preempt` takes the last
                self.preempt(request, output)


class ForkingScheduler(PagedScheduler):
    """Lets a request be forked: its child shares all its blocks, and a shared block is copied before it is written.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def fork_request(self, request_id: RequestId, child_id: RequestId) -> Request:
        """Give a request of the batch a child sequence: the same tokens, in the same blocks, with another id.

        Call it between two steps, not while the tokens of one are awaited.

        Args:
            request_id: the parent. It is in the batch and has at least one generated token.
            child_id: names the child.

        Returns:
            The child. It is in the batch, at its end.

        Raises:
            ValueError: no request of that id is decoding, the batch is full, or `child_id` is taken. Nothing has
                changed.
        """
        parent = next((each for each in self.running if each.request_id == request_id), None)
        if parent is None or not parent.output_token_ids:
            raise ValueError(f"request {request_id!r} is not in decode: only such a request can be forked")
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(f"the batch has {self.max_num_seqs} requests already: raise max_num_seqs")
        child = parent.child(child_id)
        self.register(child)
        self.pool.share(parent.block_ids)
        child.block_ids = parent.block_ids.copy()
        child.output_token_ids = parent.output_token_ids.copy()
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = RequestStatus.RUNNING
        self.running.append(child)
        return child

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request needs before its next tokens can be computed, a copy's block included."""
        return super().blocks_missing(request) + self.writes_shared(request)

    def grow(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.grow`, without a copy's block, which `schedule_tokens` takes."""
        request.block_ids += self.pool.allocate(super().blocks_missing(request))

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """As `Scheduler.schedule_tokens`; and a shared block that the request writes into is copied first.

        Args:
            request: of the batch, and not in the step yet.
            output: the step so far. `blocks_to_copy` gets a pair (source block, target block) for the copy.
        """
        if self.writes_shared(request):
            self.copy_block(request, output)
        super().schedule_tokens(request, output)

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


def unschedule(scheduler: Scheduler, request: Request, output: SchedulerOutput) -> None:
    """Take what `request` was to compute out of the step, if it is in it."""
    if request.request_id in output.num_scheduled_tokens:
        scheduler.token_budget += output.num_scheduled_tokens.pop(request.request_id)
        output.scheduled.remove(request)
