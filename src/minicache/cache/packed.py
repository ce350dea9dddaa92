"""The integers of a step, made at once from its requests, and a step's cache over them.

`minicache.cache.paged.RaggedStep` makes the same tensors from block tables, token by token. An engine's own runners
make them with few operations, and for a GPU in one buffer, which is copied at once. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minicache import kernels
from minicache.cache.paged import PagedStorage
from minicache.cache.quantized import scales_of
from minicache.request import Request

ALIGNED: Final = 16
"""Every view of a buffer begins at a multiple of so many numbers, and block tables are a multiple of it wide: Triton
compiles a kernel again where a pointer or a number stops being divisible by 16."""


Places = Sequence[tuple[int, int]]
"""Of each layer its group, and its index in the storage (`minicache.model.groups`)."""


class StepTensors(NamedTuple):
    """All integers of a step, int64.

    Attributes:
        token_ids: `[N]`, of all sequences, one after the other.
        positions: `[N]`, where each token stands in its sequence.
        slot_mapping: `[G, N]`, in each group of layers the slot of each token; −1: padding.
        last: `[R]`, the tokens among the N whose logits are wanted: of each sequence the last, and before it as many as
            its request has draft tokens. R = B where there are none.
        context_lens: `[B]`, tokens of each sequence, the new ones too; 0: padding.
        query_start_loc: `[B + 1]`, where each sequence's tokens begin among the N.
        block_tables: `[G, B, width]`, in each group the blocks of each sequence. After its last block: no block.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    last: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    block_tables: Tensor


PADDING: Final = (0, 0, -1, 0, 0, 0, -1)
"""What each of `StepTensors` has where there is no request."""


class StepSize(NamedTuple):
    """How large the tensors of a step are.

    Attributes:
        num_tokens: N.
        num_seqs: B.
        width: columns of the block tables.
        num_drafts: R − B.
        num_groups: G.
    """

    num_tokens: int
    num_seqs: int
    width: int
    num_drafts: int = 0
    num_groups: int = 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers each of `StepTensors` takes; each group's slots are `aligned`."""
        num_tokens, num_seqs, width, num_drafts, num_groups = self
        num_slots, num_rows = num_groups * aligned(num_tokens), num_seqs + num_drafts
        return num_tokens, num_tokens, num_slots, num_rows, num_seqs, num_seqs + 1, num_groups * num_seqs * width

    @property
    def buffer_size(self) -> int:
        """How many numbers the buffer has."""
        return sum(map(aligned, self.counts))

    def views(self, buffer: Tensor) -> StepTensors:
        """The tensors of a step in its buffer `[buffer_size]`."""
        parts = torch.split(buffer, [aligned(count) for count in self.counts])
        views = StepTensors._make(part[:count] for part, count in zip(parts, self.counts, strict=True))
        return views._replace(
            slot_mapping=views.slot_mapping.view(self.num_groups, -1)[:, : self.num_tokens],
            block_tables=views.block_tables.view(self.num_groups, self.num_seqs, self.width),
        )


class Blocks(NamedTuple):
    """What the block tables of a step's requests are made of.

    Attributes:
        block_size: tokens of a block.
        num_groups: G, how many tables a request has.
        null_block: the block that stands for NULL_BLOCK, of zeros: kernels read it, and hide what they read. −1: there
            is none, and no table has such an entry.
    """

    block_size: int
    num_groups: int = 1
    null_block: int = -1


def step_tensors(requests: Sequence[Request], counts: Sequence[int], blocks: Blocks, width: int) -> StepTensors:
    """The integers of a step, on the CPU.

    Args:
        requests: in batch order; their blocks have room for the new tokens.
        counts: how many tokens each computes, ≥ 1.
        blocks: theirs.
        width: columns of the block tables, at least the most blocks of a request.
    """
    block_size, num_groups, null_block = blocks
    block_ids: list[int] = []
    token_ids: list[int] = []
    for request, count in zip(requests, counts, strict=True):
        token_ids += request.token_ids(request.num_computed_tokens, request.num_computed_tokens + count)
        if num_groups == 1:
            block_ids += request.block_ids
            block_ids += [-1] * (width - len(request.block_ids))
    if num_groups > 1:
        for group in zip(*(request.group_block_ids for request in requests), strict=True):
            for table in group:
                block_ids += table + [-1] * (width - len(table))
    tables = np.array(block_ids).reshape(num_groups, len(requests), width)
    if null_block >= 0:
        tables[tables < 0] = null_block
    starts = np.array([0, *accumulate(counts)])
    ends, owner = starts[1:], np.repeat(np.arange(len(requests)), counts)
    context_lens = np.array([request.num_computed_tokens for request in requests]) + counts
    positions = np.arange(len(token_ids)) + (context_lens - ends)[owner]
    entries = owner * width + positions // block_size
    slots = tables.reshape(num_groups, -1).take(entries, axis=1) * block_size + positions % block_size
    last = ends - 1
    if any(request.draft_token_ids for request in requests):
        num_rows = np.array([1 + len(request.draft_token_ids) for request in requests])
        end_rows = num_rows.cumsum()
        last = np.repeat(ends - end_rows, num_rows) + np.arange(end_rows[-1])
    arrays = (np.array(token_ids), positions, slots, last, context_lens, starts, tables)
    return StepTensors._make(map(torch.from_numpy, arrays))


def pack(requests: Sequence[Request], counts: Sequence[int], blocks: Blocks, size: StepSize) -> Tensor:
    """The integers of a step, in one buffer on the host.

    Args:
        requests: as for `step_tensors`.
        counts: likewise.
        blocks: likewise.
        size: of the step, at least that of the requests. What is left is padding.

    Returns:
        `[size.buffer_size]` int64; in pinned memory where there is a GPU, so copying it need not wait.
    """
    buffer = torch.empty(size.buffer_size, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    tensors = step_tensors(requests, counts, blocks, size.width)
    for view, values, padding in zip(size.views(buffer), tensors, PADDING, strict=True):
        if view.shape != values.shape:
            view.fill_(padding)
        view[tuple([slice(size) for size in values.shape])] = values
    return buffer


class PackedStep:
    """The cache of one step, over tensors that are on the device already; otherwise as `minicache.cache.RaggedStep`.

    It checks nothing but what the kernels check: the tensors come from `pack`.

    Args:
        storage: where keys and values are.
        tensors: of the step.
        num_new_tokens: how many tokens each sequence brings. None: one each, in a step that is captured once and run
            again with other numbers.
        lengths: the context lengths, if `num_new_tokens` is given.
        places: of each layer. None: all are in one group.
    """

    def __init__(
        self,
        storage: PagedStorage,
        tensors: StepTensors,
        *,
        num_new_tokens: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        places: Places | None = None,
    ) -> None:
        self.storage = storage
        self.tensors = tensors
        starts = None if num_new_tokens is None or max(num_new_tokens) == 1 else tensors.query_start_loc
        self._places = places
        self._slots = tensors.slot_mapping.unbind()
        self._metadata = [
            kernels.AttentionMetadata(
                tables, tensors.context_lens, starts, lengths=lengths, num_new_tokens=num_new_tokens
            )
            for tables in tensors.block_tables.unbind()
        ]

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's N tokens: `[N]` int64."""
        return self.tensors.positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values `[1, H_kv, N, d]` of the step's tokens in `layer`."""
        k, v = (rows[0].transpose(0, 1) for rows in (k, v))
        group, at = self._place(layer)
        k_cache, v_cache = self.storage.k(at), self.storage.v(at)
        kernels.store_kv(k, v, k_cache, v_cache, self._slots[group], **scales_of(self.storage, at))

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the step's tokens, `[1, H, N, d]`, each over its own sequence."""
        group, at = self._place(layer)
        rows, k_cache, v_cache = q[0].transpose(0, 1), self.storage.k(at), self.storage.v(at)
        out = kernels.paged_attention(
            rows, k_cache, v_cache, self._metadata[group], **scales_of(self.storage, at), sliding_window=window
        )
        return out.transpose(0, 1)[None]

    def _place(self, layer: int) -> tuple[int, int]:
        return (0, layer) if self._places is None else self._places[layer]


def aligned(count: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED
