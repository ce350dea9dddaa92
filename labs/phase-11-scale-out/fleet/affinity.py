# Phase 11, scale-out: your file. It stands in for minicache.fleet.affinity.
# Write what raises NotImplementedError. `minicache grade 11` grades it, `minicache hint 11.K` helps with task K.
"""Prefix affinity (phase 11): a request goes where its prompt's beginning was computed. Pure standard library.

A replica's prefix cache helps only the requests that are sent to that replica. The router remembers which blocks it has
sent where, as a cache without contents, and prefers the replica that has most of a prompt (as SGLang's cache-aware
router does; Zheng et al., 2024). A bound on the imbalance keeps one hot prompt from overloading its replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from minicache.fleet.router import Router, no_replica
from minicache.fleet.views import ReplicaId, ReplicaView, RoutedRequest
from minicache.memory.prefix import BlockHash


class PrefixAffinityRouter(Router):
    """The replica that has most of the prompt, among those that are not too busy.

    Args:
        max_imbalance: how many unfinished requests more than the least busy a chosen replica may have, ≥ 0.
        capacity_blocks: how many blocks are remembered for each replica, ≥ 1.

    Attributes:
        blocks: the remembered blocks of each replica, the least recently used first. A replica without any need not be
            in it.
        holders: the inverse: the replicas for which a block is remembered. No set is empty.
    """

    def __init__(self, *, max_imbalance: int = 8, capacity_blocks: int = 4096) -> None:
        self.max_imbalance, self.capacity_blocks = max_imbalance, capacity_blocks
        self.blocks: dict[ReplicaId, OrderedDict[BlockHash, None]] = {}
        self.holders: dict[BlockHash, set[ReplicaId]] = {}

    def remember(self, block_hash: BlockHash, replica_id: ReplicaId) -> None:
        """The replica has the block, and has just used it. Kept in `blocks`, as the last, and in `holders`."""
        blocks = self.blocks.setdefault(replica_id, OrderedDict())
        if block_hash in blocks:
            blocks.move_to_end(block_hash)
        else:
            blocks[block_hash] = None
            self.holders.setdefault(block_hash, set()).add(replica_id)

    def forget(self, block_hash: BlockHash, replica_id: ReplicaId) -> None:
        """The replica no longer has the block. Removed from `blocks` and `holders`."""
        del self.blocks[replica_id][block_hash]
        self.holders[block_hash].remove(replica_id)
        if not self.holders[block_hash]:
            del self.holders[block_hash]

    def num_remembered(self, request: RoutedRequest, replica_id: ReplicaId) -> int:
        """How many blocks of the prompt, from its first on and without a gap, are remembered for the replica."""
        raise NotImplementedError(
            "phase 11, task 2: Prefix affinity; read docs/en/phase-11-scale-out/lab/02-prefix-affinity.md"
        )

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        """Of the replicas that are not too busy, the one with the most remembered blocks of the prompt.

        A replica is too busy if it is full, or if it has more than `max_imbalance` unfinished requests more than the
        least busy of those that are not full. Of replicas with equally many blocks of the prompt, the least busy is
        chosen; of these, the one with the fewest remembered blocks in all; of these, the first by name.

        `choose` remembers nothing; `on_sent` does.

        Args:
            request: its `block_hashes` may be empty, for a prompt shorter than a block.
            replicas: those that take requests, in any order. Do not change or keep it.

        Raises:
            NoReplicaError: there is none, or all are full: `no_replica(replicas)`.
        """
        raise NotImplementedError(
            "phase 11, task 2: Prefix affinity; read docs/en/phase-11-scale-out/lab/02-prefix-affinity.md"
        )

    def on_sent(self, request: RoutedRequest, replica_id: ReplicaId) -> None:
        """The replica now has the prompt's blocks, as its most recently used.

        Beyond `capacity_blocks`, the least recently used are forgotten. A block is useless without those before it, so
        the end of a prompt is forgotten before its beginning, as in the replica's own cache: the prompt's first block
        counts as the most recently used of all, its last block as the least recently used of this prompt.
        """
        raise NotImplementedError(
            "phase 11, task 2: Prefix affinity; read docs/en/phase-11-scale-out/lab/02-prefix-affinity.md"
        )

    def on_left(self, replica_id: ReplicaId) -> None:
        """Forget the replica's blocks: a successor of the same name has an empty cache."""
        raise NotImplementedError(
            "phase 11, task 2: Prefix affinity; read docs/en/phase-11-scale-out/lab/02-prefix-affinity.md"
        )
