"""A fleet: each replica in turn, and as many as have 24 requests each, fewer after half a minute (phase 11)."""

from __future__ import annotations

from minicache.fleet import Autoscaler, RoundRobinRouter, Router
from minicache_course.arena import FleetArena


def create(arena: FleetArena) -> tuple[Router, Autoscaler]:
    """The two of phase 11."""
    scaler = Autoscaler(target_unfinished=24, max_replicas=arena.max_replicas, downscale_delay=30.0)
    return RoundRobinRouter(), scaler
