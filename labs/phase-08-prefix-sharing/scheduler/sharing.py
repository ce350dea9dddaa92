# Phase 8, prefix-sharing: your file. It stands in for minicache.scheduler.sharing.
# Write what raises NotImplementedError. `minicache grade 8` grades it, `minicache hint 8.K` helps with task K.
"""Sharing: requests that begin alike hold the same blocks, and who writes into a shared block gets a copy first.

Phase 8 builds it, on the schedulers of phases 6 and 7. A prompt's beginning that some block holds already is not
computed again (the prefix cache), and a request can be forked in the middle of its answer, for several answers to one
prompt (Kwon et al. 2023, §4.4). Pure standard library.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Unpack

from minicache.memory.prefix import BlockHash, CachingBlockPool, PrefixCacheStats, block_hash, root_hash
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.fair import FairScheduler, Rank
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions, PagedScheduler


class SharingOptions(PagedOptions, total=False):
    """The keyword arguments of `SharingScheduler`, which documents them."""

    prefix_caching: bool


class SharingScheduler(PagedScheduler):
    """Finds the beginnings of prompts in blocks that hold them already, and lets requests be forked.

    **Prefix cache.** When a request is admitted, the longest beginning of its tokens that full, cached blocks hold is
    not computed: it shares these blocks. At least its last token is always computed, because the model must run on
    something to give the next one. A block can be found when a step is scheduled that fills it; so a request that is
    admitted in the same step finds it too, and the pass that reads it has written it before. Blocks stay cached after
    their requests have ended, until they are handed out anew, the one that has been free longest first. What decode
    fills is only noted down, for a step must be quick, and gets its name when somebody looks (`name_blocks`).

    **Forks.** `fork_request` gives a request a twin, which shares its blocks. A request that would write into a block
    with another owner gets a copy of it first: `blocks_to_copy`. The copy's block is counted among those that the
    request lacks before anything is promised.

    Args:
        prefix_caching: look for beginnings that are computed already. Forks do not need it.
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
        self._filled: list[tuple[Request, int, int]] = []  # whose tokens start … stop − 1 filled blocks without a name
        self._unfilled: dict[int, Request] = {}  # cached blocks that the step under way is to fill, and who does
        self._num_forks = 0
        self._may_share_tails = False  # whether anybody may be about to write into a block with two owners

    # The prefix cache

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

    @property
    def is_awaited(self) -> bool:
        """Whether a step was scheduled and not reported."""
        return self._issued is not None

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest beginning of a request's tokens. Gives no block to anybody.

        What was filled since somebody last looked is cached first (`name_blocks`).

        Returns:
            Their ids, in order, used or free; of at most all tokens but the last. None without a prefix cache, and none
            for a request that is swapped out: its own are on the host.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def hashes(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """The hashes of at least the first `num_blocks` blocks of a request's tokens, each computed once.

        They are kept in `request.block_hashes`: what stands there is right and is not computed again, for tokens are
        only ever added at the end. The first block's parent is `root_hash` of the request's cache_salt and adapter.

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
        """Cache the blocks that a step fills which computes a request's tokens start … stop − 1.

        They are those whose last token is among these. A block that the step leaves unfinished waits for a later one;
        one that was full before has its name. Of the blocks that are cached, those whose last token is not computed yet
        (`num_computed_tokens`) are for the step under way to fill: `_unfilled` says whose part that is, block →
        request, until the report. Without a prefix cache nothing happens.

        Args:
            request: in the batch; it has the blocks for these tokens.
            start: 0 … stop.
            stop: start … num_tokens.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def name_blocks(self) -> None:
        """Cache what the batch has filled since this was done last (`cache_blocks`), in the order in which it did."""
        for request, start, stop in self._filled:
            self.cache_blocks(request, start, stop)
        self._filled.clear()

    def schedule(self) -> SchedulerOutput:
        """As `PagedScheduler.schedule`; but what a step was to fill whose tokens never came is not filled.

        If this step orders the same of the batch once more (`repeats`), it fills the same, and nothing changes. Else it
        may fill less, or other blocks. So the promises are off: what was noted of that step is struck out, and nobody
        relies on it any more (`take_back`). What this step fills is noted anew.
        """
        if self._cache is not None and self._issued is not None and not self.repeats(self._issued):
            self._filled = [each for each in self._filled if each[2] <= each[0].num_computed_tokens]
            self.take_back(self.running)
            self._unfilled.clear()
        return super().schedule()

    def repeats(self, lost: SchedulerOutput) -> bool:
        """Whether the next step has the batch compute what a lost one had it compute, into the same blocks.

        It does if everybody in the batch was given all that a step may give it (`largest_chunk`), so that nobody gets
        more now at another's cost; and if nobody's blocks are about to be replaced by copies. Then nobody needs a block
        that it has not got in the lost step, and nobody is preempted either.

        Args:
            lost: the last step, whose tokens never came.
        """
        ordered = lost.num_scheduled_tokens
        return not self._may_share_tails and all(
            ordered.get(request.request_id) == self.largest_chunk(request.num_tokens - request.num_computed_tokens)
            for request in self.running
        )

    def num_new_tokens(self, request: Request) -> int:
        """As `PagedScheduler.num_new_tokens`, less those that are found (`find_prefix`).

        Found are the first of its tokens. Once it has them they are computed, and must not be subtracted twice: of the
        tokens that are found and those that are computed, the larger number counts.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def blocks_to_take(self, request: Request) -> int:
        """As `PagedScheduler.blocks_to_take`, less those that are found and used: a free one is taken all the same."""
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.enter`; but what `find_prefix` finds is shared first, and counts as computed.

        That is for a WAITING request, new or preempted by recompute, of a scheduler with a prefix cache. Each time the
        `stats` count a request, the tokens that it has, and those that were found. `num_cached_tokens` says what was
        found when it was admitted first, and stays so. Whoever enters, what this step fills is cached (`cache_blocks`)
        at once: the next in the line may begin alike.

        Args:
            request: WAITING or SWAPPED, in neither queue.
            output: the step so far, to which it is added.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def take_back(self, fillers: Iterable[Request]) -> None:
        """Have nobody rely on blocks that these requests were to fill in a step whose tokens never came.

        They are those of a request's blocks that it has not computed to their end, and for which `_unfilled` still
        names it. They lose their names. Whoever else has found them in that same step computes them itself: of a
        request of the batch that lists such a block of another, nothing counts as computed from the first such block
        on; and never more than did before, for an earlier block may have been lost already. There may be several, who
        would all write into it: then `_may_share_tails` is True.

        Args:
            fillers: they still have their blocks.
        """
        raise NotImplementedError(
            "phase 8, task 3: Find a prefix; read docs/en/phase-08-prefix-sharing/lab/00-the-prefix-cache.md"
        )

    def release(self, request: Request) -> None:
        """As `PagedScheduler.release`; but what has no name yet gets it first (`name_blocks`).

        And what a step was to fill, and has not, is taken back (`take_back`): that is so if the step's tokens never
        came, and the request has ended or been preempted since.
        """
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

    # Copy-on-write

    def fork_request(
        self, request_id: RequestId, child_id: RequestId, output_token_ids: Sequence[int] | None = None
    ) -> Request:
        """Give a request a twin, with an id and a future of its own. To be called between two steps.

        The twin has the same prompt and options (`Request.twin`). It is taken on as any request is (`add_request`), but
        does not wait (`withdraw`): it is RUNNING, and shares blocks with its parent (`share_blocks`). It counts as
        having arrived with its parent (`arrival_index`), and is the n-th fork of this scheduler (`fork_index` n, from
        1). The batch is in the order of `seniority`, so that its place is behind its family.

        Args:
            request_id: who is forked: in the batch, with at least one token of output.
            child_id: names the twin.
            output_token_ids: what the twin has generated: fewer tokens than max_tokens, and with the prompt fewer than
                the scheduler's max_model_len, if there is one, for at either it would have ended. It may differ from
                the request's own from some token on; with no token, the first is its own, too. None: the same.

        Returns:
            The twin.

        Raises:
            ValueError: nobody of that name is decoding, a step's tokens are awaited, the batch has no seat left,
                `child_id` is taken, or `output_token_ids` are too many. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def share_blocks(self, parent: Request, child: Request) -> None:
        """Give a twin the blocks of what it has in common with its parent, and count as computed what of that is.

        In common are the prompt, and the outputs up to the first that differs, or that only one of them has. Of these
        tokens the parent's computed ones are computed for the twin too (`num_computed_tokens`), but not the twin's last
        token: one is always left to compute. It shares the blocks that they lie in. The last of these may be half full:
        who writes into it next gets a copy (`_may_share_tails` says that somebody may).

        Except for that last block if the parent has filled it since, and not with tokens that both have. It may be
        cached under the parent's tokens, and once the parent has gone, the twin would write others into it. The twin
        leaves this block alone, and computes the few tokens of its own that would be in it.

        Args:
            parent: in the batch.
            child: has its prompt and its outputs, no blocks, and nothing computed.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def withdraw(self, request: Request) -> None:
        """Take a request out of the line, wherever it stands."""
        del self.waiting[request.request_id]

    def seniority(self, request: Request) -> Rank:
        """What the batch is in the order of: arrival, and within a family the order of the forks."""
        return request.arrival_index, request.fork_index

    def grow_batch(self, output: SchedulerOutput) -> None:
        """As `PagedScheduler.grow_batch`; who writes into shared blocks gets copies, and what is filled is noted.

        When it is a request's turn, and its `blocks_missing` are free, those that must be copied are (`copy_on_write`,
        if `_may_share_tails`), and the blocks that it then still lacks (`blocks_missing`, which a later stage counts in
        another way) go behind the others. With a prefix cache, everybody who is ordered and fills a block is noted in
        `_filled`, in the order of the batch: (request, its first token of this step, the first behind them).

        A batch that has run empty shares nothing: `_may_share_tails` is False again. And once the step before is
        reported, nobody's part in it is open: `_unfilled` is emptied.

        Args:
            output: the step so far. `blocks_to_copy` gets a pair (source block, target block) for every copy.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def blocks_missing(self, request: Request) -> int:
        """As `PagedScheduler.blocks_missing`, and one for each block that must be copied before it is written.

        Looking for these (`written_and_shared`) takes time on every token, and is not needed while `_may_share_tails`
        is False: it is True from the fork on until the batch has run empty.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def written_and_shared(self, request: Request) -> list[int]:
        """Of a request's blocks the places of those that its next tokens are written into, and that others own too.

        Its next tokens are all that are not computed: what lies before `num_computed_tokens` is only read.

        Returns:
            Indices in `request.block_ids`, rising.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def copy_on_write(self, request: Request, output: SchedulerOutput) -> None:
        """Replace each block that is written and shared by a new one of the request's own, and have it copied.

        The request gives up its share of the old one; the others keep theirs.

        Args:
            request: in the batch; so many blocks are free.
            output: the step so far. `blocks_to_copy` gets a pair (source block, target block) for each.
        """
        raise NotImplementedError(
            "phase 8, task 4: Fork and copy on write; read docs/en/phase-08-prefix-sharing/lab/01-forks-and-beams.md"
        )

    def make_room(self, request: Request, missing: int, output: SchedulerOutput) -> bool:
        """As `PagedScheduler.make_room`, victim by victim: who lost its twin may need no copy any more."""
        while (missing := self.blocks_missing(request)) > self.pool.num_free:
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                return super().make_room(request, missing, output)  # which ends it: the pool is too small for it
            self.preempt(victim, output)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.preempt`; but one that has more tokens than the whole pool has room for ends.

        It could only grow so long because it shared its blocks. Alone it would wait for ever: it ends as
        FINISHED_CAPACITY, and is named in `output.finished`.

        Args:
            request: the last of the batch.
            output: the step so far, in which it has not been ordered.
        """
        if -(-request.num_tokens // self.pool.block_size) <= self.pool.num_blocks:
            super().preempt(request, output)
        else:
            self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
            output.finished.append(request.request_id)


class FairSharingScheduler(SharingScheduler, FairScheduler):
    """`SharingScheduler` in the order of `FairScheduler`: priority, arrival, groups, and the bound.

    Arguments and errors are `SharingScheduler`'s.
    """

    def __init__(self, **options: Unpack[SharingOptions]) -> None:
        checked: Any = options  # each class on the way takes its own out
        super().__init__(**checked)

    def rank(self, request: Request) -> Rank:
        """As `FairScheduler.rank`; within a family, the order of the forks."""
        return *super().rank(request), request.fork_index

    def arrival(self, request: Request) -> Rank:
        """As `FairScheduler.arrival`; within a family, the order of the forks."""
        return *super().arrival(request), request.fork_index

    def seniority(self, request: Request) -> Rank:
        """What the batch is in the order of: rank."""
        return self.rank(request)

    def withdraw(self, request: Request) -> None:
        """As `SharingScheduler.withdraw`, and out of all of its lines."""
        super().withdraw(request)
        self.leave_line(request)
