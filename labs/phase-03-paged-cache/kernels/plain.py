# Phase 3, paged-cache: your file. It stands in for minicache.kernels.plain.
# Write what raises NotImplementedError. `minicache grade 3` grades it, `minicache hint 3.K` helps with task K.
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
    raise NotImplementedError(
        "phase 3, task 5: Store and gather; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
    )


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
    raise NotImplementedError(
        "phase 3, task 5: Store and gather; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
    )


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
    raise NotImplementedError(
        "phase 3, task 7: Attend through the table; read docs/en/phase-03-paged-cache/lab/02-attend-through-the-table.md"
    )


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
    raise NotImplementedError(
        "phase 3, task 7: Attend through the table; read docs/en/phase-03-paged-cache/lab/02-attend-through-the-table.md"
    )
