"""Paged decode attention on a CPU: the Triton kernel of `minicache.kernels.decode`, eight numbers at a time.

A tile of a sequence's tokens is read for one key/value head and attended to by each of its query heads, with the online
softmax between tiles (Milakov and Gimelshein 2018; Dao et al. 2022). Nothing is gathered: a tile is a list of where in
memory its rows begin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from minicache.kernels.cpu.vectors import (
    OPTIONS,
    add,
    exp,
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

_ZERO, _ONE, _MINUS_INFINITY = np.float32(0), np.float32(1), np.float32(-np.inf)

SIGNATURE = (
    "void(float32[:, :, :], float32[:, :, :, :], float32[:, :, :, :], int64[:, :], int64[:], float32, int64, "
    "float32[:, :, ::1])"
)


@cache
def decode_kernel(head_dim: int, group_size: int) -> Any:
    """Compile the kernel for heads of `head_dim` numbers, a multiple of 8, or load it from the disk.

    Returns:
        A function `(q, k_cache, v_cache, block_tables, context_lens, scale, window, out)` of numpy arrays:
        q `[B, ≥ H, d]` float32, of which the first H heads are read: it may be the rows of q, k and v together;
        caches `[num_blocks, block_size, H_kv, d]` float32; block_tables `[B, max_blocks]` and context_lens `[B]` int64;
        scale float32; window int, 0 for none; out `[B, H, d]` float32, contiguous, written. The last axis of each array
        is contiguous; the others may have any strides. It checks nothing: a block that is not there is read all the
        same, from wherever that is.
    """
    tile = max(8, 4096 // head_dim // 8 * 8)  # 16 KiB of keys: with them and the scores, the values stay in L1

    @njit(SIGNATURE, **OPTIONS)
    def decode(q, k_cache, v_cache, block_tables, context_lens, scale, window, out):
        block_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
        num_heads = out.shape[1]
        group = num_heads // num_kv_heads
        k_rows, v_rows = np.empty(tile, np.int64), np.empty(tile, np.int64)  # where in memory the tile's rows begin
        p = np.empty(tile, np.float32)
        top, denominator = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
        for b in range(out.shape[0]):
            context_len = context_lens[b]
            first = max(0, context_len - window) if window > 0 else 0
            top[:], denominator[:], out[b] = _MINUS_INFINITY, _ZERO, _ZERO
            for start in range(first, context_len, tile):
                count = min(tile, context_len - start)
                block, offset = start // block_size, start % block_size
                for t in range(-(-count // 8) * 8):
                    if offset == block_size:
                        block, offset = block + 1, 0
                    if t < count:
                        k_rows[t] = (block_tables[b, block] * k_cache.strides[0] + offset * k_cache.strides[1]) // 4
                        v_rows[t] = (block_tables[b, block] * v_cache.strides[0] + offset * v_cache.strides[1]) // 4
                        offset += 1
                    else:  # a tail of the last eight: any row that may be read
                        k_rows[t] = k_rows[0]
                for h in range(num_heads):
                    k_at, v_at = h // group * k_cache.strides[2] // 4, h // group * v_cache.strides[2] // 4
                    q_at, out_at = (b * q.strides[0] + h * q.strides[1]) // 4, (b * num_heads + h) * head_dim
                    # Scores of eight tokens at a time.
                    tops = full(top[h])
                    for t in range(0, count, 8):
                        r0, r1, r2, r3 = (
                            k_rows[t] + k_at,
                            k_rows[t + 1] + k_at,
                            k_rows[t + 2] + k_at,
                            k_rows[t + 3] + k_at,
                        )
                        r4, r5, r6, r7 = (
                            k_rows[t + 4] + k_at,
                            k_rows[t + 5] + k_at,
                            k_rows[t + 6] + k_at,
                            k_rows[t + 7] + k_at,
                        )
                        s0, s1, s2, s3 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
                        s4, s5, s6, s7 = full(_ZERO), full(_ZERO), full(_ZERO), full(_ZERO)
                        for d in range(0, head_dim, 8):
                            x = load(q, q_at + d)
                            s0, s1 = fma(x, load(k_cache, r0 + d), s0), fma(x, load(k_cache, r1 + d), s1)
                            s2, s3 = fma(x, load(k_cache, r2 + d), s2), fma(x, load(k_cache, r3 + d), s3)
                            s4, s5 = fma(x, load(k_cache, r4 + d), s4), fma(x, load(k_cache, r5 + d), s5)
                            s6, s7 = fma(x, load(k_cache, r6 + d), s6), fma(x, load(k_cache, r7 + d), s7)
                        s = mul(totals(s0, s1, s2, s3, s4, s5, s6, s7), full(scale))
                        s = keep(s, count - t, _MINUS_INFINITY)
                        store(p, t, s)
                        tops = maximum(s, tops)
                    new_top = largest(tops)
                    # Softmax, as far as it goes by now.
                    sums = full(_ZERO)
                    for t in range(0, count, 8):
                        e = exp(sub(load(p, t), full(new_top)))
                        store(p, t, e)
                        sums = add(sums, e)
                    alpha = exp(full(top[h] - new_top))
                    denominator[h] = denominator[h] * total(alpha) / np.float32(8) + total(sums)
                    top[h] = new_top
                    for d in range(0, head_dim, 8):
                        store(out, out_at + d, mul(load(out, out_at + d), alpha))
                    # Values, of eight tokens at a time.
                    whole = count // 8 * 8
                    for t in range(0, whole, 8):
                        r0, r1, r2, r3 = (
                            v_rows[t] + v_at,
                            v_rows[t + 1] + v_at,
                            v_rows[t + 2] + v_at,
                            v_rows[t + 3] + v_at,
                        )
                        r4, r5, r6, r7 = (
                            v_rows[t + 4] + v_at,
                            v_rows[t + 5] + v_at,
                            v_rows[t + 6] + v_at,
                            v_rows[t + 7] + v_at,
                        )
                        p0, p1, p2, p3 = full(p[t]), full(p[t + 1]), full(p[t + 2]), full(p[t + 3])
                        p4, p5, p6, p7 = full(p[t + 4]), full(p[t + 5]), full(p[t + 6]), full(p[t + 7])
                        for d in range(0, head_dim, 8):
                            a = fma(p0, load(v_cache, r0 + d), load(out, out_at + d))
                            c = mul(p4, load(v_cache, r4 + d))
                            a, c = fma(p1, load(v_cache, r1 + d), a), fma(p5, load(v_cache, r5 + d), c)
                            a, c = fma(p2, load(v_cache, r2 + d), a), fma(p6, load(v_cache, r6 + d), c)
                            a, c = fma(p3, load(v_cache, r3 + d), a), fma(p7, load(v_cache, r7 + d), c)
                            store(out, out_at + d, add(a, c))
                    for t in range(whole, count):
                        for d in range(0, head_dim, 8):
                            a = fma(full(p[t]), load(v_cache, v_rows[t] + v_at + d), load(out, out_at + d))
                            store(out, out_at + d, a)
            if context_len > 0:
                for h in range(num_heads):
                    for d in range(0, head_dim, 8):
                        at = (b * num_heads + h) * head_dim + d
                        store(out, at, mul(load(out, at), full(_ONE / denominator[h])))

    return decode
