"""Your policy for the arena's second league: a router and an autoscaler.

    minicache arena run --league fleet

scores it. The rules, the score and its bound: docs/en/arena.md.
"""

from minicache.fleet import Autoscaler, PrefixAffinityRouter


class Scaler(Autoscaler):
    """Begin with phase 11's, or with any subclass of `Router` and `Autoscaler`."""


def create(arena):
    scaler = Scaler(target_unfinished=24, max_replicas=arena.max_replicas, downscale_delay=30.0)
    return PrefixAffinityRouter(), scaler
