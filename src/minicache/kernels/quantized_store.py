"""8-bit store: each row gets a scale and is rounded to int8 or e4m3. Phase 4 builds it.

A block fills token by token. With one scale per block a later, larger row would force earlier ones to be rounded again,
and what a request reads would depend on how its prompt was chunked. So there is a scale per token and key/value head,
and a row's numbers depend on that row alone (vLLM's `int8_per_token_head` and `fp8_per_token_head`).

A cast to an integer truncates, and Triton's interpreter rounds wrongly when it casts to fp8. So rows are rounded before
the cast, in arithmetic that is the same on a GPU and in the interpreter; the cast itself is then exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels.quantize import LARGEST as LARGEST_NUMBER


@triton.jit
def quantize_rows(rows, LARGEST: tl.constexpr, E4M3: tl.constexpr):
    """Divide each row by its scale, largest |number| / LARGEST, and round to the target type, half to even.

    Not a kernel but a function that kernels call. Both divisions are `tl.div_rn`, which rounds correctly; a plain `/`
    on a GPU may be off in the last bit.

    int8 values are 1 apart. e4m3 has three mantissa bits: between 2ᵉ and 2ᵉ⁺¹ its values are 2ᵉ / 8 apart, and below
    2⁻⁶ they are 2⁻⁹ apart. A number's fp32 bits masked to the exponent, `0x7F800000`, are its 2ᵉ. Adding 1.5 · 2²³ ·
    step and subtracting it again rounds to a multiple of step, the precision of fp32 at that magnitude.

    A row of zeros has scale 0 and numbers 0: do not divide 0 by 0. A row with NaN or ±inf has scale NaN and numbers 0,
    and reads as NaN. A GPU's `tl.max` ignores NaN; a sum does not.

    Argument:
        rows: `[HEADS, DIMS]` fp32, zero where the tile is padded.

    Constants:
        LARGEST: the largest number used, 127 or 448.
        E4M3: whether the target type is e4m3; otherwise int8.

    Result:
        numbers `[HEADS, DIMS]` fp32, each exactly representable in the target type; scales `[HEADS]` fp32.
    """
    not_finite = tl.where(tl.abs(rows) < float("inf"), 0.0, float("nan"))
    scales = tl.div_rn(tl.max(tl.abs(rows), 1), LARGEST) + tl.sum(not_finite, 1)
    usable = scales > 0  # neither 0 nor NaN
    numbers = tl.where(usable[:, None], tl.div_rn(rows, tl.where(usable, scales, 1.0)[:, None]), 0.0)
    numbers = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)  # a subnormal scale has lost digits
    step = 1.0
    if E4M3:
        power = (numbers.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power / 8.0, 2.0**-9)
    shift = 1.5 * 2.0**23 * step
    return numbers + shift - shift, scales


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
    """One program quantizes one token's keys and values, all heads at once, into the token's slot, with their scales.

    Grid, tile, strides and sizes are those of `store_kernel`. Convert loaded values to fp32 before any arithmetic, and
    numbers to `k_cache_ptr.dtype.element_ty` when they are stored.

    Pointers:
        k_ptr, v_ptr: `[N, NUM_KV_HEADS, HEAD_DIM]`, fp32, fp16 or bf16.
        k_cache_ptr, v_cache_ptr: `[num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]` int8 or e4m3, written in place.
        k_scale_ptr, v_scale_ptr: `[num_blocks, BLOCK_SIZE, NUM_KV_HEADS]` fp32, contiguous, written in place: the scale
            of each slot and head.
        slot_mapping_ptr: `[N]`, contiguous, int32 or int64; negative is padding: that token is neither read nor
            written.

    Constants:
        LARGEST, E4M3: as in `quantize_rows`.
        all others: as in `store_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_HEADS).to(tl.int64)
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    rows = heads[:, None]
    mask = (rows < NUM_KV_HEADS) & (dims < HEAD_DIM)

    k = tl.load(k_ptr + token * stride_k_token + rows * stride_k_head + dims * stride_k_dim, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * stride_v_token + rows * stride_v_head + dims * stride_v_dim, mask=mask, other=0.0)
    k, k_scale = quantize_rows(k.to(tl.float32), LARGEST, E4M3)
    v, v_scale = quantize_rows(v.to(tl.float32), LARGEST, E4M3)

    block, row = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_row = k_cache_ptr + block * stride_kc_block + row * stride_kc_slot
    v_row = v_cache_ptr + block * stride_vc_block + row * stride_vc_slot
    tl.store(k_row + rows * stride_kc_head + dims * stride_kc_dim, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_row + rows * stride_vc_head + dims * stride_vc_dim, v.to(v_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(k_scale_ptr + slot * NUM_KV_HEADS + heads, k_scale, mask=heads < NUM_KV_HEADS)
    tl.store(v_scale_ptr + slot * NUM_KV_HEADS + heads, v_scale, mask=heads < NUM_KV_HEADS)


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
    """Launch `quantized_store_kernel`: one program per token. `minicache.kernels.store_kv` checked the arguments.

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
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    quantized_store_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_mapping.contiguous(),
        *k.stride(),
        *v.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        PADDED_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_HEAD_DIM=triton.next_power_of_2(head_dim),
        LARGEST=LARGEST_NUMBER[k_cache.dtype],
        E4M3=k_cache.dtype == torch.float8_e4m3fn,
    )
