# Phase 8, prefix-sharing: your file. It stands in for minicache.scheduler.prefix_caching.
# Write what raises NotImplementedError. `minicache grade 8` grades it, `minicache hint 8.K` helps with task K.
"""Prefix caching: a prompt's beginning that some blocks hold already is not computed again.

Phase 8 builds it, on the scheduler of phase 6. Full blocks are known by the hash of their tokens and of all before them
(`minicache.memory.prefix`); a request that is admitted shares the blocks of the longest beginning that is cached. Pure
standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from minicache.memory.prefix import BlockHash, CachingBlockPool, PrefixCacheStats, block_hash, root_hash
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions, PagedScheduler


class PrefixCachingOptions(PagedOptions, total=False):
    """The keyword arguments of `PrefixCachingScheduler`, which documents them."""

    prefix_caching: bool


class PrefixCachingScheduler(PagedScheduler):
    """Shares the blocks of a prompt's beginning with the requests that have computed it.

    When a request is admitted, the longest beginning of its tokens that full, cached blocks hold is not computed: it
    shares these blocks. At least its last token is always computed, because the model must run on something to generate
    the next one. Blocks stay cached after their requests have finished, until they are allocated for other tokens.

    A block can be found from the `schedule()` on that fills it, so a request that is admitted in the same step finds it
    too: the forward pass writes it before it is read. That is safe because a step is computed as it was scheduled, also
    for a request that has been finished from outside meanwhile, or it fails, and `recover` forgets every hash.

    Blocks that fill up while requests run are only noted, for a step must be quick. They are cached when a request
    looks for blocks, or releases its own (`cache_filled`).

    Args:
        prefix_caching: False: find nothing, and cache nothing.
        options: `PagedScheduler`'s.

    Raises:
        TypeError, ValueError: as `PagedScheduler`.
    """

    def __init__(self, *, prefix_caching: bool = False, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        if not isinstance(prefix_caching, bool):
            raise TypeError(f"prefix_caching must be True or False; got {prefix_caching!r}")
        self._cache = CachingBlockPool(self.pool.num_blocks, self.pool.block_size) if prefix_caching else None
        if self._cache is not None:
            self.pool = self._cache
        self._stats = PrefixCacheStats()
        self._filled: list[tuple[Request, int, int]] = []  # requests whose tokens start … stop − 1 filled blocks

    @property
    def prefix_caching(self) -> bool:
        """Whether beginnings that are computed already are looked for."""
        return self._cache is not None

    @property
    def stats(self) -> PrefixCacheStats:
        """What the prefix cache has found so far."""
        if self._cache is not None:
            self._stats.num_evicted_blocks = self._cache.num_evicted
        return self._stats

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest beginning of a request's tokens. Shares none of them.

        What was filled since the last look is cached first (`cache_filled`).

        Returns:
            Their ids, in order, used or free; of at most all tokens but the last. None without a prefix cache, and none
            for a request that is swapped out: its own are in CPU swap space.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def hashes(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks of a request's tokens, each computed once.

        They are kept in `request.block_hashes`: what is there is right and is not computed again, for tokens are only
        ever added at the end. The first block's parent is `root_hash` of the request's cache_salt and adapter.

        Args:
            request: has so many full blocks of tokens, prompt and output together.
            num_blocks: how many, ≥ 0.

        Returns:
            `request.block_hashes`, which may have more.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def cache_blocks(self, request: Request, start: int, stop: int) -> None:
        """Cache the blocks of a request that become full when its tokens start … stop − 1 are computed.

        They are those whose last token is among these. A block that stays unfinished is cached by a later step; one
        that was full before is cached already. Without a prefix cache nothing happens.

        Args:
            request: in the batch; it has the blocks for these tokens.
            start: 0 … stop.
            stop: start … num_tokens.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def cache_filled(self) -> None:
        """Cache the blocks noted since the last call (`cache_blocks`), in the order in which they were filled."""
        for request, start, stop in self._filled:
            self.cache_blocks(request, start, stop)
        self._filled.clear()

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `PagedScheduler.admit`; but the found blocks are shared first, and their tokens count as computed.

        That is for a WAITING request, new or preempted by recompute, of a scheduler with a prefix cache. The `stats`
        count an admission, the tokens that the request has, and those that were found. `num_cached_tokens` is set to
        the latter at the first admission, and not when the request comes back from a preemption. Blocks that this step
        fills are cached at once (`cache_blocks`): the next request of the queue may begin alike.

        Args:
            request: WAITING or SWAPPED, in `waiting`.
            output: the step so far, to which it is added.
            found: the blocks that `find_prefix` has found for it.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `PagedScheduler.schedule_running`; with a prefix cache, requests that fill a block in this step are noted.

        They are appended to `_filled`, in batch order: (request, start, stop) if the step computes its tokens start …
        stop − 1.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def release(self, request: Request) -> None:
        """As `PagedScheduler.release`; but the blocks that it has filled are cached first (`cache_filled`).

        If it failed (FINISHED_ERROR), what its blocks hold is not to be trusted: they lose their hashes (`uncache`).
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def recover(self) -> None:
        """As `Scheduler.recover`; and the prefix cache forgets every hash."""
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def reset_prefix_cache(self) -> None:
        """Forget what blocks hold, as is needed when the model's weights change.

        Raises:
            ValueError: there is no prefix cache, or a request holds blocks. Nothing has changed.
        """
        if self._cache is None:
            raise ValueError("this scheduler has no prefix cache: give it prefix_caching=True")
        self._cache.reset()
