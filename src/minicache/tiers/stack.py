"""The tiers of an engine, the fastest first, and the threads that work in them. Standard library only.

The engine's thread starts a load or a store and goes on: nothing here makes it wait, or raises. What a tier does wrong
is counted and logged, and costs a computation: a load ends with the blocks that it has.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Final

from minicache.errors import CorruptBlockError
from minicache.memory.prefix import BlockHash
from minicache.tiers.contract import Key, Tier, seal, unseal

LOAD_SECONDS: Final = 3.0
"""The most that a request waits for its blocks; then it computes those that have not come."""

PAUSE_SECONDS: Final = 10.0
"""How long a tier that has failed, or was too slow, is left alone."""

MAX_STORE_NBYTES: Final = 256 * 2**20
"""Bytes that may wait to be stored. Beyond, blocks are dropped: a slow disk must not take the machine's memory."""

CLOSE_SECONDS: Final = 5.0
"""How long the end of the process waits for blocks to be stored."""

NUM_LOADERS: Final = 4
CHUNK: Final = 16
"""Blocks that are asked for at a time: what is lost if a request leaves, or its time is over."""

logger = logging.getLogger("minicache")

Job = Callable[[], object]


class Load:
    """The blocks of one prefix, on their way from the tiers.

    Args:
        deadline: on the clock of `time.monotonic`, when it ends at the latest.

    Attributes:
        blocks: those that have come, the first one first. It may grow until the load is done.
        tier: the tier that is working on it; None if none is.
    """

    __slots__ = ("_deadline", "_is_over", "blocks", "tier")

    def __init__(self, deadline: float) -> None:
        self.blocks: list[bytes] = []
        self.tier: Tier | None = None
        self._deadline = deadline
        self._is_over = False

    @property
    def is_done(self) -> bool:
        """Whether no more blocks will come: all are there, the tiers have no more, or its time is over."""
        return self._is_over or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether its time is over, and it was not."""
        return not self._is_over and time.monotonic() > self._deadline

    def end(self) -> None:
        """No more blocks are wanted. A tier that is working on it may still be at it for a while."""
        self._is_over = True


class TierStack:
    """An engine's tiers. Its methods return at once; only `wait` and `flush` wait.

    A block is looked for in all tiers, in their order, and stored in all. One that comes from a tier is stored in those
    before it too.

    Keys are the blocks' hashes, mixed with `fingerprint`: a tier that has blocks of another model, or of other dtypes,
    has none of this one's.

    Args:
        tiers: the fastest first.
        fingerprint: 32 bytes, a hash of all that the bytes of a block depend on besides the tokens.
        block_nbytes: bytes of a block. A record with another number counts as corrupt.
    """

    def __init__(self, tiers: Sequence[Tier], fingerprint: bytes, block_nbytes: int) -> None:
        self.tiers = list(tiers)
        self._fingerprint = fingerprint
        self._block_nbytes = block_nbytes
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()
        self._paused: dict[tuple[int, str], float] = {}  # (tier, what it is asked for) → until when
        self._num_waiting_nbytes = 0  # of blocks to be stored
        self._news = Event()
        self._to_load: SimpleQueue[Job | None] = SimpleQueue()
        self._to_store: SimpleQueue[Job | None] = SimpleQueue()
        loaders = [Thread(target=_work, args=(self._to_load,), daemon=True) for _ in range(NUM_LOADERS)]
        storer = Thread(target=_work, args=(self._to_store,), daemon=True)
        for thread in (*loaders, storer):
            thread.start()
        weakref.finalize(self, _end, self._to_load, self._to_store, storer)

    # What the engine's thread calls

    def fetch(self, hashes: Sequence[BlockHash]) -> Load:
        """Begin to load the longest prefix of these blocks that the tiers have.

        Args:
            hashes: of consecutive blocks of one sequence.
        """
        load = Load(time.monotonic() + LOAD_SECONDS)
        if any(self._is_usable(tier, "load") for tier in self.tiers):
            keys = [self._key(each) for each in hashes]
            self._to_load.put(partial(self._fill, load, keys))
        else:
            load.end()
        return load

    def give_up(self, load: Load) -> None:
        """A load has come too late, or no one needs it any more. If it is late, its tier is left alone for a while."""
        tier = load.tier
        if load.is_late and tier is not None:
            self._count("errors", tier)
            self._pause(tier, "load", f"it took more than {LOAD_SECONDS:g} s")
        load.end()

    def store(self, block_hash: BlockHash, block: bytes) -> None:
        """Have a block stored, soon. It is dropped if too much is waiting for that."""
        self._queue(self._key(block_hash), block, self.tiers)

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks of one sequence, from its first on, were used now: `Tier.touch`."""
        keys = [self._key(each) for each in hashes]
        self._to_store.put(lambda: self._each(lambda tier: tier.touch(keys), self.tiers))

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """The contents of these blocks are in doubt: drop them, and those that wait to be stored before."""
        keys = [self._key(each) for each in hashes]
        self._to_store.put(lambda: self._each(lambda tier: tier.discard(keys), self.tiers))

    def wait(self, seconds: float) -> None:
        """Wait until a load is done that was not at the last call; at most so many seconds."""
        self._news.wait(seconds)
        self._news.clear()

    def flush(self, seconds: float) -> bool:
        """Wait until everything is stored that was given up to now; at most so many seconds.

        Returns:
            Whether it is.
        """
        done = Event()
        self._to_store.put(done.set)
        return done.wait(seconds)

    def take_counts(self) -> list[tuple[str, int, str]]:
        """What has happened since the last call: (what, how often, the tier's name).

        "hits" are blocks that were loaded, "loaded_bytes" and "stored_bytes" what was read and written, "errors" calls
        that failed, late loads and corrupt blocks, "dropped" blocks that were not stored.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return [(what, number, name) for (what, name), number in counts.items()]

    # The threads

    def _fill(self, load: Load, keys: Sequence[Key]) -> None:
        """Load the longest prefix of `keys`, and end the load."""
        try:
            while keys and not load.is_done:
                num_found = self._fill_chunk(load, keys[:CHUNK])
                if not num_found:
                    return
                keys = keys[num_found:]
        finally:
            load.tier = None
            load.end()
            self._news.set()

    def _fill_chunk(self, load: Load, keys: Sequence[Key]) -> int:
        """Load what the first tier has that has any of it, and have the tiers before keep that. Returns the number."""
        for place, tier in enumerate(self.tiers):
            load.tier = tier
            if blocks := self._read(tier, keys):
                load.blocks += blocks
                for key, block in zip(keys, blocks, strict=False):
                    self._queue(key, block, self.tiers[:place])
                return len(blocks)
        return 0

    def _read(self, tier: Tier, keys: Sequence[Key]) -> list[bytes]:
        """The blocks of the longest prefix of `keys` that one tier has.

        A corrupt one is dropped, with those behind it: they will be computed, and stored anew, also if they are corrupt
        too.
        """
        blocks: list[bytes] = []
        if self._is_usable(tier, "load"):
            try:
                num_found = tier.lookup(keys)
                for key, record in zip(keys, tier.load(keys[:num_found]) if num_found else (), strict=False):
                    block = self._opened(key, record)
                    blocks.append(block)  # one by one: those before a corrupt one stay
            except CorruptBlockError as error:
                logger.warning("tier %s: %s: its tokens are computed again", tier.name, error)
                self._count("errors", tier)
                self._each(lambda tier: tier.discard(keys[len(blocks) :]), [tier])
            except Exception as error:
                self._count("errors", tier)
                self._pause(tier, "load", error)
        self._count("hits", tier, len(blocks))
        self._count("loaded_bytes", tier, sum(map(len, blocks)))
        return blocks

    def _opened(self, key: Key, record: bytes) -> bytes:
        """What a record holds.

        Raises:
            CorruptBlockError: not what was stored, or not a block of this size.
        """
        block = unseal(key, record)
        if len(block) != self._block_nbytes:
            raise CorruptBlockError(f"a stored block has {len(block)} bytes instead of {self._block_nbytes}")
        return block

    def _queue(self, key: Key, block: bytes, tiers: Sequence[Tier]) -> None:
        """Have a block stored in some tiers, unless too much is waiting for that."""
        if not tiers:
            return
        with self._lock:
            is_dropped = self._num_waiting_nbytes + len(block) > MAX_STORE_NBYTES
            if not is_dropped:
                self._num_waiting_nbytes += len(block)
        if is_dropped:
            for tier in tiers:
                self._count("dropped", tier)
        else:
            self._to_store.put(partial(self._write, key, block, tiers))

    def _write(self, key: Key, block: bytes, tiers: Sequence[Tier]) -> None:
        """Store a block in some tiers."""
        record = seal(key, block)
        for tier in self._each(lambda tier: tier.store(key, record), tiers):
            self._count("stored_bytes", tier, len(block))
        with self._lock:
            self._num_waiting_nbytes -= len(block)

    def _each(self, call: Callable[[Tier], object], tiers: Sequence[Tier]) -> list[Tier]:
        """Call something that writes for each usable one of some tiers; and return those for which it did not fail."""
        done = []
        for tier in tiers:
            if self._is_usable(tier, "store"):
                try:
                    call(tier)
                except Exception as error:
                    self._count("errors", tier)
                    self._pause(tier, "store", error)
                else:
                    done.append(tier)
        return done

    # What is known of the tiers

    def _key(self, block_hash: BlockHash) -> Key:
        return blake2b(block_hash, digest_size=32, key=self._fingerprint).digest()

    def _is_usable(self, tier: Tier, what: str) -> bool:
        """Whether a tier is not left alone."""
        return time.monotonic() >= self._paused.get((id(tier), what), 0.0)

    def _pause(self, tier: Tier, what: str, reason: object) -> None:
        """Leave a tier alone for a while; what it is asked for otherwise goes on: a full disk can be read."""
        logger.warning("tier %s: no %s for %g s: %s", tier.name, what, PAUSE_SECONDS, reason)
        self._paused[id(tier), what] = time.monotonic() + PAUSE_SECONDS

    def _count(self, what: str, tier: Tier, number: int = 1) -> None:
        if number:
            with self._lock:
                self._counts[what, tier.name] += number


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """A thread: do the jobs in their order, until None."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(to_load: SimpleQueue[Job | None], to_store: SimpleQueue[Job | None], storer: Thread) -> None:
    """No one has the stack any more, or the process ends: store what waits for it, and end the threads."""
    for _ in range(NUM_LOADERS):
        to_load.put(None)
    to_store.put(None)
    if current_thread() is not storer:
        storer.join(CLOSE_SECONDS)
