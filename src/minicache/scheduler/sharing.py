"""Sharing: a request can be forked, and a request that writes into a shared block gets a copy of it first.

Phase 8 builds it, on prefix caching. A fork gives a request in decode a child with the same blocks, for several answers
to one prompt and for beam search (Kwon et al. 2023, §4.4). Pure standard library.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice
from typing import Unpack

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.prefix_caching import PrefixCachingOptions, PrefixCachingScheduler


class SharingScheduler(PrefixCachingScheduler):
    """Forks requests, and copies shared blocks before they are written.

    `fork_request` gives a request a child, which shares its blocks. A request that would write into a block with
    another reference gets a copy of it first (`blocks_to_copy`). The copy's block counts as one that the
    request is missing, so it is available before the step is scheduled. Forks need no prefix cache.

    Arguments and errors are `PrefixCachingScheduler`'s.
    """

    def __init__(self, **options: Unpack[PrefixCachingOptions]) -> None:
        super().__init__(**options)
        self._num_forks = 0
        self._may_share_tails = False  # whether a request's next write may go into a block with two references

    def fork_request(
        self, request_id: RequestId, child_id: RequestId, output_token_ids: Sequence[int] | None = None
    ) -> Request:
        """Give a request a child, which continues separately. Call it between two steps.

        The child has the same prompt and options (`Request.child`). It is registered like any request (`register`),
        but is not queued: it is RUNNING, and shares blocks with its parent (`share_blocks`). It counts as having
        arrived with its parent (`arrival_index`), and is the n-th fork of this scheduler (`fork_index` n, from 1); so
        `priority_key` puts it behind its siblings in the batch.

        Args:
            request_id: the parent: in the batch, with at least one token of output.
            child_id: the child's id.
            output_token_ids: the child's output: fewer tokens than max_tokens, and with the prompt fewer than
                the scheduler's max_model_len, if it has one: at either limit it would have finished. Any tokens are
                allowed, and so is []. None: the same as the parent's.

        Returns:
            The child.

        Raises:
            ValueError: no request of that id is decoding, a step is outstanding, the batch has no slot left, `child_id`
                is in use, or `output_token_ids` are too many. Nothing has changed.
        """
        parent = next((each for each in self.running if each.request_id == request_id), None)
        if parent is None or not parent.output_token_ids or self.outstanding is not None:
            raise ValueError(f"request {request_id!r} cannot be forked: it must be in decode, between two steps")
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(f"the batch has {self.max_num_seqs} requests already: no slot for a child")
        outputs = list(parent.output_token_ids if output_token_ids is None else output_token_ids)
        longest = parent.max_tokens
        if self.max_model_len is not None:
            longest = min(longest, self.max_model_len - parent.num_prompt_tokens)
        if len(outputs) >= longest:
            raise ValueError(f"a child of {parent!r} has at most {longest - 1} tokens of output; got {len(outputs)}")
        child = parent.child(child_id)
        self.register(child)
        self._num_forks += 1
        child.arrival_index, child.fork_index = parent.arrival_index, self._num_forks
        child.output_token_ids = outputs
        child.status = RequestStatus.RUNNING
        self.share_blocks(parent, child)
        insort(self.running, child, key=self.priority_key)
        return child

    def share_blocks(self, parent: Request, child: Request) -> None:
        """Share with a child the parent's blocks that hold computed tokens of both.

        Both have the prompt, and the outputs up to the first difference. Those that the parent has computed
        count as computed for the child too (`num_computed_tokens`), except the child's last token: one is always left
        to compute. The last shared block may be partly filled: the next request to write into it gets a copy
        (`_may_share_tails` is True from now on).

        One exception: if the parent has since filled that last block with tokens that the child does not have, it is
        not shared, and the child computes from its start on. The block may be cached under the parent's tokens, and
        once the parent has finished, the child would write its own into it.

        Args:
            parent: in the batch.
            child: has its prompt and its outputs, no blocks, and nothing computed.
        """
        shared = parent.num_prompt_tokens
        for theirs, its in zip(parent.output_token_ids, child.output_token_ids, strict=False):
            if theirs != its:
                break
            shared += 1
        num_computed, block_size = min(parent.num_computed_tokens, shared, child.num_tokens - 1), self.pool.block_size
        if shared // block_size == num_computed // block_size < parent.num_computed_tokens // block_size:
            num_computed -= num_computed % block_size  # the parent has filled that block with other tokens
        child.num_computed_tokens = num_computed
        child.block_ids = parent.block_ids[: -(-num_computed // block_size)]
        self.pool.share(child.block_ids)
        self._may_share_tails = True

    def blocks_missing(self, request: Request) -> int:
        """As `PagedScheduler.blocks_missing`, plus one for each block that must be copied before it is written.

        Finding these (`written_and_shared`) takes time for every token. It is skipped while `_may_share_tails` is
        False. The flag is True from a fork on until the batch is empty.
        """
        num_tokens = request.num_prompt_tokens + len(request.output_token_ids)
        missing = -(-num_tokens // self.pool.block_size) - len(request.block_ids)  # as super(), without its calls
        return missing + len(self.written_and_shared(request)) if self._may_share_tails else missing

    def written_and_shared(self, request: Request) -> list[int]:
        """Indices of the request's blocks that its next tokens are written into and that have other references.

        Its next tokens are all uncomputed ones: positions before `num_computed_tokens` are only read.

        Returns:
            Indices in `request.block_ids`, rising.
        """
        first = request.num_computed_tokens // self.pool.block_size
        return [
            index
            for index, block_id in enumerate(islice(request.block_ids, first, None), first)
            if self.pool.ref_count(block_id) > 1
        ]

    def grow(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.grow`; but shared blocks that the step writes into are replaced by copies first.

        `copy_on_write` is called only while `_may_share_tails` is True, as in `blocks_missing`.
        """
        if self._may_share_tails:
            self.copy_on_write(request, output)
        super().grow(request, output)

    def copy_on_write(self, request: Request, output: SchedulerOutput) -> None:
        """Replace each shared block that the request writes into by a new one, and have it copied.

        The request gives up its reference to the old one; the others keep theirs.

        Args:
            request: in the batch; enough blocks are free.
            output: the step so far. `blocks_to_copy` gets a pair (source block, target block) for each.
        """
        for index in self.written_and_shared(request):
            source, [target] = request.block_ids[index], self.pool.allocate(1)
            request.block_ids[index] = target
            self.pool.free([source])
            output.blocks_to_copy.append((source, target))

    def release(self, request: Request) -> None:
        """As `PrefixCachingScheduler.release`; and once the batch is empty, `_may_share_tails` is False."""
        super().release(request)
        if not self.running:
            self._may_share_tails = False
