"""Paged scheduling: memory is taken as tokens come, and taken back when it runs out.

Phase 6 builds it. Nothing is reserved any more: a request is admitted when its tokens fit, and grows by a block when
its last one is full. So the batch is larger, and one day there is no free block. Then the newest request leaves the
batch: its keys and values are computed again later, or wait in the host's memory (Kwon et al. 2023, §4.5).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, Unpack, get_args

from minicache.blocks import BlockPool
from minicache.errors import InvariantError
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


class AllocStatus(Enum):
    """When a request's blocks can be had."""

    OK = "now"
    LATER = "later"
    NEVER = "never"


class PagedScheduler(ContinuousBatchScheduler):
    """Admits by free blocks, grows requests block by block, and preempts the newest when blocks run out.

    Args:
        preemption: "recompute" frees a victim's blocks, and computes its tokens again when it comes back; "swap" copies
            them to host blocks, and back. A victim for which the host pool has no room is recomputed.
        num_host_blocks: blocks of the host pool, ≥ 1 for "swap".
        watermark: the part of the pool, 0 ≤ watermark < 1, that an admission must leave free for the batch to grow
            into. It holds nobody back when the batch is empty.
        options: `Scheduler`'s. A request that was preempted may have outgrown max_num_batched_tokens: it is then
            computed in one step all the same, with nobody else admitted beside it.

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
        if preemption not in get_args(Preemption):
            raise ValueError(f"preemption must be one of {', '.join(get_args(Preemption))}; got {preemption!r}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark is a part of the pool, 0 ≤ watermark < 1; got {watermark!r}")
        self.host_pool = BlockPool(num_host_blocks, self.pool.block_size) if preemption == "swap" else None
        self._num_watermark_blocks = int(watermark * self.pool.num_blocks)

    def schedule(self) -> SchedulerOutput:
        """Every request in the batch gets the blocks that it needs, oldest first; then requests are admitted.

        Nobody is admitted in a step that preempted somebody.

        Returns:
            The step's work. It orders a token, or ends a request, whenever there is an unfinished one.
        """
        output = SchedulerOutput()
        self.grow_batch(output)
        if not output.preempted:
            self.admit(output)
        return self.issue(output)

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the tokens that the request has now, swapped out or not."""
        return -(-request.num_tokens // self.pool.block_size)

    def can_allocate(self, request: Request) -> AllocStatus:
        """Whether the blocks to admit `request` can be had.

        Returns:
            OK: now, and the watermark's blocks stay free (of an empty batch nothing has to). LATER: when others have
            left. NEVER: the whole pool is too small.
        """
        needed = self.blocks_to_admit(request)
        if needed > self.pool.num_blocks:
            return AllocStatus.NEVER
        spared = self._num_watermark_blocks if self.running else 0
        return AllocStatus.OK if needed + spared <= self.pool.num_free else AllocStatus.LATER

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the head of the line while there are a seat, tokens in the step, and free blocks.

        As `StaticBatchScheduler.admit`, but for the blocks: those of the tokens that the request has, and OK by
        `can_allocate`. One that was swapped out gets its keys and values back from the host and computes one token;
        one that was preempted by recompute computes its prompt and all that it had generated.

        Args:
            output: the step so far; what is admitted is added to it.
        """
        budget = self.max_num_batched_tokens - output.total_num_scheduled_tokens
        num_seated = self.num_running
        while len(self.running) < self.max_num_seqs and (request := self.head()):
            num_new = request.num_tokens - request.num_computed_tokens
            # It was small enough when it came, and has grown since: some step must take it whole.
            outgrown = num_new > self.max_num_batched_tokens and self.num_running == num_seated
            if (num_new > budget and not outgrown) or self.can_allocate(request) is not AllocStatus.OK:
                return
            del self.waiting[request.request_id]
            self.enter(request, output)
            budget -= num_new

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """Give `request`, which has just left the line, its blocks and its place at the end of the batch."""
        request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
        if request.status is RequestStatus.SWAPPED:
            self.swap_in(request, output)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.order(request, output)

    def grow_batch(self, output: SchedulerOutput) -> None:
        """Order the next tokens of every request in the batch, and take the blocks that they need.

        From the oldest to the newest. Where blocks are short, `make_room` preempts.

        Args:
            output: the step so far.
        """
        turn = 0
        while turn < len(self.running):
            request = self.running[turn]
            missing = self.blocks_missing(request)
            if missing:
                if not self.make_room(request, missing, output):
                    return  # it was the last of the batch, and has left it
                request.block_ids += self.pool.allocate(missing)
            self.order(request, output)
            turn += 1

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request in the batch must get before its next tokens are computed."""
        return -(-request.num_tokens // self.pool.block_size) - len(request.block_ids)

    def make_room(self, request: Request, missing: int, output: SchedulerOutput) -> bool:
        """Preempt the newest of the batch, one after the other, until `missing` blocks are free.

        When it is the turn of `request` itself, nobody after it is left. It is preempted too; but if the batch is all
        its own, the whole pool is too small for it, and it ends as FINISHED_CAPACITY.

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
        """Take a request out of the batch, and all its blocks, and put it at the head of the line.

        By swap if that is the policy and the host pool has room for what the request has computed; else by recompute.

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
        """Have the first `num_blocks` blocks of a request copied to the host, and give all its blocks back."""
        assert self.host_pool is not None
        host_block_ids = self.host_pool.allocate(num_blocks)
        output.swapped_out[request.request_id] = list(zip(request.block_ids, host_block_ids, strict=False))
        self.release(request)
        request.host_block_ids = host_block_ids
        request.status = RequestStatus.SWAPPED

    def swap_in(self, request: Request, output: SchedulerOutput) -> None:
        """Have a request's host blocks copied into its first blocks, and give them back."""
        output.swapped_in[request.request_id] = list(zip(request.host_block_ids, request.block_ids, strict=False))
        self.release_host(request)

    def release(self, request: Request) -> None:
        """Give back all that the request holds: its blocks, and its host blocks."""
        super().release(request)
        self.release_host(request)

    def release_host(self, request: Request) -> None:
        """Give the request's host blocks back, if it has any."""
        if self.host_pool is not None and request.host_block_ids:
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
