"""Paged attention on a CPU: short sequences attend together, long prompts in tiles, as planned once a step.

`plain` goes from one sequence to the next. For 32 sequences of a hundred tokens, in each of six layers, that is
hundreds of calls a step, whose overhead is longer than the arithmetic. Here sequences with one query and about the
same number of visible tokens are gathered into a rectangle and attend in one call, as long as the rectangle is small
enough to be read again from the processor's cache.

Everything else goes sequence by sequence: through `plain`, or through this module's `_attend_window` where a layer has
a sliding window. The queries of a long prompt are cut into tiles first, each a short sequence of its own over the same
blocks, so masks stay small; with a window a tile gathers only the blocks that its window reaches. The cost of a window
therefore follows the window, and a window that no context exceeds costs nothing.

No phase builds this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache.kernels import AttentionMetadata, plain

RECTANGLE_NBYTES = 1 << 20
"""The most that a rectangle's keys and values may take. With half as much there are more calls, and with more there is
more padding, and the copy falls out of the processor's cache. Measured from 256 KiB to 8 MiB, on 32 sequences of 75 to
175 tokens and on 32 of 64 to 1,024."""

QUERY_TILE = 256
"""The most queries of a prompt that attend at a time, where they need a mask."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`minicache.kernels.paged_attention` in PyTorch, with a scale. It runs on any device, and is made for a CPU.

    Returns:
        `[N, H, d]`, the dtype of `q`. Zeros for a sequence with context_lens 0.
    """
    if sliding_window is not None and sliding_window >= max(metadata.lengths):
        sliding_window = None
    plan = _plan(q, k_cache, v_cache, metadata, sliding_window)
    if not plan.rectangles:
        return _one_by_one(q, k_cache, v_cache, plan.rest, scale, sliding_window)
    *together, alone = torch.split(q.index_select(0, plan.order), plan.sizes)
    out = [
        _attend_rectangle(rows, k_cache, v_cache, rectangle, scale)
        for rows, rectangle in zip(together, plan.rectangles, strict=True)
    ]
    if alone.shape[0]:
        out.append(_one_by_one(alone, k_cache, v_cache, plan.rest, scale, sliding_window))
    return torch.cat(out).index_select(0, plan.inverse)


@dataclass(frozen=True)
class _Rectangle:
    """Sequences that attend together, n of them, with at most S visible tokens each.

    Attributes:
        slots: `[n · S]` int64, each token's slot. A sequence with fewer tokens is padded with its first one: padding is
            masked, but must not be NaN, as other sequences' or unused slots may be.
        bias: `[n, 1, 1, S]`, to be added to the scores: 0, and −inf after a sequence's last token.
    """

    slots: Tensor
    bias: Tensor


@dataclass(frozen=True)
class _Plan:
    """How the sequences of a step attend.

    Attributes:
        rectangles: the sequences that attend together. If there are none, the next three are empty.
        order: `[N]` int64, the step's queries, rectangle after rectangle, and last those of `rest`.
        inverse: `[N]` int64, the index of each query in `order`.
        sizes: how many queries each rectangle has, and how many `rest`.
        rest: the sequences that attend one by one, long prompts cut into tiles.
    """

    rectangles: list[_Rectangle]
    order: Tensor
    inverse: Tensor
    sizes: list[int]
    rest: AttentionMetadata


def _plan(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, window: int | None) -> _Plan:
    """The step's plan for layers with this window, made at the first of them."""
    can_pack = q.device.type == "cpu" and k_cache.is_contiguous() and v_cache.is_contiguous()
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    token_nbytes = 2 * num_kv_heads * head_dim * k_cache.itemsize
    key = (window, can_pack, block_size, token_nbytes, q.dtype)
    plan: _Plan | None = metadata.plans.get(key)
    if plan is None:
        max_tokens = RECTANGLE_NBYTES // token_nbytes if can_pack else 0
        plan = metadata.plans[key] = _make_plan(metadata, window, max_tokens, block_size, q.dtype)
    return plan


def _make_plan(
    metadata: AttentionMetadata, window: int | None, max_tokens: int, block_size: int, dtype: torch.dtype
) -> _Plan:
    """Put sequences with one query into rectangles of at most `max_tokens` tokens, and cut the others into tiles."""
    starts = metadata.starts
    visible = [length if window is None else min(length, window) for length in metadata.lengths]
    single = [i for i, (start, end) in enumerate(pairwise(starts)) if end - start == 1 and visible[i]]
    groups = _pack(single, visible, max_tokens)
    members = list(chain.from_iterable(groups))
    grouped = set(members)
    others = [i for i in range(len(visible)) if i not in grouped]
    rest = _tiles(metadata, others, window)
    if not groups:
        return _Plan([], torch.empty(0), torch.empty(0), [], rest)
    rows = [starts[i] for i in members]
    for i in others:
        rows.extend(range(starts[i], starts[i + 1]))
    sizes = [*map(len, groups), len(rows) - len(members)]
    order = torch.tensor(rows)
    return _Plan(_rectangles(metadata, groups, visible, block_size, dtype), order, order.argsort(), sizes, rest)


def _pack(sequences: list[int], visible: list[int], max_tokens: int) -> list[list[int]]:
    """Group sequences of similar lengths, two or more each, so that a rectangle has at most `max_tokens` tokens.

    The last of a group is its longest.
    """
    groups: list[list[int]] = []
    for sequence in sorted(sequences, key=visible.__getitem__):
        # They come by length, so the new one would be the rectangle's width.
        if groups and (len(groups[-1]) + 1) * visible[sequence] <= max_tokens:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [group for group in groups if len(group) > 1]


def _rectangles(
    metadata: AttentionMetadata, groups: list[list[int]], visible: list[int], block_size: int, dtype: torch.dtype
) -> list[_Rectangle]:
    """A rectangle for each group of sequences."""
    members = torch.tensor(list(chain.from_iterable(groups)))
    counts = torch.tensor(visible)[members, None]
    first = metadata.context_lens[members, None] - counts
    # One rectangle for all groups, of which each takes a slice: a dozen calls, and not a dozen for each group.
    column = torch.arange(max(visible[group[-1]] for group in groups))
    exists = column < counts
    positions = first + torch.where(exists, column, 0)
    blocks = metadata.block_tables[members].gather(1, positions // block_size)
    slots = blocks * block_size + positions % block_size
    bias = torch.zeros(exists.shape, dtype=dtype).masked_fill_(~exists, float("-inf"))[:, None, None]
    found, start = [], 0
    for group in groups:
        end, longest = start + len(group), visible[group[-1]]
        found.append(_Rectangle(slots[start:end, :longest].flatten(), bias[start:end, ..., :longest]))
        start = end
    return found


def _tiles(metadata: AttentionMetadata, sequences: list[int], window: int | None) -> AttentionMetadata:
    """Metadata of some of the sequences, those with many queries cut into tiles: sequences over the same blocks.

    A whole prompt without a window is not cut: PyTorch needs no mask for a causal triangle.
    """
    lengths, starts = metadata.lengths, metadata.starts
    owners, ends, counts = [], [], []
    for i in sequences:
        length, num_new = lengths[i], starts[i + 1] - starts[i]
        tile = num_new if window is None and num_new == length else QUERY_TILE
        for done in range(0, num_new, tile or 1):
            count = min(tile, num_new - done)
            owners.append(i)
            counts.append(count)
            ends.append(length - num_new + done + count)
    if owners == list(range(len(lengths))):
        return metadata
    device = metadata.context_lens.device
    tables = metadata.block_tables[torch.tensor(owners, dtype=torch.int64, device=device)]
    if metadata.query_start_loc is None:
        return AttentionMetadata(tables, torch.tensor(ends, device=device))
    new_starts = torch.tensor([0, *counts], device=device).cumsum(0)
    return AttentionMetadata(tables, torch.tensor(ends, device=device), new_starts)


def _attend_rectangle(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rectangle: _Rectangle, scale: float | None
) -> Tensor:
    """One query of each of n sequences, `[n, H, d]`, over its visible tokens."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_seqs, longest = q.shape[0], rectangle.bias.shape[3]
    shape = (num_seqs, longest, num_kv_heads, head_dim)
    k, v = (
        cache.view(-1, num_kv_heads, head_dim).index_select(0, rectangle.slots).view(shape).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [n, H_kv, S, d]
    # As in `plain`: a group's query heads are one head's query rows, so that each key is read once.
    rows = q.view(num_seqs, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=rectangle.bias, scale=scale).reshape(q.shape)


def _one_by_one(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float | None, window: int | None
) -> Tensor:
    """Attention of one sequence after the other."""
    if window is None:
        paged = (k_cache, v_cache, metadata.block_tables, metadata.context_lens)
        if metadata.query_start_loc is None:
            return plain.paged_decode_attention(q, *paged, scale=scale)
        return plain.paged_prefill_attention(q, *paged, metadata.query_start_loc, scale=scale)
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    sequences = zip(metadata.block_tables, metadata.lengths, pairwise(metadata.starts), strict=True)
    for block_table, end, (first_row, last_row) in sequences:
        if first_row == last_row or not end:
            continue
        start = max(0, end - (last_row - first_row) - window + 1)  # what the first query's window reaches
        blocks = block_table[start // block_size : -(-end // block_size)]
        skipped = start // block_size * block_size
        k, v = (
            cache.index_select(0, blocks).flatten(0, 1)[start - skipped : end - skipped].transpose(0, 1)
            for cache in (k_cache, v_cache)
        )  # [H_kv, S, d]
        out[first_row:last_row] = _attend_window(q[first_row:last_row], k, v, scale, window)
    return out


def _attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """One sequence's last n tokens `q` `[n, H, d]` over what their windows reach, `k` and `v` `[H_kv, S, d]`."""
    num_new, (num_kv_heads, num_tokens, head_dim) = q.shape[0], k.shape
    heads = q.reshape(num_new, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [H_kv, group, n, d]
    if num_new == 1:  # one token sees all of them, and its group's query heads can be one head's query rows
        heads, visible = heads.transpose(1, 2), None
    else:
        visible = torch.ones(num_new, num_tokens, dtype=torch.bool, device=q.device)
        visible = visible.tril(num_tokens - num_new).triu(num_tokens - num_new - window + 1)
    k, v = (rows[:, None].expand(-1, heads.shape[1], -1, -1) for rows in (k, v))  # [H_kv, group or 1, S, d]: no copy
    out = F.scaled_dot_product_attention(heads, k, v, attn_mask=visible, scale=scale)
    if num_new == 1:
        return out.reshape(q.shape)
    return out.permute(2, 0, 1, 3).reshape(q.shape)
