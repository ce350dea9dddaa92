# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.decode.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""Paged decode attention: one query token per sequence over that sequence's KV entries, read in place.

Phase 4 builds it. Decode is memory-bound: each number of a key or value is read for one multiplication per query head.
So the kernel reads each KV entry once, with many loads in flight, and never stores a score. `attend_range` is that
loop; split-KV runs it over part of the context, and prefill for many query tokens at once.

Follows PagedAttention (Kwon et al. 2023, §4.1), online softmax (Milakov and Gimelshein 2018) and FlashAttention (Dao et
al. 2022).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels import configs, runtime


@triton.jit
def attend_range(
    q,
    query_positions,
    slopes,
    k_head_ptr,
    v_head_ptr,
    k_token_scale_ptr,
    v_token_scale_ptr,
    kv_head,
    num_kv_heads,
    block_table_ptr,
    start,
    end,
    scale,
    sliding_window,
    softcap,
    k_strides,
    v_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax of some query rows over the tokens start … end − 1 of one sequence, TILE tokens at a time.

    Not a kernel but a function that kernels call. For each tile: look up each token's block, load its key and value,
    score it against all query rows, and fold the tile into three running values in fp32. When a tile raises the
    maximum, the running sums are rescaled by exp(old − new). Nothing before `start` or from `end` on is read, in the
    cache or in the block table. An empty range gives −inf, 0 and 0.

    Query row r sees the tokens up to its position, so a row may see nothing of a tile, or of all tiles so far: its
    maximum is then −inf, and −inf − (−inf) is NaN. Subtract 0 instead, and every exp gives 0.

    Args of the rows, which are query tokens or query heads, packed by the caller:
        q: queries `[ROWS, PADDED_HEAD_DIM]`, zero past HEAD_DIM. Keys, values and probabilities are converted to q's
            dtype for `tl.dot`, which accumulates in fp32; `input_precision="ieee"` keeps fp32 from becoming TF32.
        query_positions: `[ROWS]`, the position of each row's query token.

    Args of the cache:
        k_head_ptr, v_head_ptr: the caches' pointers, advanced to this head.
        block_table_ptr: this sequence's block table, contiguous.
        start, end: the range, run-time integers; `start` need not be a multiple of anything.
        k_strides, v_strides: the caches' strides in elements: of the block, the slot in the block, the head and the
            dimension. Multiply block ids and slots in int64.
        scale: fp32, the factor of the scores.
        HEAD_DIM, BLOCK_SIZE: sizes of the cache, any numbers ≥ 1.
        TILE: tokens per tile, a power of two of at least 16, independent of BLOCK_SIZE.

    Result:
        row_max `[ROWS]`, the largest score m; row_sum `[ROWS]`, the sum of exp(score − m); acc
        `[ROWS, PADDED_HEAD_DIM]`, the sum of exp(score − m) · value. All fp32. Attention over the range is acc /
        row_sum.

    Options, each None if it is not used (task 6). Per score, in this order: times `scale`; `softcap`; plus slope · (key
    position − query position); −inf where the token is not visible.
        softcap: c. score = c · tanh(score / c). The interpreter has no tanh. (1 − e) / (1 + e) with e = exp(−2 |x|) and
            the sign of x cannot overflow; but for small |x|, as under a large cap, 1 − e cancels: for |x| < 0.03 use
            x − x³ / 3.
        slopes: `[ROWS]` fp32, ALiBi's slope per row.
        sliding_window: W. A row sees its own position and the W − 1 before it.

    Scales per token, or None (task 9):
        k_token_scale_ptr, v_token_scale_ptr: `[num_blocks, BLOCK_SIZE, num_kv_heads]` fp32, contiguous: a key is the
            cache's numbers times its token's scale. Multiply the scores by it, right after the product, and for values
            the probabilities before the product; row_sum sums the unscaled probabilities. Load a scale under the same
            mask as its token.
        kv_head, num_kv_heads: this head's index, and the number of heads.
    """
    raise NotImplementedError(
        "phase 4, task 4: One head, through the table; read docs/en/phase-04-triton-kernels/lab/02-one-head.md"
    )


@triton.jit
def attend_group(
    q,
    query_positions,
    heads,
    present,
    kv_head,
    seq,
    start,
    end,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """`attend_range` from a kernel whose first axis is the key/value head, as decode, split-KV and prefill have it.

    It advances the pointers to the head and the sequence, loads the rows' slopes, and applies the scales that all
    tokens share: a key is k_scale times the cache's numbers, and the product is linear, so the scores are multiplied,
    not the keys, and the accumulator, not the values.

    Args of the rows and the range; all others are the arguments of `decode_kernel` of these names:
        q: queries `[ROWS, PADDED_HEAD_DIM]`, zero where padded.
        query_positions: `[ROWS]`, the position of each row's query token.
        heads: `[ROWS]`, the query head of each row.
        present: `[ROWS]`, False for padding rows.
        kv_head, seq: this program's key/value head and sequence, both int64.
        start, end: the range of tokens.

    Result:
        row_max `[ROWS]`, row_sum `[ROWS]` and acc `[ROWS, PADDED_HEAD_DIM]` of `attend_range`.
    """
    slopes = None
    if alibi_slopes_ptr is not None:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=present, other=0.0).to(tl.float32)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
    row_max, row_sum, acc = attend_range(
        q,
        query_positions,
        slopes,
        k_cache_ptr + kv_head * k_strides[2],
        v_cache_ptr + kv_head * v_strides[2],
        k_token_scale_ptr,
        v_token_scale_ptr,
        kv_head,
        tl.num_programs(0),
        block_tables_ptr + seq * stride_table_seq,
        start,
        end,
        scale,
        sliding_window,
        softcap,
        k_strides,
        v_strides,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
    )
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_head)
    return row_max, row_sum, acc


@triton.jit
def decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
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
    out_strides,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program computes attention for all query heads of one group: one key/value head of one sequence.

    Grid (H_kv, B): program (h, i) handles key/value head h of sequence i, and with it the query heads h · GROUP … h ·
    GROUP + GROUP − 1. They are the rows of its matrix product, so each key and value is loaded once for all of them.
    Tensor cores take 16 rows or more: row r ≥ GROUP is padding, loaded as zeros and not stored.

    The query is at position context_len − 1. With a sliding window the range begins at context_len − W, never below 0,
    and nothing before it is loaded. A context of 0 is an empty range, and its output is zeros, not 0 / 0.

    Pointers:
        q_ptr: `[B, H, HEAD_DIM]`, H = H_kv · GROUP.
        k_cache_ptr, v_cache_ptr: `[num_blocks, BLOCK_SIZE, H_kv, HEAD_DIM]`, in q's dtype, int8 or fp8.
        block_tables_ptr: `[B, max_blocks]`, each row contiguous, int32 or int64; entries past the last block in use are
            undefined and not read.
        context_lens_ptr: `[B]`, contiguous, int32 or int64.
        out_ptr: `[B, H, HEAD_DIM]`, of the dtype `out_ptr.dtype.element_ty`: convert before the store.
        alibi_slopes_ptr: `[H]`, contiguous, or None.
        k_scale_ptr, v_scale_ptr: `[H_kv]` fp32, contiguous, or None. A key is k_scale times the cache's numbers, and
            the product is linear: multiply the scores, not the keys, and the output, not the values.
        k_token_scale_ptr, v_token_scale_ptr: `[num_blocks, BLOCK_SIZE, H_kv]` fp32, contiguous, or None: a scale per
            token, which `attend_range` applies.

    Numbers: scale, sliding_window (or None), softcap (or None). A None is compiled away.

    Strides, in elements: a tuple for each tensor, a number per axis, as its shape above; for the tables, whose rows are
    contiguous, one number. They are arbitrary. Multiply sequences, block ids and the caches' head in int64.

    Constants:
        GROUP: query heads per key/value head.
        ROWS: a power of two, at least 16 and at least GROUP.
        HEAD_DIM, BLOCK_SIZE: sizes of the cache, any numbers ≥ 1.
        PADDED_HEAD_DIM: a power of two, at least 16 and at least HEAD_DIM.
        TILE: tokens per tile, a power of two of at least 16.
        DOT_DTYPE: the dtype of `tl.dot`'s operands; convert q to it right after its load.
    """
    raise NotImplementedError(
        "phase 4, task 5: Groups of query heads; read docs/en/phase-04-triton-kernels/lab/03-groups.md"
    )


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
) -> Tensor:
    """Launch `decode_kernel`: one program per sequence and key/value head. The arguments have been checked.

    `launch_options`, `new_output`, `per_head`, `per_token` and `rows_contiguous` below provide what every launcher
    needs: constants, an output that is converted to q's dtype at the end, scales as tensors of either kind, tables with
    contiguous rows. What the kernel's docstring calls contiguous, the launcher makes so. Pass `scale` as a float, since
    Triton specialises an integer 1 as a constant. An empty batch launches nothing.

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

    Returns:
        `[B, H, d]`, the dtype of `q`; zeros where the context is empty.
    """
    raise NotImplementedError(
        "phase 4, task 5: Groups of query heads; read docs/en/phase-04-triton-kernels/lab/03-groups.md"
    )


# Shared by the launchers


def launch_options(q: Tensor, k_cache: Tensor, kernel: configs.Kernel = "decode") -> dict[str, Any]:
    """A kernel's constants, warps and pipeline stages, chosen by `minicache.kernels.configs`.

    Args:
        q: queries, `[…, H, d]`.
        k_cache: keys, `[num_blocks, block_size, H_kv, d]`.
        kernel: "decode", for `split_kernel` too, or "prefill".

    Raises:
        KernelUnavailableError: this GPU has no configuration for these dtypes, this head size or this group.
    """
    num_heads, head_dim = q.shape[-2:]
    group = num_heads // k_cache.shape[2]
    arch = configs.architecture(q.device)
    config = configs.choose(kernel, arch, q.dtype, k_cache.dtype, head_dim, group)
    return {
        "GROUP": group,
        "ROWS": config.rows,
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": max(configs.MIN_ROWS, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": k_cache.shape[1],
        "TILE": config.tile,
        "DOT_DTYPE": dot_dtype(q),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def dot_dtype(q: Tensor) -> tl.dtype:
    """The dtype of `tl.dot`'s operands: half precision unchanged, for the tensor cores; everything else in fp32.

    Under the interpreter always fp32: bf16 arithmetic is silently wrong there. An int8 or fp8 number fits into bf16 and
    into fp16 without rounding.
    """
    halves = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if runtime.interpreting() else halves.get(q.dtype, tl.float32)


def new_output(q: Tensor) -> Tensor:
    """An uninitialised output like `q`, contiguous, for the kernel to fill and the launcher to convert to q's dtype.

    Under the interpreter it is fp32, because a store to bf16 truncates there instead of rounding. On a GPU it already
    has q's dtype, and the conversion does nothing.
    """
    return torch.empty(q.shape, dtype=torch.float32 if runtime.interpreting() else q.dtype, device=q.device)


def per_head(scale: float | Tensor | None, k_cache: Tensor) -> Tensor | None:
    """A scale for all tokens as `[H_kv]` fp32, contiguous, in whichever form it was given; None without one."""
    if scale is None or per_token(scale) is not None:
        return None
    if isinstance(scale, Tensor):
        return scale.float().expand(k_cache.shape[2]).contiguous()
    return torch.full((k_cache.shape[2],), scale, dtype=torch.float32, device=k_cache.device)


def per_token(scale: float | Tensor | None) -> Tensor | None:
    """The scale if it is per token, `[num_blocks, block_size, H_kv]`, else None."""
    return scale if isinstance(scale, Tensor) and scale.ndim == 3 else None


def rows_contiguous(block_tables: Tensor) -> Tensor:
    """Block tables with contiguous rows: unchanged if they are, even as a slice of a wider tensor, else a copy."""
    return block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
