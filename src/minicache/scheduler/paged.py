"""Paged scheduling: memory is taken as tokens come, and taken back when it runs out.

Phase 6 builds it. Nothing is reserved any more: a request is admitted when its tokens fit, and grows by a block when
its last one is full. So the batch is larger, and one day there is no free block. Then the newest request leaves the
batch: its keys and values are computed again later, or wait in the host's memory (Kwon et al. 2023, §4.5).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, Unpack, get_args

from minicache.errors import InvariantError, require_count
from minicache.memory.blocks import BlockPool
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import SchedulerOptions
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.output import SchedulerOutput

Preemption = Literal["recompute", "swap"]


class PagedOptions(SchedulerOptions, total=False):
    """The keyword arguments of `PagedScheduler`, which documents them."""

    preemption: Preemption
    num_host_blocks: int
    watermark: float


def require_paged_options(preemption: object, num_host_blocks: object, watermark: object) -> None:
    """Refuse what `PagedScheduler` adds to the options of `Scheduler` unless it can be. It documents them.

    Raises:
        TypeError: `num_host_blocks` is not an int, or `watermark` is not a number.
        ValueError: `preemption` is unknown, or a number is out of its bounds.
    """
    if preemption not in get_args(Preemption):
        raise ValueError(f"preemption must be one of {', '.join(get_args(Preemption))}; got {preemption!r}")
    require_count("num_host_blocks", num_host_blocks, at_least=1 if preemption == "swap" else 0)
    if not isinstance(watermark, int | float) or isinstance(watermark, bool):
        raise TypeError(f"watermark must be a number, got {watermark!r}")
    if not 0 <= watermark < 1:
        raise ValueError(f"watermark is a part of the pool, 0 ≤ watermark < 1; got {watermark!r}")


class AllocStatus(Enum):
    """When a request's blocks can be had."""

    OK = "now"
    """They are free, and enough besides."""
    LATER = "later"
    """When others have left."""
    NEVER = "never"
    """The whole pool has fewer."""


class PagedScheduler(ContinuousBatchScheduler):
    """Admits by free blocks, grows requests block by block, and preempts the newest when blocks run out.

    The batch is in the order of admission, which is that of arrival: `running[0]` is the oldest and `running[-1]` the
    newest. Who is preempted goes to the head of the line, so that everybody in the batch arrived before everybody in
    the line, and the line is in the order of arrival.

    Args:
        preemption: "recompute" frees a victim's blocks, and computes its tokens again when it comes back; "swap" copies
            them to host blocks, and back. A victim for which the host pool has no room is recomputed.
        num_host_blocks: blocks of the host pool, ≥ 0; ≥ 1 for "swap".
        watermark: the part of the pool, 0 ≤ watermark < 1, that an admission must leave free for the batch to grow
            into, rounded down to whole blocks. It holds nobody back when the batch is empty.
        options: `Scheduler`'s. A request that was preempted may have outgrown max_num_batched_tokens: it is then
            computed in one step all the same, and nobody else is admitted in that step.

    Attributes:
        host_pool: the `BlockPool` of the host's memory; None unless preemption is "swap".

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds, or `preemption` is unknown.
    """

    def __init__(
        self,
        *,
        preemption: Preemption = "recompute",
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        **options: Unpack[SchedulerOptions],
    ) -> None:
        super().__init__(**options)
        require_paged_options(preemption, num_host_blocks, watermark)
        self.host_pool = BlockPool(num_host_blocks, self.pool.block_size) if preemption == "swap" else None
        self._num_watermark_blocks = int(watermark * self.pool.num_blocks)

    def schedule(self) -> SchedulerOutput:
        """Every request in the batch gets the blocks that it needs (`grow_batch`); then others are admitted (`admit`).

        Nobody is admitted in a step that preempted somebody: memory is short, and a victim that came back at once would
        be the next victim.

        Returns:
            The step's work: those that were in the batch, in order, then those just admitted. It orders a token, or
            ends a request, whenever there is an unfinished one. Copies that it orders are made before the model runs;
            if the tokens of the step never come, they are not ordered again.
        """
        output = SchedulerOutput()
        self.grow_batch(output)
        if not output.preempted:
            self.admit(output)
        return self.issue(output)

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the tokens that the request has now, prompt and output. None are reserved."""
        return -(-request.num_tokens // self.pool.block_size)

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the blocks to admit `request` can be had. Takes none.

        Returns:
            NEVER: the whole pool has fewer than `blocks_to_admit`, free or not. OK: `blocks_to_take` are free, and the
            watermark's blocks (⌊watermark · num_blocks⌋) besides; beside an empty batch the watermark asks for none, or
            a large request could wait for ever for blocks that nobody uses. LATER: neither.
        """
        if self.blocks_to_admit(request) > self.pool.num_blocks:
            return AllocStatus.NEVER
        spared = self._num_watermark_blocks if self.running else 0
        return AllocStatus.OK if self.blocks_to_take(request) + spared <= self.pool.num_free else AllocStatus.LATER

    def blocks_to_take(self, request: Request) -> int:
        """Free blocks that it takes to admit `request`: `blocks_to_admit`. Fewer once blocks are shared (phase 8)."""
        return self.blocks_to_admit(request)

    def num_new_tokens(self, request: Request) -> int:
        """Tokens that a step computes in which `request` is admitted: all that are not computed yet."""
        return request.num_tokens - request.num_computed_tokens

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the head of the line (`head`) while there are a seat, tokens in the step, and free blocks.

        Stops at the first that cannot be had: nobody overtakes it. A request's tokens in this step are its
        `num_new_tokens`: of a new one its prompt; of one that was preempted by recompute its prompt and all that it had
        generated; of one that was swapped out, the newest. They must fit into what this step has left of
        max_num_batched_tokens; but a request that has grown past max_num_batched_tokens itself, so that no step has
        room for it, is admitted where a token is left, as the only one admitted in its step. Its blocks must be OK by
        `can_allocate`. Who is admitted leaves the line, and gets the rest from `enter`.

        Args:
            output: the step so far; what is admitted is added to it.
        """
        budget = left = self.max_num_batched_tokens - output.total_num_scheduled_tokens
        while len(self.running) < self.max_num_seqs and (request := self.head()):
            num_new = self.num_new_tokens(request)
            # Where no token is left it waits too: the batch would outgrow the budget for all the steps to come.
            outgrown = num_new > self.max_num_batched_tokens and 0 < left == budget
            if (num_new > left and not outgrown) or self.can_allocate(request) is not AllocStatus.OK:
                return
            del self.waiting[request.request_id]
            self.enter(request, output)
            left -= num_new

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """Give `request`, which has just left the line, its blocks and its place at the end of the batch.

        It gets as many blocks as it lacks of `blocks_to_admit`, behind those that it has (before phase 8: none). It is
        RUNNING, and is ordered (`order`). If it was SWAPPED, its host blocks are copied into the first of its blocks
        (`swap_in`).

        Args:
            request: WAITING or SWAPPED, in neither queue. Its blocks are free.
            output: the step so far, to which it is added.
        """
        request.block_ids += self.pool.allocate(self.blocks_to_admit(request) - len(request.block_ids))
        if request.status is RequestStatus.SWAPPED:
            self.swap_in(request, output)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.order(request, output)

    def grow_batch(self, output: SchedulerOutput) -> None:
        """Order the next tokens of every request in the batch (`order`), and take the blocks that they need.

        From the oldest to the newest: each takes its `blocks_missing` from the pool, behind those that it has. Where
        too few are free, `make_room` preempts from the other end. Who is preempted before its turn has none.

        Args:
            output: the step so far, in which nothing is ordered yet.
        """
        for request in self.running:  # which `make_room` shortens, at its end
            if missing := self.blocks_missing(request):
                if missing > self.pool.num_free and not self.make_room(request, missing, output):
                    return  # it was the last of the batch, and has left it
                request.block_ids += self.pool.allocate(missing)
            self.order(request, output)

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request in the batch must get before its next tokens are computed.

        Those for all its tokens, less those that it has: 1 when its last block is full, else 0.
        """
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids)  # a property's call would cost as much
        return -(-num_tokens // self.pool.block_size) - len(request.block_ids)

    def make_room(self, request: Request, missing: int, output: SchedulerOutput) -> bool:
        """Preempt the newest of the batch, one after the other, until `missing` blocks are free. None if they are.

        When it is the turn of `request` itself, nobody after it is left. It is preempted too; but if it is alone in the
        batch, everything that is used is its own, so the whole pool is too small for it: preempted, it would wait for
        ever. It ends as FINISHED_CAPACITY (`finish_request`), and is named in `output.finished`.

        Args:
            request: of the batch, the one that grows. Those before it have had their turn.
            missing: blocks that it needs, ≥ 1.
            output: the step so far.

        Returns:
            Whether the blocks are free, and `request` still in the batch.
        """
        while missing > self.pool.num_free:
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
                output.finished.append(request.request_id)
                return False
            self.preempt(victim, output)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take the newest request out of the batch, with all its blocks, and put it at the head of the line.

        It is counted (`num_preemptions`, `output.preempted`). If the policy is swap, it has computed something, and the
        host pool has room for the blocks of what it has computed, they are swapped out (`swap_out`). Else it is
        recomputed: its blocks are freed (`release`), none of its tokens counts as computed any more, and it is WAITING.
        What it has generated stays, in both cases.

        Args:
            request: the last of the batch.
            output: the step so far, in which it has not been ordered.
        """
        self.running.pop()
        request.num_preemptions += 1
        output.preempted.append(request.request_id)
        num_computed_blocks = -(-request.num_computed_tokens // self.pool.block_size)
        if self.host_pool is not None and 0 < num_computed_blocks <= self.host_pool.num_free:
            self.swap_out(request, num_computed_blocks, output)
        else:
            self.release(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.WAITING
        self.line_up(request, first=True)

    def swap_out(self, request: Request, num_blocks: int, output: SchedulerOutput) -> None:
        """Have the first blocks of a request copied to the host, and give all its blocks back: it is SWAPPED.

        Its computed tokens stay computed. The pairs (block, host block) go into `output.swapped_out`, in the order of
        the positions, and the host blocks into `host_block_ids`, in the same order.

        Args:
            request: it has left the batch.
            num_blocks: blocks of its computed tokens, ≥ 1; so many are free in `host_pool`.
            output: the step so far.
        """
        assert self.host_pool is not None
        host_block_ids = self.host_pool.allocate(num_blocks)
        output.swapped_out[request.request_id] = list(zip(request.block_ids, host_block_ids, strict=False))
        self.release(request)
        request.host_block_ids = host_block_ids
        request.status = RequestStatus.SWAPPED

    def swap_in(self, request: Request, output: SchedulerOutput) -> None:
        """Have a request's host blocks copied into its first blocks, and give them back (`release_host`).

        The pairs (host block, block) go into `output.swapped_in`, in the order of the positions.

        Args:
            request: SWAPPED, with new blocks: at least as many as it has on the host.
            output: the step so far.
        """
        output.swapped_in[request.request_id] = list(zip(request.host_block_ids, request.block_ids, strict=False))
        self.release_host(request)

    def release(self, request: Request) -> None:
        """Give back all that the request holds: its blocks, and its host blocks (`release_host`)."""
        super().release(request)
        if request.host_block_ids:
            self.release_host(request)

    def release_host(self, request: Request) -> None:
        """Give the request's host blocks back to `host_pool`, the last one first; it has none then."""
        assert self.host_pool is not None
        self.host_pool.free(request.host_block_ids[::-1])
        request.host_block_ids = []

    def check(self) -> None:
        """As `Scheduler.check`, and the same of the host pool: who is swapped out, and nobody else, holds its blocks.

        Raises:
            InvariantError: the books do not agree.
        """
        super().check()
        if self.host_pool is None:
            return
        self.host_pool.check()
        held = 0
        for request in (*self.running, *self.waiting.values()):
            held += len(request.host_block_ids)
            if bool(request.host_block_ids) != (request.status is RequestStatus.SWAPPED):
                raise InvariantError(f"{request!r} holds host blocks {request.host_block_ids}")
        if held != self.host_pool.num_used:
            raise InvariantError(f"{self.host_pool.num_used} host blocks are used, requests list {held}")
