# Phase 0, decode-arithmetic: your file. It stands in for minicache.arithmetic.paper.
# Write what raises NotImplementedError. `minicache grade 0` grades it, `minicache hint 0.K` helps with task K.
"""The answers to phase 0's paper exercise, each one number that you worked out by hand.

Phase 0 begins with it: docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md has the same nine questions in
the same order, with more explanation. Each function asks a question and returns your number. The tests report how far
off it is without revealing the answer. Compute on paper before you write any code; from task 2 on you write the code
that checks you.

1 KiB is 1,024 bytes and 1 GiB is 1,024³; 1 GB is 10⁹. A float16 or bfloat16 takes 2 bytes, a float32 takes 4, an int8
takes 1.
"""

from __future__ import annotations


def opt_13b_bytes_per_token() -> int:
    """Question 1. OPT-13B: how many bytes does one token leave in the KV cache?

    40 layers. Multi-head attention, 40 heads of 128 (together 5,120, the hidden size). float16.

    Returns:
        Bytes, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def qwen3_14b_bytes_per_token() -> int:
    """Question 2. Qwen3-14B: how many bytes does one token leave in the KV cache?

    40 layers. Grouped-query attention: 40 query heads share 8 KV heads, each of 128. bfloat16.

    Returns:
        Bytes, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def deepseek_v2_bytes_per_token() -> int:
    """Question 3. DeepSeek-V2: how many bytes does one token leave in the cache of multi-head latent attention?

    60 layers, 128 heads. A layer stores one latent of 512 numbers, from which keys and values of all heads are made,
    and one RoPE key of 64 numbers, which all heads share. bfloat16.

    Returns:
        Bytes, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def opt_30b_slots_in_20_gib() -> int:
    """Question 4. OPT-30B on an A100-80GB: weights and reserve leave 20 GiB for the cache. How many tokens fit?

    48 layers. Multi-head attention, 56 heads of 128. float16.

    Returns:
        Tokens, to within 0.2 %: a result rounded to three digits is accepted.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def qwen3_14b_sequences_in_48_gib() -> int:
    """Question 5. Qwen3-14B: 48 GiB are left for the cache. How many sequences of 8,192 tokens fit at once?

    Each sequence reserves memory for all its 8,192 tokens from the start. Use `qwen3_14b_bytes_per_token`.

    Returns:
        Whole sequences, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def unused_rows_bytes() -> int:
    """Question 6. A small dense cache: how many bytes are reserved and never used?

    A model of 4 layers reserves a cache of 64 slots per layer, one for each token that could come. A slot takes 64
    bytes, key and value together. The sequence ends after 4 tokens, so 60 slots stay empty. "About 16 KiB" is a fair
    estimate; what is it exactly?

    Returns:
        Bytes of all layers together, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def h100_pcie_ridge_point() -> float:
    """Question 7. H100 PCIe: how many FLOPs can it do in the time it takes to read one byte?

    Its data sheet gives 1,513 · 10¹² FLOP/s in 16 bits "with sparsity", and 2.0 · 10¹² bytes/s. The model is dense.

    Returns:
        FLOP/byte, to within 1 %.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def decode_intensity_with_int8_weights() -> float:
    """Question 8. One sequence, one new token, an empty cache: how many FLOPs per byte does a decode step do?

    A token costs 2 FLOPs per weight. The weights are stored as int8, and each is read once. Neglect attention and the
    cache.

    Returns:
        FLOP/byte, to within 1 %.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )


def decode_break_even_batch_on_h100_pcie() -> int:
    """Question 9. H100 PCIe: how many sequences must decode together for the step not to be memory-bound?

    As in `decode_intensity_with_int8_weights`, attention and cache neglected: the weights are read once for the whole
    batch, and each sequence does its own FLOPs with them, in 16 bits. Find the smallest batch whose intensity is at
    least `h100_pcie_ridge_point`. Do not round that ridge first.

    Returns:
        Whole sequences, exactly.
    """
    raise NotImplementedError(
        "phase 0, task 1: On paper: how big is a token?; read docs/en/phase-00-decode-arithmetic/lab/00-derive-cache-size.md"
    )
