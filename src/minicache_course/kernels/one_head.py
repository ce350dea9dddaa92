"""`attend_range` by itself: queries of one head, over a range of one sequence's tokens. No phase builds this.

Kernels call `minicache.kernels.decode.attend_range` and divide its results. This kernel stores them undivided, so phase
4 can inspect and grade them before there is a kernel for a whole batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels.decode import attend_range


@triton.jit
def one_head_kernel(
    q_ptr,
    positions_ptr,
    slopes_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    max_ptr,
    sum_ptr,
    acc_ptr,
    num_queries,
    start,
    end,
    scale,
    sliding_window,
    softcap,
    k_strides,
    v_strides,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: load the queries, call `attend_range`, store its three results undivided."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    mask = (rows < num_queries)[:, None] & (dims < HEAD_DIM)
    numbers = rows[:, None] * HEAD_DIM + dims
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + rows, mask=rows < num_queries, other=0.0)
    row_max, row_sum, acc = attend_range(
        tl.load(q_ptr + numbers, mask=mask, other=0.0),
        tl.load(positions_ptr + rows, mask=rows < num_queries, other=-1),
        slopes,
        k_cache_ptr,
        v_cache_ptr,
        None,
        None,
        0,
        1,
        block_table_ptr,
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
    tl.store(max_ptr + rows, row_max, mask=rows < num_queries)
    tl.store(sum_ptr + rows, row_sum, mask=rows < num_queries)
    tl.store(acc_ptr + numbers, acc, mask=mask)


def attend_one_head(
    q: Tensor,
    query_positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    start: int,
    end: int,
    *,
    scale: float | None = None,
    slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tile: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `attend_range` returns for some queries of one head.

    Args:
        q: queries `[N, d]`, in fp32 or fp16; contiguous.
        query_positions: `[N]` int32, the position of each query's token in its sequence; contiguous.
        k_cache: keys `[num_blocks, block_size, d]`, of one head; any strides.
        v_cache: values, the same shape.
        block_table: `[max_blocks]` int32 or int64, contiguous.
        start: the range's first token.
        end: the token after its last one.
        scale: the factor of the scores; 1 / √d by default.
        slopes: `[N]` fp32, ALiBi's slope per query, contiguous, or None.
        sliding_window: W ≥ 1, or None.
        softcap: c > 0, or None.
        tile: tokens per tile, a power of two: 16 or more on a GPU, any in the interpreter.

    Returns:
        row_max `[N]`, row_sum `[N]` and acc `[N, d]`, fp32. Attention over the range is acc / row_sum[:, None].
    """
    num_queries, head_dim = q.shape
    row_max, row_sum = torch.empty(2, num_queries, dtype=torch.float32, device=q.device)
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    one_head_kernel[(1,)](
        q,
        query_positions,
        slopes,
        k_cache,
        v_cache,
        block_table,
        row_max,
        row_sum,
        acc,
        num_queries,
        start,
        end,
        head_dim**-0.5 if scale is None else float(scale),
        sliding_window,
        softcap,
        k_cache[:, :, None].stride(),
        v_cache[:, :, None].stride(),
        ROWS=max(16, triton.next_power_of_2(num_queries)),
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=k_cache.shape[1],
        TILE=tile,
    )
    return row_max, row_sum, acc
