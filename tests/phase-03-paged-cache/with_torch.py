"""Fixtures of phase 3 that need torch: phase 1's rows and attention, sequences scattered over blocks.

conftest.py imports them if torch is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minicache.cache.paged import PagedKVCache
from minicache_course.follow import following
from minicache_course.seeds import fresh
from minicache_course.templates import load

_phase_1 = load(Path(__file__).parents[1] / "phase-01-dense-cache" / "conftest.py")

_one_thread_and_a_seed = _phase_1._one_thread_and_a_seed
numbered = _phase_1.numbered
by_hand = _phase_1.by_hand


@pytest.fixture(autouse=True)
def _caches():
    """A failure shows the caches, and the calls to them."""
    with following(PagedKVCache, "__init__", "append", "fork", "truncate", "reset"):
        yield


@pytest.fixture(scope="session")
def scatter():
    """`scatter(keys, values, block_size)`: sequences stored in blocks in any order, as kernels get them.

    `keys` and `values` are lists of `[S_i, H_kv, d]`. Returns k_cache, v_cache, block_tables and context_lens. Slots
    that no sequence uses hold NaN, and the tables continue after the last block in use with invalid block ids.
    """

    def scattered(keys, values, block_size, *, order=0, ints=torch.int64):
        counts = [-(-len(rows) // block_size) for rows in keys]
        num_blocks = sum(counts) + 3
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(fresh(order))).tolist()
        caches = [torch.full((num_blocks, block_size, *rows[0].shape[1:]), float("nan")) for rows in (keys, values)]
        caches = [cache.to(keys[0].dtype) for cache in caches]
        tables = torch.full((len(keys), max(counts) + 2), 10**6, dtype=ints)
        for i, count in enumerate(counts):
            mine = [ids.pop() for _ in range(count)]
            tables[i, :count] = torch.tensor(mine, dtype=ints)
            for cache, rows in zip(caches, (keys, values), strict=True):
                for position, row in enumerate(rows[i]):
                    cache[mine[position // block_size], position % block_size] = row
        return *caches, tables, torch.tensor([len(rows) for rows in keys], dtype=ints)

    return scattered
