"""Paged decode attention on a CPU: the Triton kernel of `minicache.kernels.decode`, eight numbers at a time.

All query heads of a group attend to a tile of a sequence's tokens before the next tile is read: the first two heads
load the tile's keys and values into the processor's cache, where the others find them. Heads are processed in pairs,
which use each loaded key twice. The softmax is online, from tile to tile (Milakov and Gimelshein 2018; Dao et al.
2022). Nothing is gathered: a tile is a list of row offsets.

Caches are arrays `[num_blocks, block_size, H_kv, d]`, d a multiple of 8, the last axis contiguous, the others of any
strides: float32, or one byte per number (`vectors`) with a scale per token and head. A key's scale multiplies its
score, and a value's its probability, never a whole row. The kernel is compiled for each dtype; without scales it has no
code for them. The kernels check no bounds: `steps` does, beforehand. No phase builds this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from minicache.kernels.cpu.vectors import (
    INLINE,
    OPTIONS,
    add,
    exp,
    fma,
    full,
    keep,
    largest_of_halves,
    load,
    load_halves,
    maximum,
    mul,
    store,
    sub,
    totals,
)

# vectors.py as compiled code knows it, sha256: 60a8d9aca10b4be7

TILE_NUMBERS = 4096
"""Tokens per tile, times d: 16 KiB of keys and as much of values, which stay in a core's L1 cache (32 or 48 KiB)
while a group's heads read them one after the other. Half and twice as many took the same time, within 10 %."""

_ZERO, _ONE, _MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit(**INLINE)
def find_rows(cache, block_table, start, count, rows):
    """Offsets in the cache's memory of the tokens start … start + count − 1, for key/value head 0.

    `rows` is padded to a multiple of four with the first offset, which is safe to read.
    """
    block_stride, slot_stride = cache.strides[0] // cache.itemsize, cache.strides[1] // cache.itemsize
    block, slot = start // cache.shape[1], start % cache.shape[1]
    for t in range(count):
        if slot == cache.shape[1]:
            block, slot = block + 1, 0
        rows[t] = block_table[block] * block_stride + slot * slot_stride
        slot += 1
    for t in range(count, -(-count // 4) * 4):
        rows[t] = rows[0]


@njit(**INLINE)
def new_scales(scale, tile):
    """Memory for the scales of a tile, `[1, H_kv, tile]`; None if `scale` is None."""
    if scale is None:
        return scale
    return np.empty((1, scale.shape[2], tile), np.float32)


@njit(**INLINE)
def find_scales(scale, block_table, start, count, scales):
    """The scales of the tokens start … start + count − 1: token t's for key/value head h becomes scales[0, h, t].

    scale: `[num_blocks, block_size, H_kv]`, contiguous; None: nothing is done.
    """
    if scale is not None:
        block, slot = start // scale.shape[1], start % scale.shape[1]
        for t in range(count):
            if slot == scale.shape[1]:
                block, slot = block + 1, 0
            for head in range(scale.shape[2]):
                scales[0, head, t] = scale[block_table[block], slot, head]
            slot += 1


@njit(**INLINE)
def score(q, a_at, b_at, k_cache, head_at, step, rows, count, head_dim, scale, scales, a_scales, b_scales, scores):
    """Scores of two query heads, a and b, with four keys at a time: a's four, then b's four; −inf past `count`.

    The keys of b are `step` numbers after those of a; with 0 both heads read the same keys, loaded once. The scales of
    the keys begin at `a_scales` and `b_scales`, unless `scales` is None.

    Returns the largest of each lane. NaN is ignored here; it reaches the result through exp.
    """
    tops = full(_MINUS_INFINITY)
    for t in range(0, count, 4):
        r0, r1, r2, r3 = rows[t] + head_at, rows[t + 1] + head_at, rows[t + 2] + head_at, rows[t + 3] + head_at
        a0, a1, a2, a3 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
        b0, b1, b2, b3 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
        for d in range(0, head_dim, 8):
            a, b = load(q, a_at + d), load(q, b_at + d)
            a0, b0 = fma(a, load(k_cache, r0 + d), a0), fma(b, load(k_cache, r0 + step + d), b0)
            a1, b1 = fma(a, load(k_cache, r1 + d), a1), fma(b, load(k_cache, r1 + step + d), b1)
            a2, b2 = fma(a, load(k_cache, r2 + d), a2), fma(b, load(k_cache, r2 + step + d), b2)
            a3, b3 = fma(a, load(k_cache, r3 + d), a3), fma(b, load(k_cache, r3 + step + d), b3)
        s = mul(totals(a0, a1, a2, a3, b0, b1, b2, b3), full(scale))
        if scales is not None:
            s = mul(s, load_halves(scales, a_scales + t, b_scales + t))
        s = keep(s, count - t, _MINUS_INFINITY)
        store(scores, 2 * t, s)
        tops = maximum(s, tops)
    return tops


@njit(**INLINE)
def exponentiate(scores, count, row_max, scales, a_scales, b_scales):
    """Replace each score by exp(score − its head's row_max); return the sums of each lane.

    The exponentials left in `scores` are multiplied by the values' scales, unless `scales` is None.
    """
    sums = full(_ZERO)
    for t in range(0, count, 4):
        p = exp(sub(load(scores, 2 * t), row_max))
        sums = add(sums, p)
        if scales is not None:
            p = mul(p, load_halves(scales, a_scales + t, b_scales + t))
        store(scores, 2 * t, p)
    return sums


@njit(**INLINE)
def add_values(p, v_cache, head_at, step, rows, count, head_dim, acc, a_at, b_at):
    """acc += Σ p[t] · value t for both heads, four values at a time; `p` has the layout of `score`."""
    whole = count // 4 * 4
    for t in range(0, whole, 4):
        r0, r1, r2, r3 = rows[t] + head_at, rows[t + 1] + head_at, rows[t + 2] + head_at, rows[t + 3] + head_at
        i = 2 * t
        a0, a1, a2, a3 = full(p[i]), full(p[i + 1]), full(p[i + 2]), full(p[i + 3])
        b0, b1, b2, b3 = full(p[i + 4]), full(p[i + 5]), full(p[i + 6]), full(p[i + 7])
        for d in range(0, head_dim, 8):
            a, b = load(acc, a_at + d), load(acc, b_at + d)
            a, b = fma(a0, load(v_cache, r0 + d), a), fma(b0, load(v_cache, r0 + step + d), b)
            a, b = fma(a1, load(v_cache, r1 + d), a), fma(b1, load(v_cache, r1 + step + d), b)
            a, b = fma(a2, load(v_cache, r2 + d), a), fma(b2, load(v_cache, r2 + step + d), b)
            a, b = fma(a3, load(v_cache, r3 + d), a), fma(b3, load(v_cache, r3 + step + d), b)
            store(acc, a_at + d, a)
            store(acc, b_at + d, b)
    for t in range(whole, count):
        pa, pb = full(p[t + whole]), full(p[t + whole + 4])
        for d in range(0, head_dim, 8):
            at = rows[t] + head_at + d
            a = fma(pa, load(v_cache, at), load(acc, a_at + d))
            b = fma(pb, load(v_cache, at + step), load(acc, b_at + d))
            store(acc, a_at + d, a)
            store(acc, b_at + d, b)


@njit(**INLINE)
def scale_rows(rows, a_at, b_at, head_dim, a_factor, b_factor):
    """Row a *= a_factor, row b *= b_factor. Both may be the same row."""
    for d in range(0, head_dim, 8):
        a, b = mul(load(rows, a_at + d), full(a_factor)), mul(load(rows, b_at + d), full(b_factor))
        store(rows, a_at + d, a)
        store(rows, b_at + d, b)


@njit(**INLINE)
def attend_tile(
    q, a_q, b_q, k_cache, k_head, k_step, k_rows, v_cache, v_head, v_step, v_rows, count, head_dim, scale,
    k_scales, v_scales, a_scales, b_scales, p, state, state_at, acc, a_at, b_at,
):  # fmt: skip
    """Two query heads attend to a tile: the online softmax.

    `state`, from `state_at` on: each head's largest score so far, four times; then the sums of each lane.
    """
    row_max, row_sum = load(state, state_at), load(state, state_at + 8)
    tops = score(q, a_q, b_q, k_cache, k_head, k_step, k_rows, count, head_dim, scale, k_scales, a_scales, b_scales, p)
    new_max = maximum(row_max, largest_of_halves(tops))
    sums = exponentiate(p, count, new_max, v_scales, a_scales, b_scales)
    rescale = exp(sub(row_max, new_max))
    store(state, state_at, rescale)
    scale_rows(acc, a_at, b_at, head_dim, state[state_at], state[state_at + 4])
    store(state, state_at, new_max)
    store(state, state_at + 8, fma(row_sum, rescale, sums))
    add_values(p, v_cache, v_head, v_step, v_rows, count, head_dim, acc, a_at, b_at)


@njit(**OPTIONS)
def decode(q, k_cache, v_cache, k_scale, v_scale, block_tables, context_lens, scale, window, out):
    """Attention of one query token per sequence over that sequence's KV entries, read in place.

    The query of sequence i is at position context_lens[i] − 1. With a window the range begins at context_lens[i] −
    window, never below 0, and nothing before it is read. A context of 0 gives zeros.

    - q: `[B, ≥ H, d]` float32, of which the first H heads are read: it may be the joined q, k and v.
    - k_cache: keys, float32, int8, or float8_e4m3fn as uint8.
    - v_cache: values, the same shape and dtype.
    - k_scale: `[num_blocks, block_size, H_kv]` float32, contiguous, the keys' scales; None for float32.
    - v_scale: likewise for the values.
    - block_tables: `[B, max_blocks]` int64, entries past the last block in use are not read.
    - context_lens: `[B]` int64.
    - scale: float32, the factor of the scores.
    - window: int64, W or 0 for none.
    - out: `[B, H, d]` float32, contiguous, written.
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    num_heads = out.shape[1]
    group = num_heads // num_kv_heads
    k_stride, v_stride = k_cache.strides[2] // k_cache.itemsize, v_cache.strides[2] // v_cache.itemsize
    tile = max(8, TILE_NUMBERS // head_dim // 8 * 8)
    k_rows = v_rows = np.empty(tile, np.int64)
    are_alike = k_cache.strides == v_cache.strides  # as in a `PagedStorage`
    if not are_alike:
        v_rows = np.empty(tile, np.int64)
    k_scales, v_scales = new_scales(k_scale, tile), new_scales(v_scale, tile)
    p, state = np.empty(2 * tile, np.float32), np.empty((num_heads + 1) // 2 * 16, np.float32)
    for i in range(out.shape[0]):
        context_len = context_lens[i]
        start = max(0, context_len - window) if window > 0 else 0
        out[i] = _ZERO
        for at in range(0, state.size, 16):
            state[at : at + 8], state[at + 8 : at + 16] = _MINUS_INFINITY, _ZERO
        for tile_start in range(start, context_len, tile):
            count = min(tile, context_len - tile_start)
            find_rows(k_cache, block_tables[i], tile_start, count, k_rows)
            if not are_alike:
                find_rows(v_cache, block_tables[i], tile_start, count, v_rows)
            find_scales(k_scale, block_tables[i], tile_start, count, k_scales)
            find_scales(v_scale, block_tables[i], tile_start, count, v_scales)
            for a in range(0, num_heads, 2):
                b = min(a + 1, num_heads - 1)  # with an odd number of heads the last is computed twice
                a_q, b_q = (i * q.strides[0] + a * q.strides[1]) // 4, (i * q.strides[0] + b * q.strides[1]) // 4
                a_at, b_at = (i * num_heads + a) * head_dim, (i * num_heads + b) * head_dim
                k_head, v_head = a // group * k_stride, a // group * v_stride
                a_scales, b_scales = a // group * tile, b // group * tile
                if group % 2 == 0:
                    attend_tile(
                        q, a_q, b_q, k_cache, k_head, 0, k_rows, v_cache, v_head, 0, v_rows, count, head_dim, scale,
                        k_scales, v_scales, a_scales, b_scales, p, state, 8 * a, out, a_at, b_at,
                    )  # fmt: skip
                else:
                    step = b // group - a // group
                    attend_tile(
                        q, a_q, b_q, k_cache, k_head, step * k_stride, k_rows, v_cache, v_head, step * v_stride, v_rows,
                        count, head_dim, scale, k_scales, v_scales, a_scales, b_scales, p, state, 8 * a, out, a_at,
                        b_at,
                    )  # fmt: skip
        if context_len > 0:
            for a in range(0, num_heads, 2):
                sums = state[8 * a + 8 : 8 * a + 16]
                a_sum, b_sum = sums[0] + sums[1] + sums[2] + sums[3], sums[4] + sums[5] + sums[6] + sums[7]
                a_at, b_at = (i * num_heads + a) * head_dim, (i * num_heads + min(a + 1, num_heads - 1)) * head_dim
                scale_rows(out, a_at, b_at, head_dim, _ONE / a_sum, _ONE / b_sum)


@njit(**OPTIONS)
def find_fault(block_tables, context_lens, num_blocks, block_size):
    """The first sequence whose length exceeds its table, or that has a block outside the cache.

    `decode` would read outside the cache. Arguments as there, and the caches' number of blocks and block size.

    Returns the sequence's index, and the wrong length or block; −1 and 0 if there is none.
    """
    room = block_tables.shape[1] * block_size
    for i in range(context_lens.size):
        if context_lens[i] < 0 or context_lens[i] > room:
            return i, context_lens[i]
        for j in range(-(-context_lens[i] // block_size)):
            if block_tables[i, j] < 0 or block_tables[i, j] >= num_blocks:
                return i, block_tables[i, j]
    return -1, 0


def signatures(number: str) -> dict[Any, str]:
    """The signature that each kernel is compiled for, by the caches' dtype: "float32", "int8" or "uint8"."""
    cache, scale = f"{number}[:, :, :, :]", "none" if number == "float32" else "float32[:, :, ::1]"
    return {
        find_fault: "UniTuple(int64, 2)(int64[:, :], int64[:], int64, int64)",
        decode: f"void(float32[:, :, :], {cache}, {cache}, {scale}, {scale}, int64[:, :], int64[:], float32, int64, "
        "float32[:, :, ::1])",
    }
