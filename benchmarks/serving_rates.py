"""Request rate against latency for OPT-13B on an A100-40GB: Orca's three variants and paging, next to the paper.

The PagedAttention paper (Kwon et al. 2023, section 6.2) loads a server with more and more requests a second and plots
the mean of end-to-end latency over output tokens. Of its three models on ShareGPT it says that at similar latencies
paging serves 1.7 to 2.7 times as many requests a second as Orca (Oracle), and 2.7 to 8 times as many as Orca (Max). For
Alpaca it prints curves, and no such number. Here the same schedulers serve the same lengths in simulated time.

What is an input, and what is found:

- Lengths: the paper's means; their spread is another trace's (`minicache.simulator.workload`).
- Memory: 15,728 slots, 12 GiB. The paper's.
- The time of a step: the roofline of the data sheet, and what the server spends besides. The paper's own figures imply
  45 ms for a step of 30 requests, some 15 more than the roofline says. It does not say what they are spent on, so they
  are put in twice: by the step ("step"), and by the request in its batch ("request"). And once the simulator's default
  is used, 2 ms a step: a server without that burden ("lean"). So the paper's *rates* are partly put in. Ratios between
  schedulers are found: all share one clock. An overhead by the step favours large batches, one by the request small.
- Batches, latencies, knees and ratios are found.

A knee is the rate at which the mean normalised latency is so many milliseconds a token, between the two measured rates
around it. The rates of each scheduler go from 0.6 to 1.5 of what it can serve when someone is always waiting.

    python -m benchmarks.serving_rates
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks._record import record
from minicache.arithmetic.arithmetic import cache_bytes_per_token, cache_capacity_tokens
from minicache.arithmetic.specs import A100_40GB, GIB, OPT_13B
from minicache.scheduler import Scheduler, create_scheduler
from minicache.simulator.costs import RooflineCost, StepLoad
from minicache.simulator.orca import OrcaScheduler
from minicache.simulator.report import ServingReport
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import ALPACA, SHAREGPT, Arrival, Workload, generate, stream
from minicache.trace import TraceStep

POLICIES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged"}
NUM_SLOTS = cache_capacity_tokens(12 * GIB, 0, cache_bytes_per_token(OPT_13B))
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048

SHARES = (0.6, 0.8, 0.9, 0.95, 1.0, 1.1, 1.25, 1.5)
"""Rates, as parts of what a scheduler can serve at most."""
SATURATING = 500
"""Requests that arrive at once, to see what a scheduler can serve at most."""
KNEES = {"100": 0.1, "250": 0.25, "500": 0.5}
"""Latencies at which knees are read: their names, in milliseconds a token, and seconds a token."""
KNEE = "250"

PAPER = {"paged_over_oracle": [1.7, 2.7], "paged_over_max": [2.7, 8.0], "batch_over_oracle": 2.2, "batch_over_max": 4.3}
PAPER_BATCH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
"""Kwon et al. 2023: the ratios of section 6.2, the batches of figure 13 at 2 requests a second."""
PAPER_STEP_SECONDS = round(PAPER_BATCH["paged"] / (2.0 * SHAREGPT.output.mean), 3)
PAPER_TOKENS = 0.204 * NUM_SLOTS / 7.00
"""Tokens that a running request has in the cache: under Max, 7 requests use 20.4 % of the slots (its figure 2)."""


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, and for how many seconds its requests arrive."""

    workload: Workload
    seconds: float


LOADS = {"sharegpt": Load(SHAREGPT, 900.0), "alpaca": Load(ALPACA, 100.0)}


class OverheadByRequest(RooflineCost):
    """A roofline with an overhead for each request in the batch, and none for the step.

    Args:
        seconds: of each request.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(OPT_13B, A100_40GB, overhead_seconds=0.0)
        self.seconds_per_request = seconds

    def step_seconds(self, load: StepLoad) -> float:
        """The roofline, and the requests' overhead."""
        return super().step_seconds(load) + load.num_sequences * self.seconds_per_request


def overhead_of_the_paper() -> float:
    """What a step of the paper's server takes beyond the roofline, with its batch of 30.42: 45 ms less some 30.

    45 ms by Little's law: 30.42 requests in the batch and 2 arriving a second, so each stays 15.2 s, for 338 steps.
    """
    load = StepLoad.of([(1, round(PAPER_TOKENS))] * round(PAPER_BATCH["paged"]))
    return PAPER_STEP_SECONDS - RooflineCost(OPT_13B, A100_40GB, overhead_seconds=0.0).step_seconds(load)


COSTS = {
    "step": RooflineCost(OPT_13B, A100_40GB, overhead_seconds=overhead_of_the_paper()),
    "request": OverheadByRequest(overhead_of_the_paper() / PAPER_BATCH["paged"]),
    "lean": RooflineCost(OPT_13B, A100_40GB),
}


def main() -> None:
    jobs = [(cost, load, policy) for cost in COSTS for load in LOADS for policy in POLICIES]
    found: dict[str, dict[str, dict[str, Any]]] = {cost: {load: {} for load in LOADS} for cost in COSTS}
    for cost, load, policy in track(jobs, description="Serving"):
        found[cost][load][policy] = served(policy, LOADS[load], COSTS[cost])
    batches = {policy: at_two_per_second(policy) for policy in POLICIES}
    figures = results(found, batches)
    report(figures)
    record("serving_rates", figures)


def scheduler(policy: str) -> Scheduler:
    """Orca's variants and paging over the same 15,728 slots."""
    if policy == "paged":
        return create_scheduler("paged", num_blocks=NUM_SLOTS // BLOCK_SIZE, block_size=BLOCK_SIZE)
    return OrcaScheduler(policy, num_slots=NUM_SLOTS, max_model_len=MAX_MODEL_LEN)


def served(policy: str, load: Load, cost: RooflineCost) -> dict[str, Any]:
    """What a scheduler can do at most, and a point for each rate."""
    steady = most(policy, load, cost)
    points = []
    for share in SHARES:
        rate = round(share * steady, 3)
        run = ServingSimulation(scheduler(policy), cost, arrivals(load, rate)).run()
        points.append({"rate": rate, **summary(run)})
    return {
        "most": round(steady, 3),
        "points": points,
        "knees": {name: at_latency(points, knee) for name, knee in KNEES.items()},
    }


def arrivals(load: Load, rate: float) -> Iterator[Arrival]:
    """The workload at another rate: the same lengths, for as many seconds."""
    return stream(replace(load.workload, rate=rate), round(rate * load.seconds), seed=0)


def most(policy: str, load: Load, cost: RooflineCost) -> float:
    """Requests a second while someone is waiting, after a burst: tokens a second over the mean of their outputs."""
    burst = [replace(arrival, time=0.0) for arrival in generate(load.workload, SATURATING, 0)]
    tokens, seconds = 0, 0.0

    def count(step: TraceStep) -> None:
        nonlocal tokens, seconds
        if step.num_waiting:
            tokens, seconds = tokens + len(step.batch), seconds + step.seconds

    ServingSimulation(scheduler(policy), cost, burst, trace=count).run()
    return tokens / seconds / fmean(arrival.num_output_tokens for arrival in burst)


def summary(run: ServingReport) -> dict[str, float]:
    """What is kept of a run."""
    return {
        "normalized_latency": round(run.normalized_latency.mean, 4),
        "batch": round(run.mean_batch_size, 2),
        "memory": round(run.mean_memory, 4),
        "requests_per_second": round(run.requests_per_second, 3),
        "preemptions": run.num_preemptions,
    }


def at_latency(points: list[dict[str, float]], latency: float) -> float | None:
    """The rate at which a curve reaches a latency, on a straight line through the logarithms; None if it does not."""
    for below, above in pairwise(points):
        low, high = below["normalized_latency"], above["normalized_latency"]
        if low <= latency < high:
            share = (log(latency) - log(low)) / (log(high) - log(low))
            return round(exp(log(below["rate"]) + share * (log(above["rate"]) - log(below["rate"]))), 3)
    return None


def at_two_per_second(policy: str) -> dict[str, float]:
    """Requests batched at 2 a second, as in its figure 13, with its overhead by the step."""
    return summary(ServingSimulation(scheduler(policy), COSTS["step"], arrivals(LOADS["sharegpt"], 2.0)).run())


def results(found: dict[str, Any], batches: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Inputs, curves, ratios."""
    return {
        "num_slots": NUM_SLOTS,
        "seconds": {name: load.seconds for name, load in LOADS.items()},
        "papers": {**PAPER, "batch": PAPER_BATCH},
        "paper_step_seconds": PAPER_STEP_SECONDS,
        "overhead_ms": {
            "step": 1e3 * overhead_of_the_paper(),
            "request": 1e3 * overhead_of_the_paper() / PAPER_BATCH["paged"],
            "lean": 1e3 * COSTS["lean"].overhead_seconds,
        },
        "ratios": {cost: {load: ratios(found[cost][load]) for load in LOADS} for cost in COSTS},
        "batches_at_2_per_s": batches,
        "batch_over_oracle": round(batches["paged"]["batch"] / batches["oracle"]["batch"], 2),
        "batch_over_max": round(batches["paged"]["batch"] / batches["max"]["batch"], 2),
        **found,
    }


def ratios(by_policy: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """How many times the others' rate paging serves, at each latency."""
    told: dict[str, dict[str, float | None]] = {}
    for policy in ("max", "pow2", "oracle"):
        told[policy] = {}
        for knee in KNEES:
            ours, theirs = by_policy["paged"]["knees"][knee], by_policy[policy]["knees"][knee]
            told[policy][knee] = round(ours / theirs, 2) if ours and theirs else None
    return told


def report(figures: dict[str, Any]) -> None:
    """Knees and ratios next to the paper's."""
    console = Console()
    for cost in COSTS:
        overhead = figures["overhead_ms"][cost]
        table = Table(
            title=f"Requests a second at {KNEE} ms a token; overhead: {cost}, {overhead:.2f} ms", box=SIMPLE_HEAD
        )
        for heading in ("", *POLICIES.values(), "paged / Oracle", "paged / Max"):
            table.add_column(heading, justify="right" if heading else "left")
        for load in LOADS:
            knees = [figures[cost][load][policy]["knees"][KNEE] for policy in POLICIES]
            ratio = figures["ratios"][cost][load]
            table.add_row(load, *map(str, knees), *(str(ratio[policy][KNEE]) for policy in ("oracle", "max")))
        console.print(table)
    batches = ", ".join(f"{name} {figures['batches_at_2_per_s'][policy]['batch']}" for policy, name in POLICIES.items())
    console.print("The paper's ratios, for ShareGPT on three models: 1.7 to 2.7 and 2.7 to 8.")
    console.print(f"Requests batched at 2 a second: {batches} (the paper: 7.00, 9.81, 13.62, 30.42).", soft_wrap=True)
    console.print(
        f"paged / Oracle {figures['batch_over_oracle']} (2.2), paged / Max {figures['batch_over_max']} (4.3). Paging's "
        "own batch follows from the step time, which is an input; the others' are what memory allows.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
