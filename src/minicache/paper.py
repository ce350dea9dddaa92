"""The answers of phase 0's paper exercise, each one number that you worked out by hand.

Phase 0 begins with it: docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md has the same questions with
room to think. A function asks, you return the number, and the tests say how far off it is without saying what it should
be. Compute on paper before you write any code; from task 2 on you write the code that checks you.

1 KiB is 1,024 bytes and 1 GiB is 1,024³; 1 GB is 10⁹. A float16 or bfloat16 takes 2 bytes, a float32 takes 4.
"""

from __future__ import annotations


def opt_13b_bytes_per_token() -> int:
    """OPT-13B: how many bytes does one token leave in the KV cache?

    40 layers. Multi-head attention, 40 heads of 128 (together 5,120, the hidden size). float16.

    Returns:
        Bytes, exactly.
    """
    return 819_200


def opt_13b_slots_in_12_gib() -> int:
    """OPT-13B on an A100-40GB: the weights leave 12 GiB for the cache. How many tokens fit?

    Use your answer to `opt_13b_bytes_per_token`. The PagedAttention paper (table 1) writes "12 GB" and rounds the
    result to three digits; a result rounded in the same way is accepted.

    Returns:
        Tokens, to within 0.2 %.
    """
    return 15_728


def llama_3_8b_bytes_per_token() -> int:
    """Llama-3-8B: how many bytes does one token leave in the KV cache?

    32 layers. Grouped-query attention: 32 query heads share 8 KV heads, each of 128. bfloat16.

    Returns:
        Bytes, exactly.
    """
    return 131_072


def llama_3_8b_sequences_in_60_gib() -> int:
    """Llama-3-8B: 60 GiB are left for the cache. How many sequences of 2,048 tokens fit at once?

    Each sequence gets room for all its 2,048 tokens from the start. Use `llama_3_8b_bytes_per_token`.

    Returns:
        Whole sequences, exactly.
    """
    return 240


def deepseek_v3_bytes_per_token() -> int:
    """DeepSeek-V3: how many bytes does one token leave in the cache of multi-head latent attention?

    61 layers, 128 heads. A layer stores one latent of 512 numbers, from which keys and values of all heads are made,
    and one RoPE key of 64 numbers, which all heads share. bfloat16.

    Returns:
        Bytes, exactly.
    """
    return 70_272


def unused_rows_bytes() -> int:
    """A small dense cache: how many bytes are reserved and never used?

    A model of 4 layers reserves a cache of 64 rows per layer, one row for each token that could come. A row takes 64
    bytes, key and value together. The sequence ends after 4 tokens, so that 60 rows stay empty. "About 16 KiB" is a
    fair guess; what is it exactly?

    Returns:
        Bytes of all layers together, exactly.
    """
    return 15_360


def a100_ridge_point() -> float:
    """A100-40GB: how many FLOPs can it do in the time in which it reads one byte?

    312 · 10¹² FLOP/s in 16 bits, 1.555 · 10¹² bytes/s.

    Returns:
        FLOP/byte, to within 1 %.
    """
    return 200.6


def decode_intensity_at_batch_1() -> float:
    """One sequence, one new token, an empty cache: how many FLOPs per byte does a decode step do?

    A token costs 2 FLOPs per weight. The weights are float16, and each is read once. Neglect attention and the cache.

    Returns:
        FLOP/byte, to within 1 %.
    """
    return 1.0


def decode_break_even_batch_on_a100() -> int:
    """A100-40GB: how many sequences must decode together until the step is no longer memory-bound?

    As in `decode_intensity_at_batch_1`, attention and cache neglected: the weights are read once for the whole batch,
    and each sequence does its own FLOPs with them. Find the smallest batch whose intensity is not below
    `a100_ridge_point`.

    Returns:
        Whole sequences, exactly.
    """
    return 201
