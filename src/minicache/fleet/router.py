"""What all routers have in common, and the simplest of them. Given, not built. Pure standard library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minicache.errors import NoReplicaError
from minicache.fleet.views import ReplicaId, ReplicaView, RoutedRequest
from minicache.request import RequestId


class Router(ABC):
    """Chooses a replica for each request.

    Its caller calls `choose`, then `on_sent` when the request has been sent there, and `on_finished` when it has
    finished there in any way. `on_left` means that a replica is gone, and its cache with it; a replica that comes back
    under the same name has an empty cache. A router is used by one thread.
    """

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        """The replica that should get `request`; never a full one.

        Args:
            request: the prompt's block hashes and length.
            replicas: those that take requests, in any order, each once. Do not change or keep it: the caller may change
                it after the call.

        Raises:
            NoReplicaError: there is none, or all are full.
        """

    def on_sent(self, request: RoutedRequest, replica_id: ReplicaId) -> None:  # noqa: B027, most routers need none
        """`request` was sent to `replica_id`."""

    def on_finished(self, request_id: RequestId, replica_id: ReplicaId) -> None:  # noqa: B027
        """The request has finished at `replica_id`: with an answer, an error, or because its client disconnected."""

    def on_left(self, replica_id: ReplicaId) -> None:  # noqa: B027
        """The replica is gone."""


def no_replica(replicas: Sequence[ReplicaView]) -> NoReplicaError:
    """The error to raise if none of `replicas` can be chosen, with the reason."""
    if not replicas:
        return NoReplicaError("no replica takes requests")
    return NoReplicaError(f"all {len(replicas)} replicas are full")


class RoundRobinRouter(Router):
    """Each replica in turn, by name."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        """The next by name that is not full."""
        names = [replica.replica_id for replica in replicas if replica.num_unfinished < replica.max_unfinished]
        if not names:
            raise no_replica(replicas)
        self._last = min([name for name in names if name > self._last] or names)
        return self._last
