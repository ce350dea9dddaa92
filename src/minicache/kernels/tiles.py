"""Paged attention on a CPU in PyTorch: long prompts in tiles, through windows too, as planned once a step.

`plain` attends one sequence at a time, all of its new tokens at once: the mask of a long chunk is a large square. Here
the queries of a long chunk are cut into tiles first, each a short sequence of its own over the same blocks, and the
rest is `plain`'s. A layer with a sliding window attends in this module's `_attend_window`: a tile gathers only the
blocks that its window reaches. The cost of a window therefore follows the window, and a window that no context exceeds
costs nothing.

No phase builds this module.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache.kernels import AttentionMetadata, plain

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
    is_windowed = sliding_window is not None
    key = (paged_attention, is_windowed)
    if key not in metadata.plans:
        metadata.plans[key] = _tiles(metadata, is_windowed)
    return _one_by_one(q, k_cache, v_cache, metadata.plans[key], scale, sliding_window)


def _tiles(metadata: AttentionMetadata, is_windowed: bool) -> AttentionMetadata:
    """Metadata of the same queries, those of long chunks cut into tiles: sequences over the same blocks.

    A whole prompt without a window is not cut: PyTorch needs no mask for a causal triangle.
    """
    if metadata.query_start_loc is None:
        return metadata
    lengths, starts = metadata.lengths, metadata.starts
    owners, ends, counts = [], [], []
    for i, length in enumerate(lengths):
        num_new = starts[i + 1] - starts[i]
        tile = num_new if not is_windowed and num_new == length else QUERY_TILE
        for done in range(0, num_new, tile or 1):
            count = min(tile, num_new - done)
            owners.append(i)
            counts.append(count)
            ends.append(length - num_new + done + count)
    if owners == list(range(len(lengths))):
        return metadata
    device = metadata.context_lens.device
    tables = metadata.block_tables[torch.tensor(owners, dtype=torch.int64, device=device)]
    new_starts = torch.tensor([0, *counts], device=device).cumsum(0)
    return AttentionMetadata(tables, torch.tensor(ends, device=device), new_starts)


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
