# Phase 11, scale-out: your file. It stands in for minicache.fleet.autoscaling.
# Write what raises NotImplementedError. `minicache grade 11` grades it, `minicache hint 11.K` helps with task K.
#
# Predict, before you write task 11.5. `minicache grade` checks it, without points.
# There are two replicas, upscale_delay is 30, and a call comes every 10 s. At 0, 10, 20 and 30 s 5, 3, 6 and 7 are
# wanted. What does the call at 30 s return?
# 11.5a =
# There are four replicas, downscale_delay is 60, and a call comes every 10 s. Up to 90 s 4 are wanted, from 100 s on 2.
# At which second is 2 returned for the first time?
# 11.5b =
# There are two replicas, and upscale_delay is 30. There are two calls only, at 0 s and at 100 s, and at both 5 are
# wanted. What does the second call return?
# 11.5c =
"""How many replicas there should be (phase 11). Pure standard library.

The current load gives the number of replicas wanted now. Acting on each such number would start and stop replicas all
day, and a start takes a minute in which nothing is gained. So a number counts only when it has held for a while: the
fleet grows to the smallest and shrinks to the largest number wanted in a window that ends now (the stabilization
windows of Kubernetes' Horizontal Pod Autoscaler). A replica that leaves finishes its requests first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from minicache.errors import require_count, require_positive
from minicache.fleet.views import FleetView, ReplicaId, ReplicaView


class Autoscaler:
    """Decides at each call how many replicas there should be.

    It keeps nothing between two calls: its memory is the `state` that it returns, and gets back.

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
        """The fewest replicas with which none has more than `target_unfinished` requests, if they are spread evenly.

        Requests that wait for a replica count too. Never fewer than `min_replicas`, nor more than `max_replicas`.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )

    def decide(self, view: FleetView, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, including those that are starting.

        The `wanted` of a call holds until the next. If at every moment of the last `upscale_delay` seconds more were
        wanted than there are, the result is the smallest number wanted in that time. If at every moment of the last
        `downscale_delay` seconds fewer were wanted than there are, it is the largest. Otherwise it is the current
        number: the replicas that take requests or are starting, or the nearer bound if these are fewer than
        `min_replicas` or more than `max_replicas`, since the bounds need no delay.

        What was wanted before the first call is unknown and justifies nothing. If the clock was set back, what was
        wanted after `view.now` counts no longer, and what was wanted before may be forgotten with it.

        Args:
            view: the fleet now.
            state: returned by the previous call; empty at the first. It is not changed.

        Returns:
            The number, and the new state, which `json.dumps` accepts and which keeps only what the delays need.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )

    def leaving(self, replicas: Sequence[ReplicaView], count: int) -> list[ReplicaId]:
        """Which replicas drain when there should be `count` fewer: those that will be done first.

        Args:
            replicas: those that take requests. Do not change it.
            count: 0 … len(replicas).

        Returns:
            `count` names: those with the fewest unfinished requests; of equals, those whose names come first.
        """
        raise NotImplementedError(
            "phase 11, task 5: How many replicas; read docs/en/phase-11-scale-out/lab/05-autoscaling.md"
        )
