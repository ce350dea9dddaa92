# Phase 8, prefix-sharing: your file. It stands in for minicache.memory.prefix.
# Write what raises NotImplementedError. `minicache grade 8` grades it, `minicache hint 8.K` helps with task K.
"""The prefix cache: blocks are found by the hash of their contents.

Phase 8 builds it. The hash of a full block covers its tokens and all earlier ones, so one lookup tells whether a block
holds the keys and values of a prefix. Blocks without references stay in the free list with their contents, and can be
found there until they are allocated for other tokens (SGLang's RadixAttention, Zheng et al. 2024, keeps prefixes in a
tree; the hashes are vLLM's). Pure standard library.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from minicache.errors import InvariantError, OutOfBlocksError, require_count
from minicache.memory.blocks import BlockPool

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

    A cached block is one that has a hash. It may be used or free. The free list has two ends. `allocate` takes from the
    front. A block that is freed without a hash goes to the front: nothing is lost by reusing it. One with a hash goes
    to the back. So cached blocks are evicted last, and among them the one that has been free longest first. A sequence
    that is freed from its last block to its first therefore loses the end of a prefix before its beginning, without
    which the end cannot be found. `share` takes a cached block out of any position of the free list; `allocate` drops
    the hash of a block that it hands out, which is an eviction.

    Several blocks may have one hash, if two sequences computed the same tokens at the same time. The one that was
    cached first is found.

    Everything else is as in `BlockPool`, including arguments and errors. A call takes time in proportion to the
    blocks that it is given, not to the pool; only `reset` and `check` visit all blocks.

    Attributes:
        num_evicted: cached blocks that were allocated for other tokens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.num_evicted = 0
        self._free = OrderedDict.fromkeys(range(num_blocks))  # the left end is next, and any may leave it
        self._num_references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._blocks_of: dict[BlockHash, dict[int, None]] = {}  # of each hash its blocks, the first to be cached first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that have a reference. A shared block counts once."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that have a hash, used or free."""
        return sum(map(len, self._blocks_of.values()))

    def ref_count(self, block_id: int) -> int:
        """How many references a block has; as `BlockPool.ref_count`."""
        self._check_ids((block_id,))
        return self._num_references[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks from the front of the free list; as `BlockPool.allocate`.

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
        for block_id, references in enumerate(self._num_references):
            if references < 0 or (block_id in self._free) != (references == 0):
                raise InvariantError(f"block {block_id} has {references} references; free: {block_id in self._free}")
        if strange := self._free.keys() - set(range(self.num_blocks)):
            raise InvariantError(f"{strange} are in the free list, but are no blocks of this pool")
        for each, blocks in self._blocks_of.items():
            if not blocks or any(self._hash_of[block_id] != each for block_id in blocks):
                raise InvariantError(f"blocks {list(blocks)} are found under a hash that is not theirs")
        if (hashed := sum(each is not None for each in self._hash_of)) != self.num_cached:
            raise InvariantError(f"{hashed} blocks have a hash, {self.num_cached} can be found")

    def _check_ids(self, block_ids: Iterable[int]) -> None:
        num_blocks = self.num_blocks
        for block_id in block_ids:
            if type(block_id) is not int or not 0 <= block_id < num_blocks:
                if not isinstance(block_id, int) or isinstance(block_id, bool):
                    raise TypeError(f"a block id must be an int; got {block_id!r}")
                raise IndexError(f"no block {block_id}: this pool has blocks 0 … {num_blocks - 1}")
