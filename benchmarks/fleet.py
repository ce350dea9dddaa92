"""A fleet in simulated time: what routers, an autoscaler and the size of a fleet do. All **modelled**.

Llama-3-8B, a replica on an A100-40GB, chunked prefill with a prefix cache; time is the roofline's
(`minicache.simulator.costs`).

- `chats`: people who talk, each message sent with all that was said before. Four replicas, every policy.
- `hot`: every prompt begins with the same 512 tokens. Four replicas.
- `imbalance`: prefix affinity with bounds from 0 to none, on both.
- `day`: a day squeezed into SECONDS_OF_DAY, on L4s, which start in START_SECONDS: fleets of a fixed size, and the
  autoscaler.
- `stale`: routers that know of each replica only what it reported last. Sixteen replicas, reports of every age, in ms.
- `apart`: chats among which long prompts arrive, on four replicas that do both, and on three with one for prompts.
- `speed`: how long 1,000 replicas take for requests as long as ShareGPT's, on one core, and with `--large` for a
  million of them. **Measured**, in CPU seconds.

    python -m benchmarks.fleet [--large]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from math import cos, pi
from random import Random
from typing import Any, Final

from rich.progress import Progress

from benchmarks._record import record
from benchmarks.prefix_cache import BLOCK_SIZE, CHAT_BLOCKS
from minicache.arithmetic.arithmetic import step_flops
from minicache.arithmetic.specs import A100_40GB, L4, LLAMA_3_8B
from minicache.fleet import Autoscaler, MovingCosts, ReplicaView, RoutedRequest, Router, create_router
from minicache.fleet.views import ReplicaId
from minicache.request import Request
from minicache.scheduler import Scheduler, create_scheduler
from minicache.simulator.costs import FLOPS_EFFICIENCY, RooflineCost
from minicache.simulator.fleet import Disaggregation, FleetReport, FleetSimulation, Scaling
from minicache.simulator.machine import published_machine
from minicache.simulator.prompts import VOCABULARY, behind_system_prompt, chats
from minicache.simulator.traffic import CHATS
from minicache.simulator.workload import SHAREGPT, Arrival, stream, varying_arrivals

COST: Final = RooflineCost(LLAMA_3_8B, A100_40GB)
SECONDS_PER_TOKEN: Final = step_flops(LLAMA_3_8B, 1) / (A100_40GB.peak_flops * FLOPS_EFFICIENCY)
NUM_REPLICAS: Final = 4
NO_BOUND: Final = 10**9
POLICIES: Final[dict[str, tuple[str, dict[str, int]]]] = {
    "round_robin": ("round_robin", {}),
    "power_of_two": ("power_of_two", {}),
    "prefix_affinity": ("prefix_affinity", {}),
    "unbounded": ("prefix_affinity", {"max_imbalance": NO_BOUND}),
}
IMBALANCES: Final = (0, 1, 2, 4, 8, 16, 32, 64, NO_BOUND)
NUM_CHATS, CHAT_RATE = 400, 2.4
NUM_HOT, HOT_RATE, NUM_SHARED = 1200, 16.0, 512

SECONDS_OF_DAY: Final = 3 * 3600.0
START_SECONDS: Final = 60.0
LOWEST, HIGHEST = 0.3, 6.0
"""Requests a second at night and at the busiest moment of the day. Assumed."""
TARGET: Final = 32
"""Unfinished requests a replica that the autoscaler aims at."""
SIZES: Final = (2, 3, 4, 5, 6)
"""Of the fixed fleets."""
DAY_COST: Final = RooflineCost(LLAMA_3_8B, L4)
DAY_BLOCKS: Final = published_machine("llama-3-8b", "l4", block_size=BLOCK_SIZE).num_blocks


NUM_STALE, STALE_RATE, NUM_STALE_REPLICAS = 4000, 96.0, 16
AGES: Final = (0.1, 1.0, 5.0, 20.0)
"""Seconds between two reports."""

NUM_APART, APART_RATE = 2000, 10.0
LONG, LONG_TOKENS = 0.08, 8000
"""The part of the requests that have a long prompt, and its length."""
LINKS: Final = (1, 10, 25, 100)
"""Gbit/s."""


def make_scheduler(num_blocks: int = CHAT_BLOCKS, *, prefix_caching: bool = True) -> Scheduler:
    """A replica's."""
    return create_scheduler(
        "chunked",
        num_blocks=num_blocks,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        prefix_caching=prefix_caching,
    )


def on_a_small_machine() -> Scheduler:
    """A replica's, for prompts that have nothing in common."""
    return make_scheduler(DAY_BLOCKS, prefix_caching=False)


def figures(report: FleetReport) -> dict[str, Any]:
    """What is kept of a run."""
    sent = sorted(each.num_sent for each in report.replicas)
    return {
        "num_requests": report.num_requests,
        "hit_rate": report.hit_rate,
        "ttft_p50": report.ttft.p50,
        "ttft_p99": report.ttft.p99,
        "tpot_p50": report.tpot.p50,
        "tpot_p99": report.tpot.p99,
        "makespan": report.makespan,
        "num_sent": sent,
        "replica_hours": report.replica_seconds / 3600,
    }


def talk() -> Iterator[Request]:
    """`chats`."""
    return chats(replace(CHATS, rate=CHAT_RATE), NUM_CHATS, seed=0)


def hot_prompt() -> Iterator[Request]:
    """`hot`."""
    return behind_system_prompt(replace(SHAREGPT, rate=HOT_RATE, max_model_len=4096), NUM_SHARED, NUM_HOT, seed=0)


def routed(router: Router, arrivals: Iterator[Request]) -> FleetReport:
    """A run on the small fleet."""
    return FleetSimulation(router, make_scheduler, COST, arrivals, num_replicas=NUM_REPLICAS).run()


def under(policy: str, arrivals: Callable[[], Iterator[Request]]) -> dict[str, Any]:
    """A workload under a policy."""
    name, options = POLICIES[policy]
    return figures(routed(create_router(name, **options), arrivals()))


def bounded(most: int) -> dict[str, Any]:
    """Both workloads under prefix affinity with a bound."""
    workloads = {"chats": talk, "hot": hot_prompt}
    return {
        name: figures(routed(create_router("prefix_affinity", max_imbalance=most), arrivals()))
        for name, arrivals in workloads.items()
    }


def rate_at(seconds: float) -> float:
    """Requests a second in the course of the day, which begins and ends at its quietest."""
    return LOWEST + (HIGHEST - LOWEST) * (1 - cos(2 * pi * seconds / SECONDS_OF_DAY)) / 2


def day(seconds: float = SECONDS_OF_DAY) -> Iterator[Arrival]:
    """The requests of the day, or of its beginning."""
    rng = Random("a day")
    times = takewhile(lambda moment: moment < seconds, varying_arrivals(rate_at, HIGHEST, rng))
    lengths = stream(replace(SHAREGPT, max_model_len=4096), 10**9, seed=0)
    for moment, each in zip(times, lengths, strict=False):
        yield replace(each, time=moment)


def autoscaler() -> Autoscaler:
    """As the page has it."""
    return Autoscaler(target_unfinished=TARGET, min_replicas=1, max_replicas=16, upscale_delay=30, downscale_delay=300)


def through_the_day(size: int | None) -> dict[str, Any]:
    """A fleet of a fixed size, or the autoscaler's."""
    scaling = None if size else Scaling(autoscaler(), interval=10.0, start_seconds=START_SECONDS)
    report = FleetSimulation(
        create_router("power_of_two"), on_a_small_machine, DAY_COST, day(), num_replicas=size or 1, scaling=scaling
    ).run()
    series = report.series
    told = figures(report) | {"latency_p99": report.latency.p99, "num_replicas_at_most": max(series.num_ready)}
    del told["num_sent"]
    if size is None:
        told["series"] = {"time": series.time, "num_ready": series.num_ready, "num_unfinished": series.num_unfinished}
    return told


class Reported(Router):
    """The least busy by the last reports, of all replicas or of two drawn at random. Of equals, one at random."""

    def __init__(self, num_choices: int | None) -> None:
        self.num_choices, self.rng = num_choices, Random(0)

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        """By `stats`, and by nothing that is known here."""
        drawn = self.rng.sample(replicas, self.num_choices or len(replicas))
        return min(drawn, key=lambda view: view.stats.get("num_unfinished", 0.0)).replica_id


def stale(seconds: float) -> dict[str, Any]:
    """Reports of one age: the least busy of all, and of two; and one of all at random, which reads no report."""
    workload = replace(SHAREGPT, rate=STALE_RATE, max_model_len=4096)
    told = {}
    for name, num_choices in (("all", None), ("two", 2), ("one", 1)):
        report = FleetSimulation(
            Reported(num_choices),
            partial(make_scheduler, prefix_caching=False),
            COST,
            stream(workload, NUM_STALE, seed=0),
            num_replicas=NUM_STALE_REPLICAS,
            max_unfinished=10**6,
            report_interval=seconds,
        ).run()
        told[name] = figures(report)
    return told


def long_prompts() -> Iterator[Request]:
    """`apart`."""
    rng, fill = Random("long prompts"), Random("tokens")
    for each in stream(replace(SHAREGPT, rate=APART_RATE, max_model_len=4096), NUM_APART, seed=0):
        length = LONG_TOKENS if rng.random() < LONG else each.num_prompt_tokens
        prompt = fill.choices(VOCABULARY, k=length)
        yield Request(each.request_id, prompt, each.num_output_tokens, ignore_eos=True, arrival_time=each.time)


def apart(gigabits: int | None) -> dict[str, Any]:
    """Four replicas, of which one computes prompts for the others over such a link; None: all do both."""
    costs = MovingCosts(LLAMA_3_8B, SECONDS_PER_TOKEN, (gigabits or 1) * 1e9 / 8, latency=1e-4)
    report = FleetSimulation(
        create_router("power_of_two"),
        for_long_prompts,
        COST,
        long_prompts(),
        num_replicas=NUM_REPLICAS - 1 if gigabits else NUM_REPLICAS,
        disaggregation=Disaggregation(costs, num_prefill=1) if gigabits else None,
    ).run()
    return figures(report) | {"num_moved": report.num_moved}


def for_long_prompts() -> Scheduler:
    """A replica's."""
    return create_scheduler(
        "chunked",
        num_blocks=CHAT_BLOCKS,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=LONG_TOKENS + 4096,
        prefix_caching=True,
    )


def speed(num_requests: int, num_replicas: int = 1000) -> dict[str, Any]:
    """CPU seconds of a run of many replicas."""
    workload = replace(SHAREGPT, rate=4.0 * num_replicas, max_model_len=4096)
    arrivals = behind_system_prompt(workload, 64, num_requests, seed=0)
    begun = time.process_time()
    report = FleetSimulation(
        create_router("power_of_two"), make_scheduler, COST, arrivals, num_replicas=num_replicas
    ).run()
    seconds = time.process_time() - begun
    return {
        "num_replicas": num_replicas,
        "num_requests": num_requests,
        "num_tokens": report.num_prompt_tokens + report.num_output_tokens,
        "seconds": seconds,
        "microseconds_per_request": seconds / num_requests * 1e6,
        "simulated_seconds": report.makespan,
    }


def main() -> None:
    """Run all, and write `benchmarks/results/fleet.json`."""
    runs: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        "chats": {name: partial(under, name, talk) for name in POLICIES},
        "hot": {name: partial(under, name, hot_prompt) for name in POLICIES},
        "imbalance": {str(most): partial(bounded, most) for most in IMBALANCES},
        "stale": {f"{1000 * seconds:g}": partial(stale, seconds) for seconds in AGES},
        "apart": {str(link or "together"): partial(apart, link) for link in (None, *LINKS)},
        "day": {str(size or "autoscaler"): partial(through_the_day, size) for size in (*SIZES, None)},
    }
    found: dict[str, Any] = {name: {} for name in runs}
    with Progress() as progress:
        bar = progress.add_task("runs", total=sum(map(len, runs.values())) + 1)
        for name, each in runs.items():
            for key, run in each.items():
                found[name][key] = run()
                progress.advance(bar)
        found["speed"] = speed(1_000_000 if "--large" in sys.argv[1:] else 50_000)
        progress.advance(bar)
    found["day"]["rate"] = {"lowest": LOWEST, "highest": HIGHEST, "seconds": SECONDS_OF_DAY}
    record("fleet", found)


if __name__ == "__main__":
    main()
