"""Paged decode attention on a CPU: the Triton kernel of `minicache.kernels.decode`, eight numbers at a time.

A tile of a sequence's tokens is attended to by all query heads of a group before the next tile is read: the first head
brings the tile's keys and values into the processor's cache, the others find them there. The softmax is online, from
tile to tile (Milakov and Gimelshein 2018; Dao et al. 2022). Nothing is gathered: a tile is a list of where rows begin.

Caches are float32 arrays `[num_blocks, block_size, H_kv, d]`, d a multiple of 8, the last axis contiguous, the others
of any strides. Nothing here checks a bound: `steps` does, before. No phase builds this module.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from minicache.kernels.cpu.vectors import (
    INLINE,
    OPTIONS,
    add,
    exp,
    first,
    fma,
    full,
    keep,
    largest,
    load,
    maximum,
    mul,
    store,
    sub,
    total,
    totals,
)

# vectors.py as compiled code knows it, sha256: 9aec3a3be4cc4c24

TILE_NUMBERS = 4096
"""Tokens of a tile, times d: 16 KiB of keys and as much of values, which stay in a core's first cache (32 or 48 KiB)
while a group's heads read them one after the other. Half and twice as many took the same time, within 10 %."""

_ZERO, _ONE, _MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)


@njit(**INLINE)
def find_rows(cache, block_table, start, count, rows):
    """Where in the cache's memory the rows of the tokens start … start + count − 1 begin, for key/value head 0.

    `rows` is filled up to a multiple of eight with the first row, which may be read.
    """
    block_stride, slot_stride = cache.strides[0] // 4, cache.strides[1] // 4
    block, slot = start // cache.shape[1], start % cache.shape[1]
    for t in range(count):
        if slot == cache.shape[1]:
            block, slot = block + 1, 0
        rows[t] = block_table[block] * block_stride + slot * slot_stride
        slot += 1
    for t in range(count, -(-count // 8) * 8):
        rows[t] = rows[0]


@njit(**INLINE)
def score(q, q_at, k_cache, head_at, rows, count, head_dim, scale, scores):
    """scores[t] = q · key t · scale, of eight keys at a time; −inf from `count` on to the multiple of eight.

    Returns the largest. NaN is not looked at: it reaches the result by way of exp.
    """
    tops = full(_MINUS_INFINITY)
    for t in range(0, count, 8):
        r0, r1, r2, r3 = rows[t] + head_at, rows[t + 1] + head_at, rows[t + 2] + head_at, rows[t + 3] + head_at
        r4, r5, r6, r7 = rows[t + 4] + head_at, rows[t + 5] + head_at, rows[t + 6] + head_at, rows[t + 7] + head_at
        s0, s1, s2, s3 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
        s4, s5, s6, s7 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
        for d in range(0, head_dim, 8):
            x = load(q, q_at + d)
            s0, s1 = fma(x, load(k_cache, r0 + d), s0), fma(x, load(k_cache, r1 + d), s1)
            s2, s3 = fma(x, load(k_cache, r2 + d), s2), fma(x, load(k_cache, r3 + d), s3)
            s4, s5 = fma(x, load(k_cache, r4 + d), s4), fma(x, load(k_cache, r5 + d), s5)
            s6, s7 = fma(x, load(k_cache, r6 + d), s6), fma(x, load(k_cache, r7 + d), s7)
        s = keep(mul(totals(s0, s1, s2, s3, s4, s5, s6, s7), full(scale)), count - t, _MINUS_INFINITY)
        store(scores, t, s)
        tops = maximum(s, tops)
    return largest(tops)


@njit(**INLINE)
def exponentiate(scores, count, row_max):
    """scores[t] becomes exp(scores[t] − row_max), and their sum is returned."""
    sums, base = full(_ZERO), full(row_max)
    for t in range(0, count, 8):
        p = exp(sub(load(scores, t), base))
        store(scores, t, p)
        sums = add(sums, p)
    return total(sums)


@njit(**INLINE)
def add_values(p, v_cache, head_at, rows, count, head_dim, acc, acc_at):
    """acc += Σ p[t] · value t, of eight values at a time."""
    whole = count // 8 * 8
    for t in range(0, whole, 8):
        r0, r1, r2, r3 = rows[t] + head_at, rows[t + 1] + head_at, rows[t + 2] + head_at, rows[t + 3] + head_at
        r4, r5, r6, r7 = rows[t + 4] + head_at, rows[t + 5] + head_at, rows[t + 6] + head_at, rows[t + 7] + head_at
        p0, p1, p2, p3 = full(p[t]), full(p[t + 1]), full(p[t + 2]), full(p[t + 3])
        p4, p5, p6, p7 = full(p[t + 4]), full(p[t + 5]), full(p[t + 6]), full(p[t + 7])
        for d in range(0, head_dim, 8):
            # Two sums: an fma must wait for the one that it adds to.
            a = fma(p0, load(v_cache, r0 + d), load(acc, acc_at + d))
            b = mul(p4, load(v_cache, r4 + d))
            a, b = fma(p1, load(v_cache, r1 + d), a), fma(p5, load(v_cache, r5 + d), b)
            a, b = fma(p2, load(v_cache, r2 + d), a), fma(p6, load(v_cache, r6 + d), b)
            a, b = fma(p3, load(v_cache, r3 + d), a), fma(p7, load(v_cache, r7 + d), b)
            store(acc, acc_at + d, add(a, b))
    for t in range(whole, count):
        for d in range(0, head_dim, 8):
            value = load(v_cache, rows[t] + head_at + d)
            store(acc, acc_at + d, fma(full(p[t]), value, load(acc, acc_at + d)))


@njit(**INLINE)
def scale_row(row, row_at, head_dim, factor):
    """row *= factor."""
    for d in range(0, head_dim, 8):
        store(row, row_at + d, mul(load(row, row_at + d), full(factor)))


@njit(**OPTIONS)
def decode(q, k_cache, v_cache, block_tables, context_lens, scale, window, out):
    """One query token per sequence over that sequence's rows, read where they lie.

    The query of sequence i stands at position context_lens[i] − 1. With a window the range begins at context_lens[i] −
    window, never below 0: what lies before is not read. A context of 0 gives zeros.

    - q: `[B, ≥ H, d]` float32, of which the first H heads are read: it may be the rows of q, k and v together.
    - k_cache: keys.
    - v_cache: values, the same shape.
    - block_tables: `[B, max_blocks]` int64, entries past the last block in use are not read.
    - context_lens: `[B]` int64.
    - scale: float32, what the scores are multiplied by.
    - window: int64, W or 0 for none.
    - out: `[B, H, d]` float32, contiguous, written.
    """
    num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
    num_heads = out.shape[1]
    group = num_heads // num_kv_heads
    tile = max(8, TILE_NUMBERS // head_dim // 8 * 8)
    k_rows, v_rows = np.empty(tile, np.int64), np.empty(tile, np.int64)
    p = np.empty(tile, np.float32)
    row_max, row_sum = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
    for i in range(out.shape[0]):
        context_len = context_lens[i]
        start = max(0, context_len - window) if window > 0 else 0
        row_max[:], row_sum[:], out[i] = _MINUS_INFINITY, _ZERO, _ZERO
        for tile_start in range(start, context_len, tile):
            count = min(tile, context_len - tile_start)
            find_rows(k_cache, block_tables[i], tile_start, count, k_rows)
            find_rows(v_cache, block_tables[i], tile_start, count, v_rows)
            for h in range(num_heads):
                kv_head = h // group
                k_head, v_head = kv_head * k_cache.strides[2] // 4, kv_head * v_cache.strides[2] // 4
                q_at, out_at = (i * q.strides[0] + h * q.strides[1]) // 4, (i * num_heads + h) * head_dim
                tile_max = score(q, q_at, k_cache, k_head, k_rows, count, head_dim, scale, p)
                new_max = max(row_max[h], tile_max)
                tile_sum = exponentiate(p, count, new_max)
                rescale = first(exp(full(row_max[h] - new_max)))
                row_sum[h] = row_sum[h] * rescale + tile_sum
                row_max[h] = new_max
                scale_row(out, out_at, head_dim, rescale)
                add_values(p, v_cache, v_head, v_rows, count, head_dim, out, out_at)
        if context_len > 0:
            for h in range(num_heads):
                scale_row(out, (i * num_heads + h) * head_dim, head_dim, _ONE / row_sum[h])


@njit(**OPTIONS)
def find_fault(block_tables, context_lens, num_blocks, block_size):
    """The first sequence whose length does not fit its table, or that has a block that is not in the cache.

    `decode` would read whatever lies there. Arguments as there, and of the caches the number and the size of blocks.

    Returns the sequence's index, and the length or the block that is wrong; −1 and 0 if there is none.
    """
    room = block_tables.shape[1] * block_size
    for i in range(context_lens.size):
        if context_lens[i] < 0 or context_lens[i] > room:
            return i, context_lens[i]
        for j in range(-(-context_lens[i] // block_size)):
            if block_tables[i, j] < 0 or block_tables[i, j] >= num_blocks:
                return i, block_tables[i, j]
    return -1, 0


SIGNATURES = {
    find_fault: "UniTuple(int64, 2)(int64[:, :], int64[:], int64, int64)",
    decode: "void(float32[:, :, :], float32[:, :, :, :], float32[:, :, :, :], int64[:, :], int64[:], float32, int64, "
    "float32[:, :, ::1])",
}
"""What the kernel is compiled for, and takes."""
