"""What may happen to a simulated fleet. Given, not built. Pure standard library."""

from __future__ import annotations

from dataclasses import dataclass

from minicache.errors import require_count, require_positive
from minicache.fleet import Autoscaler, MovingCosts
from minicache.fleet.views import ReplicaId


@dataclass(frozen=True, slots=True)
class Crash:
    """A replica dies.

    Attributes:
        time: when.
        replica_id: which; nothing happens if it is not in the fleet then.
        seconds: after which another takes its place, under the same name and with an empty cache; None: none does.
    """

    time: float
    replica_id: ReplicaId
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """When an autoscaler is asked, and how long a start takes.

    Attributes:
        scaler: the autoscaler.
        interval: seconds between two questions, > 0.
        start_seconds: from the decision until a new replica takes requests, ≥ 0.
    """

    scaler: Autoscaler
    interval: float = 10.0
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        require_positive("interval", self.interval)
        if self.start_seconds:
            require_positive("start_seconds", self.start_seconds)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Replicas that compute prompts for the others.

    They are named "prefill-0", "prefill-1", … and are not shown to the router. A prompt that the router has sent to a
    replica is computed on one of them if `costs` says so; its first token comes from there, and its keys and values
    follow over a link, on which each prefill replica sends one prompt at a time. So the schedulers need prefix caches:
    the last tokens, which fill no block, are computed again where the answer is.

    Attributes:
        costs: what is asked for each prompt (`choose`), and how long the link takes.
        num_prefill: of these replicas, ≥ 1.
    """

    costs: MovingCosts
    num_prefill: int

    def __post_init__(self) -> None:
        require_count("num_prefill", self.num_prefill)
