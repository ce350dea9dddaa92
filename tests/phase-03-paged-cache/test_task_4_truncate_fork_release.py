"""Phase 3, task 4: truncate a sequence, fork it, release it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from minicache.errors import OutOfBlocksError, SharedBlockError
from minicache.memory.blocks import BlockPool, BlockTable
from minicache_course.checks import CheckFailed, call, short, that


def filled(num_tokens, *, num_blocks=6, block_size=4):
    """A table of `num_tokens` tokens in blocks 0, 1, 2, … of a new pool, and the pool."""
    pool = BlockPool(num_blocks, block_size)
    table = BlockTable(pool)
    call(table.append, num_tokens).gives(list(range(num_tokens)))
    return table, pool


def forked(table):
    """What `table.fork()` gives, once it is known to be a table."""
    outcome = call(table.fork)
    if not isinstance(outcome.value, BlockTable):
        raise CheckFailed(outcome.called, short(outcome.returned), "a BlockTable", num_done=outcome.num_done)
    return outcome.value


def check_table(table, block_ids, num_tokens, when):
    """The table holds these blocks and this many tokens."""
    that(f"block_ids {when}", table.block_ids).gives(block_ids)
    that(f"num_tokens {when}", table.num_tokens).gives(num_tokens)


def check_refs(pool, refs, when):
    """The blocks have these reference counts, and the pool's check passes."""
    counts = [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
    that(f"ref_count of blocks 0 … {pool.num_blocks - 1} {when}", counts).gives(refs)
    that(f"num_free {when}", pool.num_free).gives(refs.count(0))
    call(pool.check).gives(None)


# Truncate


@pytest.mark.parametrize("kept", [11, 10, 9, 8, 7, 5, 4, 3, 1, 0], ids=lambda what: f"keep {what}")
def test_truncate(kept):
    """Of 11 tokens in blocks of 4, keep some: blocks without a token are freed, the block at the cut stays."""
    table, pool = filled(11)
    blocks = {11: 3, 10: 3, 9: 3, 8: 2, 7: 2, 5: 2, 4: 1, 3: 1, 1: 1, 0: 0}[kept]
    call(table.truncate, kept).gives(None)
    check_table(table, [0, 1, 2][:blocks], kept, f"after truncate({kept})")
    check_refs(pool, [1] * blocks + [0] * (6 - blocks), f"after truncate({kept})")
    call(table.slot, kept).raises(IndexError)
    slots = call(table.append, 2).value
    positions = [table.slot(kept), table.slot(kept + 1)]
    that(f"the slots of 2 tokens appended after truncate({kept})", slots).gives(positions)


def test_append_after_truncate():
    """New tokens take the slots of the dropped ones, as long as their block was kept."""
    table, _ = filled(11)
    call(table.truncate, 6).gives(None)
    call(table.append, 3).gives([6, 7, 12])  # block 2 was freed: the free list is 3, 4, 5, 2
    check_table(table, [0, 1, 3], 9, "after truncate(6) and append(3)")


def test_truncate_frees_the_last_block_first():
    """The blocks are freed from the last to the first, so a text's beginning stays longest in memory."""
    table, pool = filled(15)
    call(table.truncate, 3).gives(None)
    that("the free list after truncate(3)", pool.allocate(5)).gives([4, 5, 3, 2, 1])


@pytest.mark.parametrize("bad", [12, 100, -1])
def test_truncate_refuses(bad):
    """More tokens than the table has, or a negative number: ValueError, and nothing changes."""
    table, pool = filled(11)
    call(table.truncate, bad).raises(ValueError)
    check_table(table, [0, 1, 2], 11, f"after truncate({bad}) was refused")
    check_refs(pool, [1, 1, 1, 0, 0, 0], f"after truncate({bad}) was refused")


@pytest.mark.parametrize("bad", [2.0, "2", None, True], ids=repr)
def test_truncate_wants_an_int(bad):
    """A value that is not an int raises TypeError, and nothing changes."""
    table, pool = filled(11)
    call(table.truncate, bad).raises(TypeError)
    check_table(table, [0, 1, 2], 11, f"after truncate({bad!r}) was refused")
    check_refs(pool, [1, 1, 1, 0, 0, 0], f"after truncate({bad!r}) was refused")


# Release


def test_release_gives_all_blocks_back():
    """A released table is empty, its blocks are free, and its last block comes before the others."""
    table, pool = filled(11)
    call(table.release).gives(None)
    check_table(table, [], 0, "after release()")
    check_refs(pool, [0] * 6, "after release()")
    that("the free list after release()", pool.allocate(6)).gives([3, 4, 5, 2, 1, 0])


def test_a_released_table_may_be_used_again():
    """After release a table starts at position 0 of a new block; releasing an empty table does nothing."""
    table, pool = filled(11)
    call(table.release).gives(None)
    call(table.release).gives(None)
    call(table.append, 5).gives([12, 13, 14, 15, 16])
    check_table(table, [3, 4], 5, "after release() and append(5)")
    check_refs(pool, [0, 0, 0, 1, 1, 0], "after release() and append(5)")


# Fork


def test_a_fork_shares_every_block():
    """A fork has its parent's blocks and tokens, the unfinished block too. Each block gets one more reference."""
    table, pool = filled(10)
    fork = forked(table)
    that("whether fork.pool is the table's pool", fork.pool is pool).gives(True)
    check_table(fork, [0, 1, 2], 10, "of the fork")
    check_table(table, [0, 1, 2], 10, "of the parent")
    check_refs(pool, [2, 2, 2, 0, 0, 0], "after fork()")
    that("the fork's slots", [fork.slot(position) for position in range(10)]).gives(list(range(10)))


def test_a_fork_has_a_separate_list():
    """The fork's block_ids is not its parent's list: a block that one table allocates is not in the other."""
    table, pool = filled(8)
    fork = forked(table)
    call(table.append, 1).gives([8])
    that("the fork's block_ids after its parent's append(1)", fork.block_ids).gives([0, 1])
    call(fork.append, 1).gives([12])
    that("the parent's block_ids after the fork's append(1)", table.block_ids).gives([0, 1, 2])
    check_refs(pool, [2, 2, 1, 1, 0, 0], "after both appended")


def test_a_fork_needs_no_free_block():
    """A fork works in a full pool, and so does the fork of a fork."""
    table, pool = filled(8, num_blocks=2)
    fork = forked(table)
    third = forked(fork)
    check_table(third, [0, 1], 8, "of the fork's fork")
    check_refs(pool, [3, 3], "after two forks")


def test_the_fork_of_an_empty_table():
    """An empty table's fork is empty, and each then allocates separate blocks."""
    table, pool = filled(0)
    fork = forked(table)
    check_table(fork, [], 0, "of an empty table's fork")
    call(table.append, 1).gives([0])
    call(fork.append, 1).gives([4])
    check_refs(pool, [1, 1, 0, 0, 0, 0], "after both appended")


def test_parent_and_fork_grow_apart():
    """After full shared blocks each table allocates separate blocks, and neither affects the other."""
    table, pool = filled(8)
    fork = forked(table)
    call(table.append, 1).gives([8])
    call(fork.append, 5).gives([12, 13, 14, 15, 16])
    check_table(table, [0, 1, 2], 9, "of the parent")
    check_table(fork, [0, 1, 3, 4], 13, "of the fork")
    check_refs(pool, [2, 2, 1, 1, 1, 0], "after both appended")
    call(table.release).gives(None)
    check_table(fork, [0, 1, 3, 4], 13, "of the fork after its parent's release")
    check_refs(pool, [1, 1, 0, 1, 1, 0], "after the parent's release")


def test_neither_writes_into_a_shared_unfinished_block():
    """The unfinished block is shared: append raises SharedBlockError in both, until one has freed the block."""
    table, pool = filled(10)
    fork = forked(table)
    for each in (table, fork):
        call(each.append, 1).raises(SharedBlockError)
        check_table(each, [0, 1, 2], 10, "after the refused append")
    check_refs(pool, [2, 2, 2, 0, 0, 0], "after the refused appends")
    call(fork.truncate, 8).gives(None)
    check_refs(pool, [2, 2, 1, 0, 0, 0], "after the fork's truncate(8)")
    call(table.append, 1).gives([10])
    call(fork.append, 1).gives([12])
    check_table(fork, [0, 1, 3], 9, "of the fork at the end")


def test_a_cut_into_a_shared_block():
    """A full shared block that one table truncates is unfinished for that table only: the other appends after it."""
    table, pool = filled(8)
    fork = forked(table)
    call(fork.truncate, 6).gives(None)
    check_refs(pool, [2, 2, 0, 0, 0, 0], "after the fork's truncate(6)")
    call(fork.append, 1).raises(SharedBlockError)
    call(table.append, 1).gives([8])
    call(table.release).gives(None)
    call(fork.append, 3).gives([6, 7, 12])


def test_the_last_table_frees_the_blocks():
    """Released in any order, the last table frees the blocks, the last block first."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        table, pool = filled(7)
        tables = [table, forked(table), forked(table)]
        for left, which in zip((2, 1, 0), order, strict=True):
            call(tables[which].release).gives(None)
            check_refs(pool, [left, left, 0, 0, 0, 0], f"when {left} of 3 tables are left")
        that("the free list at the end", pool.allocate(6)).gives([2, 3, 4, 5, 1, 0])


# Everything together


class TablesAndModel(RuleBasedStateMachine):
    """Tables over a pool of 9 blocks of 3, and a model of them: the free list, each table's blocks and length."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(9, 3)
        self.free_list = list(range(9))
        self.tables = [(BlockTable(self.pool), [], 0)]  # (the table, its blocks, its length)

    def refs(self):
        return [sum(block_ids.count(each) for _, block_ids, _ in self.tables) for each in range(9)]

    def drop(self, dropped):
        """Blocks of a table that have no reference any more go to the free list."""
        self.free_list += [each for each in dropped if not self.refs()[each]]

    @rule()
    def new(self):
        if len(self.tables) < 5:
            self.tables.append((BlockTable(self.pool), [], 0))

    @rule(which=st.integers(0, 4), count=st.integers(0, 10))
    def append(self, which, count):
        table, block_ids, length = self.tables[which % len(self.tables)]
        needed = -(-(length + count) // 3) - len(block_ids)
        shared = bool(count and length % 3 and self.refs()[block_ids[-1]] > 1)
        short = needed > len(self.free_list)
        if shared or short:
            errors = [SharedBlockError] * shared + [OutOfBlocksError] * short
            call(table.append, count).raises(tuple(errors))
            return
        block_ids, self.free_list = block_ids + self.free_list[:needed], self.free_list[needed:]
        slots = [3 * block_ids[position // 3] + position % 3 for position in range(length, length + count)]
        call(table.append, count).gives(slots)
        self.tables[which % len(self.tables)] = (table, block_ids, length + count)

    @rule(which=st.integers(0, 4))
    def fork(self, which):
        table, block_ids, length = self.tables[which % len(self.tables)]
        if len(self.tables) < 5:
            self.tables.append((forked(table), list(block_ids), length))

    @rule(which=st.integers(0, 4), kept=st.integers(0, 27))
    def truncate(self, which, kept):
        table, block_ids, length = self.tables[which % len(self.tables)]
        kept %= length + 1
        call(table.truncate, kept).gives(None)
        blocks = -(-kept // 3)
        self.tables[which % len(self.tables)] = (table, block_ids[:blocks], kept)
        self.drop(block_ids[blocks:][::-1])

    @rule(which=st.integers(0, 4))
    def release(self, which):
        table, block_ids, _ = self.tables[which % len(self.tables)]
        call(table.release).gives(None)
        self.tables[which % len(self.tables)] = (table, [], 0)
        self.drop(block_ids[::-1])

    @invariant()
    def agree(self):
        for number, (table, block_ids, length) in enumerate(self.tables):
            check_table(table, block_ids, length, f"of table {number}")
        check_refs(self.pool, self.refs(), "now")

    def teardown(self):
        that("all that is free at the end", self.pool.allocate(len(self.free_list))).gives(self.free_list)


def test_many_calls_in_any_order():
    """Tables append, fork, truncate and release in any order: blocks, references, slots and free list match a model."""
    run_state_machine_as_test(TablesAndModel, settings=settings(max_examples=30, stateful_step_count=25))
