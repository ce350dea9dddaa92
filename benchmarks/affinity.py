"""Affinity against balance: 256 system prompts, one of them hot, on four replicas, with one bound after the other.

Every request begins with one of 256 system prompts of 2,000 tokens; two in five begin with the same one. Behind it come
a message and an answer of ShareGPT's lengths. Four replicas of Llama 3 8B on an A100-40GB (roofline), each with the
cache that fits: all system prompts fit into the fleet, and a third of them into one replica. First the bound on the
imbalance is varied, then how many blocks the router remembers of each replica.

    python -m benchmarks.affinity
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from rich.console import Console

from benchmarks._record import record
from minicache.arithmetic.specs import A100_40GB, LLAMA_3_8B
from minicache.fleet import Router, create_router
from minicache.request import Request
from minicache.scheduler import create_scheduler
from minicache.scheduler.base import Scheduler
from minicache.simulator.costs import RooflineCost
from minicache.simulator.fleet import FleetSimulation
from minicache.simulator.prompts import VOCABULARY
from minicache.simulator.workload import SHAREGPT

NUM_PROMPTS, NUM_SHARED, HOT = 256, 2_000, 0.4
RATE, COUNT, LONGEST = 20.0, 1_500, 1_000
NUM_REPLICAS, NUM_BLOCKS = 4, 10_773
"""Blocks of 16 tokens: what an A100-40GB has next to the weights and 4 GiB in reserve."""
BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 10**6)
CAPACITIES = (100, 1_000, 3_000, NUM_BLOCKS, 4 * NUM_BLOCKS)
BOUND = 8
"""The bound while capacities are varied."""


def main() -> None:
    figures = {
        "round_robin": serve(create_router("round_robin")),
        "power_of_two": serve(create_router("power_of_two")),
        "bounds": [
            {"max_imbalance": bound if bound < 10**6 else None}
            | serve(create_router("prefix_affinity", max_imbalance=bound, capacity_blocks=NUM_BLOCKS))
            for bound in BOUNDS
        ],
        "capacities": [
            {"capacity_blocks": blocks}
            | serve(create_router("prefix_affinity", max_imbalance=BOUND, capacity_blocks=blocks))
            for blocks in CAPACITIES
        ],
        "num_prompts": NUM_PROMPTS,
        "num_shared": NUM_SHARED,
        "hot": HOT,
        "rate": RATE,
        "num_requests": COUNT,
        "num_replicas": NUM_REPLICAS,
        "num_blocks": NUM_BLOCKS,
    }
    Console(highlight=False).print_json(data=figures)
    record("affinity", figures)


def serve(router: Router) -> dict[str, Any]:
    """One fleet, all requests."""
    cost = RooflineCost(LLAMA_3_8B, A100_40GB)
    fleet = FleetSimulation(router, scheduler, cost, requests(), num_replicas=NUM_REPLICAS, max_unfinished=10**6)
    report = fleet.run()
    return {
        "hit_rate": round(report.hit_rate, 3),
        "ttft_p50_ms": round(1e3 * report.ttft.p50),
        "ttft_p99_ms": round(1e3 * report.ttft.p99),
        "tpot_p50_ms": round(1e3 * report.tpot.p50, 1),
        "busiest": round(max(each.num_sent for each in report.replicas) / report.num_requests, 3),
    }


def scheduler() -> Scheduler:
    """One replica's."""
    return create_scheduler(
        "chunked",
        num_blocks=NUM_BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=2_048,
        max_model_len=8_192,
        prefix_caching=True,
    )


def requests() -> Iterator[Request]:
    """The workload: the same for all."""
    rng, now = Random(0), 0.0
    prompts = [rng.choices(VOCABULARY, k=NUM_SHARED) for _ in range(NUM_PROMPTS)]
    for number in range(COUNT):
        now += rng.expovariate(RATE)
        prompt = prompts[0] if rng.random() < HOT else rng.choice(prompts[1:])
        message = rng.choices(VOCABULARY, k=min(LONGEST, SHAREGPT.prompt.sample(rng)))
        num_answered = min(LONGEST, SHAREGPT.output.sample(rng))
        yield Request(number, prompt + message, num_answered, ignore_eos=True, arrival_time=now)


if __name__ == "__main__":
    main()
