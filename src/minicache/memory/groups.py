"""Several kinds of cache in one model: one pool of blocks, and a block table for each group of layers.

Phase 12 builds it. In many models some layers attend to all tokens and the others to a sliding window: the last
`window` tokens, the newest included. A window needs few blocks however long the request gets. So the layers of one kind
form a group (a large kind may form several, of as many layers as the others), every group has a block table of its own,
and all of them take their blocks from one pool.

A request's `tables` are a list with one table a group. In each of them, entry i is the block of the tokens
i · block_size … (i + 1) · block_size − 1, so all have one length. Where no later token of the request sees a block,
its entry is NULL_BLOCK, and the block has gone back to the pool.

The rules are those of vLLM 0.33's hybrid manager, block for block. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from minicache.errors import require_count
from minicache.memory.blocks import blocks_for
from minicache.memory.prefix import BlockHash, CachingBlockPool

NULL_BLOCK: Final = -1
"""The entry of a table where the group's layers see nothing any more, and have no block."""

Tables = list[list[int]]
"""The block tables of one request, one a group, all of one length."""


class GroupedBlockPool(CachingBlockPool):
    """A `CachingBlockPool` for whole tables: NULL_BLOCK among the ids is skipped, and the order of the ids counts.

    Blocks without a hash that are freed in one call are the next to be allocated, in the order in which they are given.
    """

    def share(self, block_ids: Iterable[int]) -> None:
        """As `CachingBlockPool.share`, without NULL_BLOCK."""
        super().share(without_null(block_ids))

    def free(self, block_ids: Iterable[int]) -> None:
        """As `CachingBlockPool.free`, without NULL_BLOCK; of the blocks without a hash, the first given is next."""
        num_plain = len(self.free_list.plain)
        super().free(without_null(block_ids))
        self.free_list.plain[num_plain:] = self.free_list.plain[num_plain:][::-1]


class BlockGroups:
    """The block tables of all groups: which blocks a request needs, gives back, and finds.

    Args:
        pool: serves all groups.
        windows: one entry a group: the tokens that its layers see, the newest included, ≥ 1. None: all tokens.
        max_step_tokens: the most tokens of one request in one step, ≥ 1.
        max_num_tokens: the most tokens of one request; None: no such limit.
        retention: of a group with a window, which full blocks are cached (`is_retained`): None: all. n: the blocks
            that a prefix of a multiple of n tokens needs (0: of no multiple), and some others. A multiple of the
            block size.

    Attributes:
        pool: as given.
        windows: as given, a tuple.
        retention: as given.

    Raises:
        TypeError: a number is not an int, or `windows` is not a tuple or list.
        ValueError: there is no group, a number is out of its bounds, or `retention` is not a multiple of the block
            size.
    """

    def __init__(
        self,
        pool: GroupedBlockPool,
        windows: Sequence[int | None],
        *,
        max_step_tokens: int,
        max_num_tokens: int | None = None,
        retention: int | None = 0,
    ) -> None:
        if not isinstance(windows, tuple | list):
            raise TypeError(f"windows must be a tuple with one entry a group, as (None, 1024); got {windows!r}")
        if not windows:
            raise ValueError("windows must have at least one group: (None,) is full attention alone")
        for window in windows:
            if window is not None:
                require_count("a window", window)
        if retention is not None:
            require_count("prefix_cache_retention", retention, at_least=0)
            if retention % pool.block_size:
                multiple = f"a multiple of the block size, {pool.block_size}"
                raise ValueError(f"prefix_cache_retention must be None or {multiple}; got {retention}")
        self.pool = pool
        self.windows = tuple(windows)
        self.retention = retention
        self._max_step_tokens = max_step_tokens
        self._max_num_tokens = max_num_tokens

    # Blocks outside the window go back

    def num_outside(self, window: int | None, num_computed_tokens: int) -> int:
        """How many whole blocks at the beginning no later token sees.

        The next token is the one at position num_computed_tokens, counted from 0. It sees itself and the window − 1
        tokens before it, and every later token sees less of what is there.

        Args:
            window: of the group; None: its layers see all tokens, so there is no such block.
            num_computed_tokens: ≥ 0.
        """
        if window is None:
            return 0
        return max(0, num_computed_tokens - window + 1) // self.pool.block_size

    def slide(self, tables: Tables, num_computed_tokens: int) -> None:
        """Free the blocks that no later token of a request sees (`num_outside`), and put NULL_BLOCK in their place.

        Group after group, in one call of `free` each: the last of these blocks first. Other requests that have one of
        the blocks keep it, and a cached block stays cached. A call takes time in proportion to the blocks that it
        frees, not to the tables: before a NULL_BLOCK there are only others.

        Args:
            tables: the request's. The lists in it change, in place: `tables` itself may be a copy.
            num_computed_tokens: of the request, without those of a step that has not been computed.
        """
        for table, window in zip(tables, self.windows, strict=True):
            index = self.num_outside(window, num_computed_tokens) - 1
            if index < 0 or table[index] == NULL_BLOCK:  # nearly always
                continue
            freed = []
            while index >= 0 and table[index] != NULL_BLOCK:
                freed.append(table[index])
                table[index] = NULL_BLOCK
                index -= 1
            self.pool.free(freed)

    def most_blocks(self, window: int | None, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at a time in a group.

        Without a window: those of all its tokens. With one: those of so many tokens as a group sees in a step, the
        window − 1 before it and its max_step_tokens, together at most max_num_tokens; and one more, because they need
        not begin where a block does. Never more than those of all its tokens.

        Args:
            window: of the group.
            num_tokens: ≥ 0.
        """
        all_blocks = blocks_for(num_tokens, self.pool.block_size)
        if window is None:
            return all_blocks
        held = window - 1 + self._max_step_tokens
        if self._max_num_tokens is not None:
            held = min(held, self._max_num_tokens)
        return min(all_blocks, blocks_for(held, self.pool.block_size) + 1)

    def blocks_to_admit(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at a time in all groups (`most_blocks`)."""
        return sum([self.most_blocks(window, num_tokens) for window in self.windows])

    def blocks_missing(self, tables: Tables, num_tokens: int) -> int:
        """Blocks that `grow` takes."""
        # Called for every token, so without the call of `blocks_for`.
        return len(tables) * (-(-num_tokens // self.pool.block_size) - len(tables[0]))

    def grow(self, tables: Tables, num_tokens: int) -> None:
        """Append the blocks that are missing for `num_tokens` tokens to every table, group after group.

        Args:
            tables: the request's.
            num_tokens: at least as many as the tables have blocks for without their last one. The blocks are free.
        """
        missing = blocks_for(num_tokens, self.pool.block_size) - len(tables[0])
        for table in tables:
            table += self.pool.allocate(missing)

    def release(self, tables: Tables) -> None:
        """Free all blocks: group after group, in one call each, from a table's last block to its first.

        The tables do not change: give the request `empty` ones.
        """
        for table in tables:
            self.pool.free(table[::-1])

    def empty(self) -> Tables:
        """The tables of a request without blocks."""
        return [[] for _ in self.windows]

    # Prefix hits, intersected

    def find(self, hashes: Sequence[BlockHash]) -> tuple[Tables, int]:
        """The longest prefix after which a request can continue in every group.

        A group allows that if it has cached every block of the prefix that the next token sees: all of them without a
        window, and those that are not outside with one (`num_outside`). Takes no reference.

        Args:
            hashes: of the blocks of a request's tokens, from its first on.

        Returns:
            The tables of the prefix, with NULL_BLOCK where the next token does not see the block, cached or not; and
            the junction: how many blocks from the beginning on the first group without a window has (if all have one:
            how long a prefix the first group would do with), if that is more than the prefix, else 0. A request that
            computes them should leave what the other groups need there (`is_retained`): others came so far too.
        """
        # Full attention first: its hit is the longest that the others can have.
        order = sorted(range(len(self.windows)), key=lambda group: self.windows[group] is not None)
        junction, length, before = None, len(hashes), -1
        while length != before:  # a group that cuts it may leave another nothing to continue from
            before = length
            for group in order:
                length = self._hit_length(group, hashes[:length])
                junction = length if junction is None else junction
        tables = []
        for group, window in enumerate(self.windows):
            first = self.num_outside(window, length * self.pool.block_size)
            tables.append([NULL_BLOCK] * first + self.pool.find(_keys(group, hashes[first:length])))
        return tables, junction if junction is not None and junction > length else 0

    def _hit_length(self, group: int, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix of these blocks after which a request can continue in one group.

        With a window it ends with the last run of `blocks_seen` cached blocks; or, if there is none, with the run of
        fewer at the beginning, before which there is nothing to see.
        """
        window = self.windows[group]
        if window is None:
            return len(self.pool.find(_keys(group, hashes)))
        needed, run = self.blocks_seen(window), 0
        for first in range(len(hashes), 0, -1):  # of the run; from the end back
            if run == needed:
                return first + run
            run = run + 1 if self.pool.find(_keys(group, hashes[first - 1 : first])) else 0
        return run

    def blocks_seen(self, window: int) -> int:
        """How many blocks before its own the first token of a block sees in a window: ⌈(window − 1) / block_size⌉."""
        return blocks_for(window - 1, self.pool.block_size)

    def blocks_to_take(self, found: Tables, blocks: Sequence[int]) -> int:
        """Free blocks that it takes to have so many blocks in each group, with the found ones.

        In each group those that are missing: its number, less the entries of its found table, NULL_BLOCKs too (so
        after a long hit a window may be charged less than `most_blocks`, as in vLLM), at least 0. And one for each
        found block that is free, because sharing it takes it out of the free list.

        Args:
            found: what `find` has found; empty tables: nothing.
            blocks: one number a group.
        """
        new = sum([max(0, count - len(table)) for count, table in zip(blocks, found, strict=True)])
        return new + sum([not self.pool.ref_count(each) for table in found for each in without_null(table)])

    # What is cached

    def cache(
        self, tables: Tables, hashes: Sequence[BlockHash], first: int, end: int, prefixes: Sequence[int] = ()
    ) -> None:
        """Cache the blocks first … end − 1 of every table, of those with a window the retained ones (`is_retained`).

        A block of tokens has one hash and a block in each group. `find` must not take one group's for another's.

        Args:
            tables: a request's.
            hashes: of the blocks of its tokens, at least `end`.
            first: 0 … end.
            end: so many blocks are full.
            prefixes: as for `is_retained`.
        """
        for group, (table, window) in enumerate(zip(tables, self.windows, strict=True)):
            kept = [index for index in range(first, end) if self.is_retained(window, index, prefixes)]
            self.pool.cache([table[index] for index in kept], _keys(group, [hashes[index] for index in kept]))

    def is_retained(self, window: int | None, index: int, prefixes: Sequence[int] = ()) -> bool:
        """Whether a full block is cached.

        Without a window all are, and all if `retention` is None. Otherwise the last `blocks_seen` blocks of certain
        prefixes are: a request that finds the prefix sees them. These prefixes are the `prefixes`, and those of every
        multiple of `retention` tokens, unless it is 0.

        Args:
            window: of the group.
            index: of the block in the table.
            prefixes: lengths of prefixes that may be found again, in blocks. 0 is none.
        """
        if window is None or self.retention is None:
            return True
        ends = list(prefixes)
        if self.retention:
            interval = self.retention // self.pool.block_size
            ends.append((index // interval + 1) * interval)  # the next one
        return any(end - self.blocks_seen(window) <= index < end for end in ends)


def without_null(table: Iterable[int]) -> list[int]:
    """The blocks of a table: its entries without NULL_BLOCK."""
    return [block_id for block_id in table if block_id != NULL_BLOCK]


def _keys(group: int, hashes: Sequence[BlockHash]) -> list[BlockHash]:
    """The hashes under which a group's blocks are cached: one block's tokens have a block in every group."""
    suffix = group.to_bytes(2)
    return [each + suffix for each in hashes]
