"""Split-KV: decode attention with each context cut into splits that are computed in parallel. Phase 4 builds it.

Decode attention starts B · H_kv programs. A GPU runs hundreds at a time: one sequence with one key/value head would
keep a single multiprocessor busy. So a context is cut into splits; each split's program stores its running softmax, and
a second kernel merges them. Follows Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels import configs
from minicache.kernels.decode import attend_group, launch_options, new_output, per_head, per_token, rows_contiguous

PROGRAMS_PER_PROCESSOR = 2
"""Programs of `split_kernel` that a multiprocessor holds and needs: see `minicache.kernels.configs`."""

MIN_SPLIT_TOKENS = 256
"""A shorter split is not worth its merge: 8 query heads of 128 write and read 8 KB per split, against 128 KB of KV."""

MAX_SPLITS = 64
"""The merge holds one row of every split at once."""


def choose_num_splits(batch_size: int, num_kv_heads: int, max_context_len: int, num_processors: int) -> int:
    """The number of splits per context, from sizes that are known without a GPU synchronisation.

    1 if the programs without splits fill 80 % of the places on the multiprocessors. Otherwise the smallest number that
    fills the places nearly as well as the best one: programs run in waves, and a last wave of a few programs leaves the
    other places empty. FlashAttention's rule (`num_splits_heuristic`).

    Args:
        batch_size: sequences.
        num_kv_heads: key/value heads.
        max_context_len: an upper bound of the contexts, in tokens.
        num_processors: multiprocessors of the GPU.

    Returns:
        1 … MAX_SPLITS, with at least MIN_SPLIT_TOKENS tokens in each split of the longest context.
    """
    places = PROGRAMS_PER_PROCESSOR * num_processors
    programs = batch_size * num_kv_heads
    most = min(max_context_len // MIN_SPLIT_TOKENS, MAX_SPLITS)
    if most <= 1 or programs == 0 or programs >= 0.8 * places:
        return 1
    used = {splits: _share_of_places_used(programs * splits, places) for splits in range(1, most + 1)}
    return next(splits for splits, share in used.items() if share >= 0.85 * max(used.values()))


def _share_of_places_used(programs: int, places: int) -> float:
    """The share of places that have a program, over all waves."""
    return programs / (math.ceil(programs / places) * places)


@triton.jit
def split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    max_ptr,
    sum_ptr,
    acc_ptr,
    alibi_slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_token_scale_ptr,
    v_token_scale_ptr,
    scale,
    sliding_window,
    softcap,
    q_strides,
    k_strides,
    v_strides,
    stride_table_seq,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program computes one group's attention over one split, and stores its running softmax.

    Grid (H_kv, B, S): program (h, i, s) handles key/value head h of sequence i, as in `decode_kernel`, and split s of
    S. The visible tokens, context_len − W … context_len − 1 with a sliding window, else 0 … context_len − 1, are cut
    into splits of ⌈⌈visible / TILE⌉ / S⌉ whole tiles each; the last one with tokens may be shorter, and splits after it
    are empty. Empty splits write −inf, 0 and zeros: the buffers are uninitialised, and the merge reads every split.

    For query head j of sequence i a split's results are row (i · H + j) · S + s of three contiguous fp32 buffers, H
    being the grid's first size times GROUP. Only rows of this group are written, and only HEAD_DIM dimensions.

    Pointers:
        max_ptr: `[B, H, S]`, the largest score.
        sum_ptr: `[B, H, S]`, the sum of exp(score − largest).
        acc_ptr: `[B, H, S, HEAD_DIM]`, the sum of exp(score − largest) · value, not divided; times v_scale if there is
            one.
        all others: as in `decode_kernel`, like the numbers, strides and constants.
    """
    kv_head, seq, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(0) * GROUP, tl.num_programs(2)
    context_len = tl.load(context_lens_ptr + seq).to(tl.int32)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)
    q_rows = q_ptr + seq * q_strides[0] + heads * q_strides[1]
    q = tl.load(q_rows[:, None] + dims * q_strides[2], mask=mask, other=0.0).to(DOT_DTYPE)

    first = 0
    if sliding_window is not None:
        first = tl.maximum(context_len - sliding_window, 0)
    split_len = tl.cdiv(tl.cdiv(context_len - first, TILE), num_splits) * TILE
    start = first + split * split_len

    row_max, row_sum, acc = attend_group(
        q,
        tl.zeros([ROWS], tl.int32) + context_len - 1,
        heads,
        rows < GROUP,
        kv_head,
        seq,
        start,
        tl.minimum(start + split_len, context_len),
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
    partial = (seq * num_heads + heads) * num_splits + split
    tl.store(max_ptr + partial, row_max, mask=rows < GROUP)
    tl.store(sum_ptr + partial, row_sum, mask=rows < GROUP)
    tl.store(acc_ptr + partial[:, None] * HEAD_DIM + dims, acc, mask=mask)


@triton.jit
def merge_kernel(
    max_ptr,
    sum_ptr,
    acc_ptr,
    out_ptr,
    num_splits,
    out_strides,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """One program merges the splits of one query head of one sequence.

    Grid (H, B): program (j, i) handles query head j of sequence i. Each split's sums are relative to its maximum. With
    M, the largest maximum, a split's sum and accumulator times exp(its maximum − M) are relative to M and can be added.
    The output is the sum of the accumulators over the sum of the sums.

    An empty split has maximum −inf and weight exp(−inf − M) = 0. If all are empty, M is −inf, and −inf − (−inf) is NaN:
    such a sequence gets zeros.

    Pointers:
        max_ptr, sum_ptr: `[B, H, num_splits]` fp32, contiguous.
        acc_ptr: `[B, H, num_splits, HEAD_DIM]` fp32, contiguous.
        out_ptr: `[B, H, HEAD_DIM]`.

    Numbers: num_splits. Strides: out_strides, the output's three, in elements.

    Constants:
        HEAD_DIM, PADDED_HEAD_DIM: as in `decode_kernel`.
        PADDED_SPLITS: the power of two that num_splits is padded to. Padding is treated as empty.
    """
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    present = splits < num_splits
    partial = (seq * tl.num_programs(0) + head) * num_splits + splits

    split_max = tl.load(max_ptr + partial, mask=present, other=float("-inf"))
    split_sum = tl.load(sum_ptr + partial, mask=present, other=0.0)
    mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(acc_ptr + partial[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)

    largest = tl.max(split_max, 0)
    weights = tl.exp(split_max - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights * split_sum, 0)
    out = tl.sum(weights[:, None] * acc, 0) / tl.where(total > 0, total, 1.0)
    out_row = out_ptr + seq * out_strides[0] + head * out_strides[1]
    tl.store(out_row + dims * out_strides[2], out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int,
) -> Tensor:
    """Launch `split_kernel` into three new fp32 buffers, then `merge_kernel`. The arguments have been checked.

    The buffers are uninitialised: two of `[B, H, num_splits]` and one of `[B, H, num_splits, d]`. An empty batch
    launches nothing. `minicache.kernels.decode` has the functions that launchers share.

    Args:
        q: queries `[B, H, d]`; any strides.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, in q's dtype, int8 or float8_e4m3fn; any strides.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64; any strides.
        context_lens: `[B]` int32 or int64, 0 … max_blocks · block_size.
        scale: the factor of the scores.
        alibi_slopes: `[H]`, or None.
        k_scale: a float, `[H_kv]` or contiguous fp32 `[num_blocks, block_size, H_kv]`, or None.
        v_scale: likewise.
        sliding_window: W ≥ 1, or None.
        softcap: c > 0, or None.
        num_splits: splits of every context, ≥ 1; more than a context has tiles is allowed.

    Returns:
        `[B, H, d]`, the dtype of `q`; zeros where the context is empty.
    """
    out = new_output(q)
    batch_size, num_heads, head_dim = q.shape
    if batch_size == 0:
        return out.to(q.dtype)
    maxima, sums = torch.empty(2, batch_size, num_heads, num_splits, dtype=torch.float32, device=q.device)
    accs = torch.empty(batch_size, num_heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
    tables = rows_contiguous(block_tables)
    options = launch_options(q, k_cache)
    split_kernel[(k_cache.shape[2], batch_size, num_splits)](
        q,
        k_cache,
        v_cache,
        tables,
        context_lens.contiguous(),
        maxima,
        sums,
        accs,
        None if alibi_slopes is None else alibi_slopes.contiguous(),
        per_head(k_scale, k_cache),
        per_head(v_scale, k_cache),
        per_token(k_scale),
        per_token(v_scale),
        float(scale),
        sliding_window,
        softcap,
        q.stride(),
        k_cache.stride(),
        v_cache.stride(),
        tables.stride(0),
        **options,
    )
    padded_splits = triton.next_power_of_2(num_splits)
    merge_kernel[(num_heads, batch_size)](
        maxima,
        sums,
        accs,
        out,
        num_splits,
        out.stride(),
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=options["PADDED_HEAD_DIM"],
        PADDED_SPLITS=padded_splits,
        num_warps=configs.merge_warps(padded_splits, options["PADDED_HEAD_DIM"]),
    )
    return out.to(q.dtype)
