"""Selective batching: one forward pass over many sequences, each with a separate dense cache.

Phase 5 builds it. Linear layers treat tokens separately, so the new tokens of all sequences go through them
concatenated, without padding. Attention runs sequence by sequence (Yu et al., OSDI 2022, §3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.cache.rows import LayerTurns, check_layer, check_rows
from minicache.errors import CacheOverflowError, require_count


class SelectiveStep:
    """One step of an engine over sequences that each have a `KVCache`: what `RaggedStep` is for block tables.

    The N new tokens of all sequences are concatenated in a batch of 1. A model that takes `[1, N]` token ids and a
    cache runs on it unchanged: `model(token_ids[None], step)`. Its linear layers see N rows. `append` and `attend`
    split the rows by sequence, call each sequence's cache, and concatenate the results.

    A step serves one forward pass. If the pass is given up, the caches that were appended to have an unfinished pass:
    `reset()` them.

    Args:
        caches: one for each of B ≥ 1 sequences, of batch size 1, none with an unfinished pass. They may differ in
            length and capacity only.
        num_new_tokens: the number of new tokens of each sequence, ≥ 1 each.

    Raises:
        TypeError: a count is not an int, or a cache has another dtype than the first.
        ValueError: no sequences; a different number of counts than caches; a count below 1; a cache given twice, of a
            batch size other than 1, or with other layers, heads, head size or device than the first.
        CacheOverflowError: a cache has no space for its tokens. Nothing was written to any.
    """

    def __init__(self, caches: Sequence[KVCache], num_new_tokens: Sequence[int]) -> None:
        check_caches(caches, num_new_tokens)
        self._caches = list(caches)
        self._counts = list(num_new_tokens)
        self._num_tokens = sum(self._counts)
        self._positions = torch.cat([cache.positions(count) for cache, count in zip(caches, self._counts, strict=True)])
        self._turns = LayerTurns(caches[0].num_layers)
        self._is_over = False

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's tokens, each in its own sequence.

        Args:
            num_new_tokens: N, the tokens of all sequences together.

        Returns:
            `[N]` int64 on the caches' device.

        Raises:
            ValueError: another number than the step was made for.
        """
        if num_new_tokens != self._num_tokens:
            raise ValueError(f"this step was made for {self._num_tokens} tokens, not for {num_new_tokens}")
        return self._positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the step's N tokens in `layer`, each sequence's in its own cache.

        Args:
            layer: 0 … num_layers − 1; must be the next layer.
            k: keys `[1, H_kv, N, d]`, in the caches' dtype and on their device.
            v: values, the same shape.

        Raises:
            IndexError: there is no such layer (negative ones included).
            TypeError: `k` or `v` is not a tensor, or has another dtype than the caches.
            ValueError: another shape, device or number of tokens; the layer is out of order; or the last layer has its
                rows, and the step is over. Nothing was written to any cache.
        """
        first = self._caches[0]
        check_layer(layer, first.num_layers)
        check_rows(k, v, 1, first.num_kv_heads, first.head_dim, first.dtype, first.device)
        if self._is_over:
            raise ValueError("every layer has its rows: a step serves one forward pass, so make another step")
        self.positions(k.shape[2])  # refuses any other number of tokens
        self._turns.check(layer, k.shape[2])
        parts = zip(self._caches, torch.split(k, self._counts, dim=2), torch.split(v, self._counts, dim=2), strict=True)
        for cache, its_k, its_v in parts:
            cache.append(layer, its_k, its_v)
        self._is_over = self._turns.advance(self._num_tokens)

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the step's tokens, each over its own sequence.

        Args:
            layer: 0 … num_layers − 1; it must have its rows.
            q: queries `[1, num_heads, N, d]`; num_heads is a multiple of the caches' num_kv_heads.
            window: the layer's sliding window, as each cache's `attend` takes it.

        Returns:
            `[1, num_heads, N, d]`.

        Raises:
            IndexError: there is no such layer.
            TypeError: `window` is not an int.
            ValueError: shapes do not fit, `window` is below 1, or `layer` has not been appended to.
        """
        check_layer(layer, self._caches[0].num_layers)
        if not (self._is_over or self._turns.is_ahead(layer)):
            raise ValueError(f"layer {layer} has no rows of this step yet: append them first")
        if q.ndim != 4:
            raise ValueError(f"q must be [1, H, {self._num_tokens}, d]; got {list(q.shape)}")
        self.positions(q.shape[2])
        parts = zip(self._caches, torch.split(q, self._counts, dim=2), strict=True)
        return torch.cat([cache.attend(layer, its_q, window=window) for cache, its_q in parts], dim=2)


def check_caches(caches: Sequence[KVCache], counts: Sequence[int]) -> None:
    """Raise what `SelectiveStep` raises, unless the caches fit one step and have space for their new tokens."""
    if not caches or len(caches) != len(counts):
        raise ValueError(f"one count for each cache, at least one; got {len(caches)} and {len(counts)}")
    for count in counts:
        require_count("num_new_tokens", count)
    if len(set(map(id, caches))) < len(caches):
        raise ValueError("a cache is given twice: pass each sequence once, with all its new tokens")
    kind = _kind(caches[0])
    for cache, count in zip(caches, counts, strict=True):
        if cache.batch_size != 1:
            raise ValueError(f"a cache holds {cache.batch_size} sequences: each sequence needs a separate cache")
        if _kind(cache) != kind:
            raise ValueError(
                f"caches of one step must match; got layers, KV heads, head size {kind} and {_kind(cache)}"
            )
        if cache.dtype != caches[0].dtype:
            raise TypeError(f"caches of one step must have one dtype; got {caches[0].dtype} and {cache.dtype}")
        if cache.num_tokens + count > cache.max_seq_len:
            raise CacheOverflowError(
                f"{cache.num_tokens} tokens + {count} new > max_seq_len {cache.max_seq_len}: reserve a longer cache"
            )


def _kind(cache: KVCache) -> tuple[int, int, int, torch.device]:
    return cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.device
