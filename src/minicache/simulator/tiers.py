"""Tiers below the prefix cache in simulated time: which blocks they have, and how long it takes to read and write them.

The scheduler is the one that runs in an engine (`minicache.scheduler.tiered`), and a tier evicts as `CPUTier` does. A
block takes its bytes over the tier's bandwidth, one after the other, reads and writes independently; memory of the host
takes no time. What goes between the device and its host, for any tier, takes `StepCost.swap_seconds` in the step.
Given, not built. Pure standard library.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

from minicache.memory.prefix import BlockHash
from minicache.tiers.cpu import CPUTier
from minicache.tiers.specs import parse_tier
from minicache.tiers.stack import LOAD_SECONDS, MAX_STORE_NBYTES

BANDWIDTHS: Final = {"cpu": float("inf"), "disk": 7e9, "redis": 12.5e9}
"""Bytes/s of the host's memory, a local NVMe disk, and a store behind a link of 100 Gbit/s. Assumed."""


class SimulatedTier:
    """A tier that has blocks by hash, and of each when it is there.

    Args:
        name: its kind, under which its hits are counted.
        max_nbytes: the most bytes of all blocks, ≥ those of a block.
        block_nbytes: of a block, ≥ 1.
        bandwidth: in bytes/s, > 0, in each direction.

    Raises:
        ValueError: it is too small for a block.
    """

    def __init__(self, name: str, max_nbytes: int, block_nbytes: int, bandwidth: float) -> None:
        if max_nbytes < block_nbytes:
            raise ValueError(f"a block has {block_nbytes:,} bytes, and the tier {name!r} only {max_nbytes:,}")
        self.name = name
        self.seconds_per_block = block_nbytes / bandwidth
        self.max_blocks = max_nbytes // block_nbytes
        self._blocks = CPUTier(self.max_blocks)  # a byte stands for a block
        self._most_seconds = MAX_STORE_NBYTES / bandwidth
        self._coming: list[tuple[float, BlockHash]] = []  # a heap: when which block is written
        self._writing: set[BlockHash] = set()
        self._read_free_at = self._write_free_at = 0.0

    def lookup(self, hashes: Sequence[BlockHash], now: float) -> int:
        """How many of the first blocks are here."""
        while self._coming and self._coming[0][0] <= now:
            block_hash = heappop(self._coming)[1]
            if block_hash in self._writing:  # it was not discarded
                self._writing.remove(block_hash)
                self._blocks.store(block_hash, b"\0")
        return self._blocks.lookup(hashes)

    def read(self, hashes: Sequence[BlockHash], now: float, deadline: float) -> tuple[int, float]:
        """Read blocks that are here, as many as come until the deadline. Returns their number, and when they are read.

        They count as used.
        """
        start, num, each = max(now, self._read_free_at), len(hashes), self.seconds_per_block
        if each:
            num = min(num, int(max(0.0, deadline - start) / each))
            self._read_free_at = start + num * each
        self._blocks.touch(hashes[:num])
        return num, start + num * each

    def write(self, block_hash: BlockHash, now: float) -> None:
        """Write a block, unless it is here, or too much is waiting for that (`MAX_STORE_NBYTES`)."""
        start = max(now, self._write_free_at)
        if block_hash in self._writing or self.lookup([block_hash], now) or start - now > self._most_seconds:
            return
        end = start + self.seconds_per_block
        if self.seconds_per_block:
            self._write_free_at = end
        self._writing.add(block_hash)
        heappush(self._coming, (end, block_hash))

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks of one sequence were used now."""
        self._blocks.touch(hashes)

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """Drop these blocks."""
        self._blocks.discard(hashes)
        self._writing.difference_update(hashes)


class SimulatedLoad:
    """A `minicache.scheduler.tiered.Load` whose blocks come at a time that is known.

    Args:
        tiers: whose clock counts.
        num_blocks: that come.
        ends_at: when all are there.
    """

    __slots__ = ("_ends_at", "_num_blocks", "_tiers")

    def __init__(self, tiers: SimulatedTiers, num_blocks: int, ends_at: float) -> None:
        self._tiers, self._num_blocks, self._ends_at = tiers, num_blocks, ends_at

    @property
    def is_done(self) -> bool:
        """Whether its time has come."""
        return self._tiers.now >= self._ends_at

    @property
    def blocks(self) -> Sequence[bytes]:
        """As many as have come; they are empty."""
        return [b""] * self._num_blocks if self.is_done else []


class SimulatedTiers:
    """The `minicache.scheduler.tiered.Tiers` of one server.

    Args:
        tiers: the fastest first. Other servers may have some of them too.

    Attributes:
        tiers: as given.
        now: the server's clock in seconds, for the simulation to set.
        num_hits: blocks that were loaded, by the name of the tier.
    """

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self.tiers = list(tiers)
        self.now = 0.0
        self.num_hits = Counter[str]()
        self._ends: list[float] = []  # a heap: of loads that may be under way

    def fetch(self, hashes: Sequence[BlockHash]) -> SimulatedLoad:
        """Begin to load the longest prefix of these blocks. What does not come within `LOAD_SECONDS` is left out."""
        time, deadline, num_found = self.now, self.now + LOAD_SECONDS, 0
        while found := self._find(hashes[num_found:]):
            place, here = found
            tier = self.tiers[place]
            num, time = tier.read(here, time, deadline)
            self.num_hits[tier.name] += num
            num_found += num
            for faster in self.tiers[:place]:
                for each in here[:num]:
                    faster.write(each, time)
            if num < len(here):
                time = deadline
                break
        heappush(self._ends, time)
        return SimulatedLoad(self, num_found, time)

    def _find(self, hashes: Sequence[BlockHash]) -> tuple[int, Sequence[BlockHash]] | None:
        """The first tier that has the first of these blocks, and those that it has; None: none has it."""
        for place, tier in enumerate(self.tiers):
            if num := tier.lookup(hashes, self.now):
                return place, hashes[:num]
        return None

    def next_end(self) -> float | None:
        """When the next load ends; None if none is under way. One that was given up counts too."""
        while self._ends and self._ends[0] <= self.now:
            heappop(self._ends)
        return self._ends[0] if self._ends else None

    def store(self, hashes: Sequence[BlockHash]) -> None:
        """Have blocks written in all tiers."""
        for tier in self.tiers:
            for each in hashes:
                tier.write(each, self.now)

    def give_up(self, load: Any) -> None:
        """Nothing: its time on the tier is spent."""

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """As `Tiers.touch`."""
        for tier in self.tiers:
            tier.touch(hashes)

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """As `Tiers.discard`."""
        for tier in self.tiers:
            tier.discard(hashes)


def simulated_tiers(specs: Sequence[str], block_nbytes: int) -> Callable[[], SimulatedTiers]:
    """What makes the tiers of each server of a fleet: CPU memory is its own, folders and stores are all servers'.

    Args:
        specs: as `minicache.tiers.specs.parse_tier` takes them, the fastest first. No folder is opened. Redis has no
            bound.
        block_nbytes: of a block.

    Raises:
        TypeError, ValueError: as `parse_tier`, or a tier is too small for a block.
    """

    def make(spec: str) -> SimulatedTier:
        kind, _, max_nbytes = parse_tier(spec)
        return SimulatedTier(kind, max_nbytes or sys.maxsize, block_nbytes, BANDWIDTHS[kind])

    shared = {spec: make(spec) for spec in specs if parse_tier(spec).kind != "cpu"}
    return lambda: SimulatedTiers([shared[spec] if spec in shared else make(spec) for spec in specs])
