# Phase 7, fairness: your file. It stands in for minicache.scheduler.fair.
# Write what raises NotImplementedError. `minicache grade 7` grades it, `minicache hint 7.K` helps with task K.
"""Fair scheduling: priority, then arrival; groups that cannot share a batch take turns; nobody is overtaken for ever.

Phase 7 builds it, after eight incidents that each broke one of these promises. It is three classes, each on the one
before: `RankedScheduler` has an order, `GroupedScheduler` keeps batches to one group, and `FairScheduler` sets a bound
to what order and groups may cost the one who came first. Pure standard library.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final, Unpack

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions, PagedScheduler

STARVATION_BOUND: Final = 64
"""How many requests in a row may be admitted ahead of the one that arrived first."""

Rank = tuple[float, ...]
"""What requests are ordered by, the lowest first: numbers of which no two requests have the same."""


class Line:
    """Requests in the order of a key, which anyone may join and leave at any time.

    Each call takes time in proportion to the logarithm of how many there are, on average over many calls; memory is in
    proportion to how many there are.

    Args:
        key: of a request, what it is ordered by; it does not change while the request is in the line.
    """

    def __init__(self, key: Callable[[Request], Rank]) -> None:
        self.key = key
        self._members: dict[Rank, Request] = {}
        self._heap: list[Rank] = []  # the members' keys, and some of those that have left

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request) -> None:
        """Let `request` join, which is not in the line."""
        key = self.key(request)
        self._members[key] = request
        heappush(self._heap, key)

    def remove(self, request: Request) -> None:
        """Let `request` leave, wherever it stands.

        Raises:
            KeyError: it is not in the line.
        """
        del self._members[self.key(request)]
        if len(self._heap) > 2 * len(self._members) + 8:  # seldom: half of all that joined since must have left
            self._heap = sorted(self._members)

    def first(self) -> Request | None:
        """The request with the lowest key, which stays; None if the line is empty."""
        heap, members = self._heap, self._members
        while heap and heap[0] not in members:
            heappop(heap)
        return members[heap[0]] if heap else None


class RankedScheduler(PagedScheduler):
    """Admits the best-ranked of all that wait, and preempts the worst-ranked of the batch.

    Rank is `priority`, the lower the better; among equals `arrival_time`, the earlier the better; among those, who was
    added first. So without priorities it is strict first come, first served. Nobody is preempted for the sake of rank:
    a better-ranked request that comes later waits for free blocks like everybody.

    `running` is in the order of rank, the best first, so that `PagedScheduler` gives blocks to the best first and takes
    them from the worst. `waiting` is in no order: who is next says `head`.

    Arguments and errors are `PagedScheduler`'s.

    Attributes:
        line: those that wait, in the order of rank.
    """

    first_come = False

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self.line = Line(self.rank)

    def rank(self, request: Request) -> Rank:
        """What the request is ordered by, the lowest first: its priority, its arrival_time, its arrival_index."""
        raise NotImplementedError(
            "phase 7, task 9: Rank; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def line_up(self, request: Request, *, first: bool = False) -> None:
        """Let a request wait, in `waiting` and in the place of `line` that its rank gives it.

        Args:
            request: one that is in neither queue.
            first: it has lost its place in the batch. That changes nothing: its rank is what it was.
        """
        raise NotImplementedError(
            "phase 7, task 9: Rank; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def leave_line(self, request: Request) -> None:
        """A request has left `waiting`, admitted or ended: `line` forgets it."""
        raise NotImplementedError(
            "phase 7, task 9: Rank; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def head(self) -> Request | None:
        """The best-ranked of all that wait, which stays there; None if nobody waits."""
        raise NotImplementedError(
            "phase 7, task 9: Rank; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """As `PagedScheduler.enter`; and the request leaves `line`, and stands in `running` where its rank puts it.

        The work of the step is carried out in any order: where the request stands in `output` does not matter.

        Args:
            request: WAITING or SWAPPED; it has just left `waiting`. Its blocks are free.
            output: the step so far, to which it is added.
        """
        raise NotImplementedError(
            "phase 7, task 9: Rank; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """As `Scheduler.finish_request`; one that was waiting leaves `line` too (`leave_line`)."""
        request = self.waiting.get(request_id)
        done = super().finish_request(request_id, status)
        if request is not None:
            self.leave_line(request)
        return done


class GroupedScheduler(RankedScheduler):
    """Keeps every batch to requests of one `group`. Those of other groups are deferred.

    The group of a batch is that of the request that was admitted when it was empty: the best-ranked of all that waited.
    Whoever is of another group keeps its place in the line, and is passed over until the batch has drained.

    Arguments and errors are `PagedScheduler`'s.

    Attributes:
        lines: group → those of the group that wait, in the order of rank; no group of which nobody waits.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self.lines: dict[str, Line] = {}

    def line_up(self, request: Request, *, first: bool = False) -> None:
        """As `RankedScheduler.line_up`, and in the line of the request's group, which begins with its first request."""
        raise NotImplementedError(
            "phase 7, task 10: Groups; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def leave_line(self, request: Request) -> None:
        """As `RankedScheduler.leave_line`, and the line of its group; one that is empty then is forgotten."""
        raise NotImplementedError(
            "phase 7, task 10: Groups; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def head(self) -> Request | None:
        """The best-ranked of those that wait and may join the batch; None if there is none, though others may wait."""
        raise NotImplementedError(
            "phase 7, task 10: Groups; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def is_compatible(self, request: Request) -> bool:
        """Whether the request may join the batch: the batch is empty, or of the request's group."""
        raise NotImplementedError(
            "phase 7, task 10: Groups; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )


class FairScheduler(GroupedScheduler):
    """Admits by rank and group, and keeps a bound on how long these may pass over who arrived first.

    **The bound.** Of any STARVATION_BOUND + 1 admissions in a row, at least one is of the request that arrived first of
    all that wait. When it is due, nobody else is admitted: the batch drains until that one fits, and is compatible.

    So no request waits for ever, whatever comes after it. The one that arrived first is admitted after at most
    STARVATION_BOUND others, each of which ends after at most max_tokens tokens; and whoever is admitted generates a
    token in that step, before it can be preempted.

    Who arrived first is a matter of arrival_time, then of arrival_index; priority and group do not count.

    Arguments and errors are `PagedScheduler`'s.

    Attributes:
        by_arrival: those that wait, in the order of arrival.
        num_overtakes: how many requests were admitted in a row, up to now, while one that arrived before them waited.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self.by_arrival = Line(self.arrival)
        self.num_overtakes = 0

    def arrival(self, request: Request) -> Rank:
        """What says who arrived first: arrival_time, then arrival_index."""
        raise NotImplementedError(
            "phase 7, task 11: The bound; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def line_up(self, request: Request, *, first: bool = False) -> None:
        """As `GroupedScheduler.line_up`, and in `by_arrival`."""
        raise NotImplementedError(
            "phase 7, task 11: The bound; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def leave_line(self, request: Request) -> None:
        """As `GroupedScheduler.leave_line`, and `by_arrival` forgets it too."""
        raise NotImplementedError(
            "phase 7, task 11: The bound; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def head(self) -> Request | None:
        """Who may be admitted next.

        Returns:
            As `GroupedScheduler.head`, while num_overtakes is below STARVATION_BOUND. Then the request that arrived
            first, or None if it is not compatible with the batch.
        """
        raise NotImplementedError(
            "phase 7, task 11: The bound; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """As `GroupedScheduler.enter`; and num_overtakes is one more if an earlier one waits on, and 0 if none does.

        Args:
            request: WAITING or SWAPPED; it has just left `waiting`. Its blocks are free.
            output: the step so far, to which it is added.
        """
        raise NotImplementedError(
            "phase 7, task 11: The bound; read docs/en/phase-07-fairness/lab/01-a-fair-scheduler.md"
        )
