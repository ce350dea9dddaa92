"""Fair scheduling: priority, then arrival; groups that cannot share a batch take turns; nobody is overtaken for ever.

Phase 7 builds it, after eight incidents that each broke one of these promises. Pure standard library.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush
from typing import Final, Unpack

from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions, PagedScheduler

STARVATION_BOUND: Final = 64
"""How many requests in a row may be admitted ahead of the one that arrived first."""

Rank = tuple[int, float, int]
"""priority, arrival_time, arrival_index: the lowest goes first, and no two requests are equal."""


class FairScheduler(PagedScheduler):
    """Admits by rank, preempts by rank, and keeps a bound on how long rank may pass over arrival.

    - **Rank.** Lower `priority` first; among equals, earlier `arrival_time`; among those, who was added first. The best
      of the line is admitted first, the worst of the batch is preempted first.
    - **Groups.** A batch holds requests of one `group`. Others are deferred: they keep their places in the line and are
      passed over until the batch has drained, or until the bound says that it must.
    - **The bound.** Of any STARVATION_BOUND + 1 admissions in a row, at least one is of the request that arrived first
      of all that wait. When it is due, nobody else is admitted before it: the batch drains until it fits.

    So no request waits for ever. The one that arrived first is admitted after at most STARVATION_BOUND others, each of
    which ends after at most max_tokens tokens; and whoever is admitted generates a token before it can be preempted.

    Arguments, attributes and errors are `PagedScheduler`'s.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        # Heaps over the same requests. One that has left the line stays in them until it comes to the top.
        self._by_rank: dict[str, list[tuple[Rank, Request]]] = {}  # group → its line
        self._by_arrival: list[tuple[float, int, Request]] = []
        self._num_overtakes = 0  # admissions in a row ahead of the request that arrived first

    def rank(self, request: Request) -> Rank:
        """What the request is ordered by."""
        return request.priority, request.arrival_time, request.arrival_index

    def line_up(self, request: Request, *, first: bool = False) -> None:
        """Let a request wait, in the place that its rank gives it: `first` changes nothing."""
        super().line_up(request)
        heappush(self._by_rank.setdefault(request.group, []), (self.rank(request), request))
        heappush(self._by_arrival, (request.arrival_time, request.arrival_index, request))

    def head(self) -> Request | None:
        """Who may be admitted next.

        Returns:
            The best-ranked request that the batch is compatible with, or, if the bound is reached, the one that arrived
            first. None if there is none, or if it is deferred.
        """
        if self._num_overtakes >= STARVATION_BOUND:
            oldest = self._oldest()
            return oldest if oldest is not None and self.is_compatible(oldest) else None
        groups = [self.running[0].group] if self.running else list(self._by_rank)
        heads = [head for group in groups if (head := self._best(group)) is not None]
        return min(heads, key=self.rank, default=None)

    def is_compatible(self, request: Request) -> bool:
        """Whether the request may join the batch: it is empty, or of the request's group."""
        return not self.running or self.running[0].group == request.group

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """Admit `request`, to the place in the batch that its rank gives it, and count whom it overtakes."""
        super().enter(request, output)
        self.running.pop()
        insort(self.running, request, key=self.rank)
        oldest = self._oldest()
        overtakes = oldest is not None and (oldest.arrival_time, oldest.arrival_index) < self.rank(request)[1:]
        self._num_overtakes = self._num_overtakes + 1 if overtakes else 0

    def _best(self, group: str) -> Request | None:
        """The best-ranked request of a group that waits."""
        line = self._by_rank.get(group, [])
        while line and line[0][1].request_id not in self.waiting:
            heappop(line)
        if line:
            return line[0][1]
        self._by_rank.pop(group, None)  # or a server would remember every group that it ever saw
        return None

    def _oldest(self) -> Request | None:
        """Of all that wait, the request that arrived first."""
        line = self._by_arrival
        while line and line[0][2].request_id not in self.waiting:
            heappop(line)
        return line[0][2] if line else None
