"""The pool that finds blocks by what they hold, against a model of it that is written with lists."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import OutOfBlocksError
from minicache.memory.eviction import EVICTION, LeastRecentlyUsed
from minicache.memory.prefix import CachingBlockPool, PrefixCacheStats, block_hash, root_hash

A, B, C = (block_hash(root_hash(), [number]) for number in range(3))

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# Hashes


def test_a_hash_covers_the_tokens_their_order_and_all_before_them():
    root = root_hash()
    names = [
        block_hash(root, [1, 2]),
        block_hash(root, [2, 1]),
        block_hash(root, [12]),
        block_hash(root, [1, 23]),
        block_hash(root, [12, 3]),
        block_hash(block_hash(root, [1, 2]), [1, 2]),
        block_hash(block_hash(root, [2, 1]), [1, 2]),
        block_hash(root_hash("a"), [1, 2]),
    ]
    assert len(set(names)) == len(names)
    assert block_hash(root, [1, 2]) == names[0]
    assert {len(name) for name in names} == {32}


def test_extra_keys_do_not_run_into_each_other():
    keys = [
        (),
        (None,),
        ("",),
        (None, None),
        ("", None),
        (None, ""),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("None",),
        ("', '",),
    ]
    assert len({root_hash(*each) for each in keys}) == len(keys)


@repeatable
@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=2, max_size=6, unique_by=tuple))
def test_different_blocks_have_different_names(blocks):
    assert len({block_hash(root_hash(), block) for block in blocks}) == len(blocks)


# The pool


def test_a_freed_block_is_found_until_it_is_handed_out():
    pool = CachingBlockPool(3, 4)
    first, second = pool.allocate(2)
    pool.cache([first, second], [A, B])
    pool.free([second, first])
    assert pool.find([A, B]) == [first, second]
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 0, 2)
    assert pool.allocate(1) == [2]  # never used
    assert pool.allocate(1) == [second]  # the tail goes first
    assert pool.find([A, B]) == [first]
    assert pool.num_evicted == 1
    pool.check()


def test_a_hit_is_taken_out_of_the_middle_of_the_free_list():
    pool = CachingBlockPool(4, 4)
    blocks = pool.allocate(4)
    pool.cache(blocks[:3], [A, B, C])
    pool.free(blocks)
    pool.share(pool.find([A, B])[1:])
    assert pool.ref_count(1) == 1
    assert pool.allocate(3) == [3, 0, 2]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    pool.check()


def test_unhashed_blocks_are_reused_before_cached_ones_are_evicted():
    """Hashed blocks go to the back in the order in which they are freed, the others to the front, the last first."""
    pool = CachingBlockPool(6, 4)
    prefix, tails = pool.allocate(2), pool.allocate(2)
    pool.cache(prefix, [A, B])
    pool.free([tails[0], prefix[1], tails[1], prefix[0]])
    assert [pool.allocate(1)[0] for _ in range(6)] == [tails[1], tails[0], 4, 5, prefix[1], prefix[0]]
    assert pool.num_evicted == 2


def test_any_number_of_unfinished_tails_evicts_nothing():
    """Requests whose only block never fills up come and go: each takes the block that the one before it gave back."""
    pool = CachingBlockPool(3, 4)
    pool.cache(pool.allocate(2), [A, B])
    pool.free([1, 0])
    for _ in range(10):
        assert pool.allocate(1) == [2]
        pool.free([2])
    assert (pool.find([A, B]), pool.num_evicted) == ([0, 1], 0)


def test_a_run_ends_where_a_block_is_missing():
    pool = CachingBlockPool(3, 4)
    pool.cache(pool.allocate(2), [A, C])
    assert pool.find([A, B, C]) == [0]
    assert pool.find([B, C]) == []
    assert pool.find([]) == []


def test_two_blocks_of_one_content():
    """Both keep their hash; the one that was cached first is found, and when it is handed out, the other."""
    pool = CachingBlockPool(2, 4)
    pool.cache(pool.allocate(2), [A, A])
    assert (pool.find([A]), pool.num_cached) == ([0], 2)
    pool.free([0])
    assert pool.allocate(1) == [0]
    assert (pool.find([A]), pool.num_cached) == ([1], 1)
    pool.check()


def test_a_hash_is_given_once():
    pool = CachingBlockPool(2, 4)
    pool.cache(pool.allocate(1), [A])
    pool.cache([0], [B])
    assert (pool.find([A]), pool.find([B])) == ([0], [])
    pool.uncache([0, 1])
    assert (pool.find([A]), pool.num_cached, pool.num_evicted) == ([], 0, 0)
    pool.cache([0], [B])
    assert pool.find([B]) == [0]


def test_reset():
    pool = CachingBlockPool(2, 4)
    pool.cache(pool.allocate(1), [A])
    with pytest.raises(ValueError, match="1 blocks are in use"):
        pool.reset()
    assert pool.find([A]) == [0]
    pool.free([0])
    pool.reset()
    assert (pool.find([A]), pool.num_cached, pool.num_evicted) == ([], 0, 0)
    assert pool.allocate(2) == [1, 0]
    pool.check()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda pool: pool.share([2]), ValueError, "block 2 is free, and not cached"),
        (lambda pool: pool.share([0, 2]), ValueError, "block 2"),
        (lambda pool: pool.share([True]), TypeError, "block id"),
        (lambda pool: pool.share([3]), IndexError, "no block 3"),
        (lambda pool: pool.free([0, 0]), ValueError, "2 times"),
        (lambda pool: pool.free([0, 2]), ValueError, "block 2"),
        (lambda pool: pool.free([-1]), IndexError, "no block -1"),
        (lambda pool: pool.cache([2], [B]), ValueError, "block 2 is free"),
        (lambda pool: pool.cache([0, 2], [B, C]), ValueError, "block 2 is free"),
        (lambda pool: pool.cache([0], [A, B]), ValueError, "one hash for each"),
        (lambda pool: pool.cache([9], [A]), IndexError, "no block 9"),
        (lambda pool: pool.uncache([0, 9]), IndexError, "no block 9"),
        (lambda pool: pool.ref_count(3), IndexError, "no block 3"),
        (lambda pool: pool.ref_count("0"), TypeError, "block id"),
        (lambda pool: pool.allocate(-1), ValueError, "count"),
        (lambda pool: pool.allocate(1.0), TypeError, "count"),
        (lambda pool: pool.allocate(2), OutOfBlocksError, "1 of 3"),
    ],
)
def test_misuse_changes_nothing(call, error, says):
    pool = CachingBlockPool(3, 4)
    pool.allocate(2)
    pool.cache([1], [A])
    with pytest.raises(error, match=says):
        call(pool)
    assert [pool.ref_count(block) for block in range(3)] == [1, 1, 0]
    assert (pool.num_free, pool.num_cached, pool.find([A]), pool.find([B])) == (1, 1, [1], [])
    pool.check()


@repeatable
@given(st.integers(0, 10**6))
def test_any_calls_against_lists(seed):
    rng = random.Random(seed)
    pool, hashes = CachingBlockPool(6, 4), [block_hash(root_hash(), [number]) for number in range(5)]
    free, references, cached = list(range(6)), [0] * 6, []  # cached: (hash, block), the first to be cached first
    for _ in range(60):
        used = [block for block in range(6) if references[block]]
        kind = rng.choice(["allocate", "share", "free", "cache", "uncache"])
        if kind == "allocate" and (count := rng.randint(0, len(free))):
            blocks, free = free[:count], free[count:]
            cached = [each for each in cached if each[1] not in blocks]
            for block in blocks:
                references[block] = 1
            assert pool.allocate(count) == blocks
        elif kind == "share" and (there := used + [block for _, block in cached]):
            block = rng.choice(there)
            free = [each for each in free if each != block]
            references[block] += 1
            pool.share([block])
        elif kind == "free" and used:
            block = rng.choice(used)
            references[block] -= 1
            if not references[block]:
                free = [*free, block] if any(each == block for _, each in cached) else [block, *free]
            pool.free([block])
        elif kind == "cache" and used:
            block, its_hash = rng.choice(used), rng.choice(hashes)
            if all(each != block for _, each in cached):
                cached.append((its_hash, block))
            pool.cache([block], [its_hash])
        elif kind == "uncache":
            block = rng.randrange(6)
            cached = [each for each in cached if each[1] != block]
            pool.uncache([block])
        pool.check()
        assert [pool.ref_count(block) for block in range(6)] == references
        assert (pool.num_free, pool.num_cached) == (len(free), len(cached))
        for its_hash in hashes:
            assert pool.find([its_hash]) == [block for each, block in cached if each == its_hash][:1]


# Eviction policies


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
