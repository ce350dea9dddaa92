"""Selective batching against each sequence alone, and against a step over blocks."""

from __future__ import annotations

import pytest
import torch

from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache, PagedStorage, RaggedStep
from minicache.cache.selective import SelectiveStep
from minicache.errors import CacheOverflowError
from minicache.memory.blocks import BlockPool, BlockTable


def caches_of(model, rows, cache_class=KVCache, **options):
    config = model.config
    return [
        cache_class(config.num_layers, 1, config.num_kv_heads, num_rows, config.head_dim, **options)
        for num_rows in rows
    ]


def test_dense_and_paged_steps_give_the_same_logits(model, prompts):
    config = model.config
    pool = BlockPool(64, 3)
    storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
    tables = [BlockTable(pool) for _ in prompts]
    caches = caches_of(model, [40] * len(prompts))
    new = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        for _ in range(4):
            counts = [len(ids) for ids in new]
            token_ids = torch.tensor([[token for ids in new for token in ids]])
            dense = model(token_ids, SelectiveStep(caches, counts))
            paged = model(token_ids, RaggedStep(storage, tables, counts))
            torch.testing.assert_close(dense, paged, atol=1e-4, rtol=0)
            last = torch.tensor(counts).cumsum(0) - 1
            new = [[token] for token in dense[0, last].argmax(dim=-1).tolist()]
    assert [cache.num_tokens for cache in caches] == [table.num_tokens for table in tables]


def test_it_serves_paged_caches_too(model, prompts):
    storage = caches_of(model, [60], PagedKVCache, block_size=4)[0].storage
    caches = caches_of(model, [9] * 3, PagedKVCache, storage=storage)
    token_ids = torch.tensor([[token for prompt in prompts[:3] for token in prompt[:2]]])
    counts = [len(prompt[:2]) for prompt in prompts[:3]]
    with torch.inference_mode():
        got = model(token_ids, SelectiveStep(caches, counts))
        expected = torch.cat([model(torch.tensor([prompt[:2]])) for prompt in prompts[:3]], dim=1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_full_cache_is_refused_before_anything_is_written(model):
    caches = caches_of(model, [5, 2, 5])
    with pytest.raises(CacheOverflowError):
        SelectiveStep(caches, [1, 3, 1])
    assert [cache.num_tokens for cache in caches] == [0, 0, 0]


def test_caches_that_do_not_go_together(model):
    one, two = caches_of(model, [5, 5])
    for caches, counts in (([], []), ([one], [1, 1]), ([one, one], [1, 1]), ([one, two], [1, 0])):
        with pytest.raises(ValueError, match=r"cache|num_new_tokens"):
            SelectiveStep(caches, counts)
    with pytest.raises(ValueError, match="2 sequences"):
        SelectiveStep([KVCache(4, 2, 2, 5, 32)], [1])
    with pytest.raises(ValueError, match="must match"):
        SelectiveStep([one, KVCache(3, 1, 2, 5, 32)], [1, 1])
    with pytest.raises(TypeError, match="dtype"):
        SelectiveStep([one, KVCache(4, 1, 2, 5, 32, dtype=torch.float16)], [1, 1])
    with pytest.raises(TypeError, match="num_new_tokens"):
        SelectiveStep([one], [1.0])
