# Phase 2, fragmentation: your file. It stands in for minicache.memory.reservation.
# Write what raises NotImplementedError. `minicache grade 2` grades it, `minicache hint 2.K` helps with task K.
#
# Predict, before you write task 2.2. `minicache grade` checks it, without points.
# 32 slots: allocate(5), allocate(3), allocate(9), allocate(2). Where does the last run start?
# 2.2a =
# How many of the allocated slots were not asked for?
# 2.2b =
# Then the run of allocate(3) is freed, and after it that of allocate(2). How long is the longest free run?
# 2.2c =
"""Contiguous reservation: every request gets one run of slots, long enough for all that it may still generate.

Phase 2 builds it: what padding costs, a buddy allocator, the three policies of Orca as the PagedAttention paper models
them (Kwon et al. 2023, sections 3.1 and 6.1), and an account of where the memory goes. A slot holds the keys and values
of one token, in all layers. Nothing here stores keys or values: it is bookkeeping in pure Python, which phase 3's
blocks replace.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from minicache.errors import CacheOverflowError, InvariantError, OutOfSlotsError, require_count

POLICIES = ("max", "pow2", "oracle")
"""What a request reserves: the model's limit, its output rounded up to a power of two, or exactly what it needs."""


def padded_rows(lengths: Sequence[int]) -> int:
    """The rows that a ragged batch takes once it is made rectangular: every sequence as long as the longest.

    Args:
        lengths: tokens of each sequence, each ≥ 1; at least one sequence.

    Returns:
        Rows of the rectangle, used and unused.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length is below 1, or there is no sequence.
    """
    raise NotImplementedError(
        "phase 2, task 1: Padding; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
    )


def padding_share(lengths: Sequence[int]) -> float:
    """The share of those rows that hold no token.

    Args:
        lengths: tokens of each sequence, each ≥ 1; at least one sequence.

    Returns:
        Padding over all rows of the rectangle: 0.0 if all are equally long, and always below 1.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length is below 1, or there is no sequence.
    """
    raise NotImplementedError(
        "phase 2, task 1: Padding; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
    )


class BuddyAllocator:
    """Slots 0 … num_slots − 1, allocated in runs whose lengths are powers of two (Knowlton 1965).

    A request for `count` slots gets a run of the next power of two. If no free run has exactly this length, a longer
    one is halved until one has; the two halves are *buddies*. A freed run merges with its buddy if that is free, and
    the result merges with *its* buddy, and so on.

    A run of length z always starts at a multiple of z. So a run and its buddy are the two halves of an aligned run of
    length 2 z, and their starts differ in one bit, the bit of value z.

    `num_slots` need not be a power of two. Memory then begins as several free runs side by side: the powers of two that
    `num_slots` is the sum of, longest first. 22 slots are runs of 16, 4 and 2, starting at 0, 16 and 20. These are not
    halves of a run: two of them never merge.

    No operation may look at every slot. The work of `allocate` and `free` grows with the number of different lengths,
    which is about log₂ num_slots, and with the cost of finding a run in a sorted list or set. Queries may go through
    all runs.

    Args:
        num_slots: slots in all, ≥ 1.

    Attributes:
        num_slots: the same.

    Raises:
        TypeError: `num_slots` is not an int.
        ValueError: `num_slots` is below 1.
    """

    def __init__(self, num_slots: int) -> None:
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def allocate(self, count: int) -> int:
        """Take a run of at least `count` slots.

        Its length is the smallest power of two that is ≥ `count`. It is cut from the shortest free run that is long
        enough; of several such runs, from the one with the lowest start. A longer run is halved, as often as needed:
        the lower half is used, the upper half stays free.

        Args:
            count: slots that are needed, ≥ 1.

        Returns:
            The first slot of the run. `allocated(start)` is its length.

        Raises:
            TypeError: `count` is not an int.
            ValueError: `count` is below 1.
            OutOfSlotsError: no free run is long enough, however many slots are free in all. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def free(self, start: int) -> None:
        """Free an allocation. Its run merges with its buddy if that is free, and so on upwards.

        Runs do not merge beyond their initial run: in 22 slots, the 4 at 16 and the 2 at 20 stay two runs.

        Args:
            start: what `allocate` returned.

        Raises:
            TypeError: `start` is not an int.
            ValueError: no allocation starts there: never made, already freed, or the middle of one. In each case
                nothing has changed.
        """
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def allocated(self, start: int) -> int:
        """The length of the allocation that begins at `start`: a power of two.

        Args:
            start: what `allocate` returned.

        Raises:
            TypeError: `start` is not an int.
            ValueError: no allocation starts there.
        """
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def allocations(self) -> list[tuple[int, int]]:
        """The allocated runs, as (start, length), lowest start first."""
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def free_runs(self) -> list[tuple[int, int]]:
        """The free runs, as (start, length), lowest start first.

        Two neighbouring free runs that are not buddies are two runs here: no allocation can use both.
        """
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    @property
    def num_free(self) -> int:
        """Slots in no allocation."""
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    @property
    def num_used(self) -> int:
        """Slots in allocations, including those that only the rounding to a power of two added."""
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    @property
    def largest_free(self) -> int:
        """The length of the longest free run: the largest count that `allocate` would grant; 0 if all are taken."""
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )

    def check(self) -> None:
        """Raise if an invariant does not hold. The check uses only the other public methods.

        Of `allocations()` and `free_runs()`:

        - together they cover slots 0 … num_slots − 1, each slot once;
        - every length is a power of two, and every start a multiple of its length;
        - no two free runs are buddies. The initial runs need no exception: they differ in length.

        Of the counts: `num_used` and `num_free` are the sums of those lengths, and `largest_free` the longest free one.

        Raises:
            InvariantError: one of these does not hold. The message states which, and where.
        """
        raise NotImplementedError(
            "phase 2, task 2: A buddy allocator; read docs/en/phase-02-fragmentation/lab/00-padding-and-buddies.md"
        )


def reservation(policy: str, num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> int:
    """The slots that a policy reserves for a request when it is admitted.

    A server cannot know how long an answer will be. The three policies differ in what they are assumed to know (Kwon
    et al. 2023, section 6.1):

    - "max": nothing. Every request gets `max_model_len` slots.
    - "pow2": the output's length to within a factor of two. The prompt, and the smallest power of two that is ≥ the
      output: 32 slots for an output of 25, and for one of 32. Never more than `max_model_len` in all, since no request
      can exceed it.
    - "oracle": the exact length. Prompt and output. No real server can do that.

    This is what the policy asks for. An allocator may round it up further.

    Args:
        policy: "max", "pow2" or "oracle".
        num_prompt_tokens: tokens of the prompt, ≥ 1.
        num_output_tokens: tokens that the request will actually generate, ≥ 1.
        max_model_len: the most tokens, prompt and output together, that the model can handle, ≥ 1.

    Returns:
        Slots, at least prompt + output.

    Raises:
        TypeError: a count is not an int.
        ValueError: an unknown policy, a count below 1, or prompt and output together beyond `max_model_len`.
    """
    raise NotImplementedError(
        "phase 2, task 3: What a policy reserves; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
    )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where the slots are at one moment. Every slot is in exactly one of the five parts.

    Attributes:
        used: hold a token.
        reserved: hold none yet, and will before their request finishes.
        internal: lie inside an allocation and will never hold a token: internal fragmentation. The policy's surplus,
            and what an allocator's unit adds, here the buddy allocator's rounding.
        external: free, but too scattered for the reservation that is waiting: external fragmentation.
        free: free and usable, or no request is waiting.
    """

    used: int
    reserved: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """All slots."""
        return self.used + self.reserved + self.internal + self.external + self.free


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one request holds.

    Attributes:
        request_id: the request.
        start: its first slot.
        num_slots: slots of its allocation, from `start` on; a power of two.
        num_reserved: those of them that the policy asked for, and that the request may fill.
        num_tokens: those of them, from `start` on, that hold a token.
        num_expected: those of them that will hold one when the request finishes: prompt + output.
    """

    request_id: Hashable
    start: int
    num_slots: int
    num_reserved: int
    num_tokens: int
    num_expected: int


class ContiguousReservation:
    """A memory in which every request gets one contiguous run of slots when admitted, and keeps it until it finishes.

    Built on a `BuddyAllocator`, like all three variants of Orca in the PagedAttention paper.

    Args:
        num_slots: slots in all, ≥ 1.
        policy: what a request reserves, see `reservation`.
        max_model_len: the most tokens of one request, prompt and output together, ≥ 1.

    Attributes:
        num_slots, policy, max_model_len: the same.
        allocator: the `BuddyAllocator` that the slots come from, for inspection: its `free_runs()` are the holes.

    Raises:
        TypeError: a count is not an int.
        ValueError: an unknown policy, or a count below 1.
    """

    def __init__(self, num_slots: int, policy: str, max_model_len: int) -> None:
        raise NotImplementedError(
            "phase 2, task 4: Admit, grow, release; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )

    def admit(self, request_id: Hashable, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Reserve for a request, and fill the first slots with its prompt.

        Args:
            request_id: its id, different from that of every admitted request.
            num_prompt_tokens: tokens of the prompt, ≥ 1. They are used from now on.
            num_output_tokens: tokens that it will actually generate, ≥ 1. "pow2" and "oracle" reserve by it, and
                `memory_use` needs it under every policy.

        Returns:
            The first slot of its run.

        Raises:
            TypeError: a count is not an int.
            ValueError: the request is already admitted, a count is below 1, or prompt and output together are beyond
                `max_model_len`.
            OutOfSlotsError: no free run is long enough. In each case nothing has changed.
        """
        raise NotImplementedError(
            "phase 2, task 4: Admit, grow, release; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )

    def grow(self, request_id: Hashable, count: int = 1) -> None:
        """Record that a request has `count` more tokens. They take the next of its slots.

        A request may generate more than it was admitted with, up to its reservation: "max" allows that, "oracle" does
        not. It may not use the slots that the buddy allocator's rounding added.

        Args:
            request_id: an admitted request.
            count: new tokens, ≥ 1.

        Raises:
            TypeError: `count` is not an int.
            ValueError: no such request is admitted, or `count` is below 1.
            CacheOverflowError: its tokens would exceed what `reservation` granted. In each case nothing has changed.
        """
        raise NotImplementedError(
            "phase 2, task 4: Admit, grow, release; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )

    def release(self, request_id: Hashable) -> None:
        """Free all slots of a finished request.

        Raises:
            ValueError: no such request is admitted.
        """
        raise NotImplementedError(
            "phase 2, task 4: Admit, grow, release; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )

    def reservations(self) -> list[Reservation]:
        """The reservations of all admitted requests, lowest start first. A later `grow` changes none of them."""
        raise NotImplementedError(
            "phase 2, task 4: Admit, grow, release; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )

    def memory_use(self, waiting: int | None = None) -> MemoryUse:
        """Where the slots are now.

        Of a request, the slots that hold a token are `used`. Those that will, up to prompt + output, are `reserved`;
        none, if it has generated more than it was admitted with. All others of its allocation are `internal`.

        How free slots count depends on the waiting reservation. Those in free runs shorter than `waiting` are
        `external`. Those in runs that are long enough are `free`; so are all of them if no request is waiting.

        Args:
            waiting: the slots that the next request needs in one run, ≥ 1: what `reservation` returned for it. None if
                no request is waiting.

        Returns:
            The five parts. They sum to `num_slots`.

        Raises:
            TypeError: `waiting` is neither None nor an int.
            ValueError: `waiting` is below 1.
        """
        raise NotImplementedError(
            "phase 2, task 5: Where the memory goes; read docs/en/phase-02-fragmentation/lab/01-reservation.md"
        )
