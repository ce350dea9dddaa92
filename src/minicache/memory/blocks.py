"""Who owns which block: a pool of equal blocks, and one table per sequence.

Phase 3 builds it. A cache's memory is cut into blocks of `block_size` tokens. `BlockPool` hands them out and counts
their owners; `BlockTable` maps the positions of one sequence to slots of its blocks. Both are bookkeeping in integers:
no tensor, no model, pure standard library. `minicache.cache.paged` puts the keys and values where the slots say, and a
scheduler decides by `num_free` whom it can serve.

The names and the block table are PagedAttention's (Kwon et al., SOSP 2023, section 4). A slot is one token's place in
the cache: block · block_size + offset.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

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


class BlockPool:
    """Blocks 0 … num_blocks − 1, each either free or used by one or more owners.

    Free blocks wait in a line, first in, first out: a new pool hands out 0, 1, 2, …, and a block that becomes free goes
    to the end of the line. So what a freed block holds survives as long as it can. `share` gives used blocks one
    more owner each; `free` takes one away, and a block without owners is free again.

    `allocate`, `share` and `free` are all or nothing: a call that raises has changed nothing, not even for the good
    part of its ids. True, which Python takes for 1, is no int here: neither as a count nor as an id.

    Args:
        num_blocks: how many blocks there are, ≥ 1.
        block_size: tokens that one block holds, ≥ 1. The pool itself does not need it; its tables do.

    Attributes:
        num_blocks: as given.
        block_size: as given.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        require_count("num_blocks", num_blocks)
        require_count("block_size", block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._line = deque(range(num_blocks))  # the free blocks; the left end is next
        self._owners = [0] * num_blocks  # of each block; 0 for the free ones

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._line)

    @property
    def num_used(self) -> int:
        """Blocks that have an owner. A shared block counts once."""
        return self.num_blocks - len(self._line)

    def ref_count(self, block_id: int) -> int:
        """How many owners a block has: 0 if it is free, 1 once it is allocated, one more each time it is shared.

        Raises:
            TypeError: `block_id` is not an int.
            IndexError: there is no such block. Negative ids do not count from the end.
        """
        if type(block_id) is not int or not 0 <= block_id < self.num_blocks:
            self._check_id(block_id)
        return self._owners[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each for one owner.

        Args:
            count: ≥ 0.

        Returns:
            The ids of the blocks that have been free longest, in the order in which they became free.

        Raises:
            TypeError: `count` is not an int.
            ValueError: `count` is negative.
            OutOfBlocksError: fewer than `count` blocks are free. None was taken.
        """
        if type(count) is not int or count < 0:  # one look at the type is all that a good call pays
            require_count("count", count, at_least=0)
        line, owners = self._line, self._owners
        if count > len(line):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(line)} of {self.num_blocks} are free")
        block_ids = []
        for _ in range(count):
            block_id = line.popleft()
            owners[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Give each of these used blocks one more owner. An id that is given twice gets two more.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is free: nobody owns what it holds.
        """
        owners = self._owners
        for block_id in self._used(block_ids):
            owners[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one owner away from each of these blocks.

        A block that loses its last owner goes to the end of the line of free blocks; several that do in one call go
        there in the order in which they lose it. An id that is given twice loses two owners.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is free already, or is given more often than it has owners.
        """
        block_ids = self._used(block_ids)
        owners, line = self._owners, self._line
        if len(block_ids) > 1 and len(set(block_ids)) < len(block_ids):
            self._check_owners_suffice(block_ids)
        for block_id in block_ids:
            owners[block_id] -= 1
            if not owners[block_id]:
                line.append(block_id)

    def check(self) -> None:
        """Raise unless the pool's books agree with themselves.

        By `ref_count`, no block has fewer than 0 owners; each that has none stands in the line of free blocks exactly
        once, and nothing else stands there. `num_free` is how many have none, and `num_used` all the others. These
        three are asked, rather than what they are computed from: so what they say is checked too. Takes time in
        proportion to the pool: it is for tests, not for every step.

        Raises:
            InvariantError: the books do not agree.
        """
        in_line, num_unowned = Counter(self._line), 0
        for block_id in range(self.num_blocks):
            owners, times = self.ref_count(block_id), in_line.pop(block_id, 0)
            if owners < 0 or times != (owners == 0):
                raise InvariantError(f"block {block_id} has {owners} owners and is {times} times among the free ones")
            num_unowned += times
        if in_line:
            raise InvariantError(f"{next(iter(in_line))!r} is among the free blocks, and no block of this pool")
        if (self.num_free, self.num_used) != (num_unowned, self.num_blocks - num_unowned):
            counts = f"{self.num_free} free and {self.num_used} used blocks"
            raise InvariantError(f"{counts} are told, and {num_unowned} of {self.num_blocks} have no owner")

    def _used(self, block_ids: Iterable[int]) -> list[int]:
        """`block_ids` as a list of its own, if each is the id of a used block; else the error that fits."""
        block_ids, owners, num_blocks = list(block_ids), self._owners, self.num_blocks
        for block_id in block_ids:
            # A negative id would count from the end of `owners`, and True would pass for 1.
            if type(block_id) is not int or not 0 <= block_id < num_blocks:
                self._check_id(block_id)
            if not owners[block_id]:
                raise ValueError(f"block {block_id} is free: it has no owner")
        return block_ids

    def _check_id(self, block_id: int) -> None:
        if not isinstance(block_id, int) or isinstance(block_id, bool):
            raise TypeError(f"a block id must be an int; got {block_id!r}")
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"no block {block_id}: this pool has blocks 0 … {self.num_blocks - 1}")

    def _check_owners_suffice(self, block_ids: list[int]) -> None:
        for block_id, times in Counter(block_ids).items():
            if times > self._owners[block_id]:
                raise ValueError(f"block {block_id} is given {times} times and has {self._owners[block_id]} owners")


class BlockTable:
    """The blocks of one sequence: position p lies in block `block_ids[p // block_size]`, at offset p % block_size.

    All blocks but the last are full, so a table holds at most block_size − 1 slots without a token. A new table is
    empty and owns nothing.

    Args:
        pool: where the blocks come from and go back to.

    Attributes:
        pool: as given.
        block_ids: the blocks, in the order of the positions. The table's own list: read it, do not write to it.
        num_tokens: tokens that have a slot.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_ids: list[int] = []
        self.num_tokens = 0

    def blocks_needed(self, num_new_tokens: int) -> int:
        """Blocks that `append(num_new_tokens)` would take from the pool, 0 while the last block has room.

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
        """Give the next tokens their slots, and take blocks from the pool when the last one is full.

        Args:
            num_new_tokens: ≥ 0.

        Returns:
            One slot a token, in the order of the positions: block · block_size + offset. Slots run on inside a
            block; from one block to the next they may jump.

        Raises:
            TypeError: `num_new_tokens` is not an int.
            ValueError: it is negative.
            SharedBlockError: the last block is unfinished and has another owner, who would read what is written into
                it. Table and pool are as they were. A shared block that is full is no obstacle, nor are 0 tokens.
            OutOfBlocksError: the pool has too few free blocks. Table and pool are as they were.
        """
        num_blocks = self.blocks_needed(num_new_tokens)
        block_size, block_ids = self.pool.block_size, self.block_ids
        position, end = self.num_tokens, self.num_tokens + num_new_tokens
        if num_new_tokens and position % block_size and self.pool.ref_count(block_ids[-1]) > 1:
            raise SharedBlockError(f"block {block_ids[-1]} is unfinished and has another owner: it cannot be written")
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
            IndexError: no token stands there. Negative positions do not count from the end.
        """
        if not isinstance(position, int) or isinstance(position, bool):
            raise TypeError(f"a position must be an int; got {position!r}")
        if not 0 <= position < self.num_tokens:
            raise IndexError(f"no token at position {position}: this table has {self.num_tokens} tokens")
        block_size = self.pool.block_size
        return self.block_ids[position // block_size] * block_size + position % block_size

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and free the blocks that none of them lies in, the last block first.

        Args:
            num_tokens: 0 … the tokens that there are.

        Raises:
            TypeError: `num_tokens` is not an int.
            ValueError: it is negative, or there are fewer tokens.
        """
        num_blocks = blocks_for(num_tokens, self.pool.block_size)
        if num_tokens > self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens: this table has {self.num_tokens}")
        self.pool.free(self.block_ids[num_blocks:][::-1])
        del self.block_ids[num_blocks:]
        self.num_tokens = num_tokens

    def fork(self) -> BlockTable:
        """A second table over the same blocks, the unfinished last one too. No block is copied or taken.

        From here on each table grows, shrinks and is released on its own. A block goes back to the pool when all the
        tables that share it have let it go.
        """
        child = BlockTable(self.pool)
        self.pool.share(self.block_ids)
        child.block_ids = self.block_ids.copy()
        child.num_tokens = self.num_tokens
        return child

    def release(self) -> None:
        """Let all blocks go, the last one first. What is left is an empty table, which may be used again."""
        self.truncate(0)
