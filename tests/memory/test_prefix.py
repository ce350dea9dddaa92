"""The pool that finds blocks by what they hold, with every eviction policy. Phase 8 has the pool's own tests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.memory.eviction import EVICTION, LeastRecentlyUsed
from minicache.memory.prefix import CachingBlockPool, PrefixCacheStats, block_hash, root_hash

A, B, C = (block_hash(root_hash(), [number]) for number in range(3))

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("eviction", EVICTION)
@repeatable
@given(st.integers(0, 10**6))
def test_any_policy_keeps_a_pool_consistent(eviction, seed):
    rng = random.Random(seed)
    pool, hashes = CachingBlockPool(6, 4, eviction), [bytes([number]) * 32 for number in range(6)]
    held = []
    for _ in range(60):
        free = {block for block in range(6) if block not in held}
        cached = {block for its_hash in hashes for block in pool.find([its_hash])} & free
        kind = rng.choice(["allocate", "share", "free", "cache", "uncache"])
        if kind == "allocate" and free:
            [block] = pool.allocate(1)
            assert block in free
            assert [block] not in [pool.find([its_hash]) for its_hash in hashes]
            held.append(block)
        elif kind == "share" and cached:
            block = rng.choice(sorted(cached))
            pool.share([block])
            held.append(block)
        elif kind == "free" and held:
            pool.free([held.pop(rng.randrange(len(held)))])
        elif kind == "cache" and held:
            pool.cache([rng.choice(held)], [rng.choice(hashes)])
        elif kind == "uncache":
            pool.uncache([rng.randrange(6)])
        pool.check()
        assert [pool.ref_count(block) for block in range(6)] == [held.count(block) for block in range(6)]
    order = list(pool.free_list)
    assert pool.allocate(pool.num_free) == order


@pytest.mark.parametrize("eviction", EVICTION)
def test_a_policy_evicts_only_if_nothing_else_is_free(eviction):
    pool = CachingBlockPool(4, 4, eviction)
    pool.cache(pool.allocate(2), [A, B])
    pool.free([1, 0])
    assert pool.allocate(2) == [2, 3]
    assert (pool.find([A, B]), pool.num_evicted) == ([0, 1], 0)


def test_a_policy_is_a_class_and_a_line(monkeypatch):
    class MostRecentlyUsed(LeastRecentlyUsed):
        def popleft(self):
            return self.popitem()[0]

        def __iter__(self):
            return self.__reversed__()

    monkeypatch.setitem(EVICTION, "mru", MostRecentlyUsed)
    pool = CachingBlockPool(3, 4, "mru")
    pool.cache(pool.allocate(3), [A, B, C])
    pool.free([0, 2, 1])
    assert pool.allocate(2) == [1, 2]
    assert (pool.find([A]), pool.num_evicted) == ([0], 2)
    with pytest.raises(ValueError, match="no eviction policy 'fifo'"):
        CachingBlockPool(3, 4, "fifo")


def test_hit_rate():
    assert PrefixCacheStats().hit_rate == 0
    assert PrefixCacheStats(2, 40, 10).hit_rate == 0.25
