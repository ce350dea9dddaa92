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
    kv_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    queries: tl.constexpr = ROWS // GROUP

    seqs = tl.arange(0, PADDED_SEQS)
    starts = tl.load(query_start_loc_ptr + seqs, mask=seqs < num_seqs, other=0).to(tl.int32)
    begun = (seqs < num_seqs) & (starts // queries + seqs <= tile)
    seq = tl.sum(begun.to(tl.int32), 0) - 1

    query_start = tl.load(query_start_loc_ptr + seq).to(tl.int32)
    query_len = tl.load(query_start_loc_ptr + seq + 1).to(tl.int32) - query_start
    first_query = (tile - query_start // queries - seq) * queries
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq).to(tl.int32)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    row_queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    present = (rows < queries * GROUP) & (row_queries < query_len)
    mask = present[:, None] & (dims < HEAD_DIM)
    tokens = (query_start + row_queries).to(tl.int64)
    q_rows = q_ptr + tokens * q_strides[0] + heads * q_strides[1]
    q = tl.load(q_rows[:, None] + dims * q_strides[2], mask=mask, other=0.0).to(DOT_DTYPE)

    first_position = context_len - query_len
    start = 0
    if sliding_window is not None:
        start = tl.maximum(first_position + first_query - sliding_window + 1, 0)

    _, row_sum, acc = attend_group(
        q,
        first_position + row_queries,
        heads,
        present,
        kv_head,
        seq.to(tl.int64),
        start,
        first_position + tl.minimum(first_query + queries, query_len),
        k_cache_ptr,
        v_cache_ptr,
        block_tables_ptr,
        alibi_slopes_ptr,
        k_scale_ptr,
        v_scale_ptr,
        k_token_scale_ptr,
        v_token_scale_ptr,
        scale,
        sliding_window,
        softcap,
        k_strides,
        v_strides,
        stride_table_seq,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
    )
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # a padding row may have seen nothing
    out_rows = out_ptr + tokens * out_strides[0] + heads * out_strides[1]
    tl.store(out_rows[:, None] + dims * out_strides[2], out.to(out_ptr.dtype.element_ty), mask=mask)


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
    out = new_output(q)
    num_queries, num_seqs = q.shape[0], context_lens.shape[0]
    if num_queries == 0:
        return out.to(q.dtype)
    tables = rows_contiguous(block_tables)
    options = launch_options(q, k_cache, "prefill")
    num_tiles = num_queries // (options["ROWS"] // options["GROUP"]) + num_seqs
    prefill_kernel[(k_cache.shape[2], num_tiles)](
        q,
        k_cache,
        v_cache,
        tables,
        context_lens.contiguous(),
        query_start_loc.contiguous(),
        out,
        None if alibi_slopes is None else alibi_slopes.contiguous(),
        per_head(k_scale, k_cache),
        per_head(v_scale, k_cache),
        per_token(k_scale),
        per_token(v_scale),
        float(scale),
        sliding_window,
        softcap,
        num_seqs,
        q.stride(),
        k_cache.stride(),
        v_cache.stride(),
        tables.stride(0),
        out.stride(),
        **options,
        PADDED_SEQS=triton.next_power_of_2(num_seqs),
    )
    return out.to(q.dtype)
