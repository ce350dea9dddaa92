"""The figures of phase 6: now, later and never; a preemption; a victim's blocks; two sources; what it costs.

What is drawn of a scheduler is read off a real one or its trace. Costs come from benchmarks/results/preemption.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.preemption import BLOCK, MIDDLE_PERCENT, burst, peak_tokens
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.palette import Scheme, color
from minicache.request import Request, RequestId
from minicache.scheduler import PagedScheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.trace import TraceStep
from scripts.figures.style import TYPE_SIZE, Diagram, draw

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
TINY = TYPE_SIZE * 0.7

NUM_BLOCKS = 10
"""Of the pool, in every diagram."""


def main() -> None:
    """Draw them all."""
    draw("now-later-never", now_later_never, size=(7.2, 3.3))
    draw("preemption-timeline", preemption_timeline, size=(7.2, 3.9))
    draw("victim-blocks", victim_blocks, size=(7.2, 4.1))
    draw("two-sources", two_sources, size=(6.2, 3.9))
    draw("blocks-and-preemptions", blocks_and_preemptions, size=(7.2, 4.6))
    draw("recompute-or-swap-modelled", modelled_costs, size=(7.2, 3.6))
    draw("recompute-or-swap-measured", measured_costs, size=(7.2, 3.4))
    draw("cost-over-pressure", cost_over_pressure, size=(7.2, 3.4))
    draw("watermark-trade", watermark_trade, size=(7.2, 3.0))


def results() -> dict[str, Any]:
    """What the benchmark found."""
    found: dict[str, Any] = json.loads((RESULTS / "preemption.json").read_text(encoding="utf-8"))
    return found


# --- theory 1 and 2: admission and growth -----------------------------------------------------------------------------


def now_later_never(figure: Figure, scheme: Scheme) -> None:
    """One pool, four questions to `can_allocate`."""
    scheduler = PagedScheduler(num_blocks=NUM_BLOCKS, watermark=0.2)
    scheduler.add_request(Request("A", [1] * 80, 20))
    scheduler.schedule()
    used = scheduler.pool.num_used
    diagram = Diagram(figure, scheme, width=18, height=8.25)
    diagram.text(0.4, 0.55, f"A pool of {NUM_BLOCKS} blocks, a watermark of 2", bold=True)
    for block in range(NUM_BLOCKS):
        kept = block >= NUM_BLOCKS - 2
        diagram.cell(0.4 + block, 1.0, "A" if block < used else "", "generated" if block < used else "free")
        if kept:
            diagram.text(0.9 + block, 1.5, "kept", align="center", fontsize=SMALL)
    diagram.text(10.8, 1.5, f"{scheduler.pool.num_free} free, {scheduler.pool.num_free - 2} for an admission")
    asked = {"B": 48, "C": 64, "D": 160, "E": 161}
    for row, (name, num_tokens) in enumerate(asked.items()):
        request = Request(name, [1] * num_tokens, 20)
        needed, answer = scheduler.blocks_to_admit(request), scheduler.can_allocate(request)
        y = 3.0 + row * 1.15
        for block in range(needed):
            diagram.cell(0.4 + block * 0.9, y, "", "prompt", width=0.9, height=0.8)
        words = f"{name}: {num_tokens} tokens, {needed} blocks"
        diagram.text(10.8, y + 0.4, words)
        diagram.text(17.6, y + 0.4, answer.name, align="right", bold=True)
    _legend(diagram, {"generated": "A's", "free": "free", "prompt": "needed"}, 0.4, 7.6, step=3.2)


def _legend(diagram: Diagram, roles: dict[str, str], x: float, y: float, *, step: float, size: float = 0.55) -> None:
    """A swatch for each role, with what it means in this picture."""
    for index, (role, meaning) in enumerate(roles.items()):
        diagram.cell(x + index * step, y, "", role, width=size, height=size)
        diagram.text(x + index * step + 1.4 * size, y + size / 2, meaning, fontsize=SMALL)


def run_case(preemption: str) -> list[TraceStep]:
    """Two prompts of 80 tokens, 20 new tokens each, in a pool of 10 blocks: the trace."""
    steps: list[TraceStep] = []
    way = {"preemption": "swap", "num_host_blocks": 8} if preemption == "swap" else {}
    scheduler = observe(PagedScheduler(num_blocks=NUM_BLOCKS, **way), Recorder(steps.append))  # type: ignore[arg-type]
    drive(scheduler, [Request(index, [1] * 80, 20) for index in range(2)])
    return steps


def preemption_timeline(figure: Figure, scheme: Scheme) -> None:
    """The two requests against steps, and the used blocks below them."""
    steps = run_case("recompute")
    left = 3.4
    diagram = Diagram(figure, scheme, width=left + len(steps) + 1.0, height=23.5)
    for number in range(0, len(steps), 5):
        diagram.text(left + number + 0.5, 1.0, str(number), align="center", fontsize=SMALL)
    diagram.text(0.4, 1.0, "step", fontsize=SMALL)
    seen: set[RequestId] = set()
    for row in range(2):
        y = 2.0 + row * 3.2
        diagram.text(0.4, y + 1.3, f"{row}", bold=True)
        for column, step in enumerate(steps):
            if (role := _role(step, row, seen)) is None:
                continue
            entry = next((each for each in step.batch if each.request_id == row), None)
            tokens = str(entry.num_new_tokens) if entry is not None and entry.num_new_tokens > 1 else ""
            diagram.cell(left + column, y, tokens, role, height=2.6, fontsize=TINY)
    _block_bars(diagram, steps, left, top=9.6, height=9.0)
    roles = {
        "prompt": "prefill",
        "generated": "decode",
        "end": "last token",
        "wasted": "computed again",
        "free": "waits, free",
    }
    _legend(diagram, roles, 0.4, 21.3, step=8.6, size=1.3)


def _role(step: TraceStep, request_id: RequestId, seen: set[RequestId]) -> str | None:
    """What a request did in a step: a role of the palette; "wasted" is a prefill that is not its first."""
    if any(event.kind == "finish" and event.request_id == request_id for event in step.events):
        seen.add((request_id, "end"))
        return "end"
    entry = next((entry for entry in step.batch if entry.request_id == request_id), None)
    if entry is None:
        return None if (request_id, "end") in seen else "free"
    if not entry.is_prefill:
        return "generated"
    again = request_id in seen
    seen.add(request_id)
    return "wasted" if again else "prompt"


def _block_bars(diagram: Diagram, steps: Sequence[TraceStep], left: float, *, top: float, height: float) -> None:
    """A column for each step: used blocks from below, free ones above."""
    unit = height / NUM_BLOCKS
    diagram.text(0.4, top + height / 2, "blocks\nin use", fontsize=SMALL)
    for column, step in enumerate(steps):
        used = step.num_used_blocks * unit
        changed = column == 0 or step.num_used_blocks != steps[column - 1].num_used_blocks
        label = str(step.num_used_blocks) if changed else ""
        diagram.cell(left + column, top + height - used, label, "shared", height=used, fontsize=TINY)
        if used < height:
            diagram.cell(left + column, top, "", "free", height=height - used)
    for column, step in enumerate(steps):
        for event in step.events:
            if event.kind in ("preempt", "resume"):
                words = f"{event.request_id} is preempted" if event.kind == "preempt" else f"{event.request_id} resumes"
                diagram.arrow((left + column + 0.5, top + height + 1.5), (left + column + 0.5, top + height + 0.1))
                diagram.text(left + column + 1.0, top + height + 1.0, words, fontsize=SMALL)


def blocks_and_preemptions(figure: Figure, scheme: Scheme) -> None:
    """Used blocks of a burst over time, with a tick for each preemption, without and with a watermark."""
    num_blocks = peak_tokens(0) * MIDDLE_PERCENT // 100 // BLOCK
    rows = figure.subplots(2, 1, sharex=True)
    for axes, watermark in zip(rows, (0.0, 0.1), strict=True):
        steps: list[TraceStep] = []
        scheduler = PagedScheduler(num_blocks=num_blocks, watermark=watermark, max_num_batched_tokens=10**6)
        tally = drive(observe(scheduler, Recorder(steps.append)), burst(0))
        numbers = [step.step for step in steps]
        used = [100 * step.num_used_blocks / num_blocks for step in steps]
        axes.fill_between(numbers, used, color=color("shared", scheme), alpha=0.45, linewidth=0)
        axes.plot(numbers, used, color=color("shared", scheme), linewidth=1.0)
        when = [step.step for step in steps for event in step.events if event.kind == "preempt"]
        axes.vlines(when, 104, 118, color=color("end", scheme), linewidth=1.0)
        axes.set(ylim=(0, 122), xlim=(0, None), ylabel="% of the blocks", yticks=(0, 50, 100))
        axes.set_title(f"watermark {watermark:.0%}: {tally.num_preemptions} preemptions", fontsize=TYPE_SIZE)
    rows[1].set_xlabel("step")


# --- theory 3: a victim's blocks --------------------------------------------------------------------------------------


def victim_blocks(figure: Figure, scheme: Scheme) -> None:
    """Where request 1's keys and values are under swap, at four moments."""
    scheduler = PagedScheduler(num_blocks=NUM_BLOCKS, preemption="swap", num_host_blocks=8)
    requests = [Request(index, [1] * 80, 20) for index in range(2)]
    for request in requests:
        scheduler.add_request(request)
    assert scheduler.host_pool is not None
    diagram = Diagram(figure, scheme, width=23.5, height=13.4)
    left, host_left = 4.2, 15.0
    diagram.text(left, 0.6, f"device: {NUM_BLOCKS} blocks", bold=True)
    diagram.text(host_left, 0.6, f"CPU: {scheduler.host_pool.num_blocks} blocks", bold=True)
    row = 0
    for step in range(21):
        output = scheduler.schedule()
        if step in (0, 1, 19, 20):
            y = 1.5 + row * 2.7
            diagram.text(0.3, y + 0.5, f"step {step}")
            _strip(diagram, left, y, NUM_BLOCKS, {request.request_id: request.block_ids for request in requests})
            hosted = {request.request_id: request.host_block_ids for request in requests}
            _strip(diagram, host_left, y, scheduler.host_pool.num_blocks, hosted)
            words = {0: "", 1: "swap out: 5 blocks copied, 1 is in the queue", 19: "", 20: "swap in: 5 copied, 1 new"}
            diagram.text(left, y + 1.5, words[step], fontsize=SMALL)
            row += 1
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    for index, (role, meaning) in enumerate({"generated": "request 0", "prompt": "request 1", "free": "free"}.items()):
        diagram.cell(left + index * 4.4, 12.3, "", role, width=0.6, height=0.6)
        diagram.text(left + 0.9 + index * 4.4, 12.6, meaning, fontsize=SMALL)


def _strip(diagram: Diagram, x: float, y: float, num_blocks: int, tables: dict[RequestId, list[int]]) -> None:
    """A pool's blocks, each with its index in its request's block table."""
    owners = {block: (owner, place) for owner, blocks in tables.items() for place, block in enumerate(blocks)}
    for block in range(num_blocks):
        owner, place = owners.get(block, (None, ""))
        role = "free" if owner is None else "generated" if owner == 0 else "prompt"
        diagram.cell(x + block, y, str(place), role, fontsize=SMALL)


# --- theory 4: the auditor --------------------------------------------------------------------------------------------


class _ForgetfulScheduler(PagedScheduler):
    """A `restart` without the line that resets the computed tokens."""

    def restart(self, request: Request) -> None:
        computed = request.num_computed_tokens
        super().restart(request)
        request.num_computed_tokens = computed


def two_sources(figure: Figure, scheme: Scheme) -> None:
    """Request 1 of the forgetful scheduler at three moments: what it counts as computed, and what its blocks hold."""
    scheduler = _ForgetfulScheduler(num_blocks=NUM_BLOCKS)
    requests = [Request(index, [1] * 80, 20) for index in range(2)]
    for request in requests:
        scheduler.add_request(request)
    held: dict[tuple[int, int], tuple[RequestId, int]] = {}  # block, offset → request, position
    victim = requests[1]
    diagram = Diagram(figure, scheme, width=22.5, height=14.16)
    left, wide, top = 6.6, 2.6, 0.6
    told = {0: "step 0: in the batch", 1: "step 1: preempted", 20: "step 20: admitted"}
    for step in range(21):
        output = scheduler.schedule()
        for request in requests:
            for position in range(request.num_computed_tokens, _computed(request, output)):
                held[request.block_ids[position // BLOCK], position % BLOCK] = request.request_id, position
        counted = _computed(victim, output)
        if step in told:
            diagram.text(0.3, top, told[step], bold=True)
            diagram.text(0.3, top + 1.2, "counts as computed")
            for first in range(0, counted, BLOCK):
                num = min(BLOCK, counted - first)
                label = str(num) if num > 3 else ""
                diagram.cell(left + first / BLOCK * wide, top + 0.7, label, width=num / BLOCK * wide)
            diagram.text(0.3, top + 2.4, "its blocks hold")
            for index, block in enumerate(victim.block_ids):
                _contents(diagram, left + index * wide, top + 1.9, wide, index, block, held)
            if not victim.block_ids:
                diagram.text(left, top + 2.4, "nothing: here the auditor raises")
            top += 4.2
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    roles = {"prompt": "its own, in place", "wasted": "its own, out of place", "generated": "request 0's"}
    for (role, meaning), x in zip(roles.items(), (0.3, 7.5, 16.4), strict=True):
        diagram.legend({role: meaning}, x, 13.2, size=0.6, fontsize=TYPE_SIZE)


def _computed(request: Request, output: SchedulerOutput) -> int:
    """A request's computed tokens once the step is done."""
    return request.num_computed_tokens + output.num_scheduled_tokens.get(request.request_id, 0)


def _contents(
    diagram: Diagram,
    x: float,
    y: float,
    width: float,
    index: int,
    block: int,
    held: dict[tuple[int, int], tuple[RequestId, int]],
) -> None:
    """What the slots of request 1's block `index` hold: a cell for each run of slots of one kind."""
    kinds: list[str] = []
    for offset in range(BLOCK):
        if (found := held.get((block, offset))) is not None:
            owner, position = found
            is_its = position == index * BLOCK + offset
            kinds.append("generated" if owner == 0 else "prompt" if is_its else "wasted")
    at = x
    for role, run in groupby(kinds):
        num = len(list(run))
        diagram.cell(at, y, str(num) if num > 3 else "", role, width=num / BLOCK * width)
        at += num / BLOCK * width


# --- theory 4: what it costs ------------------------------------------------------------------------------------------


def modelled_costs(figure: Figure, scheme: Scheme) -> None:
    """Recomputing and swapping 1,024 tokens of OPT-13B on an A100, over block sizes: a model from data sheets."""
    found = results()["modelled"]
    sizes = [int(size) for size in found["by_block_size"]]
    by_size = list(found["by_block_size"].values())
    axes = _log_axes(figure.subplots(), sizes)
    axes.axhline(found["recompute_ms"], color=color("generated", scheme), label="recompute")
    swap = color("end", scheme)
    lowest, highest = ([each[f"swap_ms_{latency}_us"] for each in by_size] for latency in (2, 10))
    axes.fill_between(sizes, lowest, highest, color=swap, alpha=0.25, linewidth=0)
    axes.plot(sizes, [each["swap_ms_5_us"] for each in by_size], color=swap, marker="o", label="swap, a copy a layer")
    packed = [each["packed_ms"] for each in by_size]
    axes.plot(sizes, packed, color=color("shared", scheme), marker="s", linestyle="--", label="swap, a copy a block")
    axes.set(ylabel="milliseconds, modelled", title="1,024 tokens of OPT-13B, A100, PCIe 4")
    axes.legend()


def measured_costs(figure: Figure, scheme: Scheme) -> None:
    """The same on this machine, with two models: measured."""
    found = results()["tensors"]
    both = figure.subplots(1, 2, sharey=True)
    for axes, name, title in zip(both, ("minigpt", "larger"), ("MiniGPT's shape", "12 M parameters"), strict=True):
        by_size = found[name]["by_block_size"]
        sizes = [int(size) for size in by_size]
        _log_axes(axes, sizes).tick_params(axis="x", labelsize=SMALL)  # nine numbers, half a page wide
        for key, role, marker, label in (
            ("recompute_ms", "generated", "o", "recompute"),
            ("swap_ms", "shared", "s", "swap"),
            ("one_by_one_ms", "end", "^", "swap, block by block"),
        ):
            axes.plot(
                sizes, [each[key] for each in by_size.values()], color=color(role, scheme), marker=marker, label=label
            )
        axes.set_title(title)
    both[0].set_ylabel("milliseconds, measured")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)


def _log_axes(axes: Axes, sizes: Sequence[int]) -> Axes:
    """Both axes logarithmic, the lower one with block sizes."""
    axes.set(xscale="log", yscale="log", xlabel="tokens a block", xticks=sizes)
    axes.set_xticklabels([str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return axes


def cost_over_pressure(figure: Figure, scheme: Scheme) -> None:
    """Tokens computed again, and the mean latency, with less and less memory."""
    found = results()["pressure"]
    percents = [int(percent) for percent in found["recompute"]]
    left, right = figure.subplots(1, 2)
    styles: dict[str, tuple[str, str, str]] = {
        "recompute": ("generated", "o", "recompute"),
        "swap_5": ("wasted", "v", "swap space 5 %"),
        "swap_25": ("end", "^", "swap space 25 %"),
        "swap_100": ("shared", "s", "swap space 100 %"),
    }
    panels: list[tuple[Axes, Callable[[dict[str, float]], float], str]] = [
        (left, lambda run: run["recomputed_tokens"] / 1000, "thousand tokens computed again"),
        (right, lambda run: run["mean_latency_s"], "mean latency, seconds (modelled)"),
    ]
    for axes, value, title in panels:
        for name, (role, marker, label) in styles.items():
            runs = [value(run) for run in found[name].values()]
            axes.plot(percents, runs, color=color(role, scheme), marker=marker, label=label, linewidth=1.5)
        axes.set(xlabel="pool, % of the burst's peak", xlim=(103, 27), ylim=(0, None), xticks=percents)
        axes.set_title(title, fontsize=TYPE_SIZE)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)


def watermark_trade(figure: Figure, scheme: Scheme) -> None:
    """Preemptions, the wait for the first token, and the time for all, over the watermark."""
    found = results()["watermarks"]["recompute"]
    percents = [int(percent) for percent in found]
    panels = {
        "preemptions": ("preemptions", "end"),
        "mean_first_token_steps": ("steps to the first token", "prompt"),
        "seconds": ("seconds for all (modelled)", "generated"),
    }
    for axes, (key, (title, role)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        values = [run[key] for run in found.values()]
        axes.plot(percents, values, color=color(role, scheme), marker="o")
        axes.set(xlabel="watermark, %", ylim=(0, 1.08 * max(values)), xticks=(0, 10, 20, 40))
        axes.set_title(title, fontsize=TYPE_SIZE)


if __name__ == "__main__":
    main()
