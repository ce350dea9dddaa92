"""What came of a simulated fleet's run. Given, not built. Pure standard library."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from minicache.fleet.views import ReplicaId
from minicache.simulator.report import Report, Samples


@dataclass(slots=True)
class FleetSeries(Samples):
    """The fleet's state over time.

    Attributes:
        num_ready: replicas that take requests.
        num_unfinished: requests that replicas have.
        num_waiting: requests that no replica has yet.
    """

    num_ready: list[int] = field(default_factory=list)
    num_unfinished: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica did, from when it was asked for to when it left or the run ended.

    Attributes:
        replica_id: its name.
        num_sent: requests that it was sent.
        seconds: that it was there for, its start included.
        busy_seconds: during which a step ran.
        num_queried_tokens: tokens that its requests had when they were admitted.
        num_hit_tokens: of these, the tokens that its prefix cache had, those from a tier included.
        num_computed_tokens: that its model ran on.
        tier_hit_tokens: that were loaded from a tier, by its name.
        crashed: whether it died.
    """

    replica_id: ReplicaId
    num_sent: int
    seconds: float
    busy_seconds: float
    num_queried_tokens: int
    num_hit_tokens: int
    num_computed_tokens: int
    tier_hit_tokens: dict[str, int]
    crashed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport(Report):
    """What came of a fleet's run. The counts of tokens are of finished requests, as their clients got them.

    Attributes:
        num_given_up: requests that finished early, as too many replicas died over them.
        num_resent: how often a request was sent again, as its replica had died.
        num_moved: prompts that were computed on one replica and moved to another.
        hit_rate: the part of the tokens of admitted requests that a prefix cache had, 0 … 1. What was moved to it, or
            loaded from a tier, counts as had.
        replica_seconds: that replicas were there for, their starts included: what the fleet costs.
        replicas: what each did.
        series: replicas and requests over time.
    """

    num_given_up: int
    num_resent: int
    num_moved: int
    hit_rate: float
    replica_seconds: float
    replicas: list[ReplicaReport]
    series: FleetSeries

    def to_json(self) -> dict[str, Any]:
        """As `Report.to_json`."""
        return Report.to_json(self) | {"replicas": [asdict(each) for each in self.replicas]}
