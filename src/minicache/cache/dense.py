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
        self._check_sizes(
            num_layers=num_layers,
            batch_size=batch_size,
            num_kv_heads=num_kv_heads,
            max_seq_len=max_seq_len,
            head_dim=head_dim,
        )
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float16; got {dtype!r}")
        self.num_layers = num_layers
        self.batch_size = batch_size
        self.num_kv_heads = num_kv_heads
        self.max_seq_len = max_seq_len
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.device = self._k.device
        self._num_tokens = 0
        self._next_layer = 0  # the next layer to append; 0 between forward passes
        self._step_tokens = 0  # T of the current forward pass

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds, per sequence: the cursor. 0 for a new cache."""
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes reserved: keys and values, all layers, `max_seq_len` slots of every sequence."""
        return self._nbytes_of(self.max_seq_len)

    @property
    def nbytes_used(self) -> int:
        """The part of `nbytes` that holds tokens: `num_tokens` slots instead of `max_seq_len`."""
        return self._nbytes_of(self.num_tokens)

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the next tokens in their sequences, for rotary embeddings.

        Args:
            num_new_tokens: T, how many tokens come next, ≥ 0.

        Returns:
            `[T]` int64 on the cache's device: num_tokens, num_tokens + 1, …

        Raises:
            ValueError: T is negative.
        """
        if num_new_tokens < 0:
            raise ValueError(f"cannot place {num_new_tokens} tokens: give a count of 0 or more")
        return torch.arange(self.num_tokens, self.num_tokens + num_new_tokens, device=self.device)

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
        self._check_layer(layer)
        self._check_rows(layer, k, v)
        num_new, start = k.shape[2], self._num_tokens
        if start + num_new > self.max_seq_len:
            raise CacheOverflowError(
                f"{start} tokens + {num_new} new > max_seq_len {self.max_seq_len}: "
                f"reserve a longer cache, append less, or reset()"
            )
        self._k[layer, :, :, start : start + num_new] = k.detach()
        self._v[layer, :, :, start : start + num_new] = v.detach()
        self._step_tokens = num_new
        self._next_layer += 1
        if self._next_layer == self.num_layers:
            self._num_tokens += num_new
            self._next_layer = 0

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
        self._check_layer(layer)
        num_held = self._num_tokens + (self._step_tokens if layer < self._next_layer else 0)
        return self._k[layer, :, :, :num_held], self._v[layer, :, :, :num_held]

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
        k, v = self.read(layer)
        return causal_attention(q, k, v, window=window)

    def reset(self) -> None:
        """Forget every token and keep the memory: the next append writes position 0 again.

        Also ends an unfinished forward pass, so the cache can be used again after an error in the model.
        """
        self._num_tokens = 0
        self._next_layer = 0
        self._step_tokens = 0

    def _nbytes_of(self, num_slots: int) -> int:
        """Bytes of `num_slots` slots of every sequence: keys and values, all layers."""
        entry_nbytes = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * self.batch_size * num_slots * entry_nbytes

    def _check_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{name} must be an int; got {size!r}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"no layer {layer}: this cache has layers 0 … {self.num_layers - 1}")

    def _check_rows(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Raise unless `k` and `v` can be the next KV entries of `layer`."""
        for name, rows in (("k", k), ("v", v)):
            if not isinstance(rows, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(rows).__name__}")
            fits = rows.ndim == 4 and rows.shape == (self.batch_size, self.num_kv_heads, k.shape[2], self.head_dim)
            if not fits or rows.shape[2] == 0:
                raise ValueError(
                    f"{name} must be [{self.batch_size}, {self.num_kv_heads}, T ≥ 1, {self.head_dim}], "
                    f"with one T for k and v; got {list(rows.shape)}"
                )
            if rows.dtype != self.dtype:
                raise TypeError(f"{name} is {rows.dtype}, the cache stores {self.dtype}: convert it first")
            if rows.device != self.device:
                raise ValueError(f"{name} is on {rows.device}, the cache on {self.device}: move it first")
        if layer != self._next_layer:
            raise ValueError(f"layers out of order: layer {self._next_layer} is next, not layer {layer}")
        if self._next_layer > 0 and k.shape[2] != self._step_tokens:
            raise ValueError(
                f"layers out of step: the earlier layers got {self._step_tokens} tokens, layer {layer} got {k.shape[2]}"
            )
