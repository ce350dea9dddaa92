# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.prefill.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
#
# Predict, before you write task 4.8. `minicache grade` checks it, without points.
# QUERIES = 4, and query_start_loc is (0, 5, 5, 12). How many programs are there for each KV head?
# 4.8a =
# What is the number of the third sequence's first tile?
# 4.8b =
# How many of the programs return at once?
# 4.8c =
"""Paged prefill attention: many query tokens per sequence, ragged and causal, over KV blocks. Phase 4 builds it.

The queries of all sequences are concatenated, `query_start_loc` holds the start of each, and they are the newest tokens
of their sequences: a whole prompt, a chunk after cached context, or a single token. A loaded key serves a tile of query
tokens instead of one, so prefill is compute-bound where decode is memory-bound.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels.decode import attend_group, launch_options, new_output, per_head, per_token, rows_contiguous


@triton.jit
def prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    out_ptr,
    alibi_slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token_scale_ptr,
    v_token_scale_ptr,
    scale,
    sliding_window,
    softcap,
    num_seqs,
    q_strides,
    k_strides,
    v_strides,
    stride_table_seq,
    out_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PADDED_SEQS: tl.constexpr,
):
    """One program computes attention for a tile of one sequence's query tokens and all heads of one group.

    The rows are packed as in `decode_kernel`, with tokens as well as heads: QUERIES = ROWS // GROUP tokens make a tile,
    and row r is query head h · GROUP + r % GROUP of the tile's token r // GROUP. If GROUP does not divide ROWS, the
    last rows are padding.

    Grid (H_kv, N // QUERIES + B). The tile of a program is not known at launch, because the lengths are on the GPU. So
    the tiles are numbered with gaps: sequence i's begin at query_start_loc[i] // QUERIES + i. The next sequence's first
    number is never smaller than that plus ⌈its queries / QUERIES⌉, so each tile has a unique number, and N // QUERIES +
    B of them are enough. A program finds its sequence by counting the first numbers that are at most its tile number;
    if its tile begins past the sequence's last query, it returns. (vLLM's unified attention numbers its tiles in this
    way.)

    Of n queries of a sequence, query t is at position context_len − n + t. The tile's range ends after the position of
    its last query; with a sliding window W it begins W − 1 before the position of its first, never below 0.
    `attend_range` masks what individual rows do not see.

    Pointers:
        q_ptr: `[N, H, HEAD_DIM]`, H = H_kv · GROUP.
        query_start_loc_ptr: `[B + 1]`, contiguous, int32 or int64, from 0 to N, non-decreasing.
        out_ptr: `[N, H, HEAD_DIM]`. Each query's row is written by exactly one program. all others: as in
            `decode_kernel`, like the numbers.

    Numbers: num_seqs is B.

    Strides: as in `decode_kernel`. Multiply tokens, sequences, block ids and the caches' head in int64. Positions are
    int32, and so are starts and lengths once they are loaded: 64 bits would take the registers that the tile needs.

    Constants:
        ROWS: a power of two, at least 16 and at least GROUP.
        PADDED_SEQS: the power of two that B is padded to.
        all others: as in `decode_kernel`.
    """
    raise NotImplementedError(
        "phase 4, task 8: Prefill; read docs/en/phase-04-triton-kernels/lab/05-prefill.md"
    )


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Launch `prefill_kernel`: N // QUERIES + B programs per key/value head. The arguments have been checked.

    `launch_options` gives constants and warps; QUERIES is its ROWS // GROUP. `minicache.kernels.decode` has the
    functions that launchers share. The lengths stay on the GPU, and the launcher must not read them. Without queries
    nothing is launched.

    Args:
        q: queries `[N, H, d]` of all sequences, concatenated; any strides.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, in q's dtype, int8 or float8_e4m3fn; any strides.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64; any strides.
        context_lens: `[B]` int32 or int64, at least each sequence's queries.
        query_start_loc: `[B + 1]` int32 or int64, from 0 to N, non-decreasing.
        scale: the factor of the scores.
        alibi_slopes: `[H]`, or None.
        k_scale: a float, `[H_kv]` or contiguous fp32 `[num_blocks, block_size, H_kv]`, or None.
        v_scale: likewise.
        sliding_window: W ≥ 1, or None.
        softcap: c > 0, or None.

    Returns:
        `[N, H, d]`, the dtype of `q`.
    """
    raise NotImplementedError(
        "phase 4, task 8: Prefill; read docs/en/phase-04-triton-kernels/lab/05-prefill.md"
    )
