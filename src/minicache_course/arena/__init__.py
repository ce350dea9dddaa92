"""The arena: one policy, fixed workloads in simulated time, one score that anybody can reproduce.

    machine      what every policy is given: an H100 with a model, its options, the clock, the limits of a request
    workloads    five of them, drawn by seed: sessions of turns, whose lengths a policy does not know
    traces       sessions from a published trace's file
    loop         one run: the real scheduler, simulated time, every request's latency, a hash of the schedule
    audit        what must hold after every step, whatever the policy
    limits       what a policy's file may import and name
    bound        how many requests no policy can serve better than
    score        all runs of a policy, checked: its share of the bound
    fleet        the same for a router and an autoscaler
    record       the score file: written, and verified
    baselines/   known policies, a short file each

Pure standard library.
"""

from __future__ import annotations

from minicache_course.arena.machine import Arena, FleetArena, Service

__all__ = ["Arena", "FleetArena", "Service"]
