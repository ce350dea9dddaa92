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
    _check_lengths(lengths)
    return len(lengths) * max(lengths)


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
    rows = padded_rows(lengths)
    return (rows - sum(lengths)) / rows


def _check_lengths(lengths: Sequence[int]) -> None:
    for length in lengths:
        require_count("each length", length)
    if not lengths:
        raise ValueError("a batch has at least one sequence")


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
        require_count("num_slots", num_slots)
        self.num_slots = num_slots
        # Length → sorted starts of the free runs of that length. Shortest first: allocate() goes upwards through it.
        self._free: dict[int, list[int]] = {1 << order: [] for order in range(num_slots.bit_length())}
        self._allocated: dict[int, int] = {}
        start = 0
        for size in reversed(self._free):
            if num_slots & size:
                self._free[size].append(start)
                start += size

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
        require_count("count", count)
        size = _next_power_of_two(count)
        found = next((length for length, starts in self._free.items() if length >= size and starts), None)
        if found is None:
            raise OutOfSlotsError(
                f"no free run of {size} slots for {count}: {self.num_free} are free, "
                f"the longest run of them has {self.largest_free}"
            )
        start = self._free[found].pop(0)
        while found > size:
            found //= 2
            insort(self._free[found], start + found)
        self._allocated[start] = size
        return start

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
        size = self.allocated(start)
        del self._allocated[start]
        # No bounds check is needed: after an initial run come only shorter ones, so no free run of the same length can
        # start where its buddy would.
        while self._remove(size, start ^ size):
            start &= ~size
            size *= 2
        insort(self._free[size], start)

    def allocated(self, start: int) -> int:
        """The length of the allocation that begins at `start`: a power of two.

        Args:
            start: what `allocate` returned.

        Raises:
            TypeError: `start` is not an int.
            ValueError: no allocation starts there.
        """
        require_count("start", start, at_least=0)
        if start not in self._allocated:
            raise ValueError(f"no allocation starts at slot {start}")
        return self._allocated[start]

    def allocations(self) -> list[tuple[int, int]]:
        """The allocated runs, as (start, length), lowest start first."""
        return sorted(self._allocated.items())

    def free_runs(self) -> list[tuple[int, int]]:
        """The free runs, as (start, length), lowest start first.

        Two neighbouring free runs that are not buddies are two runs here: no allocation can use both.
        """
        return sorted((start, size) for size, starts in self._free.items() for start in starts)

    @property
    def num_free(self) -> int:
        """Slots in no allocation."""
        return sum(size * len(starts) for size, starts in self._free.items())

    @property
    def num_used(self) -> int:
        """Slots in allocations, including those that only the rounding to a power of two added."""
        return sum(self._allocated.values())

    @property
    def largest_free(self) -> int:
        """The length of the longest free run: the largest count that `allocate` would grant; 0 if all are taken."""
        return max((size for size, starts in self._free.items() if starts), default=0)

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
        taken, free = self.allocations(), self.free_runs()
        self._check_runs(sorted(taken + free))
        for start, size in free:
            if (start ^ size, size) in free:
                raise InvariantError(f"the free runs of {size} slots at {start} and {start ^ size} have not merged")
        counted = {
            "num_used": (self.num_used, sum(size for _, size in taken)),
            "num_free": (self.num_free, sum(size for _, size in free)),
            "largest_free": (self.largest_free, max((size for _, size in free), default=0)),
        }
        for name, (noted, found) in counted.items():
            if noted != found:
                raise InvariantError(f"{name} is {noted}, but the runs give {found}")

    def _check_runs(self, runs: Iterable[tuple[int, int]]) -> None:
        """Every slot in one run, every run a power of two long and aligned to it."""
        end = 0
        for start, size in runs:
            if start != end:
                raise InvariantError(f"slot {min(start, end)} is {'in no run' if start > end else 'in two runs'}")
            if size != _next_power_of_two(size) or start % size:
                raise InvariantError(
                    f"the run of {size} slots at {start} is not a power of two, or does not start at a multiple of it"
                )
            end += size
        if end != self.num_slots:
            raise InvariantError(f"the runs end at slot {end}, but there are {self.num_slots} slots")

    def _remove(self, size: int, start: int) -> bool:
        """Take the free run of `size` slots at `start` off its list. False if there is no such run."""
        starts = self._free.get(size, [])
        index = bisect_left(starts, start)
        if index == len(starts) or starts[index] != start:
            return False
        del starts[index]
        return True


def _next_power_of_two(count: int) -> int:
    """The smallest power of two that is ≥ `count` ≥ 1."""
    return 1 << (count - 1).bit_length()


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
    _check_policy(policy)
    require_count("num_prompt_tokens", num_prompt_tokens)
    require_count("num_output_tokens", num_output_tokens)
    require_count("max_model_len", max_model_len)
    num_tokens = num_prompt_tokens + num_output_tokens
    if num_tokens > max_model_len:
        raise ValueError(
            f"{num_prompt_tokens} prompt + {num_output_tokens} output tokens > max_model_len {max_model_len}"
        )
    if policy == "max":
        return max_model_len
    if policy == "pow2":
        return min(num_prompt_tokens + _next_power_of_two(num_output_tokens), max_model_len)
    return num_tokens


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: known are {', '.join(POLICIES)}")


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
        _check_policy(policy)
        require_count("max_model_len", max_model_len)
        self.allocator = BuddyAllocator(num_slots)
        self.num_slots = num_slots
        self.policy = policy
        self.max_model_len = max_model_len
        # A request's reservation does not change; its token count does, so it is kept separately.
        self._given: dict[Hashable, Reservation] = {}
        self._num_tokens: dict[Hashable, int] = {}

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
        if request_id in self._given:
            raise ValueError(f"request {request_id!r} is already admitted")
        num_reserved = reservation(self.policy, num_prompt_tokens, num_output_tokens, self.max_model_len)
        start = self.allocator.allocate(num_reserved)
        self._num_tokens[request_id] = num_prompt_tokens
        self._given[request_id] = Reservation(
            request_id,
            start,
            num_slots=self.allocator.allocated(start),
            num_reserved=num_reserved,
            num_tokens=num_prompt_tokens,
            num_expected=num_prompt_tokens + num_output_tokens,
        )
        return start

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
        num_reserved = self._of(request_id).num_reserved
        require_count("count", count)
        num_tokens = self._num_tokens[request_id] + count
        if num_tokens > num_reserved:
            raise CacheOverflowError(
                f"request {request_id!r}: {num_tokens - count} tokens + {count} new > {num_reserved} reserved slots"
            )
        self._num_tokens[request_id] = num_tokens

    def release(self, request_id: Hashable) -> None:
        """Free all slots of a finished request.

        Raises:
            ValueError: no such request is admitted.
        """
        self.allocator.free(self._of(request_id).start)
        del self._given[request_id], self._num_tokens[request_id]

    def reservations(self) -> list[Reservation]:
        """The reservations of all admitted requests, lowest start first. A later `grow` changes none of them."""
        now = [replace(given, num_tokens=self._num_tokens[given.request_id]) for given in self._given.values()]
        return sorted(now, key=lambda held: held.start)

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
        if waiting is not None:
            require_count("waiting", waiting)
        used = sum(self._num_tokens.values())
        reserved = sum(max(given.num_expected - self._num_tokens[name], 0) for name, given in self._given.items())
        sizes = [size for _, size in self.allocator.free_runs()]
        external = sum(size for size in sizes if waiting is not None and size < waiting)
        return MemoryUse(
            used=used,
            reserved=reserved,
            internal=self.allocator.num_used - used - reserved,
            external=external,
            free=sum(sizes) - external,
        )

    def _of(self, request_id: Hashable) -> Reservation:
        if request_id not in self._given:
            raise ValueError(f"request {request_id!r} is not admitted")
        return self._given[request_id]
