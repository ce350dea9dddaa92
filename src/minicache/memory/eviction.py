"""Which free block of a prefix cache is evicted next: the policies by name, and the free list that they are in.

A policy is a `FreeList` of the cached blocks only: `append` adds one whose last reference was dropped, `remove` takes
out one that a request has found, and `popleft` the one to evict. `docs/contributing/` adds one, step by step. Pure
standard library.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minicache.memory.blocks import FreeList


class TwoEndedFreeList:
    """The free list of a `CachingBlockPool`: in front a stack of blocks without a hash, behind it the cached ones.

    Args:
        block_ids: the free blocks, all without a hash, the next one first.
        cached: an eviction policy, without blocks.

    Attributes:
        plain: a list: the stack. Its last block is the next of all.
        cached: as given.
    """

    def __init__(self, block_ids: Sequence[int], cached: FreeList) -> None:
        self.plain = list(reversed(block_ids))
        self.cached = cached

    def popleft(self) -> int:
        """Take the next block out of the list: of the stack, or else the one that the policy evicts."""
        return self.plain.pop() if self.plain else self.cached.popleft()

    def append(self, block_id: int, /) -> None:
        """Put a block that has become free on the stack."""
        self.plain.append(block_id)

    def remove(self, block_id: int, /) -> None:
        """Take a cached block out of the list."""
        self.cached.remove(block_id)

    def __len__(self) -> int:
        return len(self.plain) + len(self.cached)

    def __iter__(self) -> Iterator[int]:
        """The free blocks, the next one first."""
        return chain(reversed(self.plain), self.cached)


class LeastRecentlyUsed(OrderedDict[int, None]):
    """Evicts the block that was used least recently: the one that has been free longest."""

    def popleft(self) -> int:
        """Take out the block that was appended first."""
        return self.popitem(last=False)[0]

    def append(self, block_id: int, /) -> None:
        """Add a block at the back."""
        self[block_id] = None

    def remove(self, block_id: int, /) -> None:
        """Take a block out; the others keep their order."""
        del self[block_id]


EVICTION: Final[dict[str, Callable[[], FreeList]]] = {"lru": LeastRecentlyUsed}
"""The policies by name. A call makes the one of a pool, without blocks."""
