# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.quantized_store.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""Store in one byte a number: each row gets a scale of its own, and is rounded to int8 or e4m3. Phase 4 builds it.

A block fills token by token. Under one scale for a whole block a later, larger row would force those before it to be
rounded again, and what a request reads would depend on how its prompt was cut into chunks. So there is a scale for each
token and key/value head, and a row's numbers depend on that row alone (vLLM's `int8_per_token_head` and
`fp8_per_token_head`).

A cast to an integer cuts off, and so does Triton's interpreter when it casts to fp8. So rows are rounded before they
are cast, in arithmetic that a GPU and the interpreter do alike: the cast has nothing left to round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels.quantize import LARGEST as LARGEST_NUMBER


@triton.jit
def quantize_rows(rows, LARGEST: tl.constexpr, E4M3: tl.constexpr):
    """Divide each row by its scale, largest |number| / LARGEST, and round to what one byte can hold, half to even.

    Not a kernel but a function that kernels call. Both divisions are `tl.div_rn`, which rounds correctly; a plain `/`
    on a GPU may be off in the last bit.

    int8 holds the integers: neighbours are 1 apart. e4m3 has three bits after the leading one: between 2ᵉ and 2ᵉ⁺¹
    neighbours are 2ᵉ / 8 apart, and below 2⁻⁶ they are 2⁻⁹ apart. A number's 2ᵉ is what is left of its fp32 bits when
    only the exponent, `0x7F800000`, is kept. Adding 1.5 · 2²³ · step and subtracting it again rounds to a multiple of
    step: fp32 has no digits for less in a sum of that size.

    A row of zeros has scale 0 and numbers 0: do not divide 0 by 0. A row that holds NaN or ±inf has scale NaN and
    numbers 0, and is read as NaN. A GPU's `tl.max` passes over a NaN; a sum does not.

    Argument:
        rows: `[HEADS, DIMS]` fp32, zero where the tile is padded.

    Constants:
        LARGEST: the largest number used, 127 or 448.
        E4M3: whether numbers are e4m3, else they are integers.

    Result:
        numbers `[HEADS, DIMS]` fp32, each of them exactly a number of the target type; scales `[HEADS]` fp32.
    """
    raise NotImplementedError(
        "phase 4, task 9: One byte a number; read docs/en/phase-04-triton-kernels/lab/06-one-byte-a-number.md"
    )


@triton.jit
def quantized_store_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
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
    LARGEST: tl.constexpr,
    E4M3: tl.constexpr,
):
    """One program quantises one token's keys and values, all heads at once, into the token's slot, scales included.

    Grid, tile, strides and sizes are those of `store_kernel`. Convert what is loaded to fp32 before any arithmetic, and
    numbers to `k_cache_ptr.dtype.element_ty` when they are stored.

    Pointers:
        k_ptr, v_ptr: `[N, NUM_KV_HEADS, HEAD_DIM]`, fp32, fp16 or bf16.
        k_cache_ptr, v_cache_ptr: `[num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]` int8 or e4m3, written in place.
        k_scale_ptr, v_scale_ptr: `[num_blocks, BLOCK_SIZE, NUM_KV_HEADS]` fp32, contiguous, written in place: what the
            scale of head h in slot s is.
        slot_mapping_ptr: `[N]`, contiguous, int32 or int64; negative is padding: nothing of that token is read or
            written.

    Constants:
        LARGEST, E4M3: as in `quantize_rows`.
        all others: as in `store_kernel`.
    """
    raise NotImplementedError(
        "phase 4, task 9: One byte a number; read docs/en/phase-04-triton-kernels/lab/06-one-byte-a-number.md"
    )


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Launch `quantized_store_kernel`: one program a token. `minicache.kernels.store_kv` has checked the arguments.

    Without tokens nothing is launched. `LARGEST_NUMBER` has the largest number of the cache's dtype.

    Args:
        k: keys `[N, H_kv, d]`, float32, float16 or bfloat16; any strides.
        v: values, the same shape and dtype.
        k_cache: `[num_blocks, block_size, H_kv, d]` int8 or float8_e4m3fn, written in place.
        v_cache: the same shape and dtype.
        slot_mapping: `[N]` int32 or int64, a slot or −1; any stride.
        k_scale: `[num_blocks, block_size, H_kv]` fp32, contiguous, written in place.
        v_scale: the same shape and dtype.
    """
    raise NotImplementedError(
        "phase 4, task 9: One byte a number; read docs/en/phase-04-triton-kernels/lab/06-one-byte-a-number.md"
    )
