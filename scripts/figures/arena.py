"""The figure of the arena's page: goodput against load, from benchmarks/results/arena.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minicache.palette import INK, Scheme, color
from scripts.figures.style import draw

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

ROLES = {"paged": "end", "chunked": "generated", "least_slack": "shared", "shortest_oracle": "wasted"}
MARKERS = {"paged": "s", "chunked": "o", "least_slack": "D", "shortest_oracle": "^"}
NAMES = {
    "paged": "first come, first served",
    "chunked": "chunked",
    "least_slack": "least slack first",
    "shortest_oracle": "shortest first, by an oracle",
}


def main() -> None:
    draw("arena-goodput", goodput, size=(7.2, 4.6))


def goodput(figure: Figure, scheme: Scheme) -> None:
    """A pair of axes for each workload."""
    found: dict[str, Any] = json.loads((RESULTS / "arena.json").read_text(encoding="utf-8"))["goodput"]
    workloads = list(dict.fromkeys(cell["workload"] for cell in found["chunked"]))
    panels = figure.subplots(2, 3)
    for axes, workload in zip(panels.flat, workloads, strict=False):
        for name, role in ROLES.items():
            cells = [cell for cell in found[name] if cell["workload"] == workload]
            rates = [cell["rate"] for cell in cells]
            goodputs = [cell["goodput"] for cell in cells]
            style = {"color": color(role, scheme), "marker": MARKERS[name], "markersize": 4}
            axes.plot(rates, goodputs, label=NAMES[name], **style)
        axes.plot(rates, [cell["bound"] for cell in cells], "--", color=INK[scheme], linewidth=1, label="bound")
        axes.set(title=workload, ylim=(0, None), xticks=rates)
    for axes in panels[:, 0]:
        axes.set_ylabel("good requests/s")
    for axes in (*panels[1, :2], panels[0, 2]):
        axes.set_xlabel("sessions per second")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    panels[1, 2].axis("off")
    panels[1, 2].legend(handles, labels, loc="center")
