# Phase 5, continuous-batching: your file. It stands in for minicache.cache.selective.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
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
        raise NotImplementedError(
            "phase 5, task 5: Selective batching; read docs/en/phase-05-continuous-batching/lab/03-the-step-and-the-sampler.md"
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's tokens, each in its own sequence.

        Args:
            num_new_tokens: N, the tokens of all sequences together.

        Returns:
            `[N]` int64 on the caches' device.

        Raises:
            ValueError: another number than the step was made for.
        """
        raise NotImplementedError(
            "phase 5, task 5: Selective batching; read docs/en/phase-05-continuous-batching/lab/03-the-step-and-the-sampler.md"
        )

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
        raise NotImplementedError(
            "phase 5, task 5: Selective batching; read docs/en/phase-05-continuous-batching/lab/03-the-step-and-the-sampler.md"
        )

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
        raise NotImplementedError(
            "phase 5, task 5: Selective batching; read docs/en/phase-05-continuous-batching/lab/03-the-step-and-the-sampler.md"
        )


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
