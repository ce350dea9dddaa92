# Phase 12, production-defaults: your file. It stands in for minicache.scheduler.tiered.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
"""Tiers below the prefix cache: a request waits for its load, and blocks go down when they are full or evicted.

Phase 12 builds it, for any stage with a prefix cache. A request of which the tiers may have a longer prefix than the
prefix cache is passed over in the waiting queue while its blocks are fetched into CPU memory. It holds no blocks
meanwhile, and others go on. When it is next, the blocks that have come are put into the prefix cache, and found there
like any others. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, Protocol, cast, get_args

from minicache.errors import InvariantError
from minicache.memory.prefix import BlockHash, CachingBlockPool
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.scheduler.queue import RequestQueue, arrival_key

TierPolicy = Literal["write_through", "write_back"]

MAX_LOADS = 32
"""Requests whose blocks may be on their way, or in CPU memory, at a time. Others compute theirs."""


class Load(Protocol):
    """Blocks on their way from the tiers; `minicache.tiers.stack.Load` is one."""

    @property
    def is_done(self) -> bool:
        """Whether no more blocks will come, for whatever reason."""

    @property
    def blocks(self) -> Sequence[bytes]:
        """The contents of the first blocks that were asked for: those that have come. They do not change."""


class Tiers(Protocol):
    """What the scheduler asks of the tiers; `minicache.tiers.stack.TierStack` is one. Nothing waits, nothing raises."""

    def fetch(self, hashes: Sequence[BlockHash]) -> Load:
        """Begin to load the longest prefix of these blocks."""

    def give_up(self, load: Any) -> None:
        """No one needs a load any more, or no one waits for it any longer."""

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks of one sequence, from its first on, were used."""

    def discard(self, hashes: Sequence[BlockHash]) -> None:
        """The contents of these blocks are in doubt."""


class TieredBlockPool(CachingBlockPool):
    """A `CachingBlockPool` that notes which of its blocks tiers should have, and takes blocks that come from there.

    Arguments and errors are `CachingBlockPool`'s.

    Attributes:
        filled: block → hash, for the blocks that were cached since `take_filled`, and still hold that.
        evicted: (block, hash, whether it was in `filled`), for the cached blocks that were allocated since
            `take_evicted`. Their contents are there until the step writes.
        doubtful: hashes of blocks that were uncached since they were last looked at: their contents are in doubt.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: str = "lru") -> None:
        super().__init__(num_blocks, block_size, eviction)
        self.filled: dict[int, BlockHash] = {}
        self.evicted: list[tuple[int, BlockHash, bool]] = []
        self.doubtful: list[BlockHash] = []
        self._contents: dict[int, BlockHash] = {}  # block → its hash

    def allocate(self, count: int) -> list[int]:
        """As `CachingBlockPool.allocate`; evicted blocks are noted in `evicted`, and leave `filled`."""
        block_ids = super().allocate(count)
        for block_id in block_ids:
            if (its_hash := self._contents.pop(block_id, None)) is not None:
                self.evicted.append((block_id, its_hash, self.filled.pop(block_id, None) is not None))
        return block_ids

    def cache(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """As `CachingBlockPool.cache`; blocks without a hash before are noted in `filled`."""
        super().cache(block_ids, hashes)
        for block_id, its_hash in zip(block_ids, hashes, strict=True):
            if block_id not in self._contents:
                self._contents[block_id] = self.filled[block_id] = its_hash

    def uncache(self, block_ids: Iterable[int]) -> None:
        """As `CachingBlockPool.uncache`; the hashes are noted in `doubtful`, and their blocks leave `filled`."""
        block_ids = list(block_ids)
        super().uncache(block_ids)
        for block_id in block_ids:
            if (its_hash := self._contents.pop(block_id, None)) is not None:
                self.doubtful.append(its_hash)
                self.filled.pop(block_id, None)

    def reset(self) -> None:
        """As `CachingBlockPool.reset`; and nothing is noted any more."""
        super().reset()
        self.filled, self.evicted, self._contents = {}, [], {}

    def place(self, found: Sequence[int], hashes: Sequence[BlockHash]) -> list[int]:
        """Take free blocks for contents that come from the tiers, after a prefix that was found, and cache them.

        They are free and cached then, as blocks whose request has finished; `filled` does not have them. The found
        blocks keep their contents, and their hashes.

        Args:
            found: blocks that are cached, used or free.
            hashes: of the blocks after them; so many are free besides the found ones.

        Returns:
            The new blocks' ids.

        Raises:
            OutOfBlocksError: there are too few. Nothing has changed.
        """
        self.share(found)  # or one of them might be handed out
        try:
            block_ids = self.allocate(len(hashes))
        except Exception:
            self.free(reversed(found))
            raise
        super().cache(block_ids, hashes)
        self._contents.update(zip(block_ids, hashes, strict=True))
        self.free([*found, *block_ids][::-1])
        return block_ids


class LoadingQueue(RequestQueue):
    """A `RequestQueue` that passes over the requests which wait for their load.

    They count as members, and keep their position: `first` alone does not see them. Arguments and errors are
    `RequestQueue`'s.
    """

    def __init__(self, key: Any) -> None:
        super().__init__(key)
        self._key = key
        self._ready, self._loading = RequestQueue(key), RequestQueue(key)

    @property
    def num_loading(self) -> int:
        """Members that wait for their load."""
        return len(self._loading)

    def is_loading(self, request: Request) -> bool:
        """Whether a request is here and waits for its load."""
        return self._loading.get(request.request_id) is request

    def hold(self, request: Request) -> None:
        """A member waits for its load from now on."""
        self._ready.remove(request)
        self._loading.add(request)

    def let_go(self, request: Request) -> None:
        """A member no longer waits for its load."""
        self._loading.remove(request)
        self._ready.add(request)

    def __len__(self) -> int:
        return len(self._ready) + len(self._loading)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ready or request_id in self._loading

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._loading[request_id] if request_id in self._loading else self._ready[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        members = chain(self._ready.values(), self._loading.values())
        return (request.request_id for request in sorted(members, key=self._key))

    def add(self, request: Request) -> None:
        """As `RequestQueue.add`; it waits for no load."""
        self._ready.add(request)

    def remove(self, request: Request) -> None:
        """As `RequestQueue.remove`."""
        (self._loading if self.is_loading(request) else self._ready).remove(request)

    def first(self, group: str | None = None) -> Request | None:
        """As `RequestQueue.first`, of those that wait for no load."""
        return self._ready.first(group)

    def oldest(self) -> Request | None:
        """As `RequestQueue.oldest`, of all members."""
        firsts = (self._ready.oldest(), self._loading.oldest())
        return min((each for each in firsts if each is not None), key=arrival_key, default=None)


class TieredScheduler(PrefixCachingScheduler):
    """What tiers below its prefix cache add to a stage. `with_tiers` combines the two.

    **Down.** With "write_through", a block is stored once it is full and computed; with "write_back", when it is
    evicted from the prefix cache. Either way it is in `SchedulerOutput.blocks_to_store` of a step that writes only
    after it was stored.

    **Up.** When a request arrives, or is next, `fetch` looks for the part of its prefix that the prefix cache does not
    have. Until that load is done, the request stays in the queue and is passed over (`LoadingQueue`). It holds no
    block. Then it is admitted like any other; `find_prefix` puts what has come into the prefix cache first, if the
    request can be admitted, and into `SchedulerOutput.blocks_to_load`.

    **Failure.** A load that brings nothing, or only a part, is done like any other: the rest is computed. No request is
    asked for twice while it waits. One that finishes while its load is under way, or that is admitted because the bound
    on bypasses leaves no other choice, gives its load up.

    So a step may schedule nothing although requests wait: if all of them wait for their load (`num_loading`).

    Args:
        tiers: what is below the prefix cache.
        tier_policy: when a block is stored.
        options: the stage's, without prefix_caching.

    Attributes:
        tiers: as given.
    """

    def __init__(self, *, tiers: Tiers, tier_policy: TierPolicy = "write_through", **options: Any) -> None:
        if tier_policy not in get_args(TierPolicy):
            raise ValueError(f"the policy of tiers is one of {', '.join(get_args(TierPolicy))}; got {tier_policy!r}")
        super().__init__(**{**options, "prefix_caching": True})
        self.tiers = tiers
        self._writes_through = tier_policy == "write_through"
        self._cache = self.pool = TieredBlockPool(self.pool.num_blocks, self.pool.block_size)
        self.waiting = LoadingQueue(self.priority_key)
        # Waiting requests that have a load, under way or done, and the number of the block that it begins with.
        self._loads: dict[RequestId, tuple[Request, Load, int]] = {}
        self._asked: set[RequestId] = set()  # waiting requests that were asked for, whatever became of it
        self._to_store: list[tuple[int, BlockHash]] = []  # of the next step, as `SchedulerOutput` has them
        self._to_load: list[tuple[int, BlockHash, bytes]] = []

    @property
    def _tiered_pool(self) -> TieredBlockPool:
        return cast(TieredBlockPool, self.pool)

    @property
    def _queue(self) -> LoadingQueue:
        return cast(LoadingQueue, self.waiting)

    @property
    def num_loading(self) -> int:
        """Requests that wait for their load."""
        return self._queue.num_loading

    # Down

    def schedule(self) -> SchedulerOutput:
        """As the stage's; loads that are done let their requests go on, and the step has its blocks to store and load.

        Blocks that this step fills are stored by the next one: their contents are not computed before.
        """
        self._to_store = self.take_filled()
        self.end_loads()
        output = super().schedule()
        output.blocks_to_store = self._to_store + self.take_evicted()
        output.blocks_to_load, self._to_load, self._to_store = self._to_load, [], []
        return output

    def take_filled(self) -> list[tuple[int, BlockHash]]:
        """The blocks (block, hash) to store because they are full, each once. All steps until now are computed.

        A server whose last request has finished stores these without another step. Nothing with "write_back".
        """
        pool = self._tiered_pool
        filled, pool.filled = pool.filled, {}
        if pool.doubtful:
            self.tiers.discard(pool.doubtful)
            pool.doubtful = []
        return list(filled.items()) if self._writes_through else []

    def take_evicted(self) -> list[tuple[int, BlockHash]]:
        """The blocks (block, hash) to store because they were evicted.

        With "write_back" all that were; with "write_through" those that were not stored before.
        """
        pool = self._tiered_pool
        evicted, pool.evicted = pool.evicted, []
        return [(block_id, its_hash) for block_id, its_hash, is_new in evicted if is_new or not self._writes_through]

    # Up

    def add_request(self, request: Request) -> None:
        """As the stage's; and its load begins at once, if few others are under way."""
        super().add_request(request)
        self.begin_load(request)

    def head(self) -> Request | None:
        """As the stage's, of the requests that wait for no load. One that was not asked for yet is now (`begin_load`).

        Returns:
            A request for which no load could begin: it may be admitted. Or one that waits for its load, if the stage
            leaves no other choice (the bound on bypasses). None: there is neither.
        """
        raise NotImplementedError(
            "phase 12, task 9: Load while it waits; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def begin_load(self, request: Request) -> bool:
        """Ask the tiers for the part of a waiting request's prefix that the prefix cache does not have.

        That are the blocks from the first that the prefix cache lacks, to the last that `find_prefix` could use: the
        request's last token is always computed. The request waits for its load then (`LoadingQueue.hold`).

        Nothing happens for one that was asked for already since it began to wait, that is swapped out, or whose prefix
        is all here; and while `MAX_LOADS` requests have a load.

        Args:
            request: in `waiting`, and waits for no load.

        Returns:
            Whether it waits for a load now.
        """
        raise NotImplementedError(
            "phase 12, task 9: Load while it waits; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def end_loads(self) -> None:
        """Let the requests go on whose load is done; the tiers hear of it (`give_up`).

        A load that has brought blocks is kept for `find_prefix`. One that has not is forgotten: it counts no longer.
        """
        raise NotImplementedError(
            "phase 12, task 9: Load while it waits; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def find_prefix(self, request: Request) -> list[int]:
        """As the stage's; but blocks that were loaded for the request are put into the prefix cache first.

        Which of them are needed depends on what the prefix cache has now. It may have more than when the load began:
        only the blocks behind that are placed (`TieredBlockPool.place`), and put into `_to_load` as (block, hash,
        contents). It may have less, and no longer reach to where the load begins; then the load is of no use.

        If blocks are needed and the request cannot be admitted now (`can_allocate`), nothing happens: they stay in CPU
        memory. Otherwise the load is over (`drop_load`).

        A request that is next though its load is not done gets the blocks that have come.

        Returns:
            As the stage's: what the prefix cache had, and what was placed.
        """
        raise NotImplementedError(
            "phase 12, task 9: Load while it waits; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As the stage's; its load is over."""
        self.drop_load(request)
        self._asked.discard(request.request_id)
        super().admit(request, output, found)

    def drop_load(self, request: Request) -> None:
        """Give up a request's load, if it has one: the tiers hear of it. It no longer waits for that, if it did.

        Args:
            request: in the queue or not. Another request with its id may have a load: that one stays.
        """
        raise NotImplementedError(
            "phase 12, task 9: Load while it waits; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def release(self, request: Request) -> None:
        """As the stage's; its load is given up, and what it has read or written counts as used in the tiers."""
        self.drop_load(request)
        self._asked.discard(request.request_id)
        if request.block_ids and request.block_hashes:
            self.tiers.touch(request.block_hashes)
        super().release(request)

    def recover(self) -> None:
        """As the stage's; loads are given up, and nothing is stored of steps that may not have been computed."""
        for request, _, _ in list(self._loads.values()):
            self.drop_load(request)
        self._to_store, self._to_load = [], []
        super().recover()
        self._asked.clear()

    def reset_prefix_cache(self) -> None:
        """Refused: the tiers would still have the blocks of the old weights.

        Raises:
            ValueError: always.
        """
        raise ValueError("the tiers have blocks of these weights: make a new engine for others")

    def check(self) -> None:
        """As the stage's; and the requests that wait for a load are those that have one.

        Raises:
            InvariantError: the books do not agree.
        """
        super().check()
        for request in self.waiting.values():
            load = self._loads.get(request.request_id)
            if self._queue.is_loading(request) and load is None:
                raise InvariantError(f"{request!r} waits for a load that it does not have")
        for request, _, _ in self._loads.values():
            if self.waiting.get(request.request_id) is not request:
                raise InvariantError(f"{request!r} has a load and is not in the queue")


@cache
def with_tiers(stage: type[PrefixCachingScheduler]) -> type[PrefixCachingScheduler]:
    """A stage with tiers below its prefix cache: `TieredScheduler`'s arguments, and the stage's."""
    return type(f"Tiered{stage.__name__}", (TieredScheduler, stage), {})
