"""A server's memory under load: which slots hold a token, and why the others do not, step by step.

Phase 2 uses it to compare the three policies of contiguous reservation with phase 3's blocks. It runs at iteration
level: at each step the requests at the head of the queue are admitted, in the order of their arrival, as long as their
memory can be had; then every running request gets one token; those that have all of theirs leave.

Simplified, and the same for every policy: a step takes a fixed time, however many requests run in it; a prompt is
computed in the step that admits its request; and each token, the last one too, takes a slot when it is generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from minicache.errors import OutOfBlocksError, OutOfSlotsError, require_count, require_positive
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache.memory.reservation import ContiguousReservation, MemoryUse, reservation
from minicache.simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class Sample:
    """What is where in one step, after its requests were admitted and before they get their tokens.

    Attributes:
        time: of the step, in seconds.
        num_running: requests in the batch.
        num_waiting: requests that have arrived and are not in the batch.
        num_finished: requests that have finished so far.
        num_preempted: how often a request was put back into the queue so far.
        memory: where the slots are.
        surplus: of the slots in `memory.internal`, those that the policy asked for; the others came by rounding.
    """

    time: float
    num_running: int
    num_waiting: int
    num_finished: int
    num_preempted: int
    memory: MemoryUse
    surplus: int


@dataclass(slots=True)
class _Request:
    """A request on its way.

    Attributes:
        num_tokens: tokens that it has: its prompt, and what it has generated.
        num_left: tokens that it has yet to generate.
        num_reserved: slots that its policy asks for; None under "paged", which reserves nothing.
        surplus: those of them that it will never use.
    """

    request_id: Hashable
    num_tokens: int
    num_left: int
    num_reserved: int | None
    surplus: int


class PagedMemory:
    """Phase 3's blocks behind the calls of `ContiguousReservation`: a request holds the blocks of its tokens, no more.

    Args:
        num_slots: slots in all, ≥ block_size. Those beyond the last whole block are left out.
        block_size: slots of a block, ≥ 1.

    Attributes:
        pool: the `BlockPool` that the blocks come from.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is out of its bounds.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        require_count("block_size", block_size)
        require_count("num_slots", num_slots, at_least=block_size)
        self.pool = BlockPool(num_slots // block_size, block_size)
        self._tables: dict[Hashable, BlockTable] = {}
        self._expected: dict[Hashable, int] = {}

    def admit(self, request_id: Hashable, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Take blocks for the prompt, if one more token would fit too: an admitted request can go on.

        Raises:
            OutOfBlocksError: it would not. Nothing has changed.
        """
        needed = blocks_for(num_prompt_tokens + 1, self.pool.block_size)
        if needed > self.pool.num_free:
            raise OutOfBlocksError(f"{needed} blocks needed, {self.pool.num_free} free")
        table = BlockTable(self.pool)
        table.append(num_prompt_tokens)
        self._tables[request_id] = table
        self._expected[request_id] = num_prompt_tokens + num_output_tokens

    def grow(self, request_id: Hashable, count: int = 1) -> None:
        """Store `count` more tokens of a request.

        Raises:
            OutOfBlocksError: that takes more blocks than are free. Nothing has changed.
        """
        self._tables[request_id].append(count)

    def release(self, request_id: Hashable) -> None:
        """Give back all that a request holds."""
        self._tables.pop(request_id).release()
        del self._expected[request_id]

    def memory_use(self, waiting: int | None = None) -> MemoryUse:
        """Where the slots are now. Any free block serves any request, so none is external, whatever is waiting."""
        used = reserved = internal = 0
        for request_id, table in self._tables.items():
            unused = len(table.block_ids) * self.pool.block_size - table.num_tokens
            coming = min(unused, self._expected[request_id] - table.num_tokens)
            used += table.num_tokens
            reserved += coming
            internal += unused - coming
        return MemoryUse(used, reserved, internal, external=0, free=self.pool.num_free * self.pool.block_size)


class MemorySimulation:
    """One run of one workload on one memory. Call `step()`, or take what `run()` yields.

    Under "paged" a running request can find no free block for its next token. Then the request that was admitted last
    is preempted, itself perhaps: its blocks are freed, and it goes back to the head of the queue. When it is admitted
    again, its prompt and what it had generated are computed anew, in one step like any prompt.

    Args:
        arrivals: the requests, in the order of their times.
        policy: "max", "pow2", "oracle" or "paged".
        num_slots: slots of the memory, ≥ 1.
        max_model_len: the most tokens of one request; none of `arrivals` has more.
        seconds_per_step: what a step takes, > 0.
        block_size: slots of a block under "paged", ≥ 1.

    Attributes:
        memory: the `ContiguousReservation` or the `PagedMemory`, to look at between steps.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: an unknown policy, or a number out of its bounds.
    """

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        policy: str,
        num_slots: int,
        max_model_len: int,
        *,
        seconds_per_step: float,
        block_size: int = 16,
    ) -> None:
        require_positive("seconds_per_step", seconds_per_step)
        self.policy = policy
        self.max_model_len = max_model_len
        self.seconds_per_step = seconds_per_step
        self.memory: ContiguousReservation | PagedMemory = (
            PagedMemory(num_slots, block_size)
            if policy == "paged"
            else ContiguousReservation(num_slots, policy, max_model_len)
        )
        self._arrivals = deque(arrivals)
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []  # in the order of their admission
        self._num_steps = self._num_finished = self._num_preempted = 0

    @property
    def is_done(self) -> bool:
        """Whether every request has arrived and finished."""
        return not (self._arrivals or self._waiting or self._running)

    def run(self, every: int = 1) -> Iterator[Sample]:
        """Step until every request has finished. A server that is overloaded gets there long after the last arrival.

        Args:
            every: look only at one step in so many, ≥ 1.

        Yields:
            A sample of each step that is looked at, those included in which nothing runs.

        Raises:
            TypeError: `every` is not an int.
            ValueError: `every` is below 1.
            OutOfSlotsError, OutOfBlocksError: a request is too large for the whole memory.
        """
        require_count("every", every)
        while not self.is_done:
            yield self.step()
            for _ in range(every - 1):
                self._begin()
                self._end()

    def step(self) -> Sample:
        """Admit, look, and give every running request a token.

        Raises:
            OutOfSlotsError, OutOfBlocksError: a request is too large for the whole memory.
        """
        self._begin()
        sample = self._sample()
        self._end()
        return sample

    def _begin(self) -> None:
        self._receive()
        self._admit()

    def _end(self) -> None:
        self._generate()
        self._release_finished()
        self._num_steps += 1

    @property
    def _time(self) -> float:
        return self._num_steps * self.seconds_per_step

    def _receive(self) -> None:
        """Every request that has arrived by now joins the queue."""
        while self._arrivals and self._arrivals[0].time <= self._time:
            arrival = self._arrivals.popleft()
            num_tokens, num_left = arrival.num_prompt_tokens, arrival.num_output_tokens
            num_reserved, surplus = None, 0
            if self.policy != "paged":
                num_reserved = reservation(self.policy, num_tokens, num_left, self.max_model_len)
                surplus = num_reserved - num_tokens - num_left
            self._waiting.append(_Request(arrival.request_id, num_tokens, num_left, num_reserved, surplus))

    def _admit(self) -> None:
        """First come, first served: the head of the queue waits for its memory, and all behind it wait too."""
        while self._waiting:
            head = self._waiting[0]
            try:
                self.memory.admit(head.request_id, head.num_tokens, head.num_left)
            except (OutOfSlotsError, OutOfBlocksError):
                if not self._running:  # none will ever leave and make room
                    raise
                return
            self._running.append(self._waiting.popleft())

    def _sample(self) -> Sample:
        waiting = self._waiting[0].num_reserved if self._waiting else None
        return Sample(
            time=self._time,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_finished=self._num_finished,
            num_preempted=self._num_preempted,
            memory=self.memory.memory_use(waiting),
            surplus=sum(request.surplus for request in self._running),
        )

    def _generate(self) -> None:
        """Every running request gets a token, those admitted first before the others."""
        turn = 0
        while turn < len(self._running):
            request = self._running[turn]
            try:
                self.memory.grow(request.request_id)
            except OutOfBlocksError:
                if len(self._running) == 1:  # no other has blocks to give
                    raise
                self._preempt(self._running.pop())
                continue  # with the same request, unless it was the one
            request.num_tokens += 1
            request.num_left -= 1
            turn += 1

    def _preempt(self, request: _Request) -> None:
        self.memory.release(request.request_id)
        self._waiting.appendleft(request)
        self._num_preempted += 1

    def _release_finished(self) -> None:
        for request in self._running:
            if not request.num_left:
                self.memory.release(request.request_id)
                self._num_finished += 1
        self._running = [request for request in self._running if request.num_left]
