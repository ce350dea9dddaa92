"""Sliding windows: attention in which a token sees itself and the W − 1 tokens before it, and none further back.

Mistral 7B has one in every layer (Jiang et al. 2023, §2), some Qwen models in a part of their layers. A model's layer
knows its window, and asks for it here, beside the cache: `append` and `attend` stay what you wrote in phases 1, 3 and
5. Rows that no window reaches any more stay in the cache. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache import kernels
from minicache.cache.attention import causal_attention
from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.cache.selective import SelectiveStep
from minicache.memory.blocks import BlockTable


class WindowedRaggedStep(RaggedStep):
    """A `RaggedStep` that can be asked for a window. It is made alike, and all else is as there."""

    def __init__(self, storage: PagedStorage, tables: Sequence[BlockTable], num_new_tokens: Sequence[int]) -> None:
        super().__init__(storage, tables, num_new_tokens)
        # Names that whoever wrote `RaggedStep` will not have used.
        self._window_storage = storage
        self._window_longest = max(table.num_tokens for table in tables)
        self._window_is_decode = max(num_new_tokens) == 1

    def attend_window(self, layer: int, q: Tensor, window: int) -> Tensor:
        """As `attend`, but that each token sees itself and the `window` − 1 tokens before it.

        Args:
            layer: as `attend`.
            q: as `attend`, `[1, num_heads, N, d]`.
            window: W ≥ 1.

        Returns:
            `[1, num_heads, N, d]`.
        """
        if self._window_longest <= window:  # nobody has anything further back, and without the option a CPU is faster
            return self.attend(layer, q)
        rows, storage = q[0].transpose(0, 1), self._window_storage
        paged = (storage.k(layer), storage.v(layer), self.block_tables, self.context_lens)
        if self._window_is_decode:
            out = kernels.paged_decode_attention(rows, *paged, sliding_window=window)
        else:
            out = kernels.paged_prefill_attention(rows, *paged, self.query_start_loc, sliding_window=window)
        return out.transpose(0, 1)[None]


class WindowedSelectiveStep(SelectiveStep):
    """A `SelectiveStep` that can be asked for a window. It is made alike, and all else is as there."""

    def __init__(self, caches: Sequence[KVCache], num_new_tokens: Sequence[int]) -> None:
        super().__init__(caches, num_new_tokens)
        self._window_parts = list(zip(caches, num_new_tokens, strict=True))

    def attend_window(self, layer: int, q: Tensor, window: int) -> Tensor:
        """As `WindowedRaggedStep.attend_window`, each sequence over its own cache."""
        parts = torch.split(q, [count for _, count in self._window_parts], dim=2)
        pairs = zip(self._window_parts, parts, strict=True)
        return torch.cat([window_attention(its_q, *cache.read(layer), window) for (cache, _), its_q in pairs], dim=2)


def attend_window(cache: object, layer: int, q: Tensor, window: int) -> Tensor:
    """Causal attention of the newest T tokens over `layer`, each seeing itself and the `window` − 1 tokens before it.

    Args:
        cache: a `KVCache`, a `PagedKVCache`, a `WindowedRaggedStep` or a `WindowedSelectiveStep`. It has been appended
            to.
        layer: 0 … num_layers − 1.
        q: queries `[B, H, T, d]`.
        window: W ≥ 1.

    Returns:
        `[B, H, T, d]`.

    Raises:
        TypeError: the cache is none of these.
        Exception: what the cache raises.
    """
    if isinstance(cache, WindowedRaggedStep | WindowedSelectiveStep):
        return cache.attend_window(layer, q, window)
    if isinstance(cache, KVCache):
        return window_attention(q, *cache.read(layer), window)
    raise TypeError(
        f"layer {layer} has a sliding window of {window} tokens, and {type(cache).__name__} knows none: "
        "give the model a KVCache, a PagedKVCache, a WindowedRaggedStep or a WindowedSelectiveStep"
    )


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """`minicache.cache.attention.causal_attention` through a window: query t sees keys S − T + t − W + 1 … S − T + t.

    Args:
        q: queries of the newest T tokens, `[B, H, T, d]`.
        k: keys of all S tokens, `[B, H_kv, S, d]`.
        v: values, the same shape.
        window: W ≥ 1.

    Returns:
        `[B, H, T, d]`.

    Raises:
        ValueError: what `causal_attention` refuses.
    """
    batch, num_heads, num_new, head_dim = q.shape
    reach = num_new + window - 1  # what the first query sees, up to the last: nobody needs more
    k, v = k[:, :, -reach:], v[:, :, -reach:]
    num_tokens = k.shape[2]
    if num_new == 1 or num_tokens <= window:
        return causal_attention(q, k, v)
    num_kv_heads = k.shape[1]
    visible = torch.ones(num_new, num_tokens, dtype=torch.bool, device=q.device)
    visible = visible.tril(num_tokens - num_new).triu(num_tokens - num_new - window + 1)
    # As in `causal_attention`: a group's query heads are one head's query rows.
    rows = q.reshape(batch, num_kv_heads, -1, head_dim)
    mask = visible.repeat(num_heads // num_kv_heads, 1)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).reshape(q.shape)
