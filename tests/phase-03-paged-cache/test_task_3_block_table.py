"""Phase 3, task 3: the block table of one sequence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.errors import OutOfBlocksError, SharedBlockError
from minicache.memory.blocks import BlockPool, BlockTable
from minicache_course.checks import call, that

NO_INTS = [2.0, "2", None, True]


def scattered_pool(block_ids, block_size, num_blocks=12):
    """A pool whose free blocks are `block_ids`, in this order, and no others."""
    pool = BlockPool(num_blocks, block_size)
    pool.allocate(num_blocks)
    pool.free(block_ids)
    return pool


def check_table(table, block_ids, num_tokens, when):
    """The table holds these blocks and this many tokens."""
    that(f"block_ids {when}", table.block_ids).gives(block_ids)
    that(f"num_tokens {when}", table.num_tokens).gives(num_tokens)


def test_a_new_table_is_empty():
    """A new table has its pool, no blocks and no tokens, and has allocated nothing."""
    pool = BlockPool(4, 16)
    table = call(BlockTable, pool).value
    that("whether table.pool is the pool that it was given", table.pool is pool).gives(True)
    check_table(table, [], 0, "of a new table")
    that("pool.num_free after a new table", pool.num_free).gives(4)


def test_ten_tokens_in_blocks_7_2_and_5():
    """Blocks of 4, and the pool's next are 7, 2 and 5: ten tokens are in slots 28–31, 8–11 and 20–21."""
    table = BlockTable(scattered_pool([7, 2, 5, 9], 4))
    call(table.append, 10).gives([28, 29, 30, 31, 8, 9, 10, 11, 20, 21])
    check_table(table, [7, 2, 5], 10, "after append(10)")
    for position, slot in [(0, 28), (3, 31), (4, 8), (6, 10), (9, 21)]:
        call(table.slot, position).gives(slot)
    call(table.append, 2).gives([22, 23])
    check_table(table, [7, 2, 5], 12, "after append(10) and append(2)")
    call(table.append, 1).gives([36])
    check_table(table, [7, 2, 5, 9], 13, "after append(10), append(2) and append(1)")


def test_one_token_at_a_time():
    """Decoding: a block is allocated with its first token, never before."""
    pool = scattered_pool([3, 1, 2], 2)
    table = BlockTable(pool)
    for num_tokens, (slot, num_free) in enumerate([(6, 2), (7, 2), (2, 1), (3, 1), (4, 0), (5, 0)]):
        call(table.append, 1).gives([slot])
        that(f"pool.num_free after {num_tokens + 1} tokens", pool.num_free).gives(num_free)
    check_table(table, [3, 1, 2], 6, "after six times append(1)")


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 48])
def test_append_around_the_end_of_a_block(num_tokens):
    """Blocks of 16: 16 tokens take one block, 17 take two. Appended at once or in two parts, the slots are the same."""
    blocks = {15: 1, 16: 1, 17: 2, 31: 2, 32: 2, 33: 3, 48: 3}[num_tokens]
    order = [8, 3, 5]
    expected = [16 * order[position // 16] + position % 16 for position in range(num_tokens)]
    table = BlockTable(scattered_pool(order, 16))
    call(table.append, num_tokens).gives(expected)
    check_table(table, order[:blocks], num_tokens, f"after append({num_tokens})")
    for first in (1, 7, 15):
        table = BlockTable(scattered_pool(order, 16))
        call(table.append, first).gives(expected[:first])
        call(table.append, num_tokens - first).gives(expected[first:])
        check_table(table, order[:blocks], num_tokens, f"after append({first}) and append({num_tokens - first})")


def test_two_tables_alternate():
    """Two tables over one pool: their blocks alternate in memory, and no slot is given twice."""
    pool = BlockPool(6, 2)
    one, other = BlockTable(pool), BlockTable(pool)
    for position in range(6):
        block, offset = divmod(position, 2)
        call(one.append, 1).gives([4 * block + offset])
        call(other.append, 1).gives([4 * block + 2 + offset])
    check_table(one, [0, 2, 4], 6, "of the first table")
    check_table(other, [1, 3, 5], 6, "of the second table")
    that("the first table's slots", [one.slot(position) for position in range(6)]).gives([0, 1, 4, 5, 8, 9])
    call(one.append, 1).raises(OutOfBlocksError)


def test_blocks_of_one_token():
    """block_size 1: every token has a separate block, and its slot is the block's id."""
    table = BlockTable(scattered_pool([4, 0, 2], 1))
    call(table.append, 2).gives([4, 0])
    call(table.append, 1).gives([2])
    check_table(table, [4, 0, 2], 3, "after append(2) and append(1)")


# Blocks needed


@pytest.mark.parametrize(
    ("num_tokens", "needed"),
    [
        (0, {0: 0, 1: 1, 4: 1, 5: 2, 8: 2}),
        (1, {0: 0, 1: 0, 3: 0, 4: 1, 7: 1, 8: 2}),
        (3, {0: 0, 1: 0, 2: 1, 5: 1, 6: 2}),
        (4, {0: 0, 1: 1, 4: 1, 5: 2}),
    ],
    ids=["an empty table", "1 token", "3 tokens", "4 tokens"],
)
def test_blocks_needed(num_tokens, needed):
    """Blocks of 4: the blocks that append would allocate. blocks_needed itself allocates none."""
    pool = BlockPool(8, 4)
    table = BlockTable(pool)
    call(table.append, num_tokens).gives(list(range(num_tokens)))
    for num_new, blocks in needed.items():
        that(f"blocks_needed({num_new}) with {num_tokens} tokens", table.blocks_needed(num_new)).gives(blocks)
    check_table(table, [0] if num_tokens else [], num_tokens, "after blocks_needed")
    that("pool.num_used after blocks_needed", pool.num_used).gives(1 if num_tokens else 0)


def test_more_blocks_may_be_needed_than_there_are():
    """blocks_needed counts the blocks that append would allocate, whether the pool has them or not."""
    call(BlockTable(BlockPool(2, 4)).blocks_needed, 100).gives(25)


@given(st.integers(1, 9), st.lists(st.integers(0, 20), max_size=8))
def test_appending_in_parts_gives_the_same_slots(block_size, parts):
    """Any lengths, any block size: blocks_needed predicts what append allocates; every position has its own slot."""
    num_blocks = sum(parts) + 1
    pool = scattered_pool(list(range(num_blocks))[::-1], block_size, num_blocks)
    table, slots = BlockTable(pool), []
    for num_new in parts:
        predicted, before = call(table.blocks_needed, num_new).value, pool.num_free
        slots += call(table.append, num_new).value
        that(f"blocks that append({num_new}) took", before - pool.num_free).gives(predicted)
        that("blocks of the table", len(table.block_ids)).gives(-(-len(slots) // block_size))
        that("num_tokens", table.num_tokens).gives(len(slots))
    blocks = list(range(num_blocks))[::-1]
    that("all slots", slots).gives([blocks[p // block_size] * block_size + p % block_size for p in range(len(slots))])
    that("slot(p) of every position", [table.slot(position) for position in range(len(slots))]).gives(slots)


# Refusals


def test_appending_nothing():
    """append(0) returns an empty list and allocates nothing: in an empty table, after a full block, in a full pool."""
    table = BlockTable(BlockPool(1, 4))
    for num_new, slots in [(0, []), (3, [0, 1, 2]), (1, [3])]:
        call(table.append, num_new).gives(slots)
        call(table.append, 0).gives([])
        call(table.blocks_needed, 0).gives(0)
    check_table(table, [0], 4, "of a full table after append(0)")


@pytest.mark.parametrize("num_tokens", [0, 2, 4, 7])
def test_out_of_blocks_changes_nothing(num_tokens):
    """More tokens than the pool can hold: OutOfBlocksError. None gets a slot, and a smaller append still works."""
    pool = BlockPool(3, 4)
    table = BlockTable(pool)
    call(table.append, num_tokens).gives(list(range(num_tokens)))
    blocks = list(range(-(-num_tokens // 4)))
    for too_many in (13 - num_tokens, 100):
        call(table.append, too_many).raises(OutOfBlocksError)
        check_table(table, blocks, num_tokens, f"after append({too_many}) was refused")
        that(f"pool.num_free after append({too_many}) was refused", pool.num_free).gives(3 - len(blocks))
        call(table.slot, num_tokens).raises(IndexError)
    call(table.append, 12 - num_tokens).gives(list(range(num_tokens, 12)))
    check_table(table, [0, 1, 2], 12, "of the full table")


def test_slot_refuses_positions_without_a_token():
    """slot needs a token: IndexError past the last one, even within its block, and for −1; TypeError unless an int."""
    table = BlockTable(BlockPool(4, 4))
    call(table.slot, 0).raises(IndexError)
    call(table.append, 6).gives([0, 1, 2, 3, 4, 5])
    for position in (6, 7, 8, 100, -1, -6):
        call(table.slot, position).raises(IndexError)
    for position in (1.0, "1", None, True):
        call(table.slot, position).raises(TypeError)


def test_counts_that_are_refused():
    """append and blocks_needed: a negative count raises ValueError, a non-int TypeError; nothing changes."""
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    call(table.append, 6).gives([0, 1, 2, 3, 4, 5])
    for ask in (table.append, table.blocks_needed):
        for bad in (-1, -6):
            call(ask, bad).raises(ValueError)
        for bad in NO_INTS:
            call(ask, bad).raises(TypeError)
    check_table(table, [0, 1], 6, "after refused counts")
    that("pool.num_free after refused counts", pool.num_free).gives(2)


@pytest.mark.parametrize("num_new", [1, 2, 3, 100])
def test_a_shared_unfinished_block_is_not_written(num_new):
    """The last block is unfinished and shared: SharedBlockError, nothing changes, append(0) still works."""
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    call(table.append, 6).gives([0, 1, 2, 3, 4, 5])
    pool.share([1])
    call(table.append, num_new).raises(SharedBlockError if num_new <= 10 else (SharedBlockError, OutOfBlocksError))
    check_table(table, [0, 1], 6, f"after append({num_new}) was refused")
    that(f"pool.num_free after append({num_new}) was refused", pool.num_free).gives(2)
    that("ref_count of block 1", pool.ref_count(1)).gives(2)
    call(table.append, 0).gives([])
    pool.free([1])  # the other reference is dropped
    call(table.append, 3).gives([6, 7, 8])


def test_a_shared_full_block_is_allowed():
    """Full blocks, and blocks before the last one, may be shared: the next token goes into a new block."""
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    call(table.append, 8).gives(list(range(8)))
    pool.share([0, 1])
    call(table.append, 1).gives([8])
    call(table.append, 2).gives([9, 10])
    check_table(table, [0, 1, 2], 11, "after appending to shared full blocks")
