"""The engines that the incidents of phase 12 happened in, without the bugs: its scheduler with one more policy each.

Phase 12 comes with them. They are not stages of the course: each adds to `AsyncChunkedScheduler` only the code that a
bug needs. `overlapped` runs any of them one step ahead of the tokens. Pure standard library.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Unpack

from minicache.request import Request, RequestId
from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache.scheduler.base import Scheduler
from minicache.scheduler.chunked import ChunkedOptions
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus


def overlapped(
    scheduler: Scheduler, requests: Iterable[Request], token: Callable[[RequestId], int], *, max_steps: int = 500
) -> Iterator[tuple[SchedulerOutput, SchedulerOutput | None]]:
    """Add requests and serve them, each step scheduled while the one before runs.

    Between a step's `schedule()` and the commit of the one before, the caller may look, add requests or abort them.

    Args:
        scheduler: it overlaps.
        requests: what to add.
        token: the token that the model generates for a request, by its id.
        max_steps: where the run is given up.

    Yields:
        The step that was just scheduled, and the one before, which is committed next; None if there is none.
    """
    for request in requests:
        scheduler.add_request(request)
    before: SchedulerOutput | None = None
    for _ in range(max_steps):
        if not scheduler.has_unfinished and (before is None or not before.scheduled):
            return
        output = scheduler.schedule()
        yield output, before
        if before is not None:
            scheduler.update_from_output(before, {each: token(each) for each in before.num_scheduled_tokens})
        before = output


class FetchingScheduler(AsyncChunkedScheduler):
    """Blocks are written from outside too: a network card fills those of a request as soon as it is admitted.

    It brings keys and values of the prompt from another machine, and does not wait for the steps that run. So a request
    may not be admitted into a block that an outstanding step writes. (For a request that grows nothing changes: its
    blocks are written by steps, and those run one after the other.)

    Blocks can be held back (`hold`) until a step is committed. The pool counts them as used. A request of the batch
    that lacks blocks while some are held waits for them: no request is preempted or finished for it.

    Arguments, attributes and errors are `AsyncChunkedScheduler`'s.
    """

    def __init__(self, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        self._held: list[tuple[SchedulerOutput, list[int]]] = []  # and the step that they are held for

    @property
    def num_held(self) -> int:
        """Blocks that are held back."""
        return sum(len(block_ids) for _, block_ids in self._held)

    def hold(self, request: Request, step: SchedulerOutput) -> None:
        """Take a request's blocks from it. They are freed when `step` is committed.

        Args:
            request: it has left the batch. Afterwards it has no blocks.
            step: outstanding.
        """
        self._held.append((step, request.block_ids))
        request.block_ids = []

    @abstractmethod
    def release(self, request: Request) -> None:
        """As `AsyncChunkedScheduler.release`, which frees all blocks at once: which are held back is a subclass's."""
        super().release(request)

    def make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """As `AsyncChunkedScheduler.make_room`; if the held blocks are enough, the request waits for them.

        Then it returns False, and neither `request` nor those after it compute anything in this step.
        """
        if self.num_held and self.blocks_missing(request) <= self.pool.num_free + self.num_held:
            return False
        return super().make_room(request, output)

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """As `AsyncChunkedScheduler.update_from_output`; and what was held for this step is freed."""
        finished = super().update_from_output(output, token_ids)
        self._free_held(output)
        return finished

    def recover(self) -> None:
        """As `AsyncChunkedScheduler.recover`; no step is outstanding, and nothing is held."""
        self._free_held(None)
        super().recover()

    def check(self) -> None:
        """As `AsyncChunkedScheduler.check`, unless blocks are held: they are used, and no request lists them."""
        if self._held:
            self.pool.check()
        else:
            super().check()

    def _free_held(self, output: SchedulerOutput | None) -> None:
        """Free what is held for a step; None: for any."""
        for step, block_ids in self._held:
            if output is None or step is output:
                self.pool.free(block_ids[::-1])
        self._held = [] if output is None else [each for each in self._held if each[0] is not output]


class AlternatingScheduler(AsyncChunkedScheduler):
    """Keeps prompts and decodes apart: while prompts are left to compute, requests in decode are passed over.

    So a request may have a step in which it computes nothing, between two in which it does: a gap.

    Arguments, attributes and errors are `AsyncChunkedScheduler`'s.
    """

    prompts_only = False  # whether the step that is being scheduled is one for prompts

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `AsyncChunkedScheduler.schedule_running`; but if there are prompts, requests in decode are passed over.

        There are, if a request of the batch has prompt left to compute, or one that waits can be admitted.
        """
        self.prompts_only = any(each.num_computed_tokens < each.num_prompt_tokens for each in self.running)
        if not self.prompts_only and len(self.running) < self.max_num_seqs and (head := self.head()):
            self.prompts_only = self.can_allocate(head, self.find_prefix(head)) is AllocStatus.OK
        super().schedule_running(output)

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """As `AsyncChunkedScheduler.schedule_waiting`: a request that is admitted computes something."""
        self.prompts_only = False
        super().schedule_waiting(output)

    def num_uncomputed(self, request: Request) -> int:
        """As `AsyncChunkedScheduler.num_uncomputed`; 0 if the request is in decode and the step is for prompts."""
        if self.prompts_only and request.num_computed_tokens >= request.num_prompt_tokens:
            return 0
        return super().num_uncomputed(request)


class SlottedScheduler(AsyncChunkedScheduler):
    """The model knows batch slots and no requests, and an urgent request takes the slot of another one at once.

    Each request of the batch has a slot, a number from 0 on: the lowest that is free when it is admitted. The model
    returns a token for a slot. Whose it is, `receiver` decides.

    If the batch is full, and the head of the queue has a lower priority number than the newest of the batch, that one
    is preempted, and the head is admitted in the same step.

    Arguments and errors are `AsyncChunkedScheduler`'s.

    Attributes:
        slots: slot → the request that has it now.
    """

    def __init__(self, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        self.slots: dict[int, Request] = {}
        self._slots_of: list[tuple[SchedulerOutput, list[int]]] = []  # of the outstanding steps

    @abstractmethod
    def receiver(self, output: SchedulerOutput, slot: int) -> Request | None:
        """The request that gets the token which the model has returned for a slot.

        Args:
            output: the step that has generated it, the oldest outstanding one. Another may have been scheduled since.
            slot: the slot, as it was when that step was scheduled (`slots_of`).

        Returns:
            The request; None if no request gets it.
        """

    def slots_of(self, output: SchedulerOutput) -> list[int]:
        """The slots of an outstanding step: of `output.scheduled`, in order, those that the requests had then."""
        return next(slots for step, slots in self._slots_of if step is output)

    def schedule(self) -> SchedulerOutput:
        """As `AsyncChunkedScheduler.schedule`; the slots of the step are noted."""
        output = super().schedule()
        slots = {id(request): slot for slot, request in self.slots.items()}
        self._slots_of = [each for each in self._slots_of if each[0] is self.outstanding]
        self._slots_of.append((output, [slots[id(request)] for request in output.scheduled]))
        return output

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `AsyncChunkedScheduler.schedule_running`; but first an urgent head gets the slot of the newest.

        A request that has not gained a token since its admission keeps its slot.
        """
        self._is_urgent = False
        if len(self.running) == self.max_num_seqs and (head := self.head()):
            last = self.running[-1]
            fits = self.can_allocate(head, self.find_prefix(head)) is AllocStatus.OK
            if head.priority < last.priority and fits and self.has_gained_token(last):
                self.preempt(last, output)
                self._is_urgent = True
        super().schedule_running(output)

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join: not in a step that preempted one, unless it was for an urgent one only."""
        return len(output.preempted) == self._is_urgent

    def admit(self, request: Request, output: SchedulerOutput, found: Iterable[int] = ()) -> None:
        """As `AsyncChunkedScheduler.admit`; the request gets the lowest slot that is free."""
        slot = next(slot for slot in range(self.max_num_seqs) if slot not in self.slots)
        self.slots[slot] = request
        super().admit(request, output, tuple(found))

    def release(self, request: Request) -> None:
        """As `AsyncChunkedScheduler.release`; its slot is free."""
        super().release(request)
        self.slots = {slot: each for slot, each in self.slots.items() if each is not request}

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """As `AsyncChunkedScheduler.update_from_output`, but each token goes to the `receiver` of its slot.

        Args:
            output: the oldest outstanding step.
            token_ids: as for `AsyncChunkedScheduler.update_from_output`; the model knew the slots only.
        """
        self.check_commit(output, token_ids)
        if self.ahead is None:
            self.count(output)
        self.cache_computed()
        expecting = set(map(id, self.awaited))
        finished = []
        for request, slot in zip(output.scheduled, self.slots_of(output), strict=True):
            receiver = (
                self.receiver(output, slot) if id(request) in expecting and request.request_id in token_ids else None
            )
            if receiver is None or receiver.status.is_finished:
                continue
            if self.append_token(receiver, token_ids[request.request_id]):
                finished.append(receiver)
        self.outstanding, self.ahead, self.awaited = self.ahead, None, []
        self.running = [request for request in self.running if not request.status.is_finished]
        for request in finished:
            if self.waiting.get(request.request_id) is request:
                self.waiting.remove(request)
            self._forget(request)
        return finished
