"""Phase 8, task 2: a pool whose blocks, used or free, are found by the hash of their contents."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import InvariantError, OutOfBlocksError
from minicache.memory.prefix import CachingBlockPool
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.seeds import fresh


class Letter(bytes):
    """A hash that is recognised by its first letter."""

    def __repr__(self):
        return chr(self[0])


A, B, C, D = (Letter(bytes([number]) * 32) for number in range(65, 69))


def books(pool):
    """All that a caller can see of a pool, for comparison before and after a call."""
    references = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return references, pool.num_free, pool.num_cached, pool.num_evicted, [pool.find([each]) for each in (A, B, C, D)]


def agree(pool):
    """The pool's attributes agree with each other."""
    __tracebackhide__ = True
    try:
        pool.check()
    except InvariantError as error:
        that("pool.check()", f"InvariantError: {error}").gives("no error")


@pytest.fixture
def pool():
    """Four blocks."""
    return CachingBlockPool(4, 16)


# Still a pool


def test_unhashed_blocks_go_to_the_front(pool):
    """Blocks freed without a hash are handed out next, the one freed last first."""
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [1]).gives(None)
    call(pool.free, [2, 0]).gives(None)
    call(pool.allocate, 4).gives([0, 2, 1, 3])
    that("free blocks", pool.num_free).gives(0)
    agree(pool)


def test_references_are_counted(pool):
    """An id that is given twice gets two references; the block is free when the last of them is dropped."""
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0, 0, 1]).gives(None)
    that("references of blocks 0 and 1", [pool.ref_count(0), pool.ref_count(1)]).gives([3, 2])
    call(pool.free, [0, 1, 0]).gives(None)
    that("free blocks", pool.num_free).gives(2)
    call(pool.free, [1, 0]).gives(None)
    call(pool.allocate, 4).gives([0, 1, 2, 3])
    agree(pool)


def test_ids_may_come_from_an_iterator(pool):
    """Ids may come from a generator, which can be read once."""
    pool.allocate(2)
    call(pool.share, iter([0, 1])).gives(None)
    call(pool.free, reversed([0, 1])).gives(None)
    call(pool.uncache, iter([0, 1])).gives(None)
    that("references", [pool.ref_count(block) for block in range(4)]).gives([1, 1, 0, 0])


# Free is not forgotten


def test_a_freed_block_is_found(pool):
    """A block without references keeps its contents: it is free, and cached."""
    [block] = pool.allocate(1)
    call(pool.cache, [block], [A]).gives(None)
    call(pool.find, [A]).gives([block])
    call(pool.free, [block]).gives(None)
    call(pool.find, [A]).gives([block])
    that("free, used, cached", (pool.num_free, pool.num_used, pool.num_cached)).gives((4, 0, 1))
    agree(pool)


def test_a_found_block_comes_back_to_life(pool):
    """share takes it out of the middle of the free list: it is not handed out, and keeps its hash."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    call(pool.share, [1]).gives(None)
    that("references of block 1", pool.ref_count(1)).gives(1)
    that("free blocks", pool.num_free).gives(3)
    call(pool.find, [B]).gives([1])
    call(pool.allocate, 3).gives([0, 2, 3])
    call(pool.allocate, 1).raises(OutOfBlocksError)
    agree(pool)


def test_a_block_that_is_used_again_and_freed_goes_to_the_back(pool):
    """Used again and freed again, it goes to the back of the free list, because it was used recently."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.share([0])
    pool.free([0])
    call(pool.allocate, 4).gives([1, 2, 3, 0])


def test_a_free_block_may_be_shared_twice_in_a_call(pool):
    """Two requests find the same block: two references, and it leaves the free list once."""
    pool.cache(pool.allocate(1), [A])
    pool.free([0])
    call(pool.share, [0, 0]).gives(None)
    that("references, free", (pool.ref_count(0), pool.num_free)).gives((2, 3))
    agree(pool)


def test_a_shared_block_keeps_its_hash(pool):
    """References change; a block's contents do not."""
    pool.cache(pool.allocate(1), [A])
    pool.share([0])
    pool.free([0])
    call(pool.find, [A]).gives([0])
    that("references", pool.ref_count(0)).gives(1)


# Hashes


def test_find_stops_where_a_block_is_missing(pool):
    """A block is useful only with all earlier ones: keys and values of 0 … 15 cannot be left out."""
    pool.cache(pool.allocate(3), [A, C, D])
    call(pool.find, [A, B, C]).gives([0])
    call(pool.find, [B, C, D]).gives([])
    call(pool.find, [A, C, D, B]).gives([0, 1, 2])
    call(pool.find, []).gives([])
    call(pool.find, iter([A, C])).gives([0, 1])


def test_find_changes_nothing(pool):
    """find takes no reference, and does not move a block in the free list."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    call(pool.find, [A, B]).gives([0, 1])
    that("free blocks", pool.num_free).gives(4)
    call(pool.allocate, 1).gives([0])


def test_of_two_blocks_with_one_hash_the_first_is_found(pool):
    """Two requests computed the same tokens. The first block is found; after it is handed out, the other."""
    pool.cache(pool.allocate(2), [A, A])
    call(pool.find, [A]).gives([0])
    that("cached", pool.num_cached).gives(2)
    pool.free([0])
    call(pool.find, [A]).gives([0])
    call(pool.allocate, 3).gives([2, 3, 0])
    call(pool.find, [A]).gives([1])
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((1, 1))
    agree(pool)


def test_a_block_keeps_its_first_hash(pool):
    """A block keeps its first hash, and its position among blocks with the same hash."""
    pool.cache(pool.allocate(2), [A, B])
    call(pool.cache, [0, 1], [C, A]).gives(None)
    that("found under A, B, C", [pool.find([each]) for each in (A, B, C)]).gives([[0], [1], []])
    call(pool.cache, [0], [A]).gives(None)
    that("cached", pool.num_cached).gives(2)
    agree(pool)


def test_uncache_drops_the_hash_and_nothing_else(pool):
    """uncache drops the hash, not the reference. Another block with the same hash keeps it."""
    pool.cache(pool.allocate(3), [A, A, B])
    call(pool.uncache, [0, 3]).gives(None)
    that("found under A and B", (pool.find([A]), pool.find([B]))).gives(([1], [2]))
    that("references of block 0", pool.ref_count(0)).gives(1)
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((2, 0))
    call(pool.cache, [0], [C]).gives(None)
    call(pool.find, [C]).gives([0])
    agree(pool)


def test_an_uncached_free_block_stays_where_it_is(pool):
    """It keeps its position in the free list, and cannot be shared any more."""
    pool.cache(pool.allocate(2), [A, B])
    pool.free([0, 1])
    call(pool.uncache, [0]).gives(None)
    call(pool.share, [0]).raises(ValueError)
    call(pool.allocate, 4).gives([2, 3, 0, 1])
    that("evicted", pool.num_evicted).gives(1)


# Eviction


def test_hashed_blocks_go_to_the_back(pool):
    """They follow all blocks without a hash, in the order in which they were freed."""
    pool.cache(pool.allocate(4)[:2], [A, B])
    call(pool.free, [1, 2]).gives(None)
    call(pool.free, [0]).gives(None)
    call(pool.free, [3]).gives(None)
    call(pool.allocate, 4).gives([3, 2, 1, 0])
    that("evicted", pool.num_evicted).gives(2)
    agree(pool)


def test_tails_evict_nothing(pool):
    """A cached prefix of three blocks, and requests of one block each that never fill it: the prefix stays."""
    pool.cache(pool.allocate(3), [A, B, C])
    pool.free([2, 1, 0])
    for request in range(6):
        that(f"the block of request {request}", call(pool.allocate, 1).value).gives([3])
        pool.free([3])
    call(pool.find, [A, B, C]).gives([0, 1, 2])
    that("evicted", pool.num_evicted).gives(0)


def test_the_end_is_chosen_when_the_last_reference_goes(pool):
    """A block's hash counts when its last reference is dropped, not when an earlier one was."""
    pool.allocate(4)
    pool.share([0])
    call(pool.free, [0, 1]).gives(None)
    pool.cache([0], [A])
    call(pool.free, [2, 0, 3]).gives(None)
    call(pool.allocate, 4).gives([3, 2, 1, 0])


def test_allocate_drops_the_hash(pool):
    """allocate drops the hash: the next request overwrites the block."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([2, 0, 1, 3])
    call(pool.allocate, 2).gives([2, 0])
    that("found under A, B, C, D", [pool.find([each]) for each in (A, B, C, D)]).gives([[], [1], [], [3]])
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((2, 2))
    agree(pool)


def test_the_tail_of_a_prefix_is_evicted_first(pool):
    """A sequence is freed from its last block to its first, so its beginning can be found longest."""
    pool.cache(pool.allocate(3), [A, B, C])
    pool.free([2, 1, 0])
    found = []
    for _ in range(4):
        pool.allocate(1)
        found.append(len(pool.find([A, B, C])))
    that("blocks of A, B, C that are found after 1, 2, 3, 4 allocations", found).gives([3, 2, 1, 0])
    that("evicted", pool.num_evicted).gives(3)


def test_only_cached_blocks_are_evicted(pool):
    """num_evicted counts cached blocks, not blocks without a hash."""
    pool.free(pool.allocate(3))
    pool.cache(pool.allocate(1), [A])  # block 3
    pool.allocate(3)
    that("evicted", pool.num_evicted).gives(0)
    that("cached", pool.num_cached).gives(1)


def test_an_evicted_block_can_be_cached_anew(pool):
    """A block is evicted, overwritten and cached again."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.allocate(1)
    call(pool.cache, [0], [D]).gives(None)
    that("found under A and D", (pool.find([A]), pool.find([D]))).gives(([], [3]))
    agree(pool)


# What it costs


class Hash(bytes):
    """A hash whose comparisons are counted by `effort`."""

    def __eq__(self, other):
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def work(num_blocks):
    """The effort of each call, on a pool of so many cached blocks, all but ten of them free: the least of five."""
    pool = CachingBlockPool(num_blocks, 4)
    hashes = [Hash(number.to_bytes(32, "big")) for number in range(num_blocks)]
    pool.cache(pool.allocate(num_blocks), hashes)
    pool.free(range(10, num_blocks))
    there = iter(range(num_blocks // 2, num_blocks))
    plain = pool.allocate(5)
    calls = {
        "free": lambda number: (pool.free, [number]),
        "free without a hash": lambda number: (pool.free, [plain[number]]),
        "share": lambda number: (pool.share, [next(there)]),
        "find": lambda number: (pool.find, [Hash(next(there).to_bytes(32, "big"))]),
        "uncache": lambda number: (pool.uncache, [next(there)]),
        "allocate": lambda number: (pool.allocate, 1),
        "cache": lambda number: (pool.cache, [10 + number], [Hash(bytes(31) + b"x")]),
    }
    return {name: min(effort(*each(number)) for number in range(5)) for name, each in calls.items()}


def test_a_large_pool_costs_no_more():
    """Freeing, sharing, finding, uncaching, allocating or caching a block costs as much among 5,000 as among 50."""
    with scenario.telling():  # what the hundred calls were says nothing
        small, large = work(50), work(5_000)
    for name in small:
        more = large[name] - small[name]
        told = f"{name}, of one block: {more} instructions more in a pool of 5,000: whether that is below 300"
        that(told, more < 300).gives(True)


# Reset


def test_reset_forgets_all_hashes(pool):
    """After new weights every hash is wrong. The free list does not change, and nothing counts as evicted."""
    pool.cache(pool.allocate(2), [A, B])
    pool.free([1, 0])
    call(pool.reset).gives(None)
    that("found under A and B", (pool.find([A]), pool.find([B]))).gives(([], []))
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((0, 0))
    call(pool.share, [0]).raises(ValueError)
    call(pool.allocate, 4).gives([2, 3, 1, 0])
    that("evicted", pool.num_evicted).gives(0)
    call(pool.cache, [1], [A]).gives(None)
    call(pool.find, [A]).gives([1])
    call(pool.free, [3, 0]).gives(None)  # 0 had a hash before
    call(pool.allocate, 2).gives([0, 3])
    agree(pool)


def test_reset_does_not_undo_evictions(pool):
    """Earlier evictions stay counted."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.free(pool.allocate(2))
    call(pool.reset).gives(None)
    that("evicted", pool.num_evicted).gives(2)


def test_reset_waits_for_the_last_reference(pool):
    """A running request would continue with keys and values of the old weights."""
    pool.cache(pool.allocate(2), [A, B])
    pool.free([1])
    before = books(pool)
    call(pool.reset).raises(ValueError)
    that("references, free, cached, evicted, found", books(pool)).gives(before)


# Misuse


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("allocate", [3], OutOfBlocksError),
        ("allocate", [-1], ValueError),
        ("allocate", [1.0], TypeError),
        ("allocate", [True], TypeError),
        ("share", [[2]], ValueError),
        ("share", [[0, 2]], ValueError),
        ("share", [[1, 0, 4]], IndexError),
        ("share", [[0, -1]], IndexError),
        ("share", [[0, True]], TypeError),
        ("share", [[0, "1"]], TypeError),
        ("free", [[0, 0]], ValueError),
        ("free", [[0, 2]], ValueError),
        ("free", [[0, 1]], ValueError),
        ("free", [[0, 4]], IndexError),
        ("free", [[0, -1]], IndexError),
        ("free", [[0, 0.0]], TypeError),
        ("cache", [[0, 2], [C, D]], ValueError),
        ("cache", [[0, 1], [C, D]], ValueError),
        ("cache", [[0], [C, D]], ValueError),
        ("cache", [[0], []], ValueError),
        ("cache", [[0, 4], [C, D]], IndexError),
        ("cache", [[0, None], [C, D]], TypeError),
        ("uncache", [[1, 4]], IndexError),
        ("uncache", [[1, -1]], IndexError),
        ("uncache", [[1, True]], TypeError),
    ],
)
def test_misuse_changes_nothing(method, arguments, error):
    """All or nothing: a call that raises changes nothing."""
    pool = CachingBlockPool(3, 16)
    pool.allocate(2)  # 0 is used; 1 is free and cached; 2 is free and was never used
    pool.cache([1], [B])
    pool.free([1])
    before = books(pool)
    call(getattr(pool, method), *arguments).raises(error)
    that("references, free, cached, evicted, found", books(pool)).gives(before)
    agree(pool)
    call(pool.allocate, 2).gives([2, 1])


# Against lists


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_any_calls_do_what_lists_would_do(seed):
    """Sixty random calls, compared with a pool written with lists."""
    rng = random.Random(fresh(seed))
    pool, hashes = CachingBlockPool(6, 4), [A, B, C, D]
    free, references, cached, evicted = list(range(6)), [0] * 6, [], 0  # cached: (hash, block), in that order
    for _ in range(60):
        used = [block for block in range(6) if references[block]]
        kind = rng.choice(["allocate", "share", "free", "free", "cache", "uncache"])
        if kind == "allocate" and (count := rng.randint(0, len(free))):
            blocks, free = free[:count], free[count:]
            evicted += sum(block in blocks for _, block in cached)
            cached = [each for each in cached if each[1] not in blocks]
            for block in blocks:
                references[block] = 1
            call(pool.allocate, count).gives(blocks)
        elif kind == "share" and (there := used + [block for _, block in cached]):
            block = rng.choice(there)
            free = [each for each in free if each != block]
            references[block] += 1
            call(pool.share, [block]).gives(None)
        elif kind == "free" and used:
            blocks = rng.sample(used, rng.randint(1, len(used)))
            for block in blocks:
                references[block] -= 1
                if not references[block]:
                    hashed = block in [each for _, each in cached]
                    free = [*free, block] if hashed else [block, *free]
            call(pool.free, blocks).gives(None)
        elif kind == "cache" and used:
            block, its_hash = rng.choice(used), rng.choice(hashes)
            if all(each != block for _, each in cached):
                cached.append((its_hash, block))
            call(pool.cache, [block], [its_hash]).gives(None)
        elif kind == "uncache":
            block = rng.randrange(6)
            cached = [each for each in cached if each[1] != block]
            call(pool.uncache, [block]).gives(None)
        found = [[block for each, block in cached if each == its_hash][:1] for its_hash in hashes]
        expected = references, len(free), len(cached), evicted, found
        that("references, free, cached, evicted, found", books(pool)).gives(expected)
    agree(pool)
    that("the free list", pool.allocate(pool.num_free)).gives(free)
