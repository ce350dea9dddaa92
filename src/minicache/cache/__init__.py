"""Where keys and values lie, and how a model attends over them.

| module | owns | built in |
|---|---|---|
| `attention` | causal attention, with and without a cache | phase 1 |
| `dense` | `KVCache`: one tensor, one cursor | phase 1 |
| `paged` | `PagedStorage`, `PagedKVCache`, `RaggedStep`: blocks and block tables | phase 3 |
| `selective` | `SelectiveStep`: one step over many dense caches | phase 5 |
| `swap` | `HostStorage`: blocks copied to CPU swap space and back | phase 6 |
| `rows` | what the caches after phase 1 check about the KV entries that they are given | – |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.cache.attention import (
        attention_with_cache as attention_with_cache,
    )
    from minicache.cache.attention import (
        causal_attention as causal_attention,
    )
    from minicache.cache.dense import KVCache as KVCache
    from minicache.cache.paged import (
        PagedKVCache as PagedKVCache,
    )
    from minicache.cache.paged import (
        PagedStorage as PagedStorage,
    )
    from minicache.cache.paged import (
        RaggedStep as RaggedStep,
    )
    from minicache.cache.selective import SelectiveStep as SelectiveStep
    from minicache.cache.swap import HostStorage as HostStorage
    from minicache.cache.swap import copy_blocks as copy_blocks

__getattr__, __dir__ = lazily(
    __name__,
    attention="attention_with_cache causal_attention",
    dense="KVCache",
    paged="PagedKVCache PagedStorage RaggedStep",
    selective="SelectiveStep",
    swap="HostStorage copy_blocks",
)
