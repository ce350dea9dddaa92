"""Phase 3, task 1: allocate blocks, and free them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.errors import OutOfBlocksError
from minicache.memory.blocks import BlockPool, blocks_for
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

NO_INTS = [2.0, "2", None, True]
SIZE = one_of(16, range(17, 40))  # of a block; the pool counts blocks only
MORE = one_of(0, range(1, 100))  # blocks, under a secret seed


def check_pool(pool, refs, when):
    """The blocks of `pool` have these reference counts; those with 0 are free."""
    free = refs.count(0)
    that(f"num_free {when}", pool.num_free).gives(free)
    that(f"num_used {when}", pool.num_used).gives(len(refs) - free)
    counts = [pool.ref_count(block_id) for block_id in range(len(refs))]
    that(f"ref_count of blocks 0 … {len(refs) - 1} {when}", counts).gives(refs)


def check_free_list(pool, free_list, when):
    """All free blocks, allocated at once, come in the order `free_list`."""
    that(f"allocate({len(free_list)}), all that is free, {when}", pool.allocate(len(free_list))).gives(free_list)


# Blocks for tokens


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "blocks"),
    [(0, 16, 0), (1, 16, 1), (15, 16, 1), (16, 16, 1), (17, 16, 2), (32, 16, 2), (33, 16, 3), (5, 1, 5), (7, 100, 1)],
)
def test_blocks_for_some_tokens(num_tokens, block_size, blocks):
    """An unfinished block is a block; no tokens take none."""
    call(blocks_for, num_tokens + MORE * block_size, block_size).gives(blocks + MORE)


@given(st.integers(0, 400), st.integers(1, 50))
def test_blocks_hold_the_tokens_and_no_block_is_idle(num_tokens, block_size):
    """The blocks hold all tokens, and one block less would not."""
    held, blocks = 0, 0
    while held < num_tokens:
        held, blocks = held + block_size, blocks + 1
    call(blocks_for, num_tokens, block_size).gives(blocks)


def test_blocks_for_large_numbers_is_exact():
    """10¹⁸ + 1 tokens in blocks of 10 take 10¹⁷ + 1 blocks: a division through a float loses the last one."""
    call(blocks_for, 10**18 + 1, 10).gives(10**17 + 1)


def test_blocks_for_refuses():
    """Tokens below 0 and block sizes below 1 raise ValueError; a value that is not an int raises TypeError."""
    for num_tokens, block_size in [(-1, 16), (5, 0), (5, -4)]:
        call(blocks_for, num_tokens, block_size).raises(ValueError)
    for bad in NO_INTS:
        call(blocks_for, bad, 16).raises(TypeError)
        call(blocks_for, 16, bad).raises(TypeError)


# A new pool


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 1), (5, 16), (1000, 32)])
def test_a_new_pool_is_free(num_blocks, block_size):
    """A new pool has the sizes that it was given, and all of its blocks are free."""
    pool = call(BlockPool, num_blocks, block_size).value
    that("num_blocks", pool.num_blocks).gives(num_blocks)
    that("block_size", pool.block_size).gives(block_size)
    check_pool(pool, [0] * num_blocks, "in a new pool")


def test_sizes_of_a_pool_are_refused():
    """Fewer than 1 block, or a block size below 1, raises ValueError; a value that is not an int raises TypeError."""
    for bad in (0, -1):
        call(BlockPool, bad, 16).raises(ValueError)
        call(BlockPool, 8, bad).raises(ValueError)
    for bad in NO_INTS:
        call(BlockPool, bad, 16).raises(TypeError)
        call(BlockPool, 8, bad).raises(TypeError)


# Allocate


def test_a_new_pool_counts_from_0():
    """A new pool hands out 0, 1, 2, …, however many are asked for at a time."""
    pool = BlockPool(6, SIZE)
    call(pool.allocate, 1).gives([0])
    call(pool.allocate, 3).gives([1, 2, 3])
    check_pool(pool, [1, 1, 1, 1, 0, 0], "after allocate(1) and allocate(3)")
    call(pool.allocate, 2).gives([4, 5])
    check_pool(pool, [1] * 6, "of the full pool")


def test_allocating_nothing():
    """allocate(0) gives an empty list, from a full pool too."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 0).gives([])
    check_pool(pool, [0, 0], "after allocate(0)")
    call(pool.allocate, 2).gives([0, 1])
    call(pool.allocate, 0).gives([])


@pytest.mark.parametrize("count", [3, 4, 100])
def test_out_of_blocks(count):
    """More blocks than are free: OutOfBlocksError. None is allocated, and the next call is unaffected."""
    pool = BlockPool(5, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.allocate, count).raises(OutOfBlocksError)
    check_pool(pool, [1, 1, 1, 0, 0], f"after allocate({count}) was refused")
    call(pool.allocate, 2).gives([3, 4])
    call(pool.allocate, 1).raises(OutOfBlocksError)


def test_counts_that_are_refused():
    """A negative count raises ValueError, one that is not an int TypeError, and nothing is allocated."""
    pool = BlockPool(5, SIZE)
    call(pool.allocate, -1).raises(ValueError)
    for bad in NO_INTS:
        call(pool.allocate, bad).raises(TypeError)
    check_pool(pool, [0] * 5, "after refused calls")
    check_free_list(pool, [0, 1, 2, 3, 4], "after refused calls")


def test_the_returned_list_is_the_callers():
    """A caller that changes the list of ids changes nothing in the pool."""
    pool = BlockPool(4, SIZE)
    taken = call(pool.allocate, 2).value
    taken.clear()
    check_pool(pool, [1, 1, 0, 0], "after the caller cleared the list")
    given_back = [1, 0]
    call(pool.free, given_back).gives(None)
    given_back.append(99)
    check_free_list(pool, [2, 3, 1, 0], "after the caller changed the list that it freed")


# Free


def test_a_freed_block_goes_to_the_end_of_the_free_list():
    """First in, first out: freed blocks go to the end of the free list, in the order in which free got them."""
    pool = BlockPool(5, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [2, 0]).gives(None)
    check_pool(pool, [0, 1, 0, 0, 0], "after free([2, 0])")
    call(pool.allocate, 3).gives([3, 4, 2])
    call(pool.free, [1]).gives(None)
    call(pool.free, [4]).gives(None)
    check_free_list(pool, [0, 1, 4], "after free([1]) and free([4])")


def test_a_pool_of_one_block():
    """A pool of one block allocates the same one every time."""
    pool = BlockPool(1, SIZE)
    for _ in range(3):
        call(pool.allocate, 1).gives([0])
        call(pool.allocate, 1).raises(OutOfBlocksError)
        call(pool.free, [0]).gives(None)


def test_ids_from_a_generator():
    """Any iterable of ids is accepted, also one that can be iterated only once."""
    pool = BlockPool(4, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, (block_id for block_id in (2, 0))).gives(None)
    that(
        "ref_count of blocks 0 … 3 after a generator of 2 and 0 was freed", [pool.ref_count(n) for n in range(4)]
    ).gives([0, 1, 0, 0])
    call(pool.allocate, 3).gives([3, 2, 0])


def test_freeing_nothing():
    """free([]) does nothing."""
    pool = BlockPool(3, SIZE)
    call(pool.free, []).gives(None)
    check_free_list(pool, [0, 1, 2], "after free([])")


BAD_IDS = [
    pytest.param([3], ValueError, id="a block that was never allocated"),
    pytest.param([1], ValueError, id="a block that was freed before"),
    pytest.param([0, 3], ValueError, id="a used block, then a free one"),
    pytest.param([3, 0], ValueError, id="a free block, then a used one"),
    pytest.param([0, 0], ValueError, id="one block twice"),
    pytest.param([0, 2, 0], ValueError, id="one block twice, another between"),
    pytest.param([5], IndexError, id="an id past the last"),
    pytest.param([0, 2, 5], IndexError, id="used blocks, then an id past the last"),
    pytest.param([-1], IndexError, id="minus 1, which Python counts from the end"),
    pytest.param([0, -3], IndexError, id="a used block, then minus 3"),
    pytest.param([-100], IndexError, id="far below 0"),
    pytest.param([0.0], TypeError, id="a float"),
    pytest.param([0, 2, "4"], TypeError, id="used blocks, then a string"),
    pytest.param([0, None], TypeError, id="a used block, then None"),
    pytest.param([True], TypeError, id="True, which Python takes for block 1"),
    pytest.param([2, False], TypeError, id="a used block, then False, which Python takes for block 0"),
]


@pytest.mark.parametrize(("block_ids", "error"), BAD_IDS)
def test_free_is_all_or_nothing(block_ids, error):
    """A free block, or one given too often: ValueError. No such block: IndexError. Not an int: TypeError."""
    pool = BlockPool(5, SIZE)
    call(pool.allocate, 3).gives([0, 1, 2])
    call(pool.free, [1]).gives(None)  # used: 0 and 2; free list: 3, 4, 1
    call(pool.free, block_ids).raises(error)
    check_pool(pool, [1, 0, 1, 0, 0], f"after free({block_ids}) was refused")
    call(pool.free, [2, 0]).gives(None)
    check_free_list(pool, [3, 4, 1, 2, 0], f"after a refused free({block_ids}), then free([2, 0])")


@pytest.mark.parametrize("block_id", [2, -2], ids=str)
def test_free_refuses_ids_outside_the_pool(block_id):
    """If every block is used, −2 and the first id past the last are still refused."""
    pool = BlockPool(2, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    call(pool.free, [block_id]).raises(IndexError)
    call(pool.free, [0, block_id]).raises(IndexError)
    check_pool(pool, [1, 1], f"after block {block_id} was refused")


def test_ref_count_refuses_ids_outside_the_pool():
    """ref_count of an id outside the pool raises IndexError, of a value that is not an int TypeError."""
    pool = BlockPool(3, SIZE)
    for bad in (3, -1, 100):
        call(pool.ref_count, bad).raises(IndexError)
    for bad in (1.0, "1", None, True):
        call(pool.ref_count, bad).raises(TypeError)


# What a subclass may rely on


@pytest.mark.parametrize("block_id", [0, 2, 3])
def test_the_free_list_gives_up_any_block(block_id):
    """`free_list.remove` takes a block out wherever it is: the first of 4, one between, the last (phase 8 needs it)."""
    pool = BlockPool(4, SIZE)
    call(pool.free_list.remove, block_id).gives(None)
    left = [each for each in range(4) if each != block_id]
    that("the ids in free_list, and num_free", (list(pool.free_list), pool.num_free)).gives((left, 3))
    call(pool.free_list.append, block_id).gives(None)
    check_free_list(pool, [*left, block_id], f"after {block_id} was removed and appended")


class Stack:
    """A free list that hands out the block freed last, and has nothing but what a pool may use."""

    def __init__(self, block_ids):
        self._block_ids = block_ids

    def popleft(self):
        return self._block_ids.pop()

    def append(self, block_id):
        self._block_ids.append(block_id)

    def __len__(self):
        return len(self._block_ids)

    def __iter__(self):
        return reversed(self._block_ids)


def test_the_free_list_decides_which_block_is_next():
    """`free_list` may be replaced: allocate takes blocks from it by popleft, and free adds them by append."""
    pool = BlockPool(4, SIZE)
    that("the ids in free_list of a new pool", list(pool.free_list)).gives([0, 1, 2, 3])
    pool.free_list = Stack([3, 1, 0, 2])
    call(pool.allocate, 3).gives([2, 0, 1])
    check_pool(pool, [1, 1, 1, 0], "after allocate(3) with another free list")
    call(pool.free, [0, 2]).gives(None)
    check_pool(pool, [0, 1, 0, 0], "after free([0, 2]) with another free list")
    call(pool.allocate, 2).gives([2, 0])
    call(pool.allocate, 2).raises(OutOfBlocksError)


def test_ref_counts_are_the_references():
    """`ref_counts` is the list in which the pool counts references; a subclass may change it."""
    pool = BlockPool(3, SIZE)
    call(pool.allocate, 2).gives([0, 1])
    that("ref_counts after allocate(2)", pool.ref_counts).gives([1, 1, 0])
    pool.ref_counts[1] += 1
    that("ref_count(1) after ref_counts[1] += 1", pool.ref_count(1)).gives(2)
    call(pool.free, [0, 1]).gives(None)
    that("ref_counts after free([0, 1])", pool.ref_counts).gives([0, 1, 0])
    check_free_list(pool, [2, 0], "after free([0, 1]), where block 1 had two references")


# Any calls


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 11), min_size=1, max_size=6))))
def test_any_order_of_calls(num_blocks, calls):
    """Any order of allocate and free: the longest free come first, and no block has two references."""
    pool = BlockPool(num_blocks, 4)
    free_list, used = list(range(num_blocks)), []  # longest free first; longest used first
    for allocates, numbers in calls:
        if allocates and len(numbers) > len(free_list):
            call(pool.allocate, len(numbers)).raises(OutOfBlocksError)
        elif allocates:
            call(pool.allocate, len(numbers)).gives(free_list[: len(numbers)])
            used, free_list = used + free_list[: len(numbers)], free_list[len(numbers) :]
        else:
            chosen = list(dict.fromkeys(used[number % len(used)] for number in numbers if used))
            call(pool.free, chosen).gives(None)
            used, free_list = [each for each in used if each not in chosen], free_list + chosen
        check_pool(pool, [int(block_id in used) for block_id in range(num_blocks)], f"with {len(free_list)} left free")
    check_free_list(pool, free_list, "at the end")
