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
        num_requests = view.num_unfinished + view.num_waiting
        return self._bounded(ceil(num_requests / self.target_unfinished))

    def _bounded(self, number: int) -> int:
        return min(max(number, self.min_replicas), self.max_replicas)

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
        # (when, how many), the oldest first
        history = [(when, number) for when, number in state.get("wanted", ()) if when <= view.now]
        history.append((view.now, self.wanted(view)))
        current = self._bounded(view.num_ready + view.num_starting)
        number = current
        if (least := min(_since(history, view.now - self.upscale_delay), default=current)) > current:
            number = least
        elif (most := max(_since(history, view.now - self.downscale_delay), default=current)) < current:
            number = most
        start = view.now - max(self.upscale_delay, self.downscale_delay)
        first = max((index for index, (time, _) in enumerate(history) if time <= start), default=0)
        return number, {"wanted": [list(each) for each in history[first:]]}

    def leaving(self, replicas: Sequence[ReplicaView], count: int) -> list[ReplicaId]:
        """Which replicas drain when there should be `count` fewer: those that will be done first.

        Args:
            replicas: those that take requests. Do not change it.
            count: 0 … len(replicas).

        Returns:
            `count` names: those with the fewest unfinished requests; of equals, those whose names come first.
        """
        by_load = sorted(replicas, key=lambda replica: (replica.num_unfinished, replica.replica_id))
        return [replica.replica_id for replica in by_load[:count]]


def _since(history: Sequence[tuple[float, int]], start: float) -> list[int]:
    """The numbers wanted at any moment from `start` on; [] if they are not known for all of it."""
    known = [index for index, (time, _) in enumerate(history) if time <= start]
    return [number for _, number in history[known[-1] :]] if known else []
