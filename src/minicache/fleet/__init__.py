"""A fleet's decisions: which replica gets a request, what to do when one dies, how many there should be.

| module | owns | built in |
|---|---|---|
| `views` | what a router and an autoscaler see: `RoutedRequest`, `ReplicaView`, `FleetView` | – |
| `router` | what all routers have in common; `RoundRobinRouter` | – |
| `power_of_two` | the less busy of two replicas drawn at random | phase 11 |
| `affinity` | the replica that has most of the prompt in its cache, unless it is too busy | phase 11 |
| `membership` | which replicas are in the fleet, and the state of each | phase 11 |
| `failover` | a stream continues elsewhere when its replica dies | phase 11 |
| `autoscaling` | how many replicas there should be | phase 11 |
| `disaggregation` | whether a prompt is computed on another replica and its KV cache moved | phase 11 |

Nothing here knows of HTTP, of a clock or of an engine: the same objects decide in the simulator, in `minicache route`
and inside Ray Serve. Pure standard library.
"""

from __future__ import annotations

from minicache.errors import require_count
from minicache.fleet.affinity import PrefixAffinityRouter
from minicache.fleet.autoscaling import Autoscaler
from minicache.fleet.disaggregation import MovingCosts, Place
from minicache.fleet.failover import FailoverStream
from minicache.fleet.membership import Membership
from minicache.fleet.power_of_two import PowerOfTwoRouter
from minicache.fleet.router import RoundRobinRouter, Router
from minicache.fleet.views import FleetView, ReplicaView, RoutedRequest, route_tokens

__all__ = [
    "ROUTERS",
    "Autoscaler",
    "FailoverStream",
    "FleetView",
    "Membership",
    "MovingCosts",
    "Place",
    "PowerOfTwoRouter",
    "PrefixAffinityRouter",
    "ReplicaView",
    "RoundRobinRouter",
    "RoutedRequest",
    "Router",
    "create_router",
    "route_tokens",
]

ROUTERS = ("round_robin", "power_of_two", "prefix_affinity")
"""The names of the policies."""


def create_router(name: str, *, seed: int = 0, max_imbalance: int = 8, capacity_blocks: int = 4096) -> Router:
    """A router by the name of its policy.

    Args:
        name: "round_robin", "power_of_two" or "prefix_affinity".
        seed: of the random draws.
        max_imbalance: how many unfinished requests more than the least busy replica a replica may have and still be
            chosen for its cache, ≥ 0. For "prefix_affinity"; checked, and otherwise ignored by the others.
        capacity_blocks: how many blocks the router remembers for each replica, ≥ 1. For "prefix_affinity", as above.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: there is no such policy, or a number is out of its bounds.
    """
    require_count("seed", seed, at_least=0)
    require_count("max_imbalance", max_imbalance, at_least=0)
    require_count("capacity_blocks", capacity_blocks)
    match name:
        case "round_robin":
            return RoundRobinRouter()
        case "power_of_two":
            return PowerOfTwoRouter(seed=seed)
        case "prefix_affinity":
            return PrefixAffinityRouter(max_imbalance=max_imbalance, capacity_blocks=capacity_blocks)
    raise ValueError(f"no router {name!r}: there are {', '.join(ROUTERS)}")
