"""The power of two random choices (phase 11). Pure standard library.

Two replicas are drawn at random, and the one with fewer unfinished requests gets the request (Mitzenmacher, 2001). The
load is almost as even as with the least busy of all, and old numbers do not send every request to the one replica that
was idle when they were reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from minicache.fleet.router import Router, no_replica
from minicache.fleet.views import ReplicaId, ReplicaView, RoutedRequest


class PowerOfTwoRouter(Router):
    """The less busy of two replicas.

    Args:
        seed: of the draws. Two routers with the same seed choose alike.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.rng = Random(seed)

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        """Of two different replicas that are not full, drawn at random, the one with fewer unfinished requests.

        Every pair of replicas that are not full is equally likely. Of a pair with equally many unfinished requests each
        is equally likely. A single replica that is not full is chosen. Everything random comes from `self.rng`.

        Args:
            request: unused.
            replicas: those that take requests, in any order. Do not change or keep it.

        Raises:
            NoReplicaError: there is none, or all are full: `no_replica(replicas)`.
        """
        two = self.rng.sample(replicas, min(2, len(replicas)))
        if not two or any(replica.is_full for replica in two):  # rare, so not all replicas are filtered each time
            open_ = [replica for replica in replicas if not replica.is_full]
            if not open_:
                raise no_replica(replicas)
            two = self.rng.sample(open_, min(2, len(open_)))
        return min(two, key=lambda replica: replica.num_unfinished).replica_id
