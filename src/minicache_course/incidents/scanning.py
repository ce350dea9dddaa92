"""A waiting queue that is right and slow: every query looks at every request.

Phase 7's task 9 begins with it. Pure standard library.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler.queue import RequestQueue, arrival_key


class ScanningQueue(RequestQueue):
    """As `RequestQueue`, in time proportional to the number of requests that wait.

    With 100,000 of them, each `first` compares 100,000 keys, and a step calls it several times.
    """

    def add(self, request: Request) -> None:
        """Add a request."""
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Remove a request."""
        if self._requests.get(request.request_id) is not request:
            raise KeyError(request.request_id)
        del self._requests[request.request_id]

    def first(self, group: str | None = None) -> Request | None:
        """The request with the lowest key, of all or of one compatibility class."""
        candidates = [each for each in self._requests.values() if group in (None, each.group)]
        return min(candidates, key=self._key, default=None)

    def oldest(self) -> Request | None:
        """The request that arrived first."""
        return min(self._requests.values(), key=arrival_key, default=None)
