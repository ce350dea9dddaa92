# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.store.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""Store: the keys and values of new tokens, written to their cache slots. Phase 4 builds it.

The slot mapping gives each token's slot: slot s is offset s % block_size of block s // block_size. This is the simplest
kernel: one program per token, one tile, no loop.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    stride_k_token,
    stride_k_head,
    stride_k_dim,
    stride_v_token,
    stride_v_head,
    stride_v_dim,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_kc_dim,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    stride_vc_dim,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
):
    """One program copies one token's keys and values, all heads at once, into the token's slot.

    Grid (N,): program n handles token n. Its tile is `[PADDED_HEADS, PADDED_HEAD_DIM]`, one element per head and
    dimension. `tl.arange` takes only powers of two, so the tile may be larger than `[NUM_KV_HEADS, HEAD_DIM]`, and a
    mask keeps every load and store inside.

    Pointers:
        k_ptr, v_ptr: `[N, NUM_KV_HEADS, HEAD_DIM]`, in the dtype of the cache.
        k_cache_ptr, v_cache_ptr: `[num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]`, written in place.
        slot_mapping_ptr: `[N]`, contiguous, int32 or int64. A negative slot marks padding: the program returns without
            reading or writing that token.

    Strides, in elements: (n, h, i) of k is at `k_ptr + n * stride_k_token + h * stride_k_head + i * stride_k_dim`; kc
    and vc are the caches, addressed by block and by slot in the block. Strides are arbitrary. Multiply tokens, heads,
    slots and block ids in int64: in a cache of more than 2³¹ elements a block id times its stride exceeds 2³¹.

    Constants:
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE: sizes of the cache, any numbers ≥ 1.
        PADDED_HEADS, PADDED_HEAD_DIM: the next powers of two.
    """
    raise NotImplementedError(
        "phase 4, task 1: Store; read docs/en/phase-04-triton-kernels/lab/00-store-and-gather.md"
    )


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Launch `store_kernel`: one program per token. `minicache.kernels.store_kv` has checked the arguments.

    Without tokens nothing is launched: CUDA refuses an empty grid. The slots stay on the GPU: the launcher must
    not read them.

    Args:
        k: keys `[N, H_kv, d]`, in the cache's dtype; any strides.
        v: values, the same shape and dtype.
        k_cache: `[num_blocks, block_size, H_kv, d]`, written in place.
        v_cache: the same shape and dtype.
        slot_mapping: `[N]` int32 or int64, a slot or −1; any stride.
    """
    raise NotImplementedError(
        "phase 4, task 1: Store; read docs/en/phase-04-triton-kernels/lab/00-store-and-gather.md"
    )
