"""Which block or reservation holds which request's tokens. Bookkeeping in integers: no tensor, no model.

| module | owns | built in |
|---|---|---|
| `reservation` | contiguous reservation over a buddy allocator | phase 2 |
| `blocks` | `BlockPool`, `BlockTable`: reference-counted blocks and the table of one sequence | phase 3 |
| `eviction` | which cached block is evicted next: the policies by name | – |
| `prefix` | `CachingBlockPool`: blocks that are found again by the hash of their contents | phase 8 |
| `groups` | `BlockGroups`: a block table for each group of layers, sliding windows, common prefixes | phase 12 |

Pure standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.memory.blocks import BlockPool as BlockPool
    from minicache.memory.blocks import BlockTable as BlockTable
    from minicache.memory.blocks import blocks_for as blocks_for
    from minicache.memory.groups import BlockGroups as BlockGroups
    from minicache.memory.groups import GroupedBlockPool as GroupedBlockPool
    from minicache.memory.prefix import (
        CachingBlockPool as CachingBlockPool,
    )
    from minicache.memory.prefix import (
        PrefixCacheStats as PrefixCacheStats,
    )
    from minicache.memory.prefix import (
        block_hash as block_hash,
    )
    from minicache.memory.prefix import (
        root_hash as root_hash,
    )
    from minicache.memory.reservation import (
        BuddyAllocator as BuddyAllocator,
    )
    from minicache.memory.reservation import (
        ContiguousReservation as ContiguousReservation,
    )
    from minicache.memory.reservation import (
        MemoryUse as MemoryUse,
    )

__getattr__, __dir__ = lazily(
    __name__,
    blocks="BlockPool BlockTable blocks_for",
    groups="BlockGroups GroupedBlockPool",
    prefix="CachingBlockPool PrefixCacheStats block_hash root_hash",
    reservation="BuddyAllocator ContiguousReservation MemoryUse",
)
