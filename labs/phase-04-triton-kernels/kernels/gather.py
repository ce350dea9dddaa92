# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.gather.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""Gather: one sequence's KV entries, copied out of its blocks in token order. Phase 4 builds it.

`PagedKVCache.read` runs it on a GPU. Its core is the load of a tile of tokens through a block table; decode attention
does the same load and then computes instead of storing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Tokens that one program copies: 64 vectors of 128 half-precision numbers are 16 KB, 128 bytes per thread."""


@triton.jit
def gather_kernel(
    cache_ptr,
    block_table_ptr,
    out_ptr,
    num_tokens,
    stride_cache_block,
    stride_cache_slot,
    stride_cache_head,
    stride_cache_dim,
    stride_out_token,
    stride_out_head,
    stride_out_dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy the first num_tokens KV entries of one sequence, in token order.

    How the work is divided among programs is open, and with it the grid, these arguments and `TILE`: only `gather_kv`
    calls this kernel. Each number of the cache is loaded once, and each of the output stored once. The arguments are
    those of the reference, whose grid is (H_kv, ⌈num_tokens / TILE⌉).

    Tiles are independent of blocks: a tile may cover part of a block or span many. One may reach past num_tokens, and
    three accesses are masked there: the block table entry, which lies past the blocks in use or past the table; the
    cache's slot; and the row of the output.

    Pointers:
        cache_ptr: keys or values, `[num_blocks, BLOCK_SIZE, H_kv, HEAD_DIM]`.
        block_table_ptr: `[max_blocks]`, contiguous, int32 or int64. Only the first ⌈num_tokens / BLOCK_SIZE⌉ are read.
        out_ptr: `[num_tokens, H_kv, HEAD_DIM]`, in the dtype of the cache.

    Strides, in elements: of the cache's block, slot in the block, head and dimension, and of the output's token, head
    and dimension. They are arbitrary. Multiply block ids, heads and tokens in int64.

    Constants:
        HEAD_DIM, BLOCK_SIZE: sizes of the cache, any numbers ≥ 1.
        PADDED_HEAD_DIM: the power of two that HEAD_DIM is padded to.
        TILE: tokens of a tile, a power of two.
    """
    raise NotImplementedError(
        "phase 4, task 2: Gather; read docs/en/phase-04-triton-kernels/lab/00-store-and-gather.md"
    )


def gather_kv(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Launch `gather_kernel` into a new output. `minicache.kernels.gather_kv` has checked the arguments.

    Without tokens nothing is launched.

    Args:
        cache: keys or values, `[num_blocks, block_size, H_kv, d]`; any strides.
        block_table: `[max_blocks]` int32 or int64, the tail undefined; any stride.
        num_tokens: entries to copy.

    Returns:
        `[num_tokens, H_kv, d]`, new, in the cache's dtype.
    """
    raise NotImplementedError(
        "phase 4, task 2: Gather; read docs/en/phase-04-triton-kernels/lab/00-store-and-gather.md"
    )
