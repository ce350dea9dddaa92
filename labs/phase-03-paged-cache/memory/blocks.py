# Phase 3, paged-cache: your file. It stands in for minicache.memory.blocks.
# Write what raises NotImplementedError. `minicache grade 3` grades it, `minicache hint 3.K` helps with task K.
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
    raise NotImplementedError(
        "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
    )


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
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    @property
    def num_used(self) -> int:
        """Blocks that have an owner. A shared block counts once."""
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def ref_count(self, block_id: int) -> int:
        """How many owners a block has: 0 if it is free, 1 once it is allocated, one more each time it is shared.

        Raises:
            TypeError: `block_id` is not an int.
            IndexError: there is no such block. Negative ids do not count from the end.
        """
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

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
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """Give each of these used blocks one more owner. An id that is given twice gets two more.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is free: nobody owns what it holds.
        """
        raise NotImplementedError(
            "phase 3, task 2: Share, and check; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def free(self, block_ids: Iterable[int]) -> None:
        """Take one owner away from each of these blocks.

        A block that loses its last owner goes to the end of the line of free blocks; several that do in one call go
        there in the order in which they lose it. An id that is given twice loses two owners.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the pool. Negative ids do not count from the end.
            ValueError: a block is free already, or is given more often than it has owners.
        """
        raise NotImplementedError(
            "phase 3, task 1: Allocate and free; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def check(self) -> None:
        """Raise unless the pool's books agree with themselves.

        By `ref_count`, no block has fewer than 0 owners; each that has none stands in the line of free blocks exactly
        once, and nothing else stands there. `num_free` is how many have none, and `num_used` all the others. These
        three are asked, rather than what they are computed from: so what they say is checked too. Takes time in
        proportion to the pool: it is for tests, not for every step.

        Raises:
            InvariantError: the books do not agree.
        """
        raise NotImplementedError(
            "phase 3, task 2: Share, and check; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )


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
        raise NotImplementedError(
            "phase 3, task 3: The block table; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def blocks_needed(self, num_new_tokens: int) -> int:
        """Blocks that `append(num_new_tokens)` would take from the pool, 0 while the last block has room.

        Args:
            num_new_tokens: ≥ 0.

        Raises:
            TypeError: `num_new_tokens` is not an int.
            ValueError: it is negative.
        """
        raise NotImplementedError(
            "phase 3, task 3: The block table; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

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
        raise NotImplementedError(
            "phase 3, task 3: The block table; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def slot(self, position: int) -> int:
        """The slot of the token at `position`: block · block_size + offset.

        Args:
            position: 0 … num_tokens − 1.

        Raises:
            TypeError: `position` is not an int.
            IndexError: no token stands there. Negative positions do not count from the end.
        """
        raise NotImplementedError(
            "phase 3, task 3: The block table; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and free the blocks that none of them lies in, the last block first.

        Args:
            num_tokens: 0 … the tokens that there are.

        Raises:
            TypeError: `num_tokens` is not an int.
            ValueError: it is negative, or there are fewer tokens.
        """
        raise NotImplementedError(
            "phase 3, task 4: Truncate, fork, release; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def fork(self) -> BlockTable:
        """A second table over the same blocks, the unfinished last one too. No block is copied or taken.

        From here on each table grows, shrinks and is released on its own. A block goes back to the pool when all the
        tables that share it have let it go.
        """
        raise NotImplementedError(
            "phase 3, task 4: Truncate, fork, release; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )

    def release(self) -> None:
        """Let all blocks go, the last one first. What is left is an empty table, which may be used again."""
        raise NotImplementedError(
            "phase 3, task 4: Truncate, fork, release; read docs/en/phase-03-paged-cache/lab/00-blocks.md"
        )
