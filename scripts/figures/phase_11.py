"""The figures of phase 11: what a router knows, old information, affinity, a death in the middle of a stream, retries.

Curves are drawn from benchmarks/results/two_choices.json, affinity.json, replica_loss.json and
fleet.json, and computed by `MovingCosts`; the rest is drawn by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.fleet import TARGET
from matplotlib.figure import Figure

from minicache.arithmetic.specs import A100_40GB, LLAMA_3_8B
from minicache.fleet.disaggregation import MovingCosts
from minicache.palette import GRID, INK, Scheme, color
from minicache.simulator.costs import FLOPS_EFFICIENCY
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
GBIT = 1e9 / 8
"""Bytes."""


def main() -> None:
    """Draw them all."""
    draw("phase-11-what-is-known", what_is_known, size=(7.2, 3.6))
    draw("phase-11-old-information", old_information, size=(7.2, 3.6))
    draw("phase-11-affinity", affinity, size=(7.2, 3.4))
    draw("phase-11-death-mid-stream", death_mid_stream, size=(7.2, 3.6))
    draw("phase-11-retries", retries, size=(7.2, 3.6))
    draw("phase-11-day", day, size=(7.2, 3.2))
    draw("phase-11-bandwidth", bandwidth, size=(7.2, 3.4))


def results(name: str) -> dict[str, Any]:
    """A benchmark's results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# --- theory 1: what a second machine changes --------------------------------------------------------------------------


def what_is_known(figure: Figure, scheme: Scheme) -> None:
    """A router and three replicas: its own counts, and a report that was true two seconds ago."""
    diagram = Diagram(figure, scheme, width=24, height=12)
    diagram.cell(0.4, 4.3, "clients", "prompt", width=3.2, height=1.6)
    diagram.cell(7.2, 3.7, "the router\ncounts what it sends", "generated", width=5.8, height=2.8)
    diagram.arrow((3.7, 5.1), (7.1, 5.1), "requests")
    for index, (name, unfinished, reported) in enumerate((("A", 5, 5), ("B", 2, 6), ("C", 4, 1))):
        y = 0.3 + index * 3.6
        diagram.cell(17.6, y, f"replica {name}\nunfinished: {unfinished}", "shared", width=5.8, height=2.1)
        diagram.arrow((13.1, 4.6 + index * 0.5), (17.5, y + 1.05))
        diagram.text(20.5, y + 2.55, f"reported 2 s ago: {reported}", align="center", fontsize=SMALL)
    diagram.text(10.1, 7.2, "A 5, B 2, C 4: exact and current", align="center", bold=True)
    diagram.text(10.1, 8.1, "A 5, B 6, C 1: reported, 2 s old", align="center")
    roles = {"generated": "decides", "shared": "weights, scheduler and cache of its own"}
    diagram.legend(roles, 0.4, 11.0, step=4.0, size=0.6)


# --- theory 2: two random choices -------------------------------------------------------------------------------------


def old_information(figure: Figure, scheme: Scheme) -> None:
    """Mean time in the system against the age of the board, for one choice, two and all."""
    found = results("two_choices")["queues"]
    axes = plot(figure, xlabel="seconds between two updates of the board", ylabel="mean seconds to the answer")
    ages = [each["seconds"] for each in found]
    places = [max(age, 0.03) for age in ages]  # 0 has no place on a logarithmic axis
    curves = {
        "one": ("one choice, drawn at random", "wasted", "s"),
        "two": ("two choices", "generated", "o"),
        "all": ("the least busy of all", "end", "^"),
    }
    for name, (label, role, marker) in curves.items():
        means = [each[name]["mean"] for each in found]
        axes.plot(places, means, marker=marker, markersize=5, color=color(role, scheme), label=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(places, ["always\nright", *(f"{age:g}" for age in ages[1:])])
    axes.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.legend(loc="upper left")


# --- theory 3: affinity against balance -------------------------------------------------------------------------------


def affinity(figure: Figure, scheme: Scheme) -> None:
    """Hit rate and TTFT p99 against the bound on the imbalance."""
    found = results("affinity")
    bounds = found["bounds"]
    names = [str(each["max_imbalance"]) if each["max_imbalance"] is not None else "none" for each in bounds]
    panels = figure.subplots(1, 2)
    look = {"hit_rate": ("hit rate", "shared", 1.0), "ttft_p99_ms": ("time to first token, p99, s", "end", 1e-3)}
    for axes, (key, (title, role, unit)) in zip(panels, look.items(), strict=True):
        axes.plot(names, [unit * each[key] for each in bounds], marker="o", markersize=5, color=color(role, scheme))
        flat = unit * found["power_of_two"][key]
        axes.axhline(
            flat, color=color("generated", scheme), linestyle="--", linewidth=1.6, label="power of two choices"
        )
        axes.set_xlabel("max_imbalance")
        axes.set_title(title, fontsize=TYPE_SIZE)
    panels[0].set_ylim(0, 1)
    panels[0].legend(loc="upper left")
    panels[1].set_yscale("log")
    panels[1].set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    panels[1].minorticks_off()


# --- theory 4: when a machine dies ------------------------------------------------------------------------------------


def death_mid_stream(figure: Figure, scheme: Scheme) -> None:
    """Replica A dies after token 5, of which the client has 4; B goes on from prompt and four tokens."""
    diagram = Diagram(figure, scheme, width=24, height=12)
    row = {"replica A": 0.9, "replica B": 4.0, "the router,\nits client": 7.1}
    received = row["the router,\nits client"]
    high, width = 1.5, 1.3
    for name, y in row.items():
        diagram.text(0.2, y + high / 2, name, bold=True)
    diagram.cell(3.6, row["replica A"], "prompt", "prompt", width=2.6, height=high)
    diagram.row(6.3, row["replica A"], list("12345"), ["generated"] * 5, width=width, height=high)
    died = 6.3 + 5 * width
    diagram.cell(died + 0.1, row["replica A"], "dies", "end", width=1.9, height=high)
    diagram.row(6.9, received, list("1234"), ["generated"] * 4, width=width, height=high)
    for index in range(4):
        x = 6.3 + (index + 0.5) * width
        diagram.arrow((x, row["replica A"] + high + 0.1), (x + 0.6, received - 0.1))
    lost = 6.3 + 4.5 * width
    diagram.arrow((lost, row["replica A"] + high + 0.1), (lost + 0.2, row["replica B"] - 0.3))
    diagram.text(lost + 0.45, row["replica B"] - 0.75, "never arrives", fontsize=SMALL)
    start = 13.6
    diagram.cell(start, row["replica B"], "prompt + 1 2 3 4", "prompt", width=5.4, height=high)
    first = start + 5.5
    diagram.row(first, row["replica B"], list("567"), ["generated"] * 3, width=width, height=high)
    diagram.row(first + 0.6, received, list("567"), ["generated"] * 3, width=width, height=high)
    for index in range(3):
        x = first + (index + 0.5) * width
        diagram.arrow((x, row["replica B"] + high + 0.1), (x + 0.6, received - 0.1))
    diagram.arrow((12.2, received + 0.2), (start + 0.1, row["replica B"] + high + 0.1), bend=0.15)
    diagram.span(12.2, first + 0.5, received + high + 0.5, "no token: detection and one prefill")
    diagram.arrow((3.6, 11.2), (23.6, 11.2))
    diagram.text(23.6, 11.65, "time", align="right", fontsize=SMALL)
    roles = {"prompt": "computed at once", "generated": "generated, one a step"}
    diagram.legend(roles, 0.2, 10.3, step=5.6, size=0.6)


def retries(figure: Figure, scheme: Scheme) -> None:
    """Answers in time per second, around the loss of one of four replicas, with and without retries."""
    found = results("replica_loss")["fleet"]
    axes = plot(figure, xlabel="seconds", ylabel="answers in time, per second")
    axes.axvspan(found["lost_at"], found["back_at"], color=GRID[scheme], alpha=0.5, linewidth=0)
    middle = (found["lost_at"] + found["back_at"]) / 2
    axes.text(middle, 108, "3 of 4 replicas", ha="center", color=INK[scheme], size=SMALL)
    curves = {
        "bounded": ("retries, bounded queue", "shared", "-"),
        "retries": ("retries", "end", "-"),
        "no_retries": ("no retries", "generated", "--"),
    }
    for name, (label, role, style) in curves.items():
        rates = found["modes"][name]["answers_per_second"]
        times = [(index + 0.5) * found["window"] for index in range(len(rates))]
        axes.plot(times, rates, style, color=color(role, scheme), label=label)
    axes.set(xlim=(0, times[-1]), ylim=(-2, 115))
    axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.35))


# --- theory 5: scaling up costs the start -----------------------------------------------------------------------------


def day(figure: Figure, scheme: Scheme) -> None:
    """Replicas in the course of a day, and the number that the unfinished requests need at each moment."""
    series = results("fleet")["day"]["autoscaler"]["series"]
    minutes = [time / 60 for time in series["time"]]
    needed = [unfinished / TARGET for unfinished in series["num_unfinished"]]
    axes = plot(figure, xlabel="minutes", ylabel="replicas")
    axes.plot(minutes, needed, color=color("end", scheme), linewidth=1.2, label=f"unfinished requests / {TARGET}")
    axes.step(minutes, series["num_ready"], where="post", color=color("generated", scheme), label="replicas")
    axes.set(xlim=(0, minutes[-1]), ylim=(0, 8))
    axes.legend(loc="upper left", ncols=2)


# --- theory 6: prefill and decode apart -------------------------------------------------------------------------------


def bandwidth(figure: Figure, scheme: Scheme) -> None:
    """Seconds until a prompt of 8,000 tokens is here, computed elsewhere, by the reference's cost model."""
    seconds_per_token = 2 * LLAMA_3_8B.num_parameters / (FLOPS_EFFICIENCY * A100_40GB.peak_flops)
    speeds = [10 ** (power / 12) * GBIT for power in range(34)]
    links = [MovingCosts(LLAMA_3_8B, seconds_per_token, speed) for speed in speeds]
    tokens = 8_000
    curves = {
        "computed there, sent afterwards": ([c.prefill_seconds(tokens) + c.link_seconds(tokens) for c in links], "end"),
        "computed there, sent layer by layer": ([c.remote_seconds(tokens, tokens) for c in links], "generated"),
        "computed here": ([c.prefill_seconds(tokens) for c in links], "wasted"),
    }
    axes = plot(figure, xlabel="bandwidth of the link, Gbit/s", ylabel="seconds until the KV cache has arrived")
    for (label, (seconds, role)), style in zip(curves.items(), ("--", "-", ":"), strict=True):
        axes.plot([speed / GBIT for speed in speeds], seconds, style, color=color(role, scheme), label=label)
    axes.set(xscale="log", xlim=(1, 500), ylim=(0, 4))
    axes.set_xticks([1, 4, 10, 25, 100, 400], ["1", "4", "10", "25", "100", "400"])
    axes.minorticks_off()
    even = links[0].break_even_bandwidth() / GBIT
    axes.axvline(even, color=INK[scheme], linewidth=1.2)
    axes.text(even * 1.08, 2.1, f"break-even: {even:.1f}", color=INK[scheme])
    axes.legend(loc="upper right")


if __name__ == "__main__":
    main()
