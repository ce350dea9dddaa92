# Phase 5, continuous-batching: your file. It stands in for minicache.cache.selective.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
"""Selective batching: one pass of the model over many sequences, each with a dense cache of its own.

Phase 5 builds it. A linear layer does not care whose tokens its rows are, so all new tokens of all sequences go through
it side by side, without padding. Attention does care: it goes sequence by sequence (Yu et al., OSDI 2022, §3).
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

    The new tokens of all sequences lie one sequence after the other in a batch of 1, N in all. A model that takes
    `[1, N]` token ids and a cache runs on it as it is: `model(token_ids[None], step)`. Its linear layers see N rows. In
    `append` and `attend` the rows are split, each sequence's go to its own cache, and what comes back is joined again.

    A step serves one pass. If the pass is given up, the caches that were appended to are in the middle of theirs:
    `reset()` them.

    Args:
        caches: one for each of B ≥ 1 sequences, of batch size 1, each between two passes. They may have different
            lengths and room, and are alike in everything else.
        num_new_tokens: how many tokens each sequence brings, ≥ 1 each.

    Raises:
        TypeError: a count is not an int, or a cache has another dtype than the first.
        ValueError: no sequences; not one count for each cache; a count below 1; a cache given twice, of another batch
            size than 1, or with other layers, heads, head size or device than the first.
        CacheOverflowError: a cache has no room for its tokens. Nothing was written to any.
    """

    def __init__(self, caches: Sequence[KVCache], num_new_tokens: Sequence[int]) -> None:
        raise NotImplementedError(
            "phase 5, task 5: Selective batching; read docs/en/phase-05-continuous-batching/lab/03-the-step-and-the-sampler.md"
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """Where the step's tokens stand, each in its own sequence.

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
            layer: 0 … num_layers − 1; must be the layer whose turn it is.
            k: keys `[1, H_kv, N, d]`, in the caches' dtype and on their device.
            v: values, the same shape.

        Raises:
            IndexError: there is no such layer (negative ones included).
            TypeError: `k` or `v` is not a tensor, or has another dtype than the caches.
            ValueError: another shape, device or number of tokens; the layer is out of turn; or the last layer has had
                its rows, and the step is over. Nothing was written to any cache.
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
    """Raise what `SelectiveStep` raises, unless one step can serve these caches, each with room for its new tokens."""
    if not caches or len(caches) != len(counts):
        raise ValueError(f"one count for each cache, at least one; got {len(caches)} and {len(counts)}")
    for count in counts:
        require_count("num_new_tokens", count)
    if len(set(map(id, caches))) < len(caches):
        raise ValueError("a cache is given twice: a sequence brings its new tokens together")
    kind = _kind(caches[0])
    for cache, count in zip(caches, counts, strict=True):
        if cache.batch_size != 1:
            raise ValueError(f"a cache holds {cache.batch_size} sequences: give each sequence a cache of its own")
        if _kind(cache) != kind:
            raise ValueError(f"caches of one step are alike; got layers, kv heads, head size {kind} and {_kind(cache)}")
        if cache.dtype != caches[0].dtype:
            raise TypeError(f"caches of one step have one dtype; got {caches[0].dtype} and {cache.dtype}")
        if cache.num_tokens + count > cache.max_seq_len:
            raise CacheOverflowError(
                f"{cache.num_tokens} tokens + {count} new > max_seq_len {cache.max_seq_len}: reserve a longer cache"
            )


def _kind(cache: KVCache) -> tuple[int, int, int, torch.device]:
    return cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.device
