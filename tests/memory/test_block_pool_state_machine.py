"""Pool and tables under thousands of calls, good and bad ones, against a model that is too simple to be wrong.

The model has no reference counts and no tables. It remembers who holds which block, as a plain list of (holder, block)
pairs in which a reference count is a matter of counting, and where each token of each sequence is, one slot a token.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minicache.errors import OutOfBlocksError, SharedBlockError
from minicache.memory.blocks import BlockPool, BlockTable

LOOSE = -1
"""The holder of blocks that were allocated or shared by hand, outside any table."""

picks = st.lists(st.integers(0, 1000), max_size=6)


class PoolAndTables(RuleBasedStateMachine):
    """One pool, up to six tables, and blocks held by hand."""

    @initialize(num_blocks=st.integers(1, 14), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tables = [BlockTable(self.pool)]
        self.line = list(range(num_blocks))
        self.held: list[tuple[int, int]] = []
        self.slots: list[list[int]] = [[]]

    # The model

    def owners(self, block_id: int) -> int:
        return sum(each == block_id for _, each in self.held)

    def blocks_of(self, holder: int) -> list[int]:
        return [block_id for who, block_id in self.held if who == holder]

    def take(self, holder: int, count: int) -> list[int]:
        block_ids, self.line = self.line[:count], self.line[count:]
        self.held += [(holder, block_id) for block_id in block_ids]
        return block_ids

    def drop(self, holder: int, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.held.remove((holder, block_id))
            if not self.owners(block_id):
                self.line.append(block_id)

    def keep(self, which: int, num_tokens: int) -> None:
        """Table `which` keeps its first tokens; the blocks in which none of them lies go, the last one first."""
        self.slots[which] = self.slots[which][:num_tokens]
        kept = {slot // self.pool.block_size for slot in self.slots[which]}
        self.drop(which, [block_id for block_id in self.blocks_of(which)[::-1] if block_id not in kept])

    # By hand

    @rule(count=st.integers(0, 16))
    def allocate(self, count: int) -> None:
        if count > len(self.line):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
        else:
            assert self.pool.allocate(count) == self.take(LOOSE, count)

    @precondition(lambda self: self.held)
    @rule(picks=picks)
    def share(self, picks: list[int]) -> None:
        block_ids = [self.held[pick % len(self.held)][1] for pick in picks]
        self.pool.share(block_ids)
        self.held += [(LOOSE, block_id) for block_id in block_ids]

    @precondition(lambda self: self.blocks_of(LOOSE))
    @rule(picks=st.lists(st.integers(0, 1000), max_size=6, unique=True), into=st.sampled_from([list, tuple, iter]))
    def free(self, picks: list[int], into: Any) -> None:
        loose = self.blocks_of(LOOSE)
        block_ids = [loose[each] for each in dict.fromkeys(pick % len(loose) for pick in picks)]
        self.pool.free(into(block_ids))
        self.drop(LOOSE, block_ids)

    # Tables

    @rule()
    def new_table(self) -> None:
        if len(self.tables) < 6:
            self.tables.append(BlockTable(self.pool))
            self.slots.append([])

    @rule(pick=st.integers(0, 5), num_new=st.integers(0, 12))
    def append(self, pick: int, num_new: int) -> None:
        which, size = pick % len(self.tables), self.pool.block_size
        table, slots, block_ids = self.tables[which], self.slots[which], self.blocks_of(which)
        room = len(block_ids) * size - len(slots)
        missing = len([each for each in range(num_new) if each >= room and (each - room) % size == 0])
        assert table.blocks_needed(num_new) == missing
        if num_new and room and self.owners(block_ids[-1]) > 1:
            with pytest.raises(SharedBlockError):
                table.append(num_new)
        elif missing > len(self.line):
            with pytest.raises(OutOfBlocksError):
                table.append(num_new)
        else:
            block_ids += self.take(which, missing)
            every_slot = [block_id * size + offset for block_id in block_ids for offset in range(size)]
            new = every_slot[len(slots) : len(slots) + num_new]
            assert table.append(num_new) == new
            slots += new

    @rule(pick=st.integers(0, 5), into=st.integers(0, 5))
    def fork(self, pick: int, into: int) -> None:
        which = pick % len(self.tables)
        if len(self.tables) < 6:
            self.new_table()
            into = len(self.tables) - 1
        else:
            self.release(into)
        self.tables[into] = self.tables[which].fork()
        self.slots[into] = self.slots[which].copy()
        self.held += [(into, block_id) for block_id in self.blocks_of(which)]

    @rule(pick=st.integers(0, 5), num_tokens=st.integers(0, 1000))
    def truncate(self, pick: int, num_tokens: int) -> None:
        which = pick % len(self.tables)
        num_tokens %= len(self.slots[which]) + 1
        self.tables[which].truncate(num_tokens)
        self.keep(which, num_tokens)

    @rule(pick=st.integers(0, 5))
    def release(self, pick: int) -> None:
        which = pick % len(self.tables)
        self.tables[which].release()
        self.keep(which, 0)

    # Misuse: the invariants below see that nothing has changed

    @rule(name=st.sampled_from(["share", "free"]), picks=picks, at=st.integers(0, 6), beyond=st.integers(0, 3))
    def ids_outside(self, name: str, picks: list[int], at: int, beyond: int) -> None:
        used = [self.held[pick % len(self.held)][1] for pick in picks] if self.held else []
        good = list(dict.fromkeys(used))
        for bad in (self.pool.num_blocks + beyond, -1 - beyond):
            with pytest.raises(IndexError):
                getattr(self.pool, name)([*good[:at], bad, *good[at:]])
            with pytest.raises(IndexError):
                self.pool.ref_count(bad)

    @precondition(lambda self: self.line)
    @rule(name=st.sampled_from(["share", "free"]), picks=picks, at=st.integers(0, 6), free=st.integers(0, 1000))
    def free_blocks(self, name: str, picks: list[int], at: int, free: int) -> None:
        used = [self.held[pick % len(self.held)][1] for pick in picks] if self.held else []
        good = list(dict.fromkeys(used))
        with pytest.raises(ValueError, match="free"):
            getattr(self.pool, name)([*good[:at], self.line[free % len(self.line)], *good[at:]])

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 1000), between=picks)
    def freed_too_often(self, pick: int, between: list[int]) -> None:
        block_id = self.held[pick % len(self.held)][1]
        others = dict.fromkeys(self.held[each % len(self.held)][1] for each in between)
        with pytest.raises(ValueError, match=f"block {block_id} "):
            self.pool.free(
                [block_id, *(each for each in others if each != block_id), *[block_id] * self.owners(block_id)]
            )

    @rule(bad=st.sampled_from([1.0, "1", None, True, False, [0]]), pick=st.integers(0, 5))
    def no_ints(self, bad: Any, pick: int) -> None:
        table = self.tables[pick % len(self.tables)]
        for ask in (
            self.pool.allocate,
            self.pool.ref_count,
            table.append,
            table.blocks_needed,
            table.slot,
            table.truncate,
        ):
            with pytest.raises(TypeError):
                ask(bad)
        used = [self.held[0][1]] if self.held else []
        for ask in (self.pool.free, self.pool.share):
            with pytest.raises(TypeError):
                ask([*used, bad])

    @rule(bad=st.integers(-20, -1), beyond=st.integers(1, 20), pick=st.integers(0, 5))
    def numbers_out_of_range(self, bad: int, beyond: int, pick: int) -> None:
        which = pick % len(self.tables)
        table = self.tables[which]
        for ask in (self.pool.allocate, table.append, table.blocks_needed, table.truncate):
            with pytest.raises(ValueError, match="at least 0"):
                ask(bad)
        with pytest.raises(ValueError, match="cannot keep"):
            table.truncate(len(self.slots[which]) + beyond)
        for position in (bad, len(self.slots[which]) + beyond - 1):
            with pytest.raises(IndexError):
                table.slot(position)

    # What holds after every call

    @invariant()
    def same_books(self) -> None:
        pool = self.pool
        pool.check()
        assert pool.num_free == len(self.line)
        assert pool.num_used == len({block_id for _, block_id in self.held})
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert [pool.ref_count(each) for each in range(pool.num_blocks)] == list(
            map(self.owners, range(pool.num_blocks))
        )

    @invariant()
    def same_sequences(self) -> None:
        for which, (table, slots) in enumerate(zip(self.tables, self.slots, strict=True)):
            assert table.num_tokens == len(slots)
            assert table.block_ids == self.blocks_of(which)
            assert [table.slot(position) for position in range(len(slots))] == slots
            assert len(table.block_ids) * self.pool.block_size - len(slots) < self.pool.block_size  # bounded waste

    def teardown(self) -> None:
        """When everyone has let go, every block is free, and the line is the model's to the last block."""
        if not hasattr(self, "pool"):
            return
        for which, table in enumerate(self.tables):
            table.release()
            self.keep(which, 0)
        loose = self.blocks_of(LOOSE)
        self.pool.free(loose)
        self.drop(LOOSE, loose)
        assert self.pool.allocate(self.pool.num_blocks) == self.line


def test_thousands_of_calls_in_any_order() -> None:
    run_state_machine_as_test(PoolAndTables, settings=settings(max_examples=120, stateful_step_count=50))
