"""Phase 3, task 2: blocks with several references, and a pool that checks its state."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.errors import InvariantError, OutOfBlocksError
from minicache.memory.blocks import BlockPool
from minicache_course.checks import CheckFailed, call, that, told
from minicache_course.seeds import one_of

SIZE = one_of(16, range(17, 40))  # of a block; the pool counts blocks only


def check_pool(pool, refs, when):
    """The blocks of `pool` have these reference counts; those with 0 are free. The pool's check passes."""
    free = refs.count(0)
    that(f"num_free {when}", pool.num_free).gives(free)
    that(f"num_used {when}", pool.num_used).gives(len(refs) - free)
    counts = [pool.ref_count(block_id) for block_id in range(len(refs))]
    that(f"ref_count of blocks 0 … {len(refs) - 1} {when}", counts).gives(refs)
    call(pool.check).gives(None)


# Share


def test_a_shared_block_is_freed_with_its_last_reference():
    """Two references: the first free leaves the block in use, the second moves it to the end of the free list."""
    pool = BlockPool(4, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [1]).gives(None)
    check_pool(pool, [1, 2, 0, 0], "after share([1])")
    call(pool.free, [1]).gives(None)
    check_pool(pool, [1, 1, 0, 0], "after share([1]) and free([1])")
    call(pool.free, [0, 1]).gives(None)
    check_pool(pool, [0, 0, 0, 0], "after every reference was freed")
    that("the free list at the end", pool.allocate(4)).gives([2, 3, 0, 1])


def test_a_block_in_use_is_never_handed_out():
    """A block with one of two references left is not in the free list: the pool runs out instead of allocating it."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.share, [0]).gives(None)
    call(pool.free, [0]).gives(None)
    call(pool.allocate, 2).raises(OutOfBlocksError)
    call(pool.allocate, 1).gives([1])
    check_pool(pool, [1, 1], "at the end")


def test_sharing_takes_no_block():
    """Sharing needs no free block: it works in a full pool, and num_used counts a shared block once."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.share, [2, 0]).gives(None)
    call(pool.share, [0]).gives(None)
    check_pool(pool, [3, 1, 2], "of a full pool after share([2, 0]) and share([0])")


@pytest.mark.parametrize("times", [1, 2, 5])
def test_an_id_given_more_than_once(times):
    """share([0, 0]) adds two references to block 0, and free([0, 0]) drops two."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.share, [0] * times).gives(None)
    check_pool(pool, [1 + times, 0], f"after share({[0] * times})")
    call(pool.free, [0] * times).gives(None)
    check_pool(pool, [1, 0], f"after free({[0] * times})")
    call(pool.share, [0] * times).gives(None)
    call(pool.free, [0] * (times + 1)).gives(None)
    check_pool(pool, [0, 0], f"after free({[0] * (times + 1)})")
    that("the free list at the end", pool.allocate(2)).gives([1, 0])


def test_the_last_reference_decides_the_order():
    """free([0, 1, 0]) with two references to block 0: block 1 loses its last one first, and comes before 0."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0]).gives(None)
    call(pool.free, [0, 1, 0]).gives(None)
    check_pool(pool, [0, 0, 0], "after free([0, 1, 0])")
    that("the free list after free([0, 1, 0])", pool.allocate(3)).gives([2, 1, 0])


def test_sharing_nothing():
    """share([]) does nothing."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.share, []).gives(None)
    check_pool(pool, [1, 0], "after share([])")


@pytest.mark.parametrize(
    ("block_ids", "error"),
    [
        pytest.param([3], ValueError, id="a block that was never allocated"),
        pytest.param([1], ValueError, id="a block that was freed before"),
        pytest.param([0, 2, 3], ValueError, id="used blocks, then a free one"),
        pytest.param([4], IndexError, id="an id past the last"),
        pytest.param([0, 4], IndexError, id="a used block, then an id past the last"),
        pytest.param([-4], IndexError, id="minus 4, which Python takes for block 0"),
        pytest.param([2, -2], IndexError, id="a used block, then minus 2"),
        pytest.param([0, "2"], TypeError, id="a used block, then a string"),
        pytest.param([0, 2.0], TypeError, id="a used block, then a float"),
        pytest.param([True], TypeError, id="True, which Python takes for block 1"),
        pytest.param([2, False], TypeError, id="a used block, then False, which Python takes for block 0"),
    ],
)
def test_share_is_all_or_nothing(block_ids, error):
    """A free block: ValueError. No such block: IndexError. Not an int: TypeError. No block is shared."""
    pool = BlockPool(4, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [1]).gives(None)
    call(pool.share, [2]).gives(None)
    call(pool.share, block_ids).raises(error)
    check_pool(pool, [1, 0, 2, 0], f"after share({block_ids}) was refused")
    that("the free list at the end", pool.allocate(2)).gives([3, 1])


@pytest.mark.parametrize(
    "block_ids", [[0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1], [0, 1, 1]], ids="free({})".format
)
def test_freed_more_often_than_referenced(block_ids):
    """Block 0 has two references, block 1 has one. Freed more often in one call: ValueError, and none is freed."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0]).gives(None)
    call(pool.free, block_ids).raises(ValueError)
    check_pool(pool, [2, 1, 0], f"after free({block_ids}) was refused")


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.lists(st.integers(0, 9), max_size=4))))
def test_any_order_of_calls(calls):
    """Valid and invalid calls in any order: references, free list and errors are those of a simple model."""
    pool = BlockPool(6, 4)
    free_list, held = [0, 1, 2, 3, 4, 5], []  # the model: `held` has a block once for each reference
    for name, numbers in calls:
        ids = [held[number % len(held)] if held else number for number in numbers]
        if name == "allocate" and len(ids) <= len(free_list):
            ids, free_list = free_list[: len(ids)], free_list[len(ids) :]
            call(pool.allocate, len(ids)).gives(ids)
            held = held + ids
        elif name == "allocate":
            call(pool.allocate, len(ids)).raises(OutOfBlocksError)
        elif not held and ids:
            call(getattr(pool, name), ids).raises((IndexError, ValueError))
        elif name == "share":
            call(pool.share, ids).gives(None)
            held = held + ids
        elif any(ids.count(block_id) > held.count(block_id) for block_id in ids):
            call(pool.free, ids).raises(ValueError)
        else:
            call(pool.free, ids).gives(None)
            for block_id in ids:
                held.remove(block_id)
                free_list = free_list if block_id in held else [*free_list, block_id]
        check_pool(pool, [held.count(block_id) for block_id in range(6)], f"after {name} of {ids}")
    that("all that is free at the end", pool.allocate(len(free_list))).gives(free_list)


# Check


def pool_in_use(cls=BlockPool):
    """Eight blocks: 0 and 4 with one reference, 1 with two, 2 with three; free, in this order: 5, 6, 7, 3."""
    pool = cls(8, 16)
    call(pool.allocate, 5).gives([0, 1, 2, 3, 4])
    call(pool.share, [1, 2, 2]).gives(None)
    call(pool.free, [3]).gives(None)
    return pool


def test_check_accepts_every_reachable_state():
    """A pool that was changed by calls only is consistent, and check leaves it unchanged."""
    for pool in (BlockPool(1, 1), BlockPool(8, SIZE), pool_in_use()):
        call(pool.check).gives(None)
    pool = pool_in_use()
    call(pool.check).gives(None)
    check_pool(pool, [1, 2, 3, 0, 1, 0, 0, 0], "after check()")
    that("the free list after check()", pool.allocate(4)).gives([5, 6, 7, 3])


class Spoilt(BlockPool):
    """A pool that returns wrong values once `wrong` is set: block or property → value."""

    def __init__(self, num_blocks, block_size):
        self.wrong = {}
        super().__init__(num_blocks, block_size)

    def ref_count(self, block_id):
        refs = super().ref_count(block_id)
        return self.wrong.get(block_id, refs)

    @property
    def num_free(self):
        return self.wrong.get("num_free", super().num_free)

    @property
    def num_used(self):
        return self.wrong.get("num_used", super().num_used)


WRONG = {
    "block 1, which has two references, is free by ref_count": {1: 0},
    "block 6, which is in the free list, has a reference by ref_count": {6: 1},
    "ref_count swaps blocks 1 and 6: the sums fit, the free list does not": {1: 0, 6: 2},
    "block 1 has minus 1 references by ref_count": {1: -1},
    "block 6, which is in the free list, has minus 1 references by ref_count": {6: -1},
    "num_free is 5, and 4 blocks have no reference": {"num_free": 5},
    "num_used is 8, as if a shared block counted once for each reference": {"num_used": 8},
    "num_free is 5 and num_used 3: the sum fits, and neither is right": {"num_free": 5, "num_used": 3},
}


@pytest.mark.parametrize(("wrong", "what"), [pytest.param(wrong, what, id=what) for what, wrong in WRONG.items()])
def test_check_finds_inconsistencies(wrong, what):
    """Eight blocks, four in use. A subclass returns something wrong about one or two of them: InvariantError."""
    pool = pool_in_use(Spoilt)
    call(pool.check).gives(None)
    pool.wrong = wrong
    check_refuses(pool, what)


LISTS = {
    "block 3 is in the free list twice": [5, 6, 7, 3, 3],
    "block 3, which is free, is not in the free list": [5, 6, 7],
    "block 1, which is used, is in the free list in place of 3": [5, 6, 7, 1],
    "99 is in the free list and is no block": [5, 6, 7, 3, 99],
}


@pytest.mark.parametrize(("block_ids", "what"), [pytest.param(ids, what, id=what) for what, ids in LISTS.items()])
def test_check_reads_the_free_list(block_ids, what):
    """Blocks 3, 5, 6 and 7 are free. `free_list` is set to a list that is not these four: InvariantError."""
    pool = pool_in_use()
    pool.free_list = deque([5, 6, 7, 3])
    call(pool.check).gives(None)
    pool.free_list = deque(block_ids)
    check_refuses(pool, what)


def check_refuses(pool, what):
    """Fail unless `pool.check()` raises InvariantError."""
    outcome = call(pool.check)
    if not isinstance(outcome.error, InvariantError):
        got = told(outcome.error) if outcome.error else "no error"
        raise CheckFailed(f"check(), where {what}", got, "InvariantError")
