"""The figures of asynchronous scheduling: a timeline of CPU and GPU, and the gain against their times.

Both are the simulator's, with Llama-3-8B on an H100 and the scheduler's time as `scripts.numbers` has it.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.arithmetic.specs import H100, LLAMA_3_8B
from minicache.palette import INK, PALETTE, Scheme, color
from minicache.simulator.costs import RooflineCost, StepLoad
from minicache.simulator.overlap import overlap_gain, timeline
from scripts.figures.style import TYPE_SIZE, draw
from scripts.numbers import SCHEDULER_MS

SMALL = TYPE_SIZE * 0.85
ROLES = {"schedule": "prompt", "compute": "generated", "commit": "shared"}
NUM_CACHED, NUM_REQUESTS, NUM_STEPS = 1000, 256, 4


def main() -> None:
    """Draw both."""
    draw("async-timeline", both_timelines, size=(7.2, 3.9))
    draw("async-gain", gain, size=(7.2, 3.2))


def gpu_ms(requests: int) -> float:
    """Milliseconds of the GPU for a decode step of Llama-3-8B on an H100."""
    load = StepLoad.of([(1, NUM_CACHED)] * requests)
    return 1e3 * RooflineCost(LLAMA_3_8B, H100, overhead_seconds=0).step_seconds(load)


def both_timelines(figure: Figure, scheme: Scheme) -> None:
    """Four steps of 256 requests, in turn and overlapped, on one axis of time."""
    panels = figure.subplots(2, 1, sharex=True)
    for axes, overlaps, title in zip(panels, (False, True), ("in turn", "overlapped"), strict=True):
        lanes(axes, scheme, overlaps=overlaps)
        axes.set_title(title)
    panels[1].set_xlabel("milliseconds")
    handles = [panels[0].barh(0, 0, color=color(role, scheme), label=work) for work, role in ROLES.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=3)


def lanes(axes: Axes, scheme: Scheme, *, overlaps: bool) -> None:
    """A row for the CPU and one for the GPU, with a box for each piece of work."""
    cpu, gpu = SCHEDULER_MS[NUM_REQUESTS], gpu_ms(NUM_REQUESTS)
    spans = timeline([gpu] * NUM_STEPS, cpu / 2, cpu / 2, overlaps=overlaps)
    for span in spans:
        row, role = int(span.work != "compute"), PALETTE[ROLES[span.work]]
        box = (span.begins + 0.1, span.ends - span.begins - 0.2)  # apart from the next
        axes.broken_barh([box], (row - 0.36, 0.72), color=role.shade(scheme))
        on = role.on_light if scheme == "light" else role.on_dark
        middle = (span.begins + span.ends) / 2
        label = f"step {span.step}" if span.work == "compute" else str(span.step)
        axes.text(middle, row, label, color=on, size=SMALL, ha="center", va="center")
    done = max(span.ends for span in spans)
    axes.axvline(done, color=INK[scheme], linewidth=1, linestyle=":")
    axes.annotate(
        f"{done:.0f} ms", (done, 0.5), (3, 0), textcoords="offset points", color=INK[scheme], size=SMALL, va="center"
    )
    axes.set(yticks=[0, 1], yticklabels=["GPU", "CPU"], ylim=(-0.55, 1.55), xlim=(0, 96))
    axes.grid(visible=False, axis="y")


def gain(figure: Figure, scheme: Scheme) -> None:
    """Throughput overlapped over that in turn, against CPU time over GPU time."""
    axes = figure.subplots()
    ratios = [10 ** (exponent / 50) for exponent in range(-150, 51)]
    axes.plot(ratios, [overlap_gain(ratio) for ratio in ratios], color=color("generated", scheme))
    for requests, cpu in SCHEDULER_MS.items():
        ratio = cpu / gpu_ms(requests)
        axes.plot([ratio], [overlap_gain(ratio)], "o", color=color("end", scheme), markersize=6)
        words = f"{requests} requests" if requests > 1 else "1 request"
        place = (0, 9) if requests == 1 else (-8, 5)
        axes.annotate(
            words,
            (ratio, overlap_gain(ratio)),
            place,
            textcoords="offset points",
            color=INK[scheme],
            size=SMALL,
            ha="center" if requests == 1 else "right",
        )
    axes.set(xscale="log", ylim=(0.95, 2.1), xlabel="CPU time of a step / GPU time", ylabel="throughput, × in turn")
    axes.set_xticks([0.001, 0.01, 0.1, 1, 10], ["0.001", "0.01", "0.1", "1", "10"])
