"""What came of a simulated fleet's run. Given, not built. Pure standard library."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from minicache.fleet.views import ReplicaId
from minicache.simulator.report import NUM_SAMPLES, RequestTimes, Summary


@dataclass(slots=True)
class FleetSeries:
    """The fleet's state over time, as at most `NUM_SAMPLES` samples.

    Attributes:
        seconds: between two samples.
        time: of the samples.
        num_ready: replicas that take requests.
        num_unfinished: requests that replicas have.
        num_waiting: requests that no replica has yet.
    """

    seconds: float = 0.1
    time: list[float] = field(default_factory=list)
    num_ready: list[int] = field(default_factory=list)
    num_unfinished: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)

    def add(self, time: float, num_ready: int, num_unfinished: int, num_waiting: int) -> float:
        """Take a sample. Returns when the next one is due."""
        columns = (self.time, self.num_ready, self.num_unfinished, self.num_waiting)
        self.time.append(time)
        self.num_ready.append(num_ready)
        self.num_unfinished.append(num_unfinished)
        self.num_waiting.append(num_waiting)
        if len(self.time) > NUM_SAMPLES:
            self.seconds *= 2
            for column in columns:
                del column[1::2]
        return time + self.seconds


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What one replica did, from when it was asked for to when it left or the run ended.

    Attributes:
        replica_id: its name.
        num_sent: requests that it was sent.
        seconds: that it was there for, its start included.
        busy_seconds: during which a step ran.
        num_queried_tokens: tokens that its requests had when they were admitted.
        num_hit_tokens: of these, the tokens that its prefix cache had.
        crashed: whether it died.
    """

    replica_id: ReplicaId
    num_sent: int
    seconds: float
    busy_seconds: float
    num_queried_tokens: int
    num_hit_tokens: int
    crashed: bool


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What came of a run. Times are in seconds of the fleet's clock, which starts at 0.

    Attributes:
        num_requests: that arrived: finished + refused + outgrown + given up.
        num_finished: that got all of their tokens.
        num_refused: that were too large for a replica, and turned away.
        num_outgrown: that ended early, as the whole memory of a replica was too small for them (FINISHED_CAPACITY).
        num_given_up: that ended early, as too many replicas died over them.
        num_resent: how often a request was sent again, as its replica had died.
        num_moved: prompts that were computed on one replica and moved to another.
        num_prompt_tokens: of the finished requests.
        num_output_tokens: that their clients got.
        makespan: when the last request finished.
        hit_rate: the part of the tokens of admitted requests that a prefix cache had, 0 … 1. What was moved to it
            counts as had.
        replica_seconds: that replicas were there for, their starts included: what the fleet costs.
        ttft: time to first token, from the arrival at the fleet.
        tpot: time per output token after the first, by request.
        latency: end to end.
        replicas: what each did.
        series: replicas and requests over time.
        times: what the summaries are made of, request by request. Not in `to_json`.
    """

    num_requests: int
    num_finished: int
    num_refused: int
    num_outgrown: int
    num_given_up: int
    num_resent: int
    num_moved: int
    num_prompt_tokens: int
    num_output_tokens: int
    makespan: float
    hit_rate: float
    replica_seconds: float
    ttft: Summary
    tpot: Summary
    latency: Summary
    replicas: list[ReplicaReport]
    series: FleetSeries
    times: RequestTimes

    def to_json(self) -> dict[str, Any]:
        """All but `times`, as `json.dump` takes it."""
        told = {name: getattr(self, name) for name in self.__slots__ if name != "times"}
        for name in ("ttft", "tpot", "latency", "series"):
            told[name] = asdict(told[name])
        return told | {"replicas": [asdict(each) for each in self.replicas]}
