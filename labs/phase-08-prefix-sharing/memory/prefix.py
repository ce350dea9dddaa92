# Phase 8, prefix-sharing: your file. It stands in for minicache.memory.prefix.
# Write what raises NotImplementedError. `minicache grade 8` grades it, `minicache hint 8.K` helps with task K.
"""The prefix cache: blocks are found by the hash of their contents.

Phase 8 builds it. The hash of a full block covers its tokens and all earlier ones, so one lookup tells whether a block
holds the keys and values of a prefix. Blocks without references stay in the free list with their contents, and can be
found there until they are allocated for other tokens (SGLang's RadixAttention, Zheng et al. 2024, keeps prefixes in a
tree; the hashes are vLLM's). Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from minicache.errors import InvariantError
from minicache.memory.blocks import BlockPool
from minicache.memory.eviction import EVICTION, TwoEndedFreeList

BlockHash = bytes
"""The hash of a full block's contents: 32 bytes."""


def root_hash(*extra_keys: str | None) -> BlockHash:
    """The parent of a sequence's first block: a hash of everything besides tokens that keys and values depend on.

    Two sequences may share blocks only if all their extra keys are equal: the salt of a tenant, the adapter that
    changes the weights. Each block's hash covers its parent's, so these keys are part of all of them.

    Args:
        extra_keys: any number of strings, in a fixed order; None for a key that is absent. None and "" are
            different, and so are ("ab", "c") and ("a", "bc"). A client may choose any salt: of any length, in any
            script, with quotes, commas or control characters in it.

    Returns:
        32 bytes: SHA-256's digest. The same keys have the same hash, in every process.
    """
    raise NotImplementedError(
        "phase 8, task 1: Hash a block; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
    )


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block: of its tokens and, through its parent's hash, of all earlier tokens.

    Keys and values of a token depend on every earlier token, so the same 16 tokens after another prefix are
    another block. With SHA-256 no two prefixes with the same hash are known, and a client that chooses its tokens
    cannot construct any.

    Args:
        parent: of the block before, or `root_hash` for the first.
        token_ids: all of the block's tokens, in order, as a list or any other sequence; ids ≥ 0 of any size. [1, 23]
            and [12, 3] are different.

    Returns:
        32 bytes: SHA-256's digest.
    """
    raise NotImplementedError(
        "phase 8, task 1: Hash a block; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
    )


@dataclass(slots=True)
class PrefixCacheStats:
    """How much a prefix cache has found.

    Attributes:
        num_requests: admissions. A request that was preempted by recompute and comes back counts again.
        num_queried_tokens: tokens that the requests had when they were admitted.
        num_hit_tokens: of these, the tokens that were found and not computed.
        num_evicted_blocks: cached blocks that were allocated for other tokens.
    """

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """The part of the queried tokens that was found, 0 … 1; 0 if there were none."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0


class CachingBlockPool(BlockPool):
    """A `BlockPool` whose blocks can be cached under the hash of their contents, and found by it.

    A cached block is one that has a hash. It may be used or free. `free_list` hands out blocks without a hash first:
    nothing is lost by reusing them. So cached blocks are evicted last, and among them, with "lru", the one that has
    been free longest first. A sequence that is freed from its last block to its first therefore loses the end of a
    prefix before its beginning, without which the end cannot be found. `share` takes a cached block out of any position
    of the free list; `allocate` drops the hash of a block that it hands out, which is an eviction.

    Several blocks may have one hash, if two sequences computed the same tokens at the same time. The one that was
    cached first is found.

    Everything else is as in `BlockPool`, including arguments and errors. A call takes time in proportion to the
    blocks that it is given, not to the pool; only `reset` and `check` visit all blocks.

    Args:
        num_blocks: as `BlockPool`'s.
        block_size: as `BlockPool`'s.
        eviction: which cached block is evicted next, a name in `minicache.memory.eviction.EVICTION`.

    Attributes:
        num_evicted: cached blocks that were allocated for other tokens.

    Raises:
        TypeError: as `BlockPool`.
        ValueError: as `BlockPool`; or there is no such policy.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: str = "lru") -> None:
        super().__init__(num_blocks, block_size)
        if eviction not in EVICTION:
            raise ValueError(f"no eviction policy {eviction!r}: there are {', '.join(EVICTION)}")
        self.num_evicted = 0
        self._hash_of: dict[int, BlockHash] = {}
        self._blocks_of: dict[BlockHash, dict[int, None]] = {}  # of each hash its blocks, the first to be cached first
        self.free_list: TwoEndedFreeList = TwoEndedFreeList(range(num_blocks), EVICTION[eviction]())

    @property
    def num_cached(self) -> int:
        """Blocks that have a hash, used or free."""
        return len(self._hash_of)

    def allocate(self, count: int) -> list[int]:
        """Take the next `count` blocks of the free list; as `BlockPool.allocate`.

        Cached ones lose their hashes: these are evictions, counted in `num_evicted`.

        Args:
            count: ≥ 0.

        Returns:
            Their ids, in the order of the free list. Each has one reference.

        Raises:
            TypeError, ValueError, OutOfBlocksError: as `BlockPool.allocate`. None was taken.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks. A cached block that is free leaves the free list.

        It keeps its hash, and the rest of the list keeps its order. An id that is given twice gets two references.

        Args:
            block_ids: used blocks, and free ones that are cached.

        Raises:
            TypeError, IndexError: as `BlockPool.share`. Nothing has changed.
            ValueError: a block is free and not cached: its contents are unknown. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each of these blocks; as `BlockPool.free`. Cached blocks stay cached.

        Args:
            block_ids: used blocks. Those that lose their last reference go to the free list one after the other: to its
                back if they have a hash, to its front if they have none.

        Raises:
            TypeError, IndexError, ValueError: as `BlockPool.free`. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    # Finding blocks by their contents

    def cache(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Cache used blocks under their hashes. A block that already has a hash keeps it.

        A block is cached even if another has the same hash: it is found once the other is evicted.

        Args:
            block_ids: full blocks, each with a reference.
            hashes: one for each, `block_hash` of its tokens.

        Raises:
            TypeError, IndexError: as `share`.
            ValueError: not one hash for each block, or a block is free. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def uncache(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes of blocks whose contents are in doubt. This does not count as eviction.

        References and the free list do not change, and neither do blocks without a hash. Only these blocks lose their
        hashes: another block with the same hash can still be found.

        Args:
            block_ids: any blocks, used or free.

        Raises:
            TypeError, IndexError: as `share`. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks of the longest cached prefix of `hashes`, one for each hash. They may be used or free.

        They get no reference: `share` them before anything is allocated, or they may be handed out.

        Args:
            hashes: of the blocks of a sequence, from its first on.

        Returns:
            Ids, up to the first hash that no block has. Of several blocks with one hash, the one that has had it
            longest.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def reset(self) -> None:
        """Drop all hashes: the weights have changed, or a failed step has left the contents in doubt.

        The free list does not change, and nothing counts as evicted.

        Raises:
            ValueError: a block is used. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 8, task 2: A pool that remembers; read docs/en/phase-08-prefix-sharing/lab/00-hashes-and-the-pool.md"
        )

    def check(self) -> None:
        """As `BlockPool.check`; and exactly the cached blocks can be found, each under its hash.

        Raises:
            InvariantError: the attributes disagree. The message names a block.
        """
        super().check()
        for its_hash, blocks in self._blocks_of.items():
            if not blocks or any(self._hash_of.get(block_id) != its_hash for block_id in blocks):
                raise InvariantError(f"blocks {list(blocks)} are found under a hash that is not theirs")
        if (num_found := sum(map(len, self._blocks_of.values()))) != self.num_cached:
            raise InvariantError(f"{self.num_cached} blocks have a hash, {num_found} can be found")
