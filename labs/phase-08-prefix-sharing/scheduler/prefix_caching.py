# Phase 8, prefix-sharing: your file. It stands in for minicache.scheduler.prefix_caching.
# Write what raises NotImplementedError. `minicache grade 8` grades it, `minicache hint 8.K` helps with task K.
#
# Predict, before you write task 8.3. `minicache grade` checks it, without points.
# Blocks of 16. A prompt of 32 tokens is served, and then the same prompt again. How many tokens does the first step of
# the second compute?
# 8.3a =
# Blocks of 4. Request a has a prompt of 6 tokens and still runs; it has 4 tokens of output, of which the newest has not
# been computed. A prompt of a's 10 tokens and one more arrives. How many of its tokens are found?
# 8.3b =
# Blocks of 4, and all are free; three of them hold the first 12 tokens of a waiting prompt of 18. How many blocks does
# its admission take out of the free list?
# 8.3c =
"""Prefix caching: a prefix that cached blocks hold is not computed again.

Phase 8 builds it, on the scheduler of phase 7. A full block is cached under the hash of its tokens and all earlier ones
(`minicache.memory.prefix`); a request that is admitted shares the blocks of its longest cached prefix. Pure standard
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from minicache.memory.prefix import BlockHash, CachingBlockPool, PrefixCacheStats, block_hash, root_hash
from minicache.request import Request, RequestStatus
from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions


class PrefixCachingOptions(PagedOptions, total=False):
    """The keyword arguments of `PrefixCachingScheduler`, which documents them."""

    prefix_caching: bool


class PrefixCachingScheduler(FairScheduler):
    """Shares the blocks of a prompt's prefix with the requests that have computed it.

    When a request is admitted, it shares the full, cached blocks of the longest prefix of its tokens instead of
    computing it. At least its last token is always computed, because the model must run on a token to generate
    the next one. Blocks stay cached after their requests have finished, until they are allocated for other tokens.

    A block can be found as soon as the tokens that fill it are scheduled. A request that is admitted in the same step
    may share it: the forward pass writes a block before it reads it. A scheduled step is computed in full, even for a
    request that is finished from outside before it runs; if it fails, `recover` drops every hash.

    Blocks that decode fills are hashed late, to keep steps short: they are noted, and cached when a request looks for a
    prefix or releases its blocks (`cache_filled`).

    Args:
        prefix_caching: whether to cache and find blocks.
        options: `FairScheduler`'s.

    Raises:
        TypeError, ValueError: as `FairScheduler`.
    """

    Options = PrefixCachingOptions

    def __init__(self, *, prefix_caching: bool = False, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        if not isinstance(prefix_caching, bool):
            raise TypeError(f"prefix_caching must be True or False; got {prefix_caching!r}")
        self._cache = CachingBlockPool(self.pool.num_blocks, self.pool.block_size) if prefix_caching else None
        if self._cache is not None:
            self.pool = self._cache
        self.prefix_caching = prefix_caching
        self._stats = PrefixCacheStats()
        self._filled: list[tuple[Request, int, int]] = []  # requests whose tokens start … stop − 1 filled blocks

    @property
    def stats(self) -> PrefixCacheStats:
        """Hits and evictions of the prefix cache so far."""
        if self._cache is not None:
            self._stats.num_evicted_blocks = self._cache.num_evicted
        return self._stats

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest prefix of a request's tokens. Shares none of them.

        Noted blocks are cached first (`cache_filled`).

        Returns:
            Their ids, in order, used or free. They never hold the request's last token. [] without a prefix cache, and
            for a request that is swapped out: its own blocks are in CPU swap space.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def hashes(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks of a request's tokens, each computed once.

        They are kept in `request.block_hashes`. Tokens are only ever appended, so a stored hash stays valid. The
        first block's parent is `root_hash` of the request's cache_salt and adapter.

        Args:
            request: has at least `num_blocks` full blocks of tokens, prompt and output together.
            num_blocks: ≥ 0.

        Returns:
            `request.block_hashes`. It may have more than `num_blocks`: take a slice.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def cache_blocks(self, request: Request, start: int, stop: int) -> None:
        """Cache the blocks of a request that become full when its tokens start … stop − 1 are computed.

        These are the blocks whose last token is one of them. Without a prefix cache nothing happens.

        Args:
            request: in the batch; it has the blocks for these tokens.
            start: 0 … stop.
            stop: start … num_tokens.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def cache_filled(self) -> None:
        """Cache the blocks noted since the last call (`cache_blocks`), in the order in which they were filled."""
        for request, start, stop in self._filled:
            self.cache_blocks(request, start, stop)
        self._filled.clear()

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `FairScheduler.admit`; but the found blocks are shared first, and their tokens count as computed.

        With a prefix cache, and for a WAITING request, new or preempted by recompute: the found blocks are its first
        `block_ids`, and the `stats` count an admission, the request's tokens, and the found ones, which are its
        `num_cached_tokens` unless it was preempted before. Blocks that this step fills are cached at once
        (`cache_blocks`), because the next request in the queue may have the same prefix.

        Args:
            request: WAITING or SWAPPED, in `waiting`.
            output: the step so far, to which it is added.
            found: the blocks that `find_prefix` has found for it.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `PagedScheduler.schedule_running`; with a prefix cache, requests that fill a block in this step are noted.

        `_filled` gets (request, start, stop) for each, in batch order: the step computes its tokens start … stop − 1.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def release(self, request: Request) -> None:
        """As `PagedScheduler.release`; but noted blocks are cached first (`cache_filled`).

        If the request failed (FINISHED_ERROR), its blocks lose their hashes (`uncache`): their contents are in doubt.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def recover(self) -> None:
        """As `Scheduler.recover`; and the prefix cache drops every hash."""
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/01-the-prefix-cache.md"
        )

    def reset_prefix_cache(self) -> None:
        """Drop every hash, as is necessary when the model's weights change.

        Raises:
            ValueError: there is no prefix cache, or a request holds blocks. Nothing has changed.
        """
        if self._cache is None:
            raise ValueError("this scheduler has no prefix cache: give it prefix_caching=True")
        self._cache.reset()
