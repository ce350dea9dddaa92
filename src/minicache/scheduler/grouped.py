"""Several kinds of cache in one model: the chunked scheduler over block tables of several groups.

Phase 12 builds it, on the scheduler of phase 9. It decides as that one does: which requests compute, in which order,
and which is preempted. Only what a request needs, holds and finds is a matter of groups, and that is in
`minicache.memory.groups`. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from minicache.memory.blocks import blocks_for
from minicache.memory.groups import BlockGroups, GroupedBlockPool, Tables, without_null
from minicache.memory.prefix import PrefixCacheStats
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.chunked import ChunkedOptions
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache.scheduler.vllm_options import VllmOptionsScheduler


class GroupedOptions(ChunkedOptions, total=False):
    """The keyword arguments of `GroupedScheduler`, which documents them."""

    windows: Sequence[int | None]
    prefix_cache_retention: int | None


class GroupedScheduler(VllmOptionsScheduler):
    """`VllmOptionsScheduler`, for a model whose layers form several groups (`BlockGroups`).

    A request has a block table in every group, `Request.group_block_ids`; `block_ids` is the first. In a group with a
    window, blocks that no later token sees go back to the pool when the request is next considered, before its missing
    blocks are counted, whether or not it is then scheduled.

    Requests are preempted by recompute, and cannot be forked.

    Args:
        windows: one entry a group: the tokens that its layers see, the newest included. None: all tokens.
        prefix_cache_retention: how much of the groups with a window the prefix cache keeps, in `BlockGroups` called
            `retention`. None: all. n: what a prefix of a multiple of n tokens needs (0: of no multiple), what the
            request itself needs if it is repeated, and what it needs at a junction, where other requests continued
            differently.
        options: `VllmOptionsScheduler`'s.

    Attributes:
        groups: the `BlockGroups`, over `pool`.

    Raises:
        TypeError, ValueError: as `VllmOptionsScheduler` and `BlockGroups`; or `preemption` is "swap".
    """

    Options = GroupedOptions

    def __init__(
        self,
        *,
        windows: Sequence[int | None],
        prefix_cache_retention: int | None = 0,
        **options: Unpack[ChunkedOptions],
    ) -> None:
        super().__init__(**options)
        if self.host_pool is not None:
            raise ValueError('windows: swapped-out requests have one block table; take preemption "recompute"')
        self._cache = None  # phase 8's, of one table
        pool = GroupedBlockPool(self.pool.num_blocks, self.pool.block_size)
        self.pool = pool
        self.groups = BlockGroups(
            pool,
            windows,
            max_step_tokens=self.max_num_batched_tokens,
            max_num_tokens=self.max_model_len,
            retention=prefix_cache_retention,
        )
        self._junctions: dict[RequestId, int] = {}  # of requests that were considered for admission, in blocks

    def register(self, request: Request) -> None:
        """As `VllmOptionsScheduler.register`; and the request has an empty table in every group."""
        super().register(request)
        request.group_block_ids = self.groups.empty()

    def fork_request(
        self, request_id: RequestId, child_id: RequestId, output_token_ids: Sequence[int] | None = None
    ) -> Request:
        """Refuse.

        Raises:
            ValueError: always. Nothing has changed.
        """
        raise ValueError("a scheduler with windows forks no requests: add a new request for each answer")

    # What a request needs

    def blocks_to_admit(self, request: Request) -> int:
        """The most blocks that the request holds at a time while its tokens are computed, in all groups."""
        return self.groups.blocks_to_admit(request.num_tokens)

    def can_allocate(self, request: Request, found: Sequence[int] = ()) -> AllocStatus:
        """As `PagedScheduler.can_allocate`, though a request may have more tokens than the pool has slots."""
        if self.blocks_to_admit(request) > self.pool.num_blocks:
            return AllocStatus.NEVER
        spared = self._num_watermark_blocks if self.running else 0
        enough = self.blocks_to_take(request, found) + spared <= self.pool.num_free
        return AllocStatus.OK if enough else AllocStatus.LATER

    def blocks_to_take(self, request: Request, found: Sequence[int] = ()) -> int:
        """Free blocks needed to admit `request`: those of its first chunk; and `blocks_to_admit`, if that is more.

        Both less the found blocks in use. Without `reserve_full_prompt`, only those of the first chunk.
        """
        tables, groups = self.tables(found), self.groups
        chunk = len(tables[0]) * self.pool.block_size + self.num_new_tokens(request, found)
        needed = groups.blocks_to_take(tables, [blocks_for(chunk, self.pool.block_size)] * len(tables))
        if self.reserve_full_prompt:
            whole = [groups.most_blocks(window, request.num_tokens) for window in groups.windows]
            needed = max(needed, groups.blocks_to_take(tables, whole))
        return needed

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request still needs before its next chunk is computed, in all groups.

        Blocks that have left a window are given back first (`BlockGroups.slide`). So a request has room from its own
        past before it takes blocks or preempts another.
        """
        num_computed = request.num_computed_tokens
        num_new = self.chunk(request.num_prompt_tokens + len(request.output_token_ids) - num_computed)
        if not num_new:  # no budget is left: the request is not considered
            return 0
        tables = request.group_block_ids
        self.groups.slide(tables, num_computed)
        return self.groups.blocks_missing(tables, num_computed + num_new)

    def grow(self, request: Request, output: SchedulerOutput) -> None:
        """Append the `blocks_missing`, which are free, to the tables of a request."""
        num_computed = request.num_computed_tokens
        num_new = self.chunk(request.num_tokens - num_computed)
        self.groups.grow(request.group_block_ids, num_computed + num_new)

    def release(self, request: Request) -> None:
        """Free the request's blocks (`BlockGroups.release`); it has empty tables then.

        If it failed (FINISHED_ERROR), its blocks lose their hashes first (`uncache`).
        """
        tables = request.group_block_ids
        if request.status is RequestStatus.FINISHED_ERROR:
            self.groups.pool.uncache(each for table in tables for each in without_null(table))
        self.groups.release(tables)
        request.group_block_ids = self.groups.empty()
        self._junctions.pop(request.request_id, None)
        super().release(request)

    # What a request finds

    @property
    def stats(self) -> PrefixCacheStats:
        """Hits and evictions of the prefix cache so far. A block of each group counts as a block."""
        self._stats.num_evicted_blocks = self.groups.pool.num_evicted
        return self._stats

    def find_prefix(self, request: Request) -> list[int]:
        """The blocks of the longest prefix that every group has cached (`BlockGroups.find`). Shares none of them.

        Where the first group's hit ended is noted, if that is more (the junction).

        Returns:
            The tables of all groups, one after the other (`tables` takes them apart). [] without a prefix cache.
        """
        if not self.prefix_caching:
            return []
        num_blocks = (request.num_tokens - 1) // self.pool.block_size
        tables, self._junctions[request.request_id] = self.groups.find(self.hashes(request, num_blocks)[:num_blocks])
        return [block_id for table in tables for block_id in table]

    def tables(self, found: Sequence[int]) -> Tables:
        """The tables of what `find_prefix` has found; empty ones if it has found nothing."""
        num_groups = len(self.groups.windows)
        length = len(found) // num_groups
        return [list(found[group * length : (group + 1) * length]) for group in range(num_groups)]

    def num_new_tokens(self, request: Request, found: Sequence[int] = ()) -> int:
        """As `VllmOptionsScheduler.num_new_tokens`, with the found blocks of all groups."""
        return super().num_new_tokens(request, found[: len(found) // len(self.groups.windows)])

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `VllmOptionsScheduler.admit`; the found blocks of all groups are shared before any is allocated."""
        self.groups.pool.share(found)
        tables = self.tables(found)
        request.group_block_ids = tables
        request.num_computed_tokens = len(tables[0]) * self.pool.block_size
        if self.prefix_caching:
            if not request.num_preemptions:
                request.num_cached_tokens = request.num_computed_tokens
            self._stats.num_requests += 1
            self._stats.num_queried_tokens += request.num_tokens
            self._stats.num_hit_tokens += request.num_computed_tokens
        self.grow(request, output)
        super().admit(request, output)

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_tokens`; and blocks that the chunk fills are cached (`cache_blocks`)."""
        super().schedule_tokens(request, output)
        if self.prefix_caching:
            start, num_new = request.num_computed_tokens, output.num_scheduled_tokens.get(request.request_id, 0)
            if start % self.pool.block_size + num_new >= self.pool.block_size:
                self.cache_blocks(request, start, start + num_new)

    def cache_blocks(self, request: Request, start: int, stop: int) -> None:
        """Cache the blocks that become full when the request's tokens start … stop − 1 are computed.

        Of a group with a window, those that are retained (`BlockGroups.is_retained`): for the prefix that this prompt
        finds when it comes again, without its last token; and for the junction.

        Args:
            request: in the batch; it has the blocks for these tokens.
            start: 0 … stop.
            stop: start … num_tokens.
        """
        block_size = self.pool.block_size
        first, end = start // block_size, stop // block_size
        prefixes = (request.num_prompt_tokens - 1) // block_size, self._junctions[request.request_id]
        self.groups.cache(request.group_block_ids, self.hashes(request, end), first, end, prefixes)

    def recover(self) -> None:
        """As `VllmOptionsScheduler.recover`; and the prefix cache drops every hash."""
        super().recover()
        self.groups.pool.reset()

    def reset_prefix_cache(self) -> None:
        """Drop every hash, as is necessary when the model's weights change.

        Raises:
            ValueError: there is no prefix cache, or a request holds blocks. Nothing has changed.
        """
        if not self.prefix_caching:
            raise ValueError("this scheduler has no prefix cache: give it prefix_caching=True")
        self.groups.pool.reset()
