"""Causal attention over the keys and values of all tokens so far.

Phase 1 builds it. *T* new tokens attend to *S* ≥ *T* tokens, and the new ones are the last *T* of the *S*. Without a
cache S = T; with one, T is 1 in every decode step while S grows.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache.errors import require_count

_QUERY_TILE = 256
"""Queries per tile. A mask for all T queries at once would take T² entries, gigabytes for a long prompt."""


class Cache(Protocol):
    """What attention needs from a KV cache. `minicache.cache.dense.KVCache` is one."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store `k`, `v` `[B, H_kv, T, d]` as the newest T tokens of `layer`."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of `q` `[B, H, T, d]` over everything that `layer` holds, `[B, H, T, d]`."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """Causal softmax attention of the last T positions over all S positions.

    Query t has position S − T + t and sees the positions 0 … S − T + t; with a sliding window of W only the
    last W of these, itself included (Jiang et al. 2023, §2). Scores are scaled by 1 / √d (Vaswani et al. 2017, §3.2.1).
    With fewer key/value heads than query heads, query head h reads key/value head h // (H / H_kv) (grouped-query
    attention, Ainslie et al. 2023).

    Args:
        q: queries of the newest T tokens, `[B, H, T, d]`, T ≥ 1.
        k: keys of all S tokens, `[B, H_kv, S, d]`, with H a multiple of H_kv and S ≥ T.
        v: values of all S tokens, the shape of `k`.
        window: W ≥ 1, the most positions that a query sees. None: all of them.

    Returns:
        `[B, H, T, d]`, the dtype of `q`.

    Raises:
        TypeError: `window` is not an int.
        ValueError: the shapes do not match: not four dimensions, different batch or head size, H not a multiple of
            H_kv, `v` not of the shape of `k`, T = 0 or S < T; or `window` is below 1.
    """
    _check_attention_shapes(q, k, v)
    if window is not None:
        require_count("window", window)
    out = []
    end = k.shape[2] - q.shape[2]  # the positions before this tile's first query
    for queries in torch.split(q, _QUERY_TILE, dim=2):
        start = 0 if window is None else max(0, end - window + 1)
        end += queries.shape[2]
        out.append(_attend(queries, k[:, :, start:end], v[:, :, start:end], window))
    return torch.cat(out, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """`causal_attention` of one tile of queries, over the positions that the tile sees."""
    batch, num_heads, num_new, head_dim = q.shape
    num_kv_heads, num_tokens = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    # A group's query heads read the same keys. As extra query rows they need no copy of k and v.
    rows = q.reshape(batch, num_kv_heads, group * num_new, head_dim)
    visible = None
    if num_new > 1:  # one new token sees everything, and an absent mask is the fast path
        visible = torch.ones(num_new, num_tokens, dtype=torch.bool, device=q.device)
        visible = visible.tril(diagonal=num_tokens - num_new)
        if window is not None:
            visible = visible.triu(diagonal=num_tokens - num_new - window + 1)
        visible = visible.repeat(group, 1)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible)
    return out.reshape(batch, num_heads, num_new, head_dim)


def attention_with_cache(q: Tensor, k: Tensor, v: Tensor, layer: int, cache: Cache | None = None) -> Tensor:
    """Causal attention of T new tokens, over themselves and over what the cache already holds.

    One model serves both cases: with `cache=None` the T tokens attend among themselves; with a cache, their keys and
    values are appended to `layer` first, and the cache attends over everything that the layer holds.

    Args:
        q: queries of the T new tokens, `[B, H, T, d]`.
        k: keys of the T new tokens, `[B, H_kv, T, d]`.
        v: values of the T new tokens, `[B, H_kv, T, d]`.
        layer: the calling layer's index, from 0.
        cache: the cache to use, or None.

    Returns:
        `[B, H, T, d]`.

    Raises:
        ValueError: without a cache, what `causal_attention` refuses. It accepts more keys than queries, S > T.
        Exception: with a cache, whatever `append` or `attend` raises propagates: CacheOverflowError, ValueError,
            IndexError and TypeError from a `KVCache`. After an error in `append`, `attend` is not called.
    """
    if cache is None:
        return causal_attention(q, k, v)
    cache.append(layer, k, v)
    return cache.attend(layer, q)


def _check_attention_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q `[B, H, T, d]` can attend over k and v `[B, H_kv, S, d]`."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q is [B, H, T, d] and k [B, H_kv, S, d]; got {list(q.shape)} and {list(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"k and v have one shape; got k {list(k.shape)} and v {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k share batch and head_dim; got q {list(q.shape)} and k {list(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly")
    if not q.shape[2]:
        raise ValueError("attention is computed for at least one new token; got 0")
    if k.shape[2] < q.shape[2]:
        raise ValueError(f"{q.shape[2]} new tokens cannot be the last of {k.shape[2]}: append them before attending")
