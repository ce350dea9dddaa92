# Phase 11, scale-out: your file. It stands in for minicache.fleet.autoscaling.
# Write what raises NotImplementedError. `minicache grade 11` grades it, `minicache hint 11.K` helps with task K.
"""How many replicas there should be (phase 11). Pure standard library.

The load now says how many replicas are wanted now. Acting on each such number would start and stop replicas all day,
and a start takes a minute in which nothing is gained. So a number is acted on only when it has held for a while: the
fleet grows to what was wanted at least, and shrinks to what was wanted at most, in a window that ends now (the
stabilization windows of Kubernetes' Horizontal Pod Autoscaler). Whoever leaves finishes its requests first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from minicache.errors import require_count, require_positive
from minicache.fleet.views import FleetView, ReplicaId, ReplicaView


class Autoscaler:
    """Decides, each time it is asked, how many replicas there should be.

    It keeps nothing between two calls: what it has to remember is in the `state` that it returns, and gets back.

    Args:
        target_unfinished: unfinished requests a replica should have, > 0.
        min_replicas: the fewest that are wanted, ≥ 1.
        max_replicas: the most that are wanted, ≥ min_replicas.
        upscale_delay: seconds for which more replicas must have been wanted before there are more, ≥ 0.
        downscale_delay: seconds for which fewer must have been wanted before there are fewer, ≥ 0.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """

    def __init__(
        self,
        *,
        target_unfinished: float,
        min_replicas: int = 1,
        max_replicas: int = 8,
        upscale_delay: float = 0.0,
        downscale_delay: float = 300.0,
    ) -> None:
        require_positive("target_unfinished", target_unfinished)
        require_count("min_replicas", min_replicas)
        require_count("max_replicas", max_replicas, at_least=min_replicas)
        for name, seconds in (("upscale_delay", upscale_delay), ("downscale_delay", downscale_delay)):
            if seconds:
                require_positive(name, seconds)
        self.target_unfinished = target_unfinished
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.upscale_delay, self.downscale_delay = upscale_delay, downscale_delay

    def wanted(self, view: FleetView) -> int:
        """The fewest replicas with which none has more than `target_unfinished` requests, if all share them evenly.

        Requests that wait for a replica count as those that have one. Never fewer than `min_replicas`, nor more than
        `max_replicas`.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )

    def decide(self, view: FleetView, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, those that start included.

        What is `wanted` at one call holds until the next. If at every moment of the last `upscale_delay` seconds more
        were wanted than there are, there should be as many as were wanted at least. If at every moment of the last
        `downscale_delay` seconds fewer were wanted than there are, there should be as many as were wanted at most.
        Else as many as there are. "As there are" means those that take requests and those that start, and the nearer
        bound where these are fewer than `min_replicas` or more than `max_replicas`: the bounds need no delay.

        What was wanted before the first call is not known, and reason for nothing. If the clock was set back, what was
        wanted at moments after `view.now` is forgotten.

        Args:
            view: the fleet now.
            state: what the call before returned; empty at the first. It is not changed.

        Returns:
            The number, and the new state: what `json.dumps` takes, and no more of the past than the delays need.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )

    def leaving(self, replicas: Sequence[ReplicaView], count: int) -> list[ReplicaId]:
        """Which replicas drain when there should be `count` fewer: those that will be done first.

        Args:
            replicas: those that take requests.
            count: 0 … len(replicas).

        Returns:
            The names of `count` of them: with the fewest unfinished requests; of equals, those whose names come first.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )
