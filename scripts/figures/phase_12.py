"""The figures of phase 12: below the prefix cache.

The steps of a request that waits are a trace that the scheduler left; times are from benchmarks/results/kv_tiers.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minicache.palette import INK, Scheme, color
from minicache.request import Request
from minicache.scheduler import create_scheduler
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("tiers-break-even", break_even, size=(7.2, 3.2))
    draw("tiers-killed", killed, size=(7.2, 2.7))
    draw("tiers-waiting", waiting, size=(7.2, 3.0))


# --- theory 3: below the prefix cache ---------------------------------------------------------------------------------


def break_even(figure: Figure, scheme: Scheme) -> None:
    """Time to first token with a slowed disk, over that without one."""
    found: dict[str, Any] = json.loads((RESULTS / "kv_tiers.json").read_text(encoding="utf-8"))
    axes = plot(
        figure, xlabel="the disk's bandwidth / break-even bandwidth", ylabel="time to first token / without a disk"
    )
    times = [each["times_break_even"] for each in found["by_bandwidth"]]
    ratios = [each["ratio"] for each in found["by_bandwidth"]]
    axes.plot(times, ratios, marker="o", color=color("generated", scheme), label="measured")
    axes.plot(times, [1 / each for each in times], "--", color=color("shared", scheme), label="loading alone")
    axes.axhline(1.0, color=INK[scheme], linewidth=1.2)
    axes.text(4.0, 1.06, "computed, without a disk", ha="right", color=INK[scheme], fontsize=SMALL)
    axes.set(xscale="log", ylim=(0, 2.4))
    axes.set_xticks(times, [f"{each:g}" for each in times])
    axes.minorticks_off()
    axes.legend(loc="upper right")


WAYS = {
    "under its own name": (("nothing", None), ("half a record", "end"), ("the record", "generated")),
    "then renamed": (("nothing", None), ("half a file", "wasted"), ("the record", "generated")),
    "to a log, with a checksum": (("nothing", None), ("half an entry", "wasted"), ("the record", "generated")),
}


def killed(figure: Figure, scheme: Scheme) -> None:
    """What is found in the folder, by how a record is written and when the process dies."""
    diagram = Diagram(figure, scheme, width=24, height=9.0)
    for place, title in enumerate(("before it writes", "in the middle of it", "after the call")):
        diagram.text(10.1 + place * 5.6, 0.7, title, align="center", bold=True)
    for row, (name, cells) in enumerate(WAYS.items()):
        y = 1.4 + row * 2.0
        diagram.text(0.2, y + 0.8, name)
        for place, (label, role) in enumerate(cells):
            diagram.cell(7.4 + place * 5.6, y, label, role, width=5.4, height=1.6)
    roles = {"end": "found, and broken", "wasted": "never found, and takes space", "generated": "found, and whole"}
    diagram.legend(roles, 0.2, 8.1, step=8.0, size=0.6)


@dataclass
class _Load:
    """A load that gets a block a step."""

    hashes: Sequence[bytes]
    blocks: list[bytes] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.blocks) == len(self.hashes)


class _Tiers:
    """Tiers that have everything, of the first request only."""

    def __init__(self) -> None:
        self.loads: list[_Load] = []

    def fetch(self, hashes: Sequence[bytes]) -> _Load:
        self.loads.append(_Load(hashes if not self.loads else ()))
        return self.loads[-1]

    def give_up(self, load: _Load) -> None: ...

    def touch(self, hashes: Sequence[bytes]) -> None: ...

    def discard(self, hashes: Sequence[bytes]) -> None: ...


def waiting(figure: Figure, scheme: Scheme) -> None:
    """Six steps: a request waits for three blocks, two others pass it."""
    tiers = _Tiers()
    scheduler = create_scheduler("chunked", num_blocks=20, block_size=4, tiers=tiers)
    arrivals = {0: Request("b", [1, 2, 3], 9), 1: Request("a", list(range(10, 23)), 9), 2: Request("c", [4, 5], 9)}
    computes, in_memory, in_pool = [], [], []
    for number in range(6):
        if number in arrivals:
            scheduler.add_request(arrivals[number])
        if number > 1 and not tiers.loads[0].is_done:
            tiers.loads[0].blocks.append(b"")
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        computes.append(dict(output.num_scheduled_tokens))
        is_waiting = "a" in scheduler.waiting
        in_memory.append(len(tiers.loads[0].blocks) if is_waiting else 0)
        in_pool.append(len(arrivals[1].block_ids))
    both = {"b": 1, "c": 1}
    assert computes == [{"b": 3}, {"b": 1}, {"b": 1, "c": 2}, both, {**both, "a": 1}, {**both, "a": 1}]
    diagram = Diagram(figure, scheme, width=24, height=10.0)
    width, left = 2.75, 7.3
    lines = {"b computes": 1.3, "c computes": 2.7, "a computes": 4.1, "a: blocks in CPU memory": 6.0}
    lines["a: blocks of the pool"] = 7.4
    for name, y in lines.items():
        diagram.text(0.2, y + 0.6, name)
    for step in range(6):
        x = left + step * width
        diagram.text(x + width / 2, 0.6, f"step {step + 1}", align="center", bold=True)
        for name in "bca":
            if count := computes[step].get(name):
                role = "prompt" if step == 0 or (name == "c" and step == 2) else "generated"
                diagram.cell(x, lines[f"{name} computes"], str(count), role, width=width - 0.1, height=1.2)
        if 1 <= step < 4:
            diagram.cell(x, lines["a computes"], "waits", "free", width=width - 0.1, height=1.2)
        if step >= 1:
            held = ((in_memory[step], "shared", 6.0), (in_pool[step], "shared", 7.4))
            for count, role, y in held:
                diagram.cell(x, y, str(count), role if count else None, width=width - 0.1, height=1.2)
    diagram.legend({"prompt": "prompt", "generated": "decode, or a's last token"}, 0.2, 9.2, step=4.0, size=0.6)
