"""Fair scheduling: priority, then arrival; one compatibility class per batch; no request waits forever.

Phase 7 builds it, after eight incidents that each broke one of these guarantees. `PriorityScheduler` has an order and
keeps batches to one compatibility class; `FairScheduler` bounds what this may cost the request that arrived first.
Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Unpack

from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedOptions, PagedScheduler
from minicache.scheduler.queue import PriorityKey, arrival_key

STARVATION_BOUND: Final = 64
"""How many requests in a row may be admitted ahead of the one that arrived first."""


class PriorityScheduler(PagedScheduler):
    """Admits the waiting request of highest priority that is compatible with the batch, and preempts the lowest.

    **Priority** is `Request.priority`, the lower the better; among equals `arrival_time`, the earlier the better; among
    those, the one that was added first. So without priorities it is strict first come, first served. No request is
    preempted in favour of a more urgent one that arrives later: that one waits for free blocks like any other.

    **Compatibility.** Every batch holds requests of one compatibility class (`Request.group`): that of the request that
    was admitted when the batch was empty, the first of the queue. A request of another class keeps its position in the
    queue until the batch has drained.

    Arguments and errors are `PagedScheduler`'s.
    """

    first_come = False

    def priority_key(self, request: Request) -> PriorityKey:
        """The key by which `waiting` and `running` are ordered: priority, arrival_time, arrival_index, fork_index."""
        return request.priority, request.arrival_time, request.arrival_index, request.fork_index

    def head(self) -> Request | None:
        """The first waiting request that is compatible with the batch; None if none is, though others may wait."""
        return self.waiting.first(self.running[0].group if self.running else None)

    def is_compatible(self, request: Request) -> bool:
        """Whether the request may join the batch: the batch is empty, or of the request's `group`."""
        return not self.running or self.running[0].group == request.group


class FairScheduler(PriorityScheduler):
    """Admits by priority and compatibility, and bounds how often these may bypass the request that arrived first.

    **The bound.** Of any STARVATION_BOUND + 1 admissions in a row, at least one is of the request that arrived first of
    all that wait. Once that many have bypassed it, no other is admitted: the batch drains until it fits, and is
    compatible.

    So no request waits forever, whatever comes after it. The one that arrived first is admitted after at most
    STARVATION_BOUND others, each of which finishes after at most max_tokens tokens; and an admitted request generates a
    token in that step, before it can be preempted.

    `arrival_key` decides which request arrived first; priority and compatibility class do not count.

    Arguments and errors are `PagedScheduler`'s.

    Attributes:
        num_bypasses: how many requests in a row, up to now, were admitted while one that arrived before them waited.
    """

    def __init__(self, **options: Unpack[PagedOptions]) -> None:
        super().__init__(**options)
        self.num_bypasses = 0

    def head(self) -> Request | None:
        """The waiting request that may be admitted next.

        Returns:
            As `PriorityScheduler.head`, while num_bypasses is below STARVATION_BOUND. Then the request that arrived
            first, or None if it is not compatible with the batch.
        """
        if self.num_bypasses < STARVATION_BOUND:
            return super().head()
        oldest = self.waiting.oldest()
        return oldest if oldest is not None and self.is_compatible(oldest) else None

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `PagedScheduler.admit`; num_bypasses is one more if an earlier request still waits, and 0 if none does.

        Args:
            request: WAITING or SWAPPED, in `waiting`. Its blocks are free.
            output: the step so far, to which it is added.
            found: of its tokens, the blocks that `find_prefix` has found.
        """
        super().admit(request, output, found)
        oldest = self.waiting.oldest() if len(self._requests) > len(self.running) else None  # None: no request waits
        bypassed = oldest is not None and arrival_key(oldest) < arrival_key(request)
        self.num_bypasses = self.num_bypasses + 1 if bypassed else 0
