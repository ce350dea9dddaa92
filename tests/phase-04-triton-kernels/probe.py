"""A kernel that calls `attend_range` and stores what it returns: decode never asks for rows at several positions.

Its own file, because importing it imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels.decode import attend_range

TILE = 16


@triton.jit
def probe_kernel(
    q_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_table_ptr,
    max_ptr,
    sum_ptr,
    acc_ptr,
    start,
    end,
    sliding_window,
    stride_k_block,
    stride_k_slot,
    stride_k_dim,
    stride_v_block,
    stride_v_slot,
    stride_v_dim,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: `attend_range` for ROWS queries of HEAD_DIM numbers, both powers of two, over the cache's head 0."""
    rows = tl.arange(0, ROWS)
    tile = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    row_max, row_sum, acc = attend_range(
        tl.load(q_ptr + tile),
        tl.load(positions_ptr + rows),
        None,
        k_cache_ptr,
        v_cache_ptr,
        None,
        None,
        0,
        1,
        block_table_ptr,
        start,
        end,
        HEAD_DIM**-0.5,
        sliding_window,
        None,
        stride_k_block,
        stride_k_slot,
        stride_k_dim,
        stride_v_block,
        stride_v_slot,
        stride_v_dim,
        HEAD_DIM,
        BLOCK_SIZE,
        TILE,
    )
    tl.store(max_ptr + rows, row_max)
    tl.store(sum_ptr + rows, row_sum)
    tl.store(acc_ptr + tile, acc)


def probe(
    q: Tensor,
    query_positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    start: int,
    end: int,
    sliding_window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attend_range returns for q `[ROWS, d]`: `[ROWS]`, `[ROWS]` and `[ROWS, d]`."""
    row_max, row_sum, acc = torch.empty_like(q[:, 0]), torch.empty_like(q[:, 0]), torch.empty_like(q)
    k_strides, v_strides = ((cache.stride(0), cache.stride(1), cache.stride(3)) for cache in (k_cache, v_cache))
    probe_kernel[(1,)](
        q,
        query_positions,
        k_cache,
        v_cache,
        block_table,
        row_max,
        row_sum,
        acc,
        start,
        end,
        sliding_window,
        *k_strides,
        *v_strides,
        ROWS=q.shape[0],
        HEAD_DIM=q.shape[1],
        BLOCK_SIZE=k_cache.shape[1],
        TILE=TILE,
    )
    return row_max, row_sum, acc
