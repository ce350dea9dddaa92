"""How fast the simulator is, and what it keeps: 100,000 requests on one core.

ShareGPT's lengths at 20 requests a second, Llama 3 8B on an H100, the fair scheduler. The run is a process of its own
without torch, so its peak memory is the simulator's. Memory is read when a tenth of the requests have finished, and
at the end.

    python -m benchmarks.simulator_speed
    python -m benchmarks.simulator_speed --count 10000      a shorter run; records nothing
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

COUNT = 100_000
RATE = 20.0
NUM_BLOCKS = 16_384
SECONDS_GOAL = 60


def main(
    count: Annotated[int, typer.Option(min=10, help="Requests; only the full number is recorded.")] = COUNT,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Time a run of the simulator."""
    if child:
        print(json.dumps(timed(count)))
        return
    command = [sys.executable, "-m", "benchmarks.simulator_speed", "--child", "--count", str(count)]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    Console(highlight=False).print(
        f"{count:,} requests, {figures['num_output_tokens']:,} tokens in {figures['num_steps']:,} steps: "
        f"{figures['seconds']:.1f} s (goal: under {SECONDS_GOAL}), {figures['nanoseconds_per_token']:.0f} ns a token. "
        f"Peak memory {figures['peak_mib_at_a_tenth']:.1f} MiB after a tenth, {figures['peak_mib']:.1f} MiB in all.",
        soft_wrap=True,
    )
    if count == COUNT:
        from benchmarks._record import record  # imports torch

        record("simulator_speed", figures)


def timed(count: int) -> dict[str, Any]:
    """One run, from the first arrival to the report."""
    from minicache.arithmetic.specs import H100, LLAMA_3_8B
    from minicache.scheduler import create_scheduler
    from minicache.simulator.costs import RooflineCost
    from minicache.simulator.serving import ServingSimulation
    from minicache.simulator.workload import SHAREGPT, stream

    arrivals = stream(replace(SHAREGPT, rate=RATE), count, seed=0)
    scheduler = create_scheduler("fair", num_blocks=NUM_BLOCKS)
    simulation = ServingSimulation(scheduler, RooflineCost(LLAMA_3_8B, H100), arrivals, skip_quiet=True)
    at_a_tenth: list[float] = []

    def progress(num_done: int) -> None:
        if not at_a_tenth and num_done >= count / 10:
            at_a_tenth.append(peak_mib())

    start = time.perf_counter()
    report = simulation.run(progress)
    seconds = time.perf_counter() - start
    return {
        "num_requests": count,
        "rate": RATE,
        "num_output_tokens": report.num_output_tokens,
        "num_steps": report.num_steps,
        "mean_batch_size": round(report.mean_batch_size, 1),
        "simulated_seconds": round(report.makespan, 1),
        "seconds": round(seconds, 2),
        "nanoseconds_per_token": round(1e9 * seconds / report.num_output_tokens),
        "peak_mib_at_a_tenth": round(at_a_tenth[0], 1),
        "peak_mib": round(peak_mib(), 1),
        "preemptions": report.num_preemptions,
    }


def peak_mib() -> float:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB elsewhere


if __name__ == "__main__":
    typer.run(main)
