# Phase 4, triton-kernels: your file. It stands in for minicache_course.kernels.online_softmax.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""The online softmax: attention of one head's queries to its keys, a tile at a time, no cache. Phase 4 builds it.

A step of the course. `minicache.kernels.decode.attend_range` is this loop over KV entries in blocks, the one that the
engine runs.

Follows Milakov and Gimelshein 2018.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
"""Queries per program: the fewest rows that a GPU's tensor cores multiply."""


@triton.jit
def online_softmax_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    num_queries,
    num_keys,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program attends with ROWS queries to all keys, TILE keys at a time.

    Grid (⌈num_queries / ROWS⌉,): program t computes the queries t · ROWS, t · ROWS + 1, … Every query sees every key.
    For each tile: load its keys and values, score the keys against the program's queries, and fold the tile into three
    running values per query: row_max, the largest score so far; row_sum, the sum of exp(score − row_max); acc, the sum
    of exp(score − row_max) · value. When a tile raises the maximum, the running sums are multiplied by exp(old − new).
    At the end the output is acc / row_sum.

    The last tile may reach past num_keys: those keys and values are not loaded, and their scores are −inf before the
    maximum is taken. Queries past num_queries are loaded as zeros and not stored.

    Pointers, each to a contiguous fp32 tensor: number i of row r is at pointer + r · HEAD_DIM + i.
        q_ptr, out_ptr: `[num_queries, HEAD_DIM]`.
        k_ptr, v_ptr: `[num_keys, HEAD_DIM]`.

    Numbers:
        num_queries, num_keys: any ≥ 1.
        scale: the factor of the scores.

    Constants:
        HEAD_DIM: any number ≥ 1.
        PADDED_HEAD_DIM: the power of two that HEAD_DIM is padded to, at least 16.
        ROWS, TILE: powers of two.
    """
    raise NotImplementedError(
        "phase 4, task 3: Online softmax; read docs/en/phase-04-triton-kernels/lab/01-online-softmax.md"
    )


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, tile: int = 16) -> Tensor:
    """Launch `online_softmax_kernel`: attention of each query to all keys.

    Args:
        q: queries `[N, d]` fp32, N ≥ 1; any strides.
        k: keys `[S, d]` fp32, S ≥ 1; any strides.
        v: values `[S, d]` fp32; any strides.
        scale: the factor of the scores; 1 / √d by default.
        tile: keys per tile, a power of two: 16 or more on a GPU, any in the interpreter.

    Returns:
        `[N, d]` fp32.
    """
    num_queries, head_dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    online_softmax_kernel[(triton.cdiv(num_queries, ROWS),)](
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        out,
        num_queries,
        k.shape[0],
        head_dim**-0.5 if scale is None else float(scale),
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=max(16, triton.next_power_of_2(head_dim)),
        ROWS=ROWS,
        TILE=tile,
    )
    return out
