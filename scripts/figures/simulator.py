"""The figures of the simulator's page: a clock by hand, rate against latency, and simulated and real makespans.

The first is read off a real run. The others come from benchmarks/results/serving_rates.json and serving_makespan.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.palette import INK, PALETTE, Scheme, color
from minicache.scheduler import create_scheduler
from minicache.simulator.costs import FixedCost
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import Arrival
from minicache.trace import TraceStep
from scripts.figures.style import TYPE_SIZE, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85

THREE = (Arrival(0, 0.0, 3, 2), Arrival(1, 0.5, 1, 1), Arrival(2, 4.0, 5, 1))
"""A, B and C of the page: when they come, tokens in, tokens out."""

POLICIES = {
    "max": ("Orca (Max)", "wasted", "s"),
    "pow2": ("Orca (Pow2)", "prompt", "^"),
    "oracle": ("Orca (Oracle)", "end", "D"),
    "paged": ("paged", "generated", "o"),
}
"""Policy → its name, its colour role, its marker."""

LOADS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
HELD_OUT = {
    "static": "static, all at once",
    "continuous": "continuous, all at once",
    "arrivals": "fair, arriving over time",
    "preemptions": "fair, too few blocks",
}


def main() -> None:
    """Draw them all."""
    draw("simulated-clock", clock, size=(7.2, 2.3))
    draw("rates-and-latency", rates_and_latency, size=(7.2, 3.4))
    draw("simulated-and-real", simulated_and_real, size=(7.2, 2.9))


def results(name: str) -> dict[str, Any]:
    """What a benchmark found."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def clock(figure: Figure, scheme: Scheme) -> None:
    """Three requests, a clock whose steps take a second, and what each request waits for."""
    steps: list[TraceStep] = []
    ServingSimulation(create_scheduler("paged", num_blocks=8), FixedCost(1.0), THREE, trace=steps.append).run()
    axes = plot(figure, xlabel="simulated time in s")
    for step in steps:
        for entry in step.batch:
            role, row = "prompt" if entry.is_prefill else "generated", int(str(entry.request_id))
            axes.barh(row, step.seconds, left=step.time, height=0.55, color=color(role, scheme))
            ink = PALETTE[role].on_light if scheme == "light" else PALETTE[role].on_dark
            words = "prompt" if entry.is_prefill else "token 2"
            axes.text(step.time + 0.5, row, words, ha="center", va="center", color=ink, size=SMALL)
    for arrival in THREE:
        row = arrival.request_id
        axes.plot([arrival.time], [row], marker=">", markersize=9, color=INK[scheme], clip_on=False, zorder=3)
    axes.text(3.0, 0.5, "no request:\nthe clock jumps", ha="center", va="center", color=INK[scheme], size=SMALL)
    axes.set(xlim=(-0.15, 5.3), ylim=(2.6, -0.6), yticks=[0, 1, 2], yticklabels=["A", "B", "C"])
    axes.grid(visible=False, axis="y")


def rates_and_latency(figure: Figure, scheme: Scheme) -> None:
    """The mean normalised latency over the rate, a curve a scheduler, a panel a workload."""
    found = results("serving_rates")["step"]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (load, name) in zip(panels, LOADS.items(), strict=True):
        for policy, (label, role, marker) in POLICIES.items():
            points = found[load][policy]["points"]
            rates, latencies = ([point[key] for point in points] for key in ("rate", "normalized_latency"))
            axes.plot(rates, latencies, color=color(role, scheme), marker=marker, markersize=4, label=label)
        axes.axhline(0.25, color=INK[scheme], linewidth=0.8, linestyle=":")
        axes.set(xlabel="requests per second", title=name, ylim=(0, 0.6), xlim=(0, None))
    panels[0].set_ylabel("latency per output token in s")
    panels[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=SMALL)


def simulated_and_real(figure: Figure, scheme: Scheme) -> None:
    """The makespans of the held-out loads, two bars each."""
    loads = results("serving_makespan")["loads"]
    axes = plot(figure, xlabel="makespan in s")
    for row, load in enumerate(HELD_OUT):
        _pair(axes, row, loads[load], scheme)
        error = loads[load]["makespan_error"]
        longest = max(loads[load]["makespan_real"], loads[load]["makespan_simulated"])
        axes.text(longest, row, f"  {error:.1%} off", va="center", color=INK[scheme], size=SMALL)
    axes.set(yticks=range(len(HELD_OUT)), yticklabels=HELD_OUT.values(), ylim=(len(HELD_OUT) - 0.4, -0.6))
    axes.set_xlim(
        0, 1.25 * max(loads[load][key] for load in HELD_OUT for key in ("makespan_real", "makespan_simulated"))
    )
    axes.grid(visible=False, axis="y")
    axes.legend(*_first_of_each(axes), loc="upper right", fontsize=SMALL)


def _pair(axes: Axes, row: int, load: dict[str, float], scheme: Scheme) -> None:
    for shift, key, role, label in (
        (-0.18, "makespan_real", "generated", "the engine"),
        (0.18, "makespan_simulated", "prompt", "the simulator"),
    ):
        axes.barh(row + shift, load[key], height=0.34, color=color(role, scheme), label=label)


def _first_of_each(axes: Axes) -> tuple[list[Any], list[str]]:
    """Handles and labels of a legend, each label once."""
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return list(named.values()), list(named)
