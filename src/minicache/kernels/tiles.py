"""Paged attention on a CPU in PyTorch: long prompts in tiles, with sliding windows, planned once per step.

`plain` computes one sequence at a time with all of its new tokens, so the mask of a long chunk is a large matrix. This
module first cuts the queries of a long chunk into tiles, each a short sequence over the same blocks, and leaves the
rest to `plain`. A layer with a sliding window uses `_attend_window`: a tile gathers only the blocks that its window
reaches. The cost therefore follows the window, and a window that no context exceeds costs nothing. A quantized cache is
read in the same way, with or without a window, and the gathered blocks become fp32.

No phase builds this module.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache.kernels import AttentionMetadata, plain, quantize

QUERY_TILE = 256
"""The most queries of a prompt per tile, where they need a mask."""


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`minicache.kernels.paged_attention` in PyTorch, with a scale. It runs on any device, and is meant for a CPU.

    `k_scale` and `v_scale` are `[num_blocks, block_size, H_kv]` of a quantized cache, else None.

    Returns:
        `[N, H, d]`, the dtype of `q`. Zeros for a sequence with context_lens 0.
    """
    if sliding_window is not None and sliding_window >= max(metadata.lengths):
        sliding_window = None
    needs_mask = sliding_window is not None or k_scale is not None
    key = (paged_attention, needs_mask)
    if key not in metadata.plans:
        metadata.plans[key] = _tiles(metadata, needs_mask)
    tiles = metadata.plans[key]
    if not needs_mask:
        paged = (k_cache, v_cache, tiles.block_tables, tiles.context_lens)
        if tiles.query_start_loc is None:
            return plain.paged_decode_attention(q, *paged, scale=scale)
        return plain.paged_prefill_attention(q, *paged, tiles.query_start_loc, scale=scale)
    return _one_by_one(q, ((k_cache, k_scale), (v_cache, v_scale)), tiles, scale, sliding_window)


def _tiles(metadata: AttentionMetadata, needs_mask: bool) -> AttentionMetadata:
    """Metadata of the same queries, with long chunks cut into tiles: sequences over the same blocks.

    A whole prompt that needs no mask is not cut: PyTorch handles the causal triangle itself.
    """
    if metadata.query_start_loc is None:
        return metadata
    lengths, starts = metadata.lengths, metadata.starts
    owners, ends, counts = [], [], []
    for i, length in enumerate(lengths):
        num_new = starts[i + 1] - starts[i]
        tile = num_new if not needs_mask and num_new == length else QUERY_TILE
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
    q: Tensor,
    caches: tuple[tuple[Tensor, Tensor | None], ...],
    metadata: AttentionMetadata,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention, one sequence after the other; `caches` are those of keys and values, with their scales."""
    out = torch.zeros_like(q)
    block_size = caches[0][0].shape[1]
    sequences = zip(metadata.block_tables, metadata.lengths, pairwise(metadata.starts), strict=True)
    for block_table, end, (first_row, last_row) in sequences:
        if first_row == last_row or not end:
            continue
        start = (
            0 if window is None else max(0, end - (last_row - first_row) - window + 1)
        )  # what the first query reaches
        blocks = block_table[start // block_size : -(-end // block_size)]
        skipped = start // block_size * block_size
        k, v = (
            _gather(*cache, blocks)[start - skipped : end - skipped].transpose(0, 1) for cache in caches
        )  # [H_kv, S, d]
        out[first_row:last_row] = _attend_window(q[first_row:last_row].to(k.dtype), k, v, scale, window or end)
    return out


def _gather(cache: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """The KV entries of some blocks, concatenated, `[S, H_kv, d]`: in the cache's dtype, or fp32 if quantized."""
    rows = cache.index_select(0, blocks)
    return (rows if scale is None else quantize.dequantize_rows(rows, scale.index_select(0, blocks))).flatten(0, 1)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int) -> Tensor:
    """One sequence's last n tokens `q` `[n, H, d]` over the `k` and `v` `[H_kv, S, d]` that their windows reach."""
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
