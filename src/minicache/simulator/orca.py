"""Orca's baselines as a scheduler: continuous batching over contiguous reservation.

The PagedAttention paper compares with three rebuilt variants of Orca (Kwon et al. 2023, section 6.1). They batch at the
level of iterations, as phase 5's `ContinuousBatchScheduler`, and reserve one run of slots for every request by phase
2's policies, over phase 2's buddy allocator. This module combines the two, so the baselines run on the same
simulator as everything else. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, Unpack

from minicache.errors import OutOfBlocksError, OutOfSlotsError, RequestTooLargeError, require_count
from minicache.memory.blocks import BlockPool
from minicache.memory.reservation import BuddyAllocator, reservation
from minicache.request import Request
from minicache.scheduler.continuous import ContinuousBatchScheduler


class BatchOptions(TypedDict, total=False):
    """The keyword arguments that `OrcaScheduler` passes on to `Scheduler`, which documents them."""

    max_num_seqs: int
    max_num_batched_tokens: int


class RunPool(BlockPool):
    """A pool whose blocks are slots, of which each allocation gets one contiguous run from a buddy allocator.

    Args:
        num_slots: slots in all, ≥ 1.

    Attributes:
        allocator: the `BuddyAllocator`.

    Raises:
        TypeError: `num_slots` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, num_slots: int) -> None:
        require_count("num_slots", num_slots)
        self.num_blocks, self.block_size = num_slots, 1
        self.allocator = BuddyAllocator(num_slots)
        self._owned = bytearray(num_slots)  # 1 for each slot inside of a run
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots in no run, however scattered they are."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots in runs, those included that only the rounding added."""
        return self.num_blocks - self._num_free

    def ref_count(self, block_id: int) -> int:
        """1 for a slot in a run, else 0."""
        require_count("block_id", block_id, at_least=0)
        return self._owned[block_id]

    def fits(self, count: int) -> bool:
        """Whether a run of `count` slots can be had now."""
        return count <= self.allocator.largest_free

    def allocate(self, count: int) -> list[int]:
        """Take one run of at least `count` slots.

        Returns:
            All slots of the run, those too that rounding to a power of two added.

        Raises:
            OutOfBlocksError: no free run is long enough. Nothing has changed.
        """
        try:
            start = self.allocator.allocate(count)
        except OutOfSlotsError as error:
            raise OutOfBlocksError(str(error)) from error
        size = self.allocator.allocated(start)
        self._owned[start : start + size] = b"\x01" * size
        self._num_free -= size
        return list(range(start, start + size))

    def free(self, block_ids: Iterable[int]) -> None:
        """Give back one run.

        Args:
            block_ids: what `allocate` returned, in any order.

        Raises:
            ValueError: they are not the slots of one run.
        """
        slots = sorted(block_ids)
        if not slots or self.allocator.allocated(slots[0]) != len(slots):
            raise ValueError("not a run that was allocated")
        self.allocator.free(slots[0])
        self._owned[slots[0] : slots[0] + len(slots)] = bytes(len(slots))
        self._num_free += len(slots)

    def check(self) -> None:
        """Raise `InvariantError` unless the allocator's books balance."""
        self.allocator.check()


class OrcaScheduler(ContinuousBatchScheduler):
    """Continuous batching that reserves one run of slots a request, for as many tokens as the policy assumes.

    Args:
        policy: "max", "pow2" or "oracle", see `minicache.memory.reservation`. The last two go by `max_tokens`: in the
            simulator that is the length that the answer will have, which no real server knows.
        num_slots: slots of the cache, ≥ 1.
        max_model_len: the most tokens of one request, ≥ 2: what "max" reserves.
        options: `max_num_seqs` and `max_num_batched_tokens`, as `Scheduler`'s.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds, or the policy is unknown.
    """

    def __init__(self, policy: str, *, num_slots: int, max_model_len: int, **options: Unpack[BatchOptions]) -> None:
        super().__init__(num_blocks=num_slots, block_size=1, max_model_len=max_model_len, **options)
        reservation(policy, 1, 1, max_model_len)  # refuses an unknown policy
        self.policy = policy
        self.pool: RunPool = RunPool(num_slots)

    def blocks_to_admit(self, request: Request) -> int:
        """The slots that the policy reserves. The allocator may round them up."""
        assert self.max_model_len is not None
        num_output = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        return reservation(self.policy, request.num_prompt_tokens, num_output, self.max_model_len)

    def check_size(self, request: Request) -> None:
        """As `Scheduler.check_size`; and an empty memory must have a run that is long enough."""
        super().check_size(request)
        longest = 1 << self.pool.num_blocks.bit_length() - 1
        if (needed := self.blocks_to_admit(request)) > longest:
            raise RequestTooLargeError(
                f"request {request.request_id!r} needs a run of {needed} slots, and the longest that there can be has "
                f"{longest}: shorten it, or raise num_slots"
            )

    def head(self) -> Request | None:
        """The first waiting request; None also if no free run is long enough for it, for it is not bypassed."""
        request = super().head()
        return request if request is not None and self.pool.fits(self.blocks_to_admit(request)) else None
