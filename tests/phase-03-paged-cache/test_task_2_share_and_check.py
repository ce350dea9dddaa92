"""Phase 3, task 2: blocks with several owners, and a pool that checks its books."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.course.checks import CheckFailed, call, that, told
from minicache.course.seeds import one_of
from minicache.errors import InvariantError, OutOfBlocksError
from minicache.memory.blocks import BlockPool

SIZE = one_of(16, range(17, 40))  # of a block; the pool counts blocks only


def check_pool(pool, owners, when):
    """Each block of `pool` has as many owners as `owners` says; those with 0 are free. The pool's own check agrees."""
    free = owners.count(0)
    that(f"num_free {when}", pool.num_free).gives(free)
    that(f"num_used {when}", pool.num_used).gives(len(owners) - free)
    counts = [pool.ref_count(block_id) for block_id in range(len(owners))]
    that(f"ref_count of blocks 0 … {len(owners) - 1} {when}", counts).gives(owners)
    call(pool.check).gives(None)


# Share


def test_a_shared_block_is_freed_by_its_last_owner():
    """Two owners: the first free leaves the block in use, the second sends it to the end of the line."""
    pool = BlockPool(4, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [1]).gives(None)
    check_pool(pool, [1, 2, 0, 0], "after share([1])")
    call(pool.free, [1]).gives(None)
    check_pool(pool, [1, 1, 0, 0], "after share([1]) and free([1])")
    call(pool.free, [0, 1]).gives(None)
    check_pool(pool, [0, 0, 0, 0], "after each owner freed its blocks")
    that("the line at the end", pool.allocate(4)).gives([2, 3, 0, 1])


def test_a_block_in_use_is_never_handed_out():
    """A block that one of two owners freed stays out of the line: the pool runs out before it hands it out."""
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
    """share([0, 0]) gives block 0 two more owners, and free([0, 0]) takes two away."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.share, [0] * times).gives(None)
    check_pool(pool, [1 + times, 0], f"after share({[0] * times})")
    call(pool.free, [0] * times).gives(None)
    check_pool(pool, [1, 0], f"after free({[0] * times})")
    call(pool.share, [0] * times).gives(None)
    call(pool.free, [0] * (times + 1)).gives(None)
    check_pool(pool, [0, 0], f"after free({[0] * (times + 1)})")
    that("the line at the end", pool.allocate(2)).gives([1, 0])


def test_a_block_stands_in_line_when_its_last_owner_has_gone():
    """free([0, 1, 0]) with two owners of block 0: block 1 loses its last owner first, and is before 0 in the line."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0]).gives(None)
    call(pool.free, [0, 1, 0]).gives(None)
    check_pool(pool, [0, 0, 0], "after free([0, 1, 0])")
    that("the line after free([0, 1, 0])", pool.allocate(3)).gives([2, 1, 0])


def test_sharing_nothing():
    """share([]) does nothing."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.share, []).gives(None)
    check_pool(pool, [1, 0], "after share([])")


@pytest.mark.parametrize(
    ("block_ids", "error"),
    [
        pytest.param([3], ValueError, id="a block that was never taken"),
        pytest.param([1], ValueError, id="a block that was freed before"),
        pytest.param([0, 2, 3], ValueError, id="used blocks, then a free one"),
        pytest.param([4], IndexError, id="an id past the last"),
        pytest.param([0, 4], IndexError, id="a used block, then an id past the last"),
        pytest.param([-4], IndexError, id="minus 4, which Python takes for block 0"),
        pytest.param([2, -2], IndexError, id="a used block, then minus 2"),
        pytest.param([0, "2"], TypeError, id="a used block, then a string"),
        pytest.param([0, 2.0], TypeError, id="a used block, then a float"),
    ],
)
def test_share_is_all_or_nothing(block_ids, error):
    """A free block: ValueError. No such block: IndexError. No int: TypeError. Not even the good ones are shared."""
    pool = BlockPool(4, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [1]).gives(None)
    call(pool.share, [2]).gives(None)
    call(pool.share, block_ids).raises(error)
    check_pool(pool, [1, 0, 2, 0], f"after share({block_ids}) was refused")
    that("the line at the end", pool.allocate(2)).gives([3, 1])


@pytest.mark.parametrize(
    "block_ids", [[0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1], [0, 1, 1]], ids="free({})".format
)
def test_freed_more_often_than_owned(block_ids):
    """Block 0 has two owners, block 1 has one. Freed once more than that in a call: ValueError, and none is freed."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.share, [0]).gives(None)
    call(pool.free, block_ids).raises(ValueError)
    check_pool(pool, [2, 1, 0], f"after free({block_ids}) was refused")


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.lists(st.integers(0, 9), max_size=4))))
def test_any_order_of_calls(calls):
    """Good and bad calls in whatever order: owners, line and refusals are those of a pool kept on paper."""
    pool = BlockPool(6, 4)
    line, held = [0, 1, 2, 3, 4, 5], []  # on paper: `held` has a block once for each owner
    for name, numbers in calls:
        ids = [held[number % len(held)] if held else number for number in numbers]
        if name == "allocate" and len(ids) <= len(line):
            ids, line = line[: len(ids)], line[len(ids) :]
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
                line = line if block_id in held else [*line, block_id]
        check_pool(pool, [held.count(block_id) for block_id in range(6)], f"after {name} of {ids}")
    that("all that is free at the end", pool.allocate(len(line))).gives(line)


# Check


def pool_in_use(cls=BlockPool):
    """Eight blocks: 0 and 4 with one owner, 1 with two, 2 with three; free and in this order: 5, 6, 7, 3."""
    pool = cls(8, 16)
    call(pool.allocate, 5).gives([0, 1, 2, 3, 4])
    call(pool.share, [1, 2, 2]).gives(None)
    call(pool.free, [3]).gives(None)
    return pool


def test_check_accepts_what_calls_can_lead_to():
    """A pool that was only ever called is in order, and check leaves it as it is."""
    for pool in (BlockPool(1, 1), BlockPool(8, SIZE), pool_in_use()):
        call(pool.check).gives(None)
    pool = pool_in_use()
    call(pool.check).gives(None)
    check_pool(pool, [1, 2, 3, 0, 1, 0, 0, 0], "after check()")
    that("the line after check()", pool.allocate(4)).gives([5, 6, 7, 3])


class Spoilt(BlockPool):
    """A pool that says something wrong about itself once `lies` are put in: block or property → what it says."""

    def __init__(self, num_blocks, block_size):
        self.lies = {}
        super().__init__(num_blocks, block_size)

    def ref_count(self, block_id):
        owners = super().ref_count(block_id)
        return self.lies.get(block_id, owners)

    @property
    def num_free(self):
        return self.lies.get("num_free", super().num_free)

    @property
    def num_used(self):
        return self.lies.get("num_used", super().num_used)


@pytest.mark.parametrize(
    ("lies", "what"),
    [
        ({1: 0}, "block 1, which has two owners, is free by ref_count"),
        ({6: 1}, "block 6, which is in the line, has an owner by ref_count"),
        ({1: 0, 6: 2}, "blocks 1 and 6 have each other's owners by ref_count: the sums fit, the line does not"),
        ({1: -1}, "block 1 has minus 1 owners by ref_count"),
        ({6: -1}, "block 6, which is in the line, has minus 1 owners by ref_count"),
        ({"num_free": 5}, "num_free is 5, and 4 blocks have no owner"),
        ({"num_used": 8}, "num_used is 8, as if a block that is shared counted once for each owner"),
        ({"num_free": 5, "num_used": 3}, "num_free is 5 and num_used 3: the sum fits, and neither is right"),
    ],
)
def test_check_finds_what_does_not_agree(lies, what):
    """Eight blocks, four in use. A subclass says something wrong about one or two of them: InvariantError."""
    pool = pool_in_use(Spoilt)
    call(pool.check).gives(None)
    pool.lies = lies
    outcome = call(pool.check)
    if not isinstance(outcome.error, InvariantError):
        got = told(outcome.error) if outcome.error else "no error"
        raise CheckFailed(f"check(), where {what}", got, "InvariantError")
