"""The figures of phase 5: the slots of static and continuous batches, the queue, and what a step is made of.

The grids, queues and latencies are drawn from traces that real schedulers left; `tests/site/` recomputes the
numbers that the pages state about them from the functions of this module. The distribution is MiniGPT's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from matplotlib.figure import Figure

from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.palette import INK, Scheme, color
from minicache.request import Request, RequestId
from minicache.scheduler import create_scheduler
from minicache.scheduler.drive import Tally, drive
from minicache.scheduler.observe import Recorder, observe
from minicache.simulator.workload import ALPACA, Arrival, LengthDistribution, generate
from minicache.trace import TraceStep
from scripts.browser.playground.workloads import SIX
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

SMALL = TYPE_SIZE * 0.85
SLOTS = 3
BURST = replace(
    ALPACA,
    name="80 short requests",
    prompt=LengthDistribution.from_mean(20, 1.0),
    output=LengthDistribution.from_mean(40, ALPACA.output.cv),
    rate=0.18,
    max_model_len=160,
)
"""Poisson arrivals, 0.18 a step: phase 2's generator, its clock read as steps. Lengths are cut to keep it small."""
BURST_COUNT, BURST_SEED, BURST_SLOTS = 80, 0, 8


def main() -> None:
    """Draw them all."""
    draw("static-grid", static_grid, size=(6.0, 2.0))
    draw("static-and-continuous-grid", both_grids, size=(6.0, 3.85))
    draw("requests-over-time", requests_over_time, size=(6.0, 5.6))
    draw("slots-and-queue", slots_and_queue, size=(6.0, 2.75))
    draw("static-rectangles", static_rectangles, size=(6.0, 2.75))
    draw("latency-static-continuous", latencies, size=(6.6, 3.4))
    draw("queue-static-continuous", queues, size=(6.6, 3.2))
    draw("selective-batching", selective_batching, size=(6.4, 4.9))
    draw("engine-loop", engine_loop, size=(6.4, 4.0))
    draw("which-tokens-stay", which_tokens_stay, size=(6.6, 4.4))


# --- runs -----------------------------------------------------------------------------------------------------------


def run_six(name: str) -> tuple[list[TraceStep], Tally]:
    """The six requests, all there from the start, under a scheduler with three slots: its trace, and what it cost."""
    steps: list[TraceStep] = []
    scheduler = observe(create_scheduler(name, num_blocks=64, max_num_seqs=SLOTS), Recorder(steps.append))
    tally = drive(scheduler, (Request(name, [0] * prompt, output) for name, (prompt, output) in SIX.items()))
    return steps, tally


def run_burst(name: str) -> tuple[list[TraceStep], Tally, list[tuple[int, Arrival]]]:
    """The Poisson arrivals under a scheduler with eight slots: trace, cost, and which arrived before which step."""
    drawn = generate(BURST, BURST_COUNT, BURST_SEED)
    coming = [(int(each.time) - int(drawn[0].time), each) for each in drawn]  # the first comes before step 0
    steps: list[TraceStep] = []
    scheduler = observe(create_scheduler(name, num_blocks=1024, max_num_seqs=BURST_SLOTS), Recorder(steps.append))
    arrivals = [
        (step, Request(each.request_id, [0] * each.num_prompt_tokens, each.num_output_tokens)) for step, each in coming
    ]
    return steps, drive(scheduler, arrivals=arrivals), coming


def utilisation(steps: Sequence[TraceStep], num_slots: int) -> float:
    """The share of slots, over all steps, in which a request computed something."""
    return sum(len(step.batch) for step in steps) / (num_slots * len(steps))


def slots_of(steps: Sequence[TraceStep]) -> dict[RequestId, int]:
    """The slot of each request: the lowest that is free when it is admitted, its own until it has finished."""
    taken: dict[RequestId, int] = {}
    slots: dict[RequestId, int] = {}
    for step in steps:
        for entry in step.batch:
            if entry.request_id not in taken:
                free = next(slot for slot in range(len(taken) + 1) if slot not in taken.values())
                taken[entry.request_id] = slots[entry.request_id] = free
        for event in step.events:
            if event.kind == "finish":
                del taken[event.request_id]
    return slots


def role_of(step: TraceStep, request_id: RequestId) -> str | None:
    """What a request did in a step, as a role of the palette: prompt, generated or end; None if it was not in it."""
    if any(event.kind == "finish" and event.request_id == request_id for event in step.events):
        return "end"
    entry = next((entry for entry in step.batch if entry.request_id == request_id), None)
    return None if entry is None else "prompt" if entry.is_prefill else "generated"


# --- grids ----------------------------------------------------------------------------------------------------------

LEFT = 2.6
"""Units on the left of a grid, for the names of its rows."""


def static_grid(figure: Figure, scheme: Scheme) -> None:
    """Three slots under static batching."""
    steps, _ = run_six("static")
    diagram = Diagram(figure, scheme, width=LEFT + len(steps) + 0.4, height=5.65)
    _slot_grid(diagram, steps, 0.9)
    _step_numbers(diagram, len(steps), 0.4)
    _grid_legend(diagram, 4.6)


def both_grids(figure: Figure, scheme: Scheme) -> None:
    """The same six requests, statically and continuously batched, on one clock."""
    static, _ = run_six("static")
    continuous, _ = run_six("continuous")
    diagram = Diagram(figure, scheme, width=LEFT + len(static) + 0.4, height=10.9)
    _step_numbers(diagram, len(static), 0.4)
    diagram.text(
        0.2, 1.35, f"static: {len(static)} steps, {utilisation(static, SLOTS):.0%} of the slots used", bold=True
    )
    _slot_grid(diagram, static, 1.9)
    told = f"continuous: {len(continuous)} steps, {utilisation(continuous, SLOTS):.0%} of the slots used"
    diagram.text(0.2, 5.75, told, bold=True)
    _slot_grid(diagram, continuous, 6.3)
    saved = len(static) - len(continuous)
    start = LEFT + len(continuous)
    diagram.span(start + 0.1, start + saved - 0.1, 7.4, f"{saved} steps")
    diagram.text(start + saved / 2, 8.5, "saved", align="center")
    _grid_legend(diagram, 9.7)


def _slot_grid(diagram: Diagram, steps: Sequence[TraceStep], y: float) -> None:
    """A row for each slot, a cell for each step in it: its request, and what it did."""
    slots = slots_of(steps)
    for slot in range(SLOTS):
        diagram.text(0.2, y + slot + 0.5, f"slot {slot + 1}")
        for column, step in enumerate(steps):
            here = [entry.request_id for entry in step.batch if slots[entry.request_id] == slot]
            label, role = (str(here[0]), role_of(step, here[0])) if here else ("", "wasted")
            diagram.cell(LEFT + column, y + slot, label, role)


def requests_over_time(figure: Figure, scheme: Scheme) -> None:
    """The same runs from the requests' side: which wait, which compute how many tokens."""
    static, _ = run_six("static")
    diagram = Diagram(figure, scheme, width=LEFT + len(static) + 0.4, height=16.2)
    _step_numbers(diagram, len(static), 0.4)
    for y, name in ((1.9, "static"), (9.1, "continuous")):
        steps, tally = run_six(name)
        mean = fmean(step + 1 for step in tally.finished.values())
        diagram.text(0.2, y - 0.55, f"{name}: a request is done after {mean:.1f} steps on average", bold=True)
        for row, request_id in enumerate(SIX):
            diagram.text(0.2, y + row * 0.95 + 0.48, f"request {request_id}", fontsize=SMALL)
            for column, step in enumerate(steps):
                role = role_of(step, request_id)
                entry = next((entry for entry in step.batch if entry.request_id == request_id), None)
                if entry is not None:
                    diagram.cell(LEFT + column, y + row * 0.95, str(entry.num_new_tokens), role, height=0.95)
                elif column < tally.finished[request_id]:
                    diagram.cell(LEFT + column, y + row * 0.95, "", "free", height=0.95)
    _legend(
        diagram, [("prompt", "prefill"), ("generated", "decode"), ("end", "its last token"), ("free", "waits")], 15.3
    )


def slots_and_queue(figure: Figure, scheme: Scheme) -> None:
    """Four steps of the continuous run: the slots, and the queue."""
    steps, _ = run_six("continuous")
    slots = slots_of(steps)
    diagram = Diagram(figure, scheme, width=17, height=7.7)
    left, room = 2.6, 3.7
    for slot in range(SLOTS):
        diagram.text(0.2, 1.6 + slot, f"slot {slot + 1}")
    diagram.text(0.2, 5.0, "waits")
    waiting = [request_id for request_id in SIX if request_id not in {"A", "B", "C"}]
    for place, step in enumerate(steps[2:6]):
        x = left + place * room
        diagram.text(x, 0.5, f"step {step.step}", bold=True)
        for entry in step.batch:
            label = f"{entry.request_id}: {entry.num_new_tokens}"
            role = role_of(step, entry.request_id)
            diagram.cell(x, 1.1 + slots[entry.request_id], label, role, width=2.7)
        admitted = {event.request_id for event in step.events if event.kind == "admit"}
        waiting = [request_id for request_id in waiting if request_id not in admitted]
        assert len(waiting) == step.num_waiting
        for position, request_id in enumerate(waiting):
            diagram.cell(x + position * 0.9, 4.5, request_id, "free", width=0.9)
        if not waiting:
            diagram.text(x, 5.0, "none", fontsize=SMALL)
    _legend(diagram, [("prompt", "prefill"), ("generated", "decode"), ("end", "last token"), ("free", "waits")], 6.6)


def static_rectangles(figure: Figure, scheme: Scheme) -> None:
    """A batch as a rectangle: as long as its longest request."""
    diagram = Diagram(figure, scheme, width=LEFT + 14.4, height=7.7)
    outputs = [output for _, output in SIX.values()]
    for place in range(2):
        x = LEFT + sum(max(outputs[batch * SLOTS : (batch + 1) * SLOTS]) for batch in range(place))
        members = list(SIX)[place * SLOTS : (place + 1) * SLOTS]
        longest = max(SIX[member][1] for member in members)
        diagram.text(x, 0.5, f"batch {place + 1}", bold=True)
        for row, member in enumerate(members):
            length = SIX[member][1]
            diagram.cell(x, 1.1 + row, f"{member}: {length}", "generated", width=length)
            if length < longest:
                diagram.cell(x + length, 1.1 + row, str(longest - length), "wasted", width=longest - length)
        diagram.span(x + 0.1, x + longest - 0.1, 4.5, f"{longest} steps")
    _legend(diagram, [("generated", "a token"), ("wasted", "idle")], 6.5)


def _step_numbers(diagram: Diagram, num_steps: int, y: float) -> None:
    diagram.text(0.2, y, "step", fontsize=SMALL)
    for step in range(num_steps):
        diagram.text(LEFT + step + 0.5, y, str(step), align="center", fontsize=SMALL)


def _grid_legend(diagram: Diagram, y: float) -> None:
    _legend(diagram, [("prompt", "prefill"), ("generated", "decode"), ("end", "last token"), ("wasted", "idle")], y)


def _legend(diagram: Diagram, entries: Sequence[tuple[str, str]], y: float) -> None:
    """Swatches with words of this page's own, side by side from the left edge."""
    for place, (role, meaning) in enumerate(entries):
        x = 0.2 + place * 4.2
        diagram.cell(x, y, "", role, width=0.7, height=0.7)
        diagram.text(x + 0.9, y + 0.35, meaning, fontsize=SMALL)


# --- a load ---------------------------------------------------------------------------------------------------------

STAGES = {"static": "wasted", "continuous": "generated"}


def latencies(figure: Figure, scheme: Scheme) -> None:
    """Steps from arrival to last token, request by request."""
    axes = plot(figure, xlabel="request, in the order of arrival", ylabel="steps until its last token")
    for (name, role), marker in zip(STAGES.items(), "so", strict=True):
        _, tally, coming = run_burst(name)
        steps = [tally.finished[each.request_id] - step + 1 for step, each in coming]
        mean = fmean(steps)
        axes.plot(steps, marker, color=color(role, scheme), markersize=4.5, label=f"{name}: {mean:.0f} on average")
        axes.axhline(mean, color=color(role, scheme), linewidth=1.2, linestyle="--")
    axes.plot(
        [each.num_output_tokens for _, each in coming],
        "_",
        color=INK[scheme],
        markersize=7,
        label="alone on the server",
    )
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def queues(figure: Figure, scheme: Scheme) -> None:
    """How many wait, step by step."""
    axes = plot(figure, xlabel="step", ylabel="waiting requests")
    for name, role in STAGES.items():
        steps, _, _ = run_burst(name)
        when, waiting = [step.step for step in steps], [step.num_waiting for step in steps]
        axes.step(when, waiting, where="post", color=color(role, scheme), label=name, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


# --- drawings -------------------------------------------------------------------------------------------------------


def selective_batching(figure: Figure, scheme: Scheme) -> None:
    """Five tokens of three requests: one row through the linear layers, three ways through attention."""
    diagram = Diagram(figure, scheme, width=17, height=13.0)
    requests = [("A", "prompt", 3, 0), ("B", "generated", 1, 6), ("C", "generated", 1, 3)]
    rows = [(name, role, cached + new) for name, role, count, cached in requests for new in range(count)]
    left, width = 4.7, 1.5
    diagram.text(0.2, 0.5, "new tokens", bold=True)
    for row, (name, role, position) in enumerate(rows):
        diagram.cell(left + row * width, 0.0, f"{name}{position}", role, width=width)
    _wide(diagram, left, 1.7, len(rows) * width, "norm, then Q, K, V: one product of 5 rows")
    centres = [left + len(rows) * width / 2] * len(requests)
    boxes = [2.9, 7.6, 13.2]
    widths = [4.2, 6.0, 3.6]
    for centre, box in zip(centres, boxes, strict=True):
        diagram.arrow((centre + (box - centre) * 0.35, 2.75), (box, 4.05))
    diagram.text(0.2, 3.2, "split", bold=True)
    for (name, role, count, cached), box, room in zip(requests, boxes, widths, strict=True):
        x = box - room / 2
        diagram.text(box, 4.5, f"attention of {name}", align="center", bold=True, fontsize=SMALL)
        size = min(0.8, room / (cached + count))
        start = box - size * (cached + count) / 2
        for position in range(cached + count):
            new = position >= cached
            shade = role if new else None
            diagram.cell(start + position * size, 5.0, str(position), shade, width=size, height=0.9, fontsize=SMALL)
        told = f"{count} queries, {count} keys" if not cached else f"{count} query, {cached + count} keys"
        diagram.text(box, 6.4, told, align="center", fontsize=SMALL)
        assert x >= 0
    for centre, box in zip(centres, boxes, strict=True):
        diagram.arrow((box, 6.9), (centre + (box - centre) * 0.35, 8.2))
    diagram.text(0.2, 7.6, "merge", bold=True)
    _wide(diagram, left, 8.4, len(rows) * width, "output, norm, feed-forward: 5 rows")
    diagram.text(0.2, 10.3, "sample", bold=True)
    last = [sum(count for _, _, count, _ in requests[: place + 1]) - 1 for place in range(len(requests))]
    for row, (name, _, position) in enumerate(rows):
        x = left + row * width
        if row in last:
            diagram.arrow((x + width / 2, 9.5), (x + width / 2, 10.2))
            diagram.cell(x, 10.3, f"{name}{position + 1}", "generated", width=width)
    legend = [("prompt", "prompt token"), ("generated", "generated token")]
    for place, (role, meaning) in enumerate(legend):
        diagram.cell(0.2 + place * 5.0, 12.0, "", role, width=0.7, height=0.7)
        diagram.text(1.1 + place * 5.0, 12.35, meaning, fontsize=SMALL)
    diagram.cell(10.8, 12.0, "", None, width=0.7, height=0.7)
    diagram.text(11.7, 12.35, "in its cache already", fontsize=SMALL)


def _wide(diagram: Diagram, x: float, y: float, width: float, label: str) -> None:
    """A layer: an outline as wide as the rows that go through it."""
    diagram.cell(x, y, label, None, width=width, fontsize=SMALL)


def engine_loop(figure: Figure, scheme: Scheme) -> None:
    """One step of the engine: four calls, and what passes between them."""
    diagram = Diagram(figure, scheme, width=17, height=10.6)
    boxes = {
        "schedule": (0.3, 2.9, "schedule()", "which, and how many tokens"),
        "run": (9.9, 2.9, "run the model", "one flat batch"),
        "sample": (9.9, 7.0, "sample", "one row of logits each"),
        "update": (0.3, 7.0, "update_from_output()", "append, or finish"),
    }
    for x, y, title, below in boxes.values():
        diagram.cell(x, y, "", None, width=6.8, height=2.0)
        diagram.text(x + 3.4, y + 0.65, title, align="center", bold=True)
        diagram.text(x + 3.4, y + 1.4, below, align="center", fontsize=SMALL)
    diagram.arrow((7.1, 3.9), (9.9, 3.9))
    diagram.text(8.5, 3.4, "output", align="center", fontsize=SMALL)
    diagram.arrow((13.3, 4.9), (13.3, 7.0))
    diagram.text(13.5, 5.95, "logits", fontsize=SMALL)
    diagram.arrow((9.9, 8.0), (7.1, 8.0))
    diagram.text(8.5, 7.5, "tokens", align="center", fontsize=SMALL)
    diagram.arrow((3.7, 7.0), (3.7, 4.9))
    diagram.text(3.9, 5.95, "the next step", fontsize=SMALL)
    diagram.arrow((3.7, 1.2), (3.7, 2.9))
    diagram.text(3.9, 0.7, "add_request(), at any time", align="center", fontsize=SMALL)
    diagram.arrow((3.7, 9.0), (3.7, 10.0))
    diagram.text(4.0, 9.9, "finished requests; every new token to its client", fontsize=SMALL)


def which_tokens_stay(figure: Figure, scheme: Scheme) -> None:
    """The distribution of the word after "They": at three temperatures, with top-k and with top-p."""
    words, logits = words_after("They")
    panels = {
        "temperature 1": kept(logits),
        "temperature 0.5": kept(logits, temperature=0.5),
        "temperature 2": kept(logits, temperature=2.0),
        "top_k = 2": kept(logits, top_k=2),
        "top_p = 0.9": kept(logits, top_p=0.9),
        "temperature 2, top_p = 0.9": kept(logits, temperature=2.0, top_p=0.9),
    }
    count = 7
    axes = figure.subplots(2, 3, sharex=True, sharey=True).flatten()
    for place, (title, values) in enumerate(panels.items()):
        shown = values[:count].tolist()
        bars = axes[place].barh(range(count), shown, color=color("generated", scheme))
        axes[place].bar_label(bars, [f"{value:.2f}" if value >= 0.005 else "" for value in shown], padding=2)
        axes[place].set_title(title, size=SMALL)
        axes[place].set(xlim=(0, 1.2), xticks=[0, 0.5, 1])
        axes[place].grid(axis="y", visible=False)
    axes[0].set_yticks(range(count), words[:count])
    axes[0].invert_yaxis()


def words_after(text: str) -> tuple[list[str], torch.Tensor]:
    """All of MiniGPT's words after a text, the likeliest first, and their logits."""
    tokenizer = Tokenizer()
    with torch.inference_mode():
        logits = load_minigpt()(torch.tensor([tokenizer.encode(text)]))[0, -1]
    logits, order = logits.sort(descending=True, stable=True)
    return [tokenizer.decode([int(token)]) for token in order], logits


def kept(logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The probabilities from which a token is drawn: `logits` descend, and masked tokens have 0.

    Written out here, independently of `minicache.engine.sampling`, to check it.
    """
    probabilities = (logits / temperature).softmax(-1)
    if top_k:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= top_p] = 0
    return probabilities / probabilities.sum()


if __name__ == "__main__":
    main()
