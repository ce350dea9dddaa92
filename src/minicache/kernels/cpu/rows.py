"""The small kernels of a transformer layer on a CPU: norms, SiLU or GELU · up, rotary positions, stores.

In PyTorch each of them is several operations, each with a call's overhead and an intermediate result in memory. Here a
row is read once and written once. Arrays are float32 and contiguous unless stated otherwise; nothing is checked.

A KV cache may also hold one byte per number: int8, or float8_e4m3fn as uint8. A row is then quantized as it is stored,
bit for bit as in `minicache.kernels.quantize.quantize_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from minicache.kernels.cpu.vectors import (
    INLINE,
    OPTIONS,
    add,
    div,
    exp,
    full,
    larger_magnitude,
    largest_magnitude,
    largest_number,
    load,
    maximum,
    mul,
    store,
    sub,
    where_at_least,
)

# vectors.py as compiled code knows it, sha256: 60a8d9aca10b4be7

_ZERO, _ONE, _INFINITY, _NAN = np.float32(0), np.float32(1), np.float32(np.inf), np.float32(np.nan)

_CUBIC, _TWICE_ROOT = np.float32(0.044715), np.float32(2 * np.sqrt(2 / np.pi))  # of GELU

# What LLVM may change to vectorize a loop. Not "nnan" or "ninf": NaN must stay NaN.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(fastmath=_FAST, **OPTIONS)
def rms_norm(x, weight, eps, out):
    """out = x / √(mean(x²) + eps) · weight, row by row: x, out `[N, width]`, weight `[width]`, eps float32."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        squares = _ZERO
        for i in range(width):
            squares += x[r, i] * x[r, i]
        factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            out[r, i] = x[r, i] * factor * weight[i]


@njit(fastmath=_FAST, **OPTIONS)
def add_rms_norm(x, y, weight, eps, out):
    """x += y in place, and out = the norm of x, as `rms_norm` computes it: x, y, out `[N, width]`."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        squares = _ZERO
        for i in range(width):
            number = x[r, i] + y[r, i]
            x[r, i] = number
            squares += number * number
        factor = _ONE / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            out[r, i] = x[r, i] * factor * weight[i]


@njit(**OPTIONS)
def silu_mul(gate_up, out):
    """out = silu(gate) · up: gate_up `[N, 2 · width]`, the gates first; out `[N, width]`, width ≥ 8."""
    num_rows, width = out.shape
    for r in range(num_rows):
        for i in range(0, width, 8):
            at = min(i, width - 8)  # the last eight may overlap those before, since out is not gate_up
            gate, up = load(gate_up, 2 * r * width + at), load(gate_up, (2 * r + 1) * width + at)
            store(out, r * width + at, div(mul(gate, up), add(full(_ONE), exp(sub(full(_ZERO), gate)))))


@njit(**OPTIONS)
def gelu_mul(gate_up, out):
    """out = gelu(gate) · up, as `silu_mul`: GELU in its tanh approximation.

    ½ · x · (1 + tanh z) is x · sigmoid(2z), for z = √(2/π) · (x + 0.044715 · x³).
    """
    num_rows, width = out.shape
    for r in range(num_rows):
        for i in range(0, width, 8):
            at = min(i, width - 8)
            gate, up = load(gate_up, 2 * r * width + at), load(gate_up, (2 * r + 1) * width + at)
            cubic = mul(mul(mul(gate, gate), gate), full(_CUBIC))
            two_z = mul(add(gate, cubic), full(_TWICE_ROOT))
            store(out, r * width + at, div(mul(gate, up), add(full(_ONE), exp(sub(full(_ZERO), two_z)))))


@njit(**INLINE)
def write_row(rows, at, cache, scale, slot, head, head_dim):
    """Write the `head_dim` numbers from rows[at] on to a slot, for a key/value head; quantized if there are scales.

    cache `[num_slots, H_kv, d]`; scale `[num_slots, H_kv]` or None; d a multiple of 8.
    """
    to = (slot * cache.shape[1] + head) * head_dim
    if scale is None:
        for i in range(0, head_dim, 8):
            store(cache, to + i, load(rows, at + i))
    else:
        sizes = full(_ZERO)
        for i in range(0, head_dim, 8):
            sizes = larger_magnitude(load(rows, at + i), sizes)
        largest, limit = largest_magnitude(sizes), largest_number(cache)
        step = largest / limit
        scale[slot, head] = step if largest < _INFINITY else _NAN
        low, high = full(-limit), full(limit)
        for i in range(0, head_dim, 8):
            numbers = full(_ZERO)
            if step > _ZERO and largest < _INFINITY:
                numbers = div(load(rows, at + i), full(step))
                numbers = maximum(where_at_least(numbers, high, high, numbers), low)
            store(cache, to + i, numbers)


@njit(fastmath=_FAST, **OPTIONS)
def rope_store(qkv, cos, sin, slots, k_cache, v_cache, k_scale, v_scale, num_heads):
    """Rotate queries and keys by their positions' angles, in place, and write keys and values to their slots.

    qkv `[N, H + 2 · H_kv, d]`; cos, sin `[N, d]`, a row for each row of qkv, as `model.minigpt.turns` gives them: the
    sine's first half is negative; slots `[N]` int64, −1 stores nothing; k_cache, v_cache `[num_slots, H_kv, d]`, d a
    multiple of 8; k_scale, v_scale `[num_slots, H_kv]` for caches with one byte per number, else None; num_heads H.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[2]
    half = head_dim // 2
    for r in range(qkv.shape[0]):
        for h in range(num_heads + num_kv_heads):
            for i in range(half):
                a, b = qkv[r, h, i], qkv[r, h, i + half]
                qkv[r, h, i] = a * cos[r, i] + b * sin[r, i]
                qkv[r, h, i + half] = b * cos[r, i + half] + a * sin[r, i + half]
        slot = slots[r]
        if slot >= 0:
            for h in range(num_kv_heads):
                at = (r * qkv.shape[1] + num_heads + h) * head_dim
                write_row(qkv, at, k_cache, k_scale, slot, h, head_dim)
                write_row(qkv, at + num_kv_heads * head_dim, v_cache, v_scale, slot, h, head_dim)


@njit(fastmath=_FAST, **OPTIONS)
def norm_heads(qkv, q_weight, k_weight, eps, num_heads):
    """Norm each query head and each key head separately, in place, before rotation (Qwen3's qk-norm).

    qkv `[N, H + 2 · H_kv, d]`; q_weight, k_weight `[d]`; eps float32; num_heads H.
    """
    num_kv_heads, head_dim = (qkv.shape[1] - num_heads) // 2, qkv.shape[2]
    for r in range(qkv.shape[0]):
        for h in range(num_heads + num_kv_heads):
            weight = q_weight if h < num_heads else k_weight
            squares = _ZERO
            for i in range(head_dim):
                squares += qkv[r, h, i] * qkv[r, h, i]
            factor = _ONE / np.sqrt(squares / np.float32(head_dim) + eps)
            for i in range(head_dim):
                qkv[r, h, i] = qkv[r, h, i] * factor * weight[i]


@njit(**OPTIONS)
def store_kv(k, v, k_cache, v_cache, k_scale, v_scale, slots):
    """Write rows k, v `[N, H_kv, d]` to their slots `[N]` int64 of caches `[num_slots, H_kv, d]`; −1 skips a row.

    k and v have a contiguous last axis and d a multiple of 8. k_scale, v_scale as in `rope_store`.
    """
    num_kv_heads, head_dim = k.shape[1], k.shape[2]
    for r in range(slots.size):
        if slots[r] >= 0:
            for h in range(num_kv_heads):
                k_at, v_at = (r * k.strides[0] + h * k.strides[1]) // 4, (r * v.strides[0] + h * v.strides[1]) // 4
                write_row(k, k_at, k_cache, k_scale, slots[r], h, head_dim)
                write_row(v, v_at, v_cache, v_scale, slots[r], h, head_dim)


_ROWS, _WEIGHT, _HEADS = "float32[:, ::1]", "float32[::1]", "float32[:, :, ::1]"


def signatures(number: str) -> dict[Any, str]:
    """The signature that each kernel is compiled for, by the caches' dtype: "float32", "int8" or "uint8".

    An array of another dtype or layout is a TypeError.
    """
    cache, scale = f"{number}[:, :, ::1]", "none" if number == "float32" else _ROWS
    return {
        rms_norm: f"void({_ROWS}, {_WEIGHT}, float32, {_ROWS})",
        add_rms_norm: f"void({_ROWS}, {_ROWS}, {_WEIGHT}, float32, {_ROWS})",
        silu_mul: f"void({_ROWS}, {_ROWS})",
        gelu_mul: f"void({_ROWS}, {_ROWS})",
        rope_store: f"void({_HEADS}, {_ROWS}, {_ROWS}, int64[::1], {cache}, {cache}, {scale}, {scale}, int64)",
        norm_heads: f"void({_HEADS}, {_WEIGHT}, {_WEIGHT}, float32, int64)",
        store_kv: f"void(float32[:, :, :], float32[:, :, :], {cache}, {cache}, {scale}, {scale}, int64[::1])",
    }
