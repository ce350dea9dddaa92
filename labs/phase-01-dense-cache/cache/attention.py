# Phase 1, dense-cache: your file. It stands in for minicache.cache.attention.
# Write what raises NotImplementedError. `minicache grade 1` grades it, `minicache hint 1.K` helps with task K.
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
    raise NotImplementedError(
        "phase 1, task 1: Causal attention; read docs/en/phase-01-dense-cache/lab/00-attention.md"
    )


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
    raise NotImplementedError(
        "phase 1, task 7: Attention with an optional cache; read docs/en/phase-01-dense-cache/lab/02-decode.md"
    )
