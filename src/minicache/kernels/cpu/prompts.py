"""Attention of a prompt's tokens on a CPU: products of tiles, as linear layers are (`minicache.kernels.cpu.products`).

PANEL queries of a head lie side by side. Their scores are a product whose rows are keys, so a softmax goes over the
rows, PANEL queries at a time; and what they attend to is a product whose rows are the values' dimensions, with the
weights of the softmax as its panel. A key/value head is gathered from its blocks once for all of its query heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from minicache.kernels.cpu.products import PANEL, STRIP, STRIPS, TILE_ROWS, tile
from minicache.kernels.cpu.vectors import INLINE, OPTIONS, add, exp, full, load, maximum, mul, store, sub

# vectors.py as compiled code knows it, sha256: 60a8d9aca10b4be7
# products.py as compiled code knows it, sha256: 66637c067bc42ab5

_ZERO, _INFINITY = np.float32(0), np.float32(np.inf)
_LANES = 8


@njit(**INLINE)
def _gather(cache, scale, block_table, head, first, count, rows):
    """The rows of a key/value head from token `first` on, `rows` `[≥ count, d]`, dequantized where there are scales."""
    block_size, head_dim = cache.shape[1], cache.shape[3]
    stride = np.int64(cache.strides[1] // cache.itemsize)
    for token in range(count):
        block, offset = block_table[(first + token) // block_size], (first + token) % block_size
        at = (block * cache.strides[0] + head * cache.strides[2]) // cache.itemsize + offset * stride
        for i in range(0, head_dim, _LANES):
            numbers = load(cache, at + i)
            if scale is not None:
                numbers = mul(numbers, full(scale[block, offset, head]))
            store(rows, token * head_dim + i, numbers)


@njit(**OPTIONS)
def attend_prompt(q, k_cache, v_cache, k_scale, v_scale, block_table, context_len, scale, window, out):
    """Causal attention of a sequence's newest tokens over all its keys and values.

    Args:
        q: `[n, ≥ H, d]` float32, the first H heads are the queries of the last n tokens.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`: float32, int8, or float8_e4m3fn as uint8.
        v_cache: likewise.
        k_scale: `[num_blocks, block_size, H_kv]` for one byte per number, else None.
        v_scale: likewise.
        block_table: `[max_blocks]`, the sequence's blocks in order.
        context_len: S ≥ n, the sequence's tokens with the new ones.
        scale: what the scores are multiplied by.
        window: a query sees itself and the window − 1 tokens before it; 0 is no limit.
        out: `[n, H, d]`, contiguous.
    """
    num_new, num_heads, head_dim = out.shape
    group = num_heads // k_cache.shape[2]
    first = max(0, context_len - num_new + 1 - window) if window else 0  # before it, no query sees anything
    context_len -= first
    gathered = np.empty((context_len, head_dim), np.float32)
    values = np.empty((context_len, head_dim), np.float32)
    keys = np.empty((head_dim, context_len), np.float32)
    queries = np.empty((head_dim, PANEL), np.float32)
    weights = np.empty((context_len, PANEL), np.float32)
    attended = np.empty((head_dim, PANEL), np.float32)
    sums = np.empty(PANEL, np.float32)
    for head in range(num_heads):
        if head % group == 0:
            _gather(k_cache, k_scale, block_table, head // group, first, context_len, gathered)
            _gather(v_cache, v_scale, block_table, head // group, first, context_len, values)
            for token in range(context_len):
                for i in range(head_dim):
                    keys[i, token] = gathered[token, i]
        for start in range(0, num_new, PANEL):
            count = min(PANEL, num_new - start)
            for lane in range(PANEL):  # beyond the last query: another one's, and not kept
                query = min(start + lane, num_new - 1)
                for i in range(head_dim):
                    queries[i, lane] = q[query, head, i] * scale
            seen = context_len - num_new + start + 1  # by the first of the queries
            low = max(0, seen - window) if window else 0
            high = seen + count - 1
            for key in range(low, high, TILE_ROWS):
                num_rows, at = min(TILE_ROWS, high - key), key * PANEL
                for strip in range(STRIPS):
                    to = at + strip * STRIP
                    tile(
                        num_rows, strip, keys, key, context_len, head_dim, queries, 0, 0, None, None, weights, to, PANEL
                    )
            _hide(weights, low, high, seen, window, count)
            _softmax(weights, low, high, sums)
            for i in range(0, head_dim, TILE_ROWS):
                num_rows, at = min(TILE_ROWS, head_dim - i), low * head_dim + i
                for strip in range(STRIPS):
                    to = i * PANEL + strip * STRIP
                    depth = high - low
                    tile(num_rows, strip, values, at, head_dim, depth, weights, low, 0, None, None, attended, to, PANEL)
            for lane in range(count):
                for i in range(head_dim):
                    out[start + lane, head, i] = attended[i, lane] / sums[lane]


@njit(**INLINE)
def _hide(weights, low, high, seen, window, count):
    """Scores `[≥ high, PANEL]` of keys that a query does not see become −∞; query `lane` sees `seen + lane` keys."""
    for key in range(seen, high):
        for lane in range(min(PANEL, key - seen + 1)):
            weights[key, lane] = -_INFINITY
    if window:
        for key in range(low, min(high, seen + count - window)):
            for lane in range(max(0, key - (seen - window) + 1), PANEL):
                weights[key, lane] = -_INFINITY


@njit(**INLINE)
def _softmax(weights, low, high, sums):
    """In place: the exponentials of scores less the largest of their query; and the sums of each query's."""
    for at in range(0, PANEL, _LANES):
        top = load(weights, low * PANEL + at)
        for key in range(low + 1, high):
            top = maximum(load(weights, key * PANEL + at), top)
        total = full(_ZERO)
        for key in range(low, high):
            weight = exp(sub(load(weights, key * PANEL + at), top))
            store(weights, key * PANEL + at, weight)
            total = add(total, weight)
        store(sums, at, total)


def signatures(number: str) -> dict[Any, str]:
    """The signature that the kernel is compiled for, by the caches' dtype: "float32", "int8" or "uint8"."""
    cache, scale = f"{number}[:, :, :, :]", "none" if number == "float32" else "float32[:, :, ::1]"
    return {
        attend_prompt: f"void(float32[:, :, :], {cache}, {cache}, {scale}, {scale}, int64[:], int64, float32, int64, "
        "float32[:, :, ::1])",
    }
