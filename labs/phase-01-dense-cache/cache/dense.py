# Phase 1, dense-cache: your file. It stands in for minicache.cache.dense.
# Write what raises NotImplementedError. `minicache grade 1` grades it, `minicache hint 1.K` helps with task K.
#
# Predict, before you write task 1.3. `minicache grade` checks it, without points.
# A cache of four layers holds 6 tokens. In the next pass, with T = 3, layers 0 and 1 have appended. How many entries
# has read(1)?
# 1.3a =
# What is num_tokens at that moment?
# 1.3b =
# Then layers 2 and 3 append too. What is the first number of positions(2)?
# 1.3c =
"""The dense KV cache: one tensor, one cursor.

Phase 1 builds it. The cache reserves `max_seq_len` slots for every sequence at the start, and a cursor counts how many
are in use. Nothing is ever moved or reallocated; phases 2 and 3 show what that costs in memory. `PagedKVCache` is a
subclass, so callers use only `append`, `read`, `attend`, `positions` and `reset`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minicache.cache.attention import causal_attention
from minicache.errors import CacheOverflowError


class KVCache:
    """Keys and values of all tokens so far, for every layer of one batch.

    All sequences of the batch have the same length, `num_tokens`. The reference keeps one tensor for keys and one for
    values, both laid out as

        [num_layers, batch_size, num_kv_heads, max_seq_len, head_dim]

    so the KV entries of one head of one sequence are contiguous in memory: decode attention streams through them.
    This is a choice of the reference and not part of the contract: the tests check the public behaviour only.

    A forward pass appends to layer 0, 1, … num_layers − 1, in this order and with the same T in each. `num_tokens`
    moves when the last layer has appended; until then `read(layer)` already returns the new entries of the layers that
    have them.

    Args:
        num_layers: attention layers, ≥ 1.
        batch_size: sequences, ≥ 1.
        num_kv_heads: key/value heads (H_kv), ≥ 1.
        max_seq_len: slots to reserve per sequence, one per token (S_max), ≥ 1.
        head_dim: size of one head (d), ≥ 1.
        dtype: a floating-point `torch.dtype` to store.
        device: where to store it.

    Attributes:
        num_layers, batch_size, num_kv_heads, max_seq_len, head_dim: as given. An engine reads them (phase 5).
        dtype: as given.
        device: the `torch.device` of what is stored.

    Raises:
        TypeError: a size is not an int (`True` is not one), or `dtype` is not a floating-point `torch.dtype`.
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_seq_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        raise NotImplementedError(
            "phase 1, task 2: Reserve the memory; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds, per sequence: the cursor. 0 for a new cache."""
        raise NotImplementedError(
            "phase 1, task 3: Append and read; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    @property
    def nbytes(self) -> int:
        """Bytes reserved: keys and values, all layers, `max_seq_len` slots of every sequence."""
        raise NotImplementedError(
            "phase 1, task 2: Reserve the memory; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    @property
    def nbytes_used(self) -> int:
        """The part of `nbytes` that holds tokens: `num_tokens` slots instead of `max_seq_len`."""
        raise NotImplementedError(
            "phase 1, task 3: Append and read; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the next tokens in their sequences, for rotary embeddings.

        Args:
            num_new_tokens: T, how many tokens come next, ≥ 0.

        Returns:
            `[T]` int64 on the cache's device: num_tokens, num_tokens + 1, …

        Raises:
            ValueError: T is negative.
        """
        raise NotImplementedError(
            "phase 1, task 3: Append and read; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of T new tokens in `layer`.

        Values are copied; no gradient flows through a cache. A call that raises has written nothing and moved nothing.

        Args:
            layer: 0 … num_layers − 1; must be the next layer of the forward pass (see the class).
            k: keys `[batch_size, num_kv_heads, T, head_dim]`, T ≥ 1, in the cache's dtype and on its device.
            v: values, the same shape.

        Raises:
            IndexError: there is no such layer (negative ones included).
            TypeError: `k` or `v` is not a tensor, or has another dtype than the cache.
            ValueError: another shape or device; T = 0; T differs from the forward pass's earlier layers; or the layer
                is out of order.
            CacheOverflowError: num_tokens + T > max_seq_len.
        """
        raise NotImplementedError(
            "phase 1, task 3: Append and read; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every token that `layer` holds.

        Between forward passes S = num_tokens. During one, a layer that has appended returns its new entries too. The
        tensors are read-only, and valid until the next `append` or `reset`.

        Args:
            layer: 0 … num_layers − 1.

        Returns:
            `(k, v)`, each `[batch_size, num_kv_heads, S, head_dim]`, oldest token first. The reference
            returns views into the cache; a copy is just as valid. Callers must not write to either.

        Raises:
            IndexError: there is no such layer (negative ones included).
        """
        raise NotImplementedError(
            "phase 1, task 3: Append and read; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the newest T tokens over everything that `layer` holds.

        Call it after `append(layer, …)`: the queries belong to the last T tokens of `read(layer)`.

        Args:
            layer: 0 … num_layers − 1.
            q: queries `[batch_size, num_heads, T, head_dim]`, T ≥ 1; num_heads is a multiple of num_kv_heads.
            window: W ≥ 1, the layer's sliding window: a token sees itself and the W − 1 before it. None: all before it.

        Returns:
            `[batch_size, num_heads, T, head_dim]`.

        Raises:
            IndexError: there is no such layer.
            TypeError: `window` is not an int.
            ValueError: shapes do not match, T is more than the layer holds, or `window` is below 1.
        """
        raise NotImplementedError(
            "phase 1, task 6: Attend through the cache; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )

    def reset(self) -> None:
        """Forget every token and keep the memory: the next append writes position 0 again.

        Also ends an unfinished forward pass, so the cache can be used again after an error in the model.
        """
        raise NotImplementedError(
            "phase 1, task 5: Start again; read docs/en/phase-01-dense-cache/lab/01-the-cache.md"
        )
