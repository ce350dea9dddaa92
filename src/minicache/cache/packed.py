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


class StepTensors(NamedTuple):
    """All integers of a step, int64.

    Attributes:
        token_ids: `[N]`, of all sequences, one after the other.
        positions: `[N]`, where each token stands in its sequence.
        slot_mapping: `[N]`, the slot of each token; −1: padding.
        last: `[R]`, the tokens among the N whose logits are wanted: of each sequence the last, and before it as many as
            its request has draft tokens. R = B where there are none.
        context_lens: `[B]`, tokens of each sequence, the new ones too; 0: padding.
        query_start_loc: `[B + 1]`, where each sequence's tokens begin among the N.
        block_tables: `[B, width]`, −1 after each sequence's last block.
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
    """

    num_tokens: int
    num_seqs: int
    width: int
    num_drafts: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers each of `StepTensors` has."""
        num_tokens, num_seqs, width, num_drafts = self
        num_rows = num_seqs + num_drafts
        return num_tokens, num_tokens, num_tokens, num_rows, num_seqs, num_seqs + 1, num_seqs * width

    @property
    def buffer_size(self) -> int:
        """How many numbers the buffer has."""
        return sum(map(aligned, self.counts))

    def views(self, buffer: Tensor) -> StepTensors:
        """The tensors of a step in its buffer `[buffer_size]`."""
        parts = torch.split(buffer, [aligned(count) for count in self.counts])
        *vectors, tables = (part[:count] for part, count in zip(parts, self.counts, strict=True))
        return StepTensors._make([*vectors, tables.view(self.num_seqs, self.width)])


def step_tensors(requests: Sequence[Request], counts: Sequence[int], block_size: int, width: int) -> StepTensors:
    """The integers of a step, on the CPU.

    Args:
        requests: in batch order; their blocks have room for the new tokens.
        counts: how many tokens each computes, ≥ 1.
        block_size: tokens of a block.
        width: columns of the block tables, at least the most blocks of a request.
    """
    block_ids: list[int] = []
    token_ids: list[int] = []
    for request, count in zip(requests, counts, strict=True):
        block_ids += request.block_ids
        block_ids += [-1] * (width - len(request.block_ids))
        token_ids += request.token_ids(request.num_computed_tokens, request.num_computed_tokens + count)
    tables = np.array(block_ids).reshape(len(requests), width)
    starts = np.array([0, *accumulate(counts)])
    ends, owner = starts[1:], np.repeat(np.arange(len(requests)), counts)
    context_lens = np.array([request.num_computed_tokens for request in requests]) + counts
    positions = np.arange(len(token_ids)) + (context_lens - ends)[owner]
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    last = ends - 1
    if any(request.draft_token_ids for request in requests):
        num_rows = np.array([1 + len(request.draft_token_ids) for request in requests])
        end_rows = num_rows.cumsum()
        last = np.repeat(ends - end_rows, num_rows) + np.arange(end_rows[-1])
    arrays = (np.array(token_ids), positions, slots, last, context_lens, starts, tables)
    return StepTensors._make(map(torch.from_numpy, arrays))


def pack(requests: Sequence[Request], counts: Sequence[int], block_size: int, size: StepSize) -> Tensor:
    """The integers of a step, in one buffer on the host.

    Args:
        requests: as for `step_tensors`.
        counts: likewise.
        block_size: likewise.
        size: of the step, at least that of the requests. What is left is padding.

    Returns:
        `[size.buffer_size]` int64; in pinned memory where there is a GPU, so copying it need not wait.
    """
    buffer = torch.empty(size.buffer_size, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    tensors = step_tensors(requests, counts, block_size, size.width)
    for view, values, padding in zip(size.views(buffer), tensors, PADDING, strict=True):
        view[: values.shape[0]] = values
        view[values.shape[0] :] = padding
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
    """

    def __init__(
        self,
        storage: PagedStorage,
        tensors: StepTensors,
        *,
        num_new_tokens: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        self.storage = storage
        self.tensors = tensors
        starts = None if num_new_tokens is None or max(num_new_tokens) == 1 else tensors.query_start_loc
        self._metadata = kernels.AttentionMetadata(
            tensors.block_tables, tensors.context_lens, starts, lengths=lengths, num_new_tokens=num_new_tokens
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's N tokens: `[N]` int64."""
        return self.tensors.positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values `[1, H_kv, N, d]` of the step's tokens in `layer`."""
        k, v = (rows[0].transpose(0, 1) for rows in (k, v))
        k_cache, v_cache, slots = self.storage.k(layer), self.storage.v(layer), self.tensors.slot_mapping
        kernels.store_kv(k, v, k_cache, v_cache, slots, **scales_of(self.storage, layer))

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the step's tokens, `[1, H, N, d]`, each over its own sequence."""
        rows, k_cache, v_cache = q[0].transpose(0, 1), self.storage.k(layer), self.storage.v(layer)
        out = kernels.paged_attention(
            rows, k_cache, v_cache, self._metadata, **scales_of(self.storage, layer), sliding_window=window
        )
        return out.transpose(0, 1)[None]


def aligned(count: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-count // ALIGNED) * ALIGNED
