"""Phase 1's tests, run on a paged cache: the files are loaded unchanged, and their `KVCache` is replaced.

A test file of this phase calls `vars().update(tests_of("test_task_5_reset.py", …))` to have their tests. The fixture
`kv_cache` that comes with them replaces `KVCache` with a class for each kind of paged cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minicache.cache.paged import PagedKVCache, PagedStorage
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache_course.seeds import fresh
from minicache_course.templates import load

PHASE_1 = Path(__file__).parents[1] / "phase-01-dense-cache"


def with_blocks_of(size):
    """PagedKVCache with another default for block_size."""

    def construct(self, *args, **kwargs):
        PagedKVCache.__init__(self, *args, block_size=size, **kwargs)

    return type("PagedKVCache", (PagedKVCache,), {"__init__": construct})


def over_a_shared_storage():
    """PagedKVCache over a storage of which half is in use: its free blocks are scattered, and all slots hold NaN."""

    def construct(self, num_layers, batch_size, num_kv_heads, max_seq_len, head_dim, dtype=torch.float32):
        pool = BlockPool(2 * batch_size * blocks_for(max_seq_len, 3), 3)
        BlockTable(pool).append(pool.num_blocks * pool.block_size)
        pool.free(torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(fresh(3)))[::2].tolist())
        storage = PagedStorage(pool, num_layers, num_kv_heads, head_dim, dtype=dtype)
        for layer in range(num_layers):
            storage.k(layer).fill_(float("nan"))
            storage.v(layer).fill_(float("nan"))
        sizes = (num_layers, batch_size, num_kv_heads, max_seq_len, head_dim)
        PagedKVCache.__init__(self, *sizes, dtype=dtype, storage=storage)

    return type("PagedKVCache", (PagedKVCache,), {"__init__": construct})


OWN_STORAGE = [pytest.param(with_blocks_of(size), id=f"block_size {size}") for size in (1, 3, 16)]
SHARED_STORAGE = [pytest.param(over_a_shared_storage(), id="a shared storage, block_size 3")]


def tests_of(*files, caches):
    """The tests of phase 1's `files`, to be run on each of `caches`, as a namespace for a test file.

    Names are prefixed with the file's number, to keep tests of two files from hiding each other.
    """
    namespace = {}
    modules = [load(PHASE_1 / file) for file in files]

    @pytest.fixture(autouse=True, scope="module", params=caches)
    def kv_cache(request):
        for module in modules:
            module.KVCache = request.param

    for module in modules:
        task = module.__name__.split("_")[2]
        for name, value in vars(module).items():
            if name.startswith("test_"):
                namespace[f"test_{task}_{name.removeprefix('test_')}"] = value
    return namespace | {"kv_cache": kv_cache}
