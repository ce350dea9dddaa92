"""Blocks and who references them: a pool of equal blocks, and one block table per sequence.

Phase 3 builds it. A cache's memory is divided into blocks of `block_size` tokens. `BlockPool` allocates them and counts
their references; `BlockTable` maps the positions of one sequence to slots of its blocks. Both are integer bookkeeping
with the standard library only: no tensor, no model. `minicache.cache.paged` stores keys and values in the slots, and a
scheduler decides by `num_free` which requests fit.

The names and the block table are PagedAttention's (Kwon et al., SOSP 2023, section 4). A slot is one token's place in
the cache: block · block_size + offset.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from minicache.errors import InvariantError, OutOfBlocksError, SharedBlockError, require_count


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens take: ⌈num_tokens / block_size⌉.

    Args:
        num_tokens: ≥ 0. No tokens take no block.
        block_size: tokens that one block holds, ≥ 1.

    Raises:
        TypeError: an argument is not an int (True, which Python takes for 1, is none).
        ValueError: `num_tokens` is negative, or `block_size` below 1.
    """
    require_count("num_tokens", num_tokens, at_least=0)
    require_count("block_size", block_size)
    return -(-num_tokens // block_size)


class FreeList(Protocol):
    """The free blocks of a pool, in the order in which they will be allocated; a `collections.deque` of ids is one."""

    def popleft(self) -> int:
        """Take the next block out of the list, which is not empty."""
        ...

    def append(self, block_id: int, /) -> None:
        """Add a block that has become free."""
        ...

    def remove(self, block_id: int, /) -> None:
        """Take a block out of the list, wherever it is. No caller asks for one that is not there."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class BlockPool:
    """Blocks 0 … num_blocks − 1, each either free or used, with one or more references.

    The free list is a FIFO queue: a new pool hands out 0, 1, 2, …, and a block that becomes free goes to the end of the
    list. So the contents of a freed block survive as long as possible. `share` adds one reference to each of the given
    blocks; `free` drops one, and a block without references is free again.

    `allocate`, `share` and `free` are all or nothing: a call that raises has changed nothing, not even for the valid
    part of its ids. True, which Python takes for 1, is not accepted as an int, neither as a count nor as an id.

    Args:
        num_blocks: the number of blocks, ≥ 1.
        block_size: tokens that one block holds, ≥ 1. The pool does not use it; its tables do.

    Attributes:
        num_blocks: as given.
        block_size: as given.
        free_list: the ids of the free blocks, the next one first: a `FreeList`. `allocate` takes blocks from it by
            `popleft`, `free` adds them by `append`, one by one, and otherwise the pool only counts and iterates it. So
            a subclass that sets another `FreeList` here decides which block is next.
        ref_counts: a list of the references to each block; 0 if it is free.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        require_count("num_blocks", num_blocks)
        require_count("block_size", block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_list: FreeList = deque(range(num_blocks))  # its two ends cost the same, whatever its length
        self.ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self.free_list)

    @property
    def num_used(self) -> int:
        """Blocks with a reference. A shared block counts once."""
        return self.num_blocks - len(self.free_list)

    def ref_count(self, block_id: int) -> int:
        """References to a block: 0 if it is free, 1 once it is allocated, one more each time it is shared.

        Raises:
            TypeError: `block_id` is not an int.
            IndexError: there is no such block. Negative ids do not count from the end.
        """
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            self._check_id(block_id)
        return self.ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; each gets one reference.

        Args:
            count: ≥ 0.

        Returns:
            The ids of the blocks that have been free longest, in the order in which they became free.

        Raises:
            TypeError: `count` is not an int.
            ValueError: `count` is negative.
            OutOfBlocksError: fewer than `count` blocks are free. None was taken.
        """
        if type(count) is not int or count < 0:  # a valid call pays for one comparison of types only
            require_count("count", count, at_least=0)
        free, refs = self.free_list, self.ref_counts
        if count > len(free):
            raise OutOfBlocksError(f"cannot allocate {count} blocks: {len(free)} of {self.num_blocks} are free")
        block_ids = []
        for _ in range(count):
            block_id = free.popleft()
            refs[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these used blocks. An id that is given twice gets two.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is free, so its contents belong to no sequence.
        """
        refs = self.ref_counts
        for block_id in self._used(block_ids):
            refs[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each of these blocks.

        A block that loses its last reference goes to the end of the free list; several that do in one call go there in
        the order in which they lose it. An id that is given twice loses two references.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is already free, or is given more often than it has references.
        """
        block_ids = self._used(block_ids)
        refs, free = self.ref_counts, self.free_list
        if len(block_ids) > 1 and len(set(block_ids)) < len(block_ids):
            self._check_refs_suffice(block_ids)
        for block_id in block_ids:
            refs[block_id] -= 1
            if not refs[block_id]:
                free.append(block_id)

    def check(self) -> None:
        """Raise unless the pool's state is consistent.

        By `ref_count`, no block has fewer than 0 references; each block with none is in the free list exactly once, and
        nothing else is in it. `num_free` counts the blocks without a reference, and `num_used` all the others. The
        check reads these three public members, not the attributes behind them, so it checks them too. It takes time
        proportional to the pool: it is for tests, not for every step.

        Raises:
            InvariantError: the state is inconsistent.
        """
        listed, num_free = Counter(self.free_list), 0
        for block_id in range(self.num_blocks):
            refs, times = self.ref_count(block_id), listed.pop(block_id, 0)
            if refs < 0 or times != (refs == 0):
                raise InvariantError(f"block {block_id} has {refs} references and is in the free list {times} times")
            num_free += times
        if listed:
            raise InvariantError(f"{next(iter(listed))!r} is in the free list and is not a block of this pool")
        if (self.num_free, self.num_used) != (num_free, self.num_blocks - num_free):
            counts = f"num_free is {self.num_free} and num_used is {self.num_used}"
            raise InvariantError(f"{counts}, but {num_free} of {self.num_blocks} blocks have no reference")

    def _used(self, block_ids: Iterable[int]) -> list[int]:
        """`block_ids` as a new list. Raises unless each is the id of a used block."""
        block_ids, refs, num_blocks = list(block_ids), self.ref_counts, self.num_blocks
        for block_id in block_ids:
            # A negative id would count from the end of `refs`, and True would pass for 1.
            if type(block_id) is not int or not 0 <= block_id < num_blocks:
                self._check_id(block_id)
            if not refs[block_id]:
                raise ValueError(f"block {block_id} is free: it has no references")
        return block_ids

    def _check_id(self, block_id: int) -> None:
        if not isinstance(block_id, int) or isinstance(block_id, bool):
            raise TypeError(f"a block id must be an int; got {block_id!r}")
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"no block {block_id}: this pool has blocks 0 … {self.num_blocks - 1}")

    def _check_refs_suffice(self, block_ids: list[int]) -> None:
        for block_id, times in Counter(block_ids).items():
            if times > (refs := self.ref_counts[block_id]):
                raise ValueError(f"block {block_id} is given {times} times and has {refs} references")


class BlockTable:
    """The blocks of one sequence: position p is in block `block_ids[p // block_size]`, at offset p % block_size.

    All blocks but the last are full, so a table has at most block_size − 1 empty slots. A new table is empty.

    Args:
        pool: allocates the blocks and takes them back.

    Attributes:
        pool: as given.
        block_ids: the blocks, in the order of the positions. This is the table's list: read it, do not change it.
        num_tokens: tokens that have a slot.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_ids: list[int] = []
        self.num_tokens = 0

    def blocks_needed(self, num_new_tokens: int) -> int:
        """Blocks that `append(num_new_tokens)` would allocate, 0 while the last block has space.

        Args:
            num_new_tokens: ≥ 0.

        Raises:
            TypeError: `num_new_tokens` is not an int.
            ValueError: it is negative.
        """
        if type(num_new_tokens) is not int or num_new_tokens < 0:
            require_count("num_new_tokens", num_new_tokens, at_least=0)
        return -(-(self.num_tokens + num_new_tokens) // self.pool.block_size) - len(self.block_ids)

    def append(self, num_new_tokens: int) -> list[int]:
        """Assign slots to the next tokens, and allocate blocks when the last one is full.

        Args:
            num_new_tokens: ≥ 0.

        Returns:
            One slot a token, in the order of the positions: block · block_size + offset. Slots are consecutive within
            a block; from one block to the next they may jump.

        Raises:
            TypeError: `num_new_tokens` is not an int.
            ValueError: it is negative.
            SharedBlockError: the last block is unfinished and shared, so another table would read what is written.
                Table and pool are unchanged. A full shared block is allowed, and so is appending 0 tokens.
            OutOfBlocksError: the pool has too few free blocks. Table and pool are unchanged.
        """
        num_blocks = self.blocks_needed(num_new_tokens)
        block_size, block_ids = self.pool.block_size, self.block_ids
        position, end = self.num_tokens, self.num_tokens + num_new_tokens
        if num_new_tokens and position % block_size and self.pool.ref_count(block_ids[-1]) > 1:
            raise SharedBlockError(f"block {block_ids[-1]} is unfinished and shared: it cannot be written")
        if num_blocks:
            block_ids += self.pool.allocate(num_blocks)
        slots: list[int] = []
        while position < end:  # once a block, not once a token
            offset = position % block_size
            start = block_ids[position // block_size] * block_size + offset
            count = min(block_size - offset, end - position)
            slots += range(start, start + count)
            position += count
        self.num_tokens = end
        return slots

    def slot(self, position: int) -> int:
        """The slot of the token at `position`: block · block_size + offset.

        Args:
            position: 0 … num_tokens − 1.

        Raises:
            TypeError: `position` is not an int.
            IndexError: no token has that position. Negative positions do not count from the end.
        """
        if not isinstance(position, int) or isinstance(position, bool):
            raise TypeError(f"a position must be an int; got {position!r}")
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"no token at position {position}: this table has {self.num_tokens} tokens")
        block_size = self.pool.block_size
        return self.block_ids[position // block_size] * block_size + position % block_size

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and free the blocks that hold none of them, the last block first.

        Args:
            num_tokens: 0 … the table's num_tokens.

        Raises:
            TypeError: `num_tokens` is not an int.
            ValueError: it is negative, or more than the table has.
        """
        num_blocks = blocks_for(num_tokens, self.pool.block_size)
        if num_tokens > self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens: this table has {self.num_tokens}")
        self.pool.free(self.block_ids[num_blocks:][::-1])
        del self.block_ids[num_blocks:]
        self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """A second table over the same blocks, including an unfinished last one. No block is copied or allocated.

        The two tables grow, shrink and are released independently. A block goes back to the pool when no table
        references it any more.
        """
        child = BlockTable(self.pool)
        self.pool.share(self.block_ids)
        child.block_ids = self.block_ids.copy()
        child.num_tokens = self.num_tokens
        return child

    def release(self) -> None:
        """Free all blocks, the last one first. The table is then empty and may be used again."""
        self.truncate(0)
