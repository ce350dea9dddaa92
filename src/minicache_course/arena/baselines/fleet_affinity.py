"""A fleet: where most of the prompt is cached, if that replica is not too loaded (SGLang's router; phase 11)."""

from __future__ import annotations

from minicache.fleet import Autoscaler, PrefixAffinityRouter, Router
from minicache_course.arena import FleetArena


def create(arena: FleetArena) -> tuple[Router, Autoscaler]:
    """The two of phase 11."""
    scaler = Autoscaler(target_unfinished=24, max_replicas=arena.max_replicas, downscale_delay=30.0)
    return PrefixAffinityRouter(), scaler
