"""Store, gather and attend through block tables in PyTorch: what a CPU runs.

Phase 3 builds it. The functions are those of `minicache.kernels`, which checks shapes, dtypes and devices before it
calls these. The only option is the scale; `every_option` has the others.

A cache is `[num_blocks, block_size, H_kv, d]`, and slot s is at offset s % block_size of block s // block_size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one row of keys and one of values to each slot, in place.

    `k` and `v` may be part of an autograd graph; the caches do not become part of it.

    Args:
        k: keys `[N, H_kv, d]` in the cache's dtype, any of PyTorch's floating-point ones or int8; any strides.
        v: values, the same shape and dtype.
        k_cache: `[num_blocks, block_size, H_kv, d]`, contiguous.
        v_cache: the same shape and dtype.
        slot_mapping: `[N]` int32 or int64, the slot of row n of `k` and `v`: 0 … num_blocks · block_size − 1, no slot
            twice, or −1 to skip the row.

    Raises:
        IndexError: a slot is below −1 or past the last. Nothing was written.
    """
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    if not slot_mapping.numel():
        return
    lowest, highest = (int(bound) for bound in slot_mapping.aminmax())
    if lowest < -1 or highest >= num_slots:
        wrong = lowest if lowest < -1 else highest
        raise IndexError(f"no slot {wrong}: this cache has slots 0 … {num_slots - 1}")
    slots = slot_mapping.long()
    kept = slots >= 0 if lowest < 0 else None
    for rows, cache in ((k, k_cache), (v, v_cache)):
        flat, new = cache.view(num_slots, *cache.shape[2:]), rows.detach()
        if cache.itemsize == 1:  # index_copy_ does not support fp8; copying bytes gives the same result
            flat, new = flat.view(torch.uint8), new.view(torch.uint8)
        if kept is None:
            flat.index_copy_(0, slots, new)
        else:
            flat.index_copy_(0, slots[kept], new[kept])


def gather_kv(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Copy the KV entries of one sequence out of its blocks, in the order of its tokens.

    Token t's entry is at offset t % block_size of block block_table[t // block_size].

    Args:
        cache: keys or values, `[num_blocks, block_size, H_kv, d]`; any strides.
        block_table: `[max_blocks]` int32 or int64, the sequence's blocks in order. Entries past the last block in use
            may be anything, even blocks that do not exist.
        num_tokens: the number of entries, 0 … max_blocks · block_size.

    Returns:
        `[num_tokens, H_kv, d]`, the cache's dtype.

    Raises:
        IndexError: a block in use is not in the cache: negative, or past the last.
    """
    num_blocks = -(-num_tokens // cache.shape[1])
    return cache.index_select(0, block_table[:num_blocks]).flatten(0, 1)[:num_tokens]


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of one query token per sequence over that sequence's keys and values.

    Sequence i's query is its last token and sees all of them, 0 … context_lens[i] − 1. Query head h reads key/value
    head h // (H / H_kv). The slots after the sequence's last token hold other data, possibly NaN, and must not affect
    the result. Scores and their softmax are fp32, whatever the dtype.

    Args:
        q: queries `[B, H, d]`; H is a multiple of H_kv.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, any strides, in the dtype of `q`.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64, each sequence's blocks in order, the tail undefined.
        context_lens: `[B]` int32 or int64, tokens of each sequence. 0 is padding of the batch.
        scale: what the scores are multiplied by; None is 1 / √d.

    Returns:
        `[B, H, d]`, the dtype of `q`. Zeros for a sequence with context_lens 0.

    Raises:
        IndexError: a block in use is not in the cache.
    """
    # One sequence at a time: its copy is read while it is in the processor's cache. Padding would copy far more.
    num_kv_heads, head_dim = k_cache.shape[2:]
    # One token sees everything, so its group's query heads can be one head's query rows: each key is read once.
    groups = q.reshape(len(q), 1, num_kv_heads, -1, head_dim).unbind()
    out = []
    for rows, block_table, num_tokens in zip(groups, block_tables.unbind(), context_lens.tolist(), strict=True):
        if num_tokens:
            k, v = gather_kv(k_cache, block_table, num_tokens), gather_kv(v_cache, block_table, num_tokens)
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, H_kv, S, d]
            out.append(F.scaled_dot_product_attention(rows, k, v, scale=scale))
        else:
            out.append(torch.zeros_like(rows))
    return torch.cat(out).reshape(q.shape)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its keys and values.

    Sequence i's queries are the rows query_start_loc[i] : query_start_loc[i + 1]; call their number n. They are its
    last n tokens, and context_lens[i] counts them too: query t of them sees tokens 0 … context_lens[i] − n + t. A
    sequence may have one query (decode), many (a prompt, or a part of one) or none. Heads, unused slots and fp32 are as
    in `paged_decode_attention`.

    Args:
        q: queries `[N, H, d]` of all sequences, one sequence after the other; H is a multiple of H_kv.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, any strides, in the dtype of `q`.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64, each sequence's blocks in order, the tail undefined.
        context_lens: `[B]` int32 or int64, tokens of each sequence with the new ones, at least n.
        query_start_loc: `[B + 1]` int32 or int64, from 0 to N, never falling.
        scale: what the scores are multiplied by; None is 1 / √d.

    Returns:
        `[N, H, d]`, the dtype of `q`.

    Raises:
        IndexError: a block in use is not in the cache.
    """
    out = torch.empty_like(q)
    starts = query_start_loc.tolist()
    for i, (block_table, num_tokens) in enumerate(zip(block_tables, context_lens.tolist(), strict=True)):
        start, end = starts[i : i + 2]
        if start < end:
            k, v = gather_kv(k_cache, block_table, num_tokens), gather_kv(v_cache, block_table, num_tokens)
            out[start:end] = _attend(q[start:end], k, v, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of one sequence: its last n tokens `q` `[n, H, d]` over all S tokens `k`, `v` `[S, H_kv, d]`."""
    (num_new, num_heads, head_dim), (num_tokens, num_kv_heads) = q.shape, k.shape[:2]
    group = num_heads // num_kv_heads
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [H_kv, S, d]
    if num_new == 1:
        # One token sees everything, so its group's query heads can be one head's query rows: each key is read once.
        rows = q.reshape(1, num_kv_heads, group, head_dim)
        out = F.scaled_dot_product_attention(rows, k[None], v[None], scale=scale)
        return out.reshape(1, num_heads, head_dim)
    heads = q.reshape(num_new, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [H_kv, group, n, d]
    k, v = (rows[:, None].expand(-1, group, -1, -1) for rows in (k, v))  # a group's heads read the same keys: no copy
    visible = None
    if num_new < num_tokens:
        visible = torch.ones(num_new, num_tokens, dtype=torch.bool, device=q.device).tril(num_tokens - num_new)
    out = F.scaled_dot_product_attention(heads, k, v, attn_mask=visible, is_causal=visible is None, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(q.shape)
