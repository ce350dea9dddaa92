"""Phase 8, task 2: a pool whose blocks are found again by what they hold, used or free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.course.checks import call, that
from minicache.errors import InvariantError, OutOfBlocksError
from minicache.memory.prefix import CachingBlockPool

A, B, C, D = (bytes([number]) * 32 for number in range(65, 69))


def books(pool):
    """All that a caller can see of a pool, to be compared before and after a call."""
    owners = [pool.ref_count(block) for block in range(pool.num_blocks)]
    return owners, pool.num_free, pool.num_cached, pool.num_evicted, [pool.find([name]) for name in (A, B, C, D)]


def agree(pool):
    """The pool's books agree with each other."""
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


def test_first_in_first_out(pool):
    """Without a cached block it is phase 3's pool: who has been free longest is handed out first."""
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [1]).gives(None)
    call(pool.free, [2, 0]).gives(None)
    call(pool.allocate, 4).gives([3, 1, 2, 0])
    that("free blocks", pool.num_free).gives(0)
    agree(pool)


def test_owners_are_counted(pool):
    """Two owners more for an id that is given twice; the block is free when the last of them has let it go."""
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0, 0, 1]).gives(None)
    that("owners of blocks 0 and 1", [pool.ref_count(0), pool.ref_count(1)]).gives([3, 2])
    call(pool.free, [0, 1, 0]).gives(None)
    that("free blocks", pool.num_free).gives(2)
    call(pool.free, [1, 0]).gives(None)
    call(pool.allocate, 4).gives([2, 3, 1, 0])
    agree(pool)


def test_an_iterator_will_do(pool):
    """Ids may come from a generator, which can be read once."""
    pool.allocate(2)
    call(pool.share, iter([0, 1])).gives(None)
    call(pool.free, reversed([0, 1])).gives(None)
    call(pool.uncache, iter([0, 1])).gives(None)
    that("owners", [pool.ref_count(block) for block in range(4)]).gives([1, 1, 0, 0])


# Free is not forgotten


def test_a_freed_block_is_found(pool):
    """Nobody owns it any more, and it still holds what it held: it is free, and cached."""
    [block] = pool.allocate(1)
    call(pool.cache, [block], [A]).gives(None)
    call(pool.find, [A]).gives([block])
    call(pool.free, [block]).gives(None)
    call(pool.find, [A]).gives([block])
    that("free, used, cached", (pool.num_free, pool.num_used, pool.num_cached)).gives((4, 0, 1))
    agree(pool)


def test_a_found_block_comes_back_to_life(pool):
    """share takes it out of the middle of the line: it is not handed out, and keeps its name."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    call(pool.share, [1]).gives(None)
    that("owners of block 1", pool.ref_count(1)).gives(1)
    that("free blocks", pool.num_free).gives(3)
    call(pool.find, [B]).gives([1])
    call(pool.allocate, 3).gives([0, 2, 3])
    call(pool.allocate, 1).raises(OutOfBlocksError)
    agree(pool)


def test_come_back_and_gone_again(pool):
    """Used again and freed again, it goes to the end of the line: it was needed a moment ago."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.share([0])
    pool.free([0])
    call(pool.allocate, 4).gives([1, 2, 3, 0])


def test_a_free_block_may_be_shared_twice_in_a_call(pool):
    """Two requests find the same block: two owners, and it leaves the line once."""
    pool.cache(pool.allocate(1), [A])
    pool.free([0])
    call(pool.share, [0, 0]).gives(None)
    that("owners, free", (pool.ref_count(0), pool.num_free)).gives((2, 3))
    agree(pool)


def test_a_shared_block_keeps_its_name(pool):
    """Owners come and go; what it holds is another matter."""
    pool.cache(pool.allocate(1), [A])
    pool.share([0])
    pool.free([0])
    call(pool.find, [A]).gives([0])
    that("owners", pool.ref_count(0)).gives(1)


# Eviction


def test_handed_out_is_forgotten(pool):
    """allocate takes the name away: the next owner writes something else into the block."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([2, 0, 1, 3])
    call(pool.allocate, 2).gives([2, 0])
    that("found under A, B, C, D", [pool.find([name]) for name in (A, B, C, D)]).gives([[], [1], [], [3]])
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((2, 2))
    agree(pool)


def test_the_tail_goes_first(pool):
    """A sequence is freed from its last block to its first, so its beginning is found longest."""
    pool.cache(pool.allocate(3), [A, B, C])
    pool.free([2, 1, 0])
    found = []
    for _ in range(4):
        pool.allocate(1)
        found.append(len(pool.find([A, B, C])))
    that("blocks of A, B, C that are found after 1, 2, 3, 4 allocations", found).gives([3, 2, 1, 0])
    that("evicted", pool.num_evicted).gives(3)


def test_only_cached_blocks_are_evicted(pool):
    """num_evicted counts what could have been found: blocks without a name are handed out for nothing."""
    pool.free(pool.allocate(3))
    pool.cache(pool.allocate(1), [A])  # block 3
    pool.allocate(3)
    that("evicted", pool.num_evicted).gives(0)
    that("cached", pool.num_cached).gives(1)


def test_a_new_owner_may_give_a_new_name(pool):
    """Evicted, written anew, cached anew."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.allocate(1)
    call(pool.cache, [0], [D]).gives(None)
    that("found under A and D", (pool.find([A]), pool.find([D]))).gives(([], [3]))
    agree(pool)


# Names


def test_find_stops_where_a_block_is_missing(pool):
    """A block is of use only with all before it: keys and values of 0 … 15 cannot be left out."""
    pool.cache(pool.allocate(3), [A, C, D])
    call(pool.find, [A, B, C]).gives([0])
    call(pool.find, [B, C, D]).gives([])
    call(pool.find, [A, C, D, B]).gives([0, 1, 2])
    call(pool.find, []).gives([])
    call(pool.find, iter([A, C])).gives([0, 1])


def test_find_changes_nothing(pool):
    """Who asks owns nothing, and asking does not make a block younger."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    call(pool.find, [A, B]).gives([0, 1])
    that("free blocks", pool.num_free).gives(4)
    call(pool.allocate, 1).gives([0])


def test_two_blocks_of_one_content(pool):
    """Two requests computed the same side by side. The first is found; when it is handed out, the other."""
    pool.cache(pool.allocate(2), [A, A])
    call(pool.find, [A]).gives([0])
    that("cached", pool.num_cached).gives(2)
    pool.free([0])
    call(pool.find, [A]).gives([0])
    call(pool.allocate, 3).gives([2, 3, 0])
    call(pool.find, [A]).gives([1])
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((1, 1))
    agree(pool)


def test_a_name_is_given_once(pool):
    """A block that has a name keeps it, also if the name is said again; its turn among equals is that of the first."""
    pool.cache(pool.allocate(2), [A, B])
    call(pool.cache, [0, 1], [C, A]).gives(None)
    that("found under A, B, C", [pool.find([name]) for name in (A, B, C)]).gives([[0], [1], []])
    call(pool.cache, [0], [A]).gives(None)
    that("cached", pool.num_cached).gives(2)
    agree(pool)


def test_uncache(pool):
    """The name goes, the owner stays. A block that shares the name keeps it; one without a name has none to lose."""
    pool.cache(pool.allocate(3), [A, A, B])
    call(pool.uncache, [0, 3]).gives(None)
    that("found under A and B", (pool.find([A]), pool.find([B]))).gives(([1], [2]))
    that("owners of block 0", pool.ref_count(0)).gives(1)
    that("cached, evicted", (pool.num_cached, pool.num_evicted)).gives((2, 0))
    call(pool.cache, [0], [C]).gives(None)
    call(pool.find, [C]).gives([0])
    agree(pool)


def test_uncache_a_free_block(pool):
    """It stays in its place in the line, and nobody can share it any more."""
    pool.cache(pool.allocate(2), [A, B])
    pool.free([0, 1])
    call(pool.uncache, [0]).gives(None)
    call(pool.share, [0]).raises(ValueError)
    call(pool.allocate, 4).gives([2, 3, 0, 1])
    that("evicted", pool.num_evicted).gives(1)


# Reset


def test_reset_forgets_all(pool):
    """After new weights no block holds what its name says. The line stays as it is, and nothing was evicted."""
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
    agree(pool)


def test_reset_does_not_undo_evictions(pool):
    """What was evicted before stays counted."""
    pool.cache(pool.allocate(4), [A, B, C, D])
    pool.free([0, 1, 2, 3])
    pool.free(pool.allocate(2))
    call(pool.reset).gives(None)
    that("evicted", pool.num_evicted).gives(2)


def test_reset_waits_for_the_last_owner(pool):
    """A request that runs would go on with keys and values of the old weights."""
    pool.cache(pool.allocate(2), [A, B])
    pool.free([1])
    before = books(pool)
    call(pool.reset).raises(ValueError)
    that("the books", books(pool)).gives(before)


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
    """All or nothing: of a call that raises, not even the good part has been done."""
    pool = CachingBlockPool(3, 16)
    pool.allocate(2)  # 0 is used; 1 is free and cached; 2 is free and was never used
    pool.cache([1], [B])
    pool.free([1])
    before = books(pool)
    call(getattr(pool, method), *arguments).raises(error)
    that("owners, free, cached, evicted, found", books(pool)).gives(before)
    agree(pool)
    call(pool.allocate, 2).gives([2, 1])


# Against lists


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_any_calls_against_lists(seed):
    """Sixty random calls, beside a pool that is written with lists and looks through all of them every time."""
    rng = random.Random(seed)
    pool, names = CachingBlockPool(6, 4), [A, B, C, D]
    line, owners, named, evicted = list(range(6)), [0] * 6, [], 0  # named: (name, block), the first to be named first
    for _ in range(60):
        used = [block for block in range(6) if owners[block]]
        kind = rng.choice(["allocate", "share", "free", "free", "cache", "uncache"])
        if kind == "allocate" and (count := rng.randint(0, len(line))):
            blocks, line = line[:count], line[count:]
            evicted += sum(block in blocks for _, block in named)
            named = [each for each in named if each[1] not in blocks]
            for block in blocks:
                owners[block] = 1
            call(pool.allocate, count).gives(blocks)
        elif kind == "share" and (there := used + [block for _, block in named]):
            block = rng.choice(there)
            line = [each for each in line if each != block]
            owners[block] += 1
            call(pool.share, [block]).gives(None)
        elif kind == "free" and used:
            blocks = rng.sample(used, rng.randint(1, len(used)))
            for block in blocks:
                owners[block] -= 1
                line += [block] * (not owners[block])
            call(pool.free, blocks).gives(None)
        elif kind == "cache" and used:
            block, name = rng.choice(used), rng.choice(names)
            if all(each != block for _, each in named):
                named.append((name, block))
            call(pool.cache, [block], [name]).gives(None)
        elif kind == "uncache":
            block = rng.randrange(6)
            named = [each for each in named if each[1] != block]
            call(pool.uncache, [block]).gives(None)
        found = [[block for each, block in named if each == name][:1] for name in names]
        that("owners, free, cached, evicted, found", books(pool)).gives((owners, len(line), len(named), evicted, found))
    agree(pool)
    that("the line", pool.allocate(pool.num_free)).gives(line)
