# Phase 6, preemption: your file. It stands in for minicache.scheduler.paged.
# Write what raises NotImplementedError. `minicache grade 6` grades it, `minicache hint 6.K` helps with task K.
#
# Predict, before you write task 6.4. `minicache grade` checks it, without points.
# Requests 1, 2 and 3 arrive together, prompts of 8 tokens, 12 new tokens each; 7 blocks of 4. In step 1 one of them is
# preempted, and another in step 5. Which one is preempted in step 5?
# 6.4a =
# In which step does it come back?
# 6.4b =
# How many preemptions are there until all three have finished?
# 6.4c =
"""Paged scheduling: memory is allocated as tokens are generated, and taken back when it runs out.

Phase 6 builds it. Nothing is reserved any more: a request is admitted when its tokens fit, and grows by a block when
its last one is full. So the batch is larger, and at some point no block is free. Then the newest request is preempted:
its keys and values are computed again later, or wait in CPU swap space (Kwon et al. 2023, §4.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Literal, Unpack, get_args

from minicache.errors import InvariantError, require_count
from minicache.memory.blocks import BlockPool
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler, SchedulerOptions
from minicache.scheduler.output import SchedulerOutput

Preemption = Literal["recompute", "swap"]


class PagedOptions(SchedulerOptions, total=False):
    """The keyword arguments of `PagedScheduler`, which documents them."""

    preemption: Preemption
    num_host_blocks: int
    watermark: float


def require_paged_options(preemption: object, num_host_blocks: object, watermark: object) -> None:
    """Check the options that `PagedScheduler` adds to those of `Scheduler`; it documents them.

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
    """When a request's blocks can be allocated."""

    OK = "now"
    """They are free, and so are the watermark's."""
    LATER = "later"
    """Once other requests have left."""
    NEVER = "never"
    """The whole pool has too few."""


class PagedScheduler(Scheduler):
    """Admits by free blocks, grows requests block by block, and preempts the newest when blocks run out.

    The batch is in the order of admission, which is that of arrival: `running[0]` is the oldest and `running[-1]` the
    newest. A preempted request is the newest of the batch and older than every waiting one, so it is the next head.

    Args:
        preemption: "recompute" frees a victim's blocks, and computes its tokens again when it comes back; "swap" copies
            them to CPU swap space, and back. A victim that does not fit is recomputed.
        num_host_blocks: blocks of the CPU swap space, ≥ 0; ≥ 1 for "swap".
        watermark: the part of the pool, 0 ≤ watermark < 1, that an admission must leave free for the batch to grow
            into, rounded down to whole blocks. It delays no admission into an empty batch.
        options: `Scheduler`'s. A preempted request that has outgrown max_num_batched_tokens is recomputed in one step,
            in which no other is admitted.

    Attributes:
        host_pool: the `BlockPool` of the CPU swap space; None unless preemption is "swap".

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds, or `preemption` is unknown.
    """

    Options = PagedOptions

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

    # Admission

    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch in this step: not in one that preempted a request.

        Memory is short then, and a victim that came back at once would be the next victim.
        """
        raise NotImplementedError(
            "phase 6, task 3: Grow by a block; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests (`admit`) from the `head` of the queue while there are a batch slot, budget, and free blocks.

        If `can_allocate` is NEVER, the request is finished as FINISHED_CAPACITY and named in `output.finished`. If it
        is LATER, or the `num_new_tokens` exceed the remaining `token_budget`, the loop stops: no request is bypassed.

        A request whose `num_new_tokens` exceed max_num_batched_tokens fits into no step's budget. It is admitted if any
        budget is left and no other was admitted before it in this step.

        Of the waiting requests only the head is looked at. `find_prefix` is called once for each head, and what it
        finds is passed on as `found`.

        Args:
            output: the step so far, to which admitted requests are added.
        """
        raise NotImplementedError(
            "phase 6, task 2: Admit; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of a waiting request's tokens already: none before phase 8."""
        return []

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for the tokens that the request has now, prompt and output. None are reserved."""
        raise NotImplementedError(
            "phase 6, task 1: Now, later, never; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def can_allocate(self, request: Request, found: Sequence[int] = ()) -> AllocStatus:
        """Whether the blocks to admit `request` can be allocated. Allocates none.

        Args:
            request: in `waiting`.
            found: of its tokens, the blocks that `find_prefix` has found.

        Returns:
            NEVER: the whole pool has fewer than `blocks_to_admit`, free or not. OK: `blocks_to_take` are free, and so
            are the watermark's ⌊watermark · num_blocks⌋. With an empty batch the watermark needs none, or a large
            request could wait forever for blocks that no request uses. LATER: neither.
        """
        raise NotImplementedError(
            "phase 6, task 1: Now, later, never; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def blocks_to_take(self, request: Request, found: Sequence[int] = ()) -> int:
        """Free blocks needed to admit `request`: `blocks_to_admit`, less the found ones that are in use.

        A found block that is free counts like any other: sharing it takes it out of the free list.
        """
        needed = self.blocks_to_admit(request)
        return needed - sum([self.pool.ref_count(block_id) > 0 for block_id in found]) if found else needed

    def num_new_tokens(self, request: Request, found: Sequence[int] = ()) -> int:
        """Tokens that this step computes if it admits `request`: all that are neither computed nor found."""
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
        return num_tokens - max(request.num_computed_tokens, len(found) * self.pool.block_size)

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `Scheduler.admit`; if the request was SWAPPED, its blocks are copied back (`swap_in`).

        Args:
            request: WAITING or SWAPPED, in `waiting`. Its blocks are free.
            output: the step so far, to which it is added.
            found: of its tokens, the blocks that `find_prefix` has found.
        """
        raise NotImplementedError(
            "phase 6, task 2: Admit; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    # Growth

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Schedule the next tokens of every request in the batch (`schedule_tokens`), with the blocks that they need.

        From the oldest to the newest: each gets its `blocks_missing` from the pool (`grow`). If too few are free,
        `make_room` preempts from the other end of the batch.

        Args:
            output: the step so far, in which nothing is scheduled yet.
        """
        raise NotImplementedError(
            "phase 6, task 3: Grow by a block; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def blocks_missing(self, request: Request) -> int:
        """Blocks that the request needs before its next tokens can be computed. In decode: 1 or 0."""
        # Called for every token, so without the calls of `blocks_to_admit` and `num_tokens`.
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
        return -(-num_tokens // self.pool.block_size) - len(request.block_ids)

    def grow(self, request: Request, output: SchedulerOutput) -> None:
        """Append its `blocks_missing`, which are free, to the blocks of a request in the batch."""
        raise NotImplementedError(
            "phase 6, task 3: Grow by a block; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """Preempt the newest of the batch, one after the other, until the `blocks_missing` of `request` are free.

        If the newest is `request` itself, no request after it is left, and it is preempted too. But if it is alone in
        the batch, every used block is its own and the pool is too small for it: preempted, it would wait forever. It is
        finished as FINISHED_CAPACITY (`finish_request`), and named in `output.finished`. It is
        not counted as preempted.

        Args:
            request: of the batch, the one that grows. Those before it are scheduled already.
            output: the step so far.

        Returns:
            Whether the blocks are free, and `request` still in the batch.
        """
        raise NotImplementedError(
            "phase 6, task 4: Preempt by recompute; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    # Preemption

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Take the newest request out of the batch, with all its blocks, and put it back into the queue.

        It is counted (`num_preemptions`, `output.preempted`). If the policy is swap, it has computed something, and the
        CPU swap space has room for the blocks of its computed tokens, they are swapped out (`swap_out`). Otherwise it
        is recomputed (`restart`). Its generated tokens stay in both cases.

        Args:
            request: the last of the batch.
            output: the step so far, in which it has not been scheduled.
        """
        raise NotImplementedError(
            "phase 6, task 4: Preempt by recompute; read docs/en/phase-06-preemption/lab/00-paged-scheduling.md"
        )

    def swap_out(self, request: Request, num_blocks: int, output: SchedulerOutput) -> None:
        """Have the first blocks of a request copied to CPU swap space, and give all its blocks back: it is SWAPPED.

        `release` gives them back. Its computed tokens stay computed. The pairs (block, CPU block) go into
        `output.swapped_out`, in the order of the positions, the CPU blocks into `host_block_ids`, in the same order.

        Args:
            request: it has left the batch.
            num_blocks: blocks of its computed tokens, ≥ 1; so many are free in `host_pool`.
            output: the step so far.
        """
        raise NotImplementedError(
            "phase 6, task 5: Swap; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    def swap_in(self, request: Request, output: SchedulerOutput) -> None:
        """Have a request's CPU blocks copied into its first blocks, and give them back (`release_host`).

        The pairs (CPU block, block) go into `output.swapped_in`, in the order of the positions.

        Args:
            request: it was SWAPPED, and has new blocks: at least as many as CPU blocks.
            output: the step so far.
        """
        raise NotImplementedError(
            "phase 6, task 5: Swap; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    def release(self, request: Request) -> None:
        """Give back all that the request holds: its blocks, and its CPU blocks (`release_host`)."""
        super().release(request)
        if request.host_block_ids:
            self.release_host(request)

    def release_host(self, request: Request) -> None:
        """Give the request's CPU blocks back to `host_pool`, the last one first, and leave it without any."""
        raise NotImplementedError(
            "phase 6, task 5: Swap; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    def check(self) -> None:
        """As `Scheduler.check`, and the same of the CPU blocks: swapped-out requests, and no others, hold them.

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
                raise InvariantError(f"{request!r} holds CPU blocks {request.host_block_ids}")
        if held != self.host_pool.num_used:
            raise InvariantError(f"{self.host_pool.num_used} CPU blocks are used, requests list {held}")
