# Phase 11, scale-out: your file. It stands in for minicache.fleet.membership.
# Write what raises NotImplementedError. `minicache grade 11` grades it, `minicache hint 11.K` helps with task K.
"""Which replicas are in the fleet, and the state of each (phase 11). Pure standard library.

Replicas join, drain, leave and crash. Their reports arrive late, out of order, or not at all. One `Membership` holds
the state behind a router's views: it knows exactly which requests were sent from here and are unfinished, and adds
those from elsewhere, according to the last report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from minicache.errors import require_count
from minicache.fleet.views import ReplicaId, ReplicaView
from minicache.request import RequestId

Attempt = int
"""A request's stay at a replica. A request that is sent again elsewhere is another attempt."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request for a replica's report, while the answer is on its way.

    Attributes:
        replica_id: the replica that was probed.
        number: a later probe has a larger number. A probe of a member also has a larger number than its `joined`.
        num_sent: unfinished requests that the replica had from here when it was probed.
    """

    replica_id: ReplicaId
    number: int
    num_sent: int


@dataclass(slots=True)
class Member:
    """The state of one replica, from when it joins to when it leaves.

    Attributes:
        replica_id: its name.
        max_unfinished: the most unfinished requests that it takes.
        joined: the number that was drawn when it joined; see `Probe`.
        attempts: unfinished attempts that were sent to it from here, in the order in which they were sent; with their
            requests.
        num_elsewhere: unfinished requests that it has from other routers, as of its last report.
        stats: its last report.
        last_probe: the number of the newest probe that was answered or failed; 0: none.
        num_failures: failed probes since the last answered one.
        is_healthy: fewer probes in a row have failed than `unhealthy_after`.
        is_draining: it gets no new requests, and finishes those that it has.
    """

    replica_id: ReplicaId
    max_unfinished: int
    joined: int
    attempts: dict[Attempt, RequestId] = field(default_factory=dict)
    num_elsewhere: int = 0
    stats: Mapping[str, float] = field(default_factory=dict)
    last_probe: int = 0
    num_failures: int = 0
    is_healthy: bool = True
    is_draining: bool = False

    @property
    def num_unfinished(self) -> int:
        """Its unfinished requests, as far as is known here."""
        return len(self.attempts) + self.num_elsewhere

    @property
    def takes_requests(self) -> bool:
        """Whether it is in the views. A full replica is in them too: `ReplicaView.is_full`."""
        return self.is_healthy and not self.is_draining


class Membership:
    """The replicas of a fleet.

    Args:
        unhealthy_after: the number of failed probes in a row that take a replica out of the views, ≥ 1.

    Attributes:
        members: those in the fleet: healthy, unhealthy and draining.
        replica_of: the replica of every unfinished attempt.
        numbers: draws 1, 2, 3, …, for joins, attempts and probes alike: of any two, the later has the larger number.

    Raises:
        TypeError: `unhealthy_after` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, *, unhealthy_after: int = 2) -> None:
        require_count("unhealthy_after", unhealthy_after)
        self.unhealthy_after = unhealthy_after
        self.members: dict[ReplicaId, Member] = {}
        self.replica_of: dict[Attempt, ReplicaId] = {}
        self.numbers = count(1)
        self._views: list[ReplicaView] = []
        self._positions: dict[ReplicaId, int] = {}  # of a replica in _views

    def views(self) -> Sequence[ReplicaView]:
        """The replicas that take requests, as routers see them, in no particular order.

        It is one list, which `refresh` keeps up to date: the views of a thousand replicas are not rebuilt for each
        request. Read it before the next call, and do not change it.
        """
        return self._views

    def refresh(self, replica_id: ReplicaId) -> None:
        """Update `views()` from `members[replica_id]`, or its absence. Call it after each change."""
        member, position = self.members.get(replica_id), self._positions.get(replica_id)
        if member is not None and member.takes_requests:
            view = ReplicaView(replica_id, member.num_unfinished, member.max_unfinished, member.stats)
            if position is None:
                self._positions[replica_id] = len(self._views)
                self._views.append(view)
            else:
                self._views[position] = view
        elif position is not None:
            del self._positions[replica_id]
            last = self._views.pop()
            if last.replica_id != replica_id:  # the last one moves into the gap
                self._views[position], self._positions[last.replica_id] = last, position

    def is_drained(self, replica_id: ReplicaId) -> bool:
        """Whether the replica is draining and has no requests left, from here or elsewhere: it can be stopped."""
        member = self.members.get(replica_id)
        return member is not None and member.is_draining and not member.num_unfinished

    def join(self, replica_id: ReplicaId, *, max_unfinished: int) -> None:
        """A replica takes requests from now on. It is healthy until probes fail, and has no report yet.

        An earlier replica of this name is another member: its attempts and probes do not count for this one.

        Args:
            replica_id: its name.
            max_unfinished: the most unfinished requests that it takes, ≥ 1.

        Raises:
            TypeError: `max_unfinished` is not an int.
            ValueError: it is below 1, or a replica of this name is in the fleet.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def leave(self, replica_id: ReplicaId) -> list[RequestId]:
        """The replica is gone, stopped or dead. Returns the unfinished requests that it had from here: they are lost.

        They are in the order in which they were sent, and their attempts are over. If the replica is not in the fleet,
        nothing happens, and the list is empty.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def drain(self, replica_id: ReplicaId) -> None:
        """The replica gets no new requests, and finishes those that it has. Ignored if it is not in the fleet."""
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def on_sent(self, request_id: RequestId, replica_id: ReplicaId) -> Attempt:
        """A request was sent to the replica. Returns the attempt, a new number, for `on_finished`.

        Raises:
            ValueError: the replica is not in the fleet.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def on_finished(self, attempt: Attempt) -> None:
        """The attempt is over: with an answer, an error, or because the client disconnected.

        An attempt that is over already, or was lost with its replica, is ignored: its request may be elsewhere.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def on_probed(self, replica_id: ReplicaId) -> Probe:
        """The replica is probed now. Its answer goes to `on_report`, a failure to `on_failed`.

        Raises:
            ValueError: the replica is not in the fleet.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def on_report(self, probe: Probe, stats: Mapping[str, float]) -> None:
        """The replica has answered the probe: it is healthy, and `stats`, copied, is its last report.

        `stats["num_unfinished"]`, if present, is the number of unfinished requests that the replica has from all
        routers. Less those that it had from here when it was probed, and at least 0, it is `num_elsewhere` until the
        next report. If it is absent, `num_elsewhere` is 0.

        Ignored if this or a later probe of the member has been answered or has failed, or if the probe was sent before
        the member joined.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )

    def on_failed(self, probe: Probe) -> None:
        """The replica has not answered the probe, or with an error: `unhealthy_after` in a row make it unhealthy.

        It keeps its requests and its last report. Ignored as in `on_report`.
        """
        raise NotImplementedError(
            "phase 11, task 3: Membership; read docs/en/phase-11-scale-out/lab/03-membership.md"
        )
