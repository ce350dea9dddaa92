"""The waiting queue: requests in priority order, any of which may leave at any time.

Phase 7 builds it; the stages of phases 5 and 6 use it as given, ordered by arrival. A heap gives the first request in
logarithmic time, but cannot remove one from its middle: a request that leaves is only taken off the list of members,
and the heap drops its key when it comes to the top. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush

from minicache.request import Request, RequestId

PriorityKey = tuple[float, ...]
"""Numbers by which requests are ordered, the lowest first. No two requests have the same."""


def arrival_key(request: Request) -> PriorityKey:
    """The key of first come, first served: arrival_time, then arrival_index; among siblings fork_index (phase 8)."""
    return request.arrival_time, request.arrival_index, request.fork_index


class LazyHeap:
    """A set of requests with fast access to the one with the lowest key.

    `add` and `first` take logarithmic time, on average over many calls; memory is proportional to the most members that
    it had at a time. `_heap` is a heap (`heapq`) of pairs (key, id): those of all members, and some of requests that
    have left.

    Args:
        key: of a request; must not change while the request is in the heap.

    Attributes:
        members: id → (key, request). A request leaves the heap by `del members[id]`.
    """

    def __init__(self, key: Callable[[Request], PriorityKey]) -> None:
        self.key = key
        self.members: dict[RequestId, tuple[PriorityKey, Request]] = {}
        self._heap: list[tuple[PriorityKey, RequestId]] = []

    def add(self, request: Request) -> None:
        """Add a request that is not in the heap. `_heap` is then never longer than 2 · `len(members)` + 8 pairs."""
        key, request_id = self.key(request), request.request_id
        self.members[request_id] = key, request
        heappush(self._heap, (key, request_id))
        if len(self._heap) > 2 * len(self.members) + 8:  # rare: half of all that were added since have left
            self._heap = sorted((key, request_id) for request_id, (key, _) in self.members.items())

    def first(self) -> Request | None:
        """The request with the lowest key, which stays; None if there is none."""
        heap, members = self._heap, self.members
        while heap:
            key, request_id = heap[0]
            member = members.get(request_id)
            if member is not None and member[0] == key:  # another request may have the id, but not the key
                return member[1]
            heappop(heap)
        return None


class RequestQueue(Mapping[RequestId, Request]):
    """The requests that wait for a batch slot: a mapping id → request, iterated in priority order.

    It answers three queries, each in logarithmic time: which request is first, which is first of one compatibility
    class (`Request.group`), and which arrived first. A request leaves it in logarithmic time, too. Its memory is
    proportional to the most requests that waited at a time, whatever their groups. Iterating sorts all of it, which is
    for tests and displays.

    Args:
        key: what the queue is ordered by; must not change while a request waits.
    """

    def __init__(self, key: Callable[[Request], PriorityKey]) -> None:
        self._key = key
        self._requests: dict[RequestId, Request] = {}
        self._by_arrival = LazyHeap(arrival_key)
        self._by_group: dict[str | None, LazyHeap] = {}  # None: of all requests

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        return (request.request_id for request in sorted(self._requests.values(), key=self._key))

    def add(self, request: Request) -> None:
        """Add a request at the position of its key: a preempted one gets the position it had before.

        Args:
            request: not in the queue; no request in it has the same id.
        """
        self._requests[request.request_id] = request
        self._by_arrival.add(request)
        for group in (None, request.group):
            if group not in self._by_group:
                self._by_group[group] = LazyHeap(self._key)
            self._by_group[group].add(request)

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it stands.

        Raises:
            KeyError: it is not in the queue, though another with its id may be.
        """
        if self._requests.get(request.request_id) is not request:
            raise KeyError(request.request_id)
        del self._requests[request.request_id]
        del self._by_arrival.members[request.request_id]
        for group in (None, request.group):
            members = self._by_group[group].members
            del members[request.request_id]
            if not members:  # or every group that ever waited would be kept
                del self._by_group[group]

    def first(self, group: str | None = None) -> Request | None:
        """The request with the lowest key, which stays in the queue; None if there is none.

        Args:
            group: look only at requests of this compatibility class. None: at all of them.
        """
        heap = self._by_group.get(group)
        return None if heap is None else heap.first()

    def oldest(self) -> Request | None:
        """The request that arrived first (`arrival_key`), which stays in the queue; None if there is none."""
        return self._by_arrival.first()
