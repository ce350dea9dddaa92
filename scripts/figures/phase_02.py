"""The figures of phase 2: kinds of waste, padding, buddies, policies, workloads, and the holes that departures leave.

What is drawn of a memory is read off a real `ContiguousReservation` or `BuddyAllocator`. The comparison with the paper
comes from benchmarks/results/memory_use.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minicache.errors import OutOfSlotsError
from minicache.memory.reservation import (
    POLICIES,
    BuddyAllocator,
    ContiguousReservation,
    MemoryUse,
    Reservation,
    padded_rows,
    padding_share,
    reservation,
)
from minicache.palette import INK, PALETTE, Scheme, color
from minicache.simulator.workload import AZURE_CODE, SHAREGPT, gamma_arrivals, generate
from scripts.figures import labels
from scripts.figures.style import FIGURES, SCHEMES, TYPE_SIZE, Diagram, draw, plot

SMALL = TYPE_SIZE * 0.85

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

RAGGED = {"A": 200, "B": 1500, "C": 60}
"""Tokens so far of three sequences in one batch."""

STATES = {
    "prompt": ("used: a prompt token", "prompt", ""),
    "generated": ("used: a generated token", "generated", ""),
    "reserved": ("reserved: will hold one", "generated", "////"),
    "internal": ("internal: never will", "wasted", ""),
    "rounding": ("internal: by rounding", "wasted", "\\\\\\"),
    "external": ("external: free but unusable", "free", "xxxx"),
    "free": ("free", "free", ""),
}
"""State of a slot → its name in a legend, its colour role, and its hatching. Hatched "reserved" is only an outline."""

LIMIT = 64
"""max_model_len of the small memories drawn here."""


def main() -> None:
    """Draw them all."""
    draw("three-kinds-of-waste", three_kinds, size=(7.2, 2.84))
    draw("padding", padding, size=(7.2, 2.5))
    draw("buddy-split", buddy_split, size=(7.2, 4.0))
    draw("buddy-merge", buddy_merge, size=(7.2, 4.4))
    draw("policies-one-request", policies_one_request, size=(7.2, 2.9))
    draw("holes-over-time", holes_over_time, size=(7.2, 5.4))
    animate_holes()
    draw("memory-use", memory_use, size=(7.2, 4.6))
    draw("memory-over-time", memory_over_time, size=(7.2, 3.8))
    draw("workload-lengths", workload_lengths, size=(7.2, 3.2))
    draw("workload-arrivals", workload_arrivals, size=(7.2, 2.6))


# --- slots ----------------------------------------------------------------------------------------------------------


def slots(axes: Axes, scheme: Scheme, state: str, corner: tuple[float, float], width: float, height: float) -> None:
    """A box of slots in one state, with its top left corner at `corner` of axes that count downwards."""
    axes.add_patch(Rectangle(corner, width, height, **_look(state, scheme)))


def _look(state: str, scheme: Scheme) -> dict[str, Any]:
    """How a box of slots in one state is filled, hatched and outlined."""
    _, role, hatch = STATES[state]
    if state == "reserved":
        return {"facecolor": "none", "edgecolor": color(role, scheme), "linewidth": 0.8, "hatch": hatch}
    edge = INK[scheme] if hatch else "none"
    return {"facecolor": color(role, scheme), "edgecolor": edge, "linewidth": 0.0, "hatch": hatch}


def legend(diagram: Diagram, states: Iterable[str], x: float, y: float, *, step: float, columns: int) -> None:
    """A swatch and a name for each state, in rows of `columns`."""
    for index, state in enumerate(states):
        left, top = x + index % columns * step, y + index // columns * 0.85
        slots(diagram.axes, diagram.scheme, state, (left, top), 0.55, 0.5)
        diagram.text(left + 0.75, top + 0.25, STATES[state][0], fontsize=SMALL)


def parts(held: Reservation, num_prompt_tokens: int) -> list[tuple[str, int, int]]:
    """What a request's run is made of: state, first slot, slots."""
    ends = {
        "prompt": num_prompt_tokens,
        "generated": held.num_tokens,
        "reserved": held.num_expected,
        "internal": held.num_slots,
    }
    starts = [0, *ends.values()]
    return [
        (state, held.start + start, end - start)
        for (state, end), start in zip(ends.items(), starts, strict=False)
        if end > start
    ]


# --- theory 1 and 2 -------------------------------------------------------------------------------------------------


def small_memory() -> ContiguousReservation:
    """32 slots under "pow2": A to E are admitted, A and E generate, B and D finish."""
    memory = ContiguousReservation(32, "pow2", 32)
    for name, num_prompt_tokens, num_output_tokens in (
        ("A", 3, 5),
        ("B", 2, 2),
        ("C", 3, 1),
        ("D", 2, 2),
        ("E", 1, 2),
    ):
        memory.admit(name, num_prompt_tokens, num_output_tokens)
    memory.grow("A", 2)
    memory.grow("E")
    memory.release("B")
    memory.release("D")
    return memory


def three_kinds(figure: Figure, scheme: Scheme) -> None:
    """The small memory while F, which needs 7 slots in one run, is waiting."""
    memory, waiting = small_memory(), reservation("pow2", 3, 4, 32)
    diagram = Diagram(figure, scheme, width=18, height=7.1)
    prompts, scale, left, top = {"A": 3, "C": 3, "E": 1}, 0.53, 0.5, 1.3
    for held in memory.reservations():
        for state, start, count in parts(held, prompts[str(held.request_id)]):
            for slot in range(start, start + count):
                slots(diagram.axes, scheme, state, (left + slot * scale + 0.03, top), scale - 0.06, 1.2)
        middle = left + (held.start + held.num_slots / 2) * scale
        diagram.text(middle, top - 0.5, str(held.request_id), align="center", bold=True)
        diagram.span(left + held.start * scale + 0.06, left + (held.start + held.num_slots) * scale - 0.06, 3.0, "")
        diagram.text(middle, 3.45, f"a run of {held.num_slots}", align="center", fontsize=SMALL)
    for start, size in memory.allocator.free_runs():
        state = "external" if size < waiting else "free"
        for slot in range(start, start + size):
            slots(diagram.axes, scheme, state, (left + slot * scale + 0.03, top), scale - 0.06, 1.2)
        diagram.text(left + (start + size / 2) * scale, 3.45, f"hole of {size}", align="center", fontsize=SMALL)
    for slot in (0, 16, 20, 24, 28):
        diagram.text(left + slot * scale, top - 0.05 - 0.9, str(slot), fontsize=SMALL)
    use = memory.memory_use(waiting)
    words = f"F waits for {waiting} slots in one run. {use.used} of {use.total} slots hold a token: "
    diagram.text(left, 4.75, f"{words}{use.used / use.total:.0%}.", bold=True)
    legend(diagram, ("prompt", "generated", "reserved", "internal", "external"), left, 5.7, step=5.9, columns=3)


def padding(figure: Figure, scheme: Scheme) -> None:
    """Three sequences in one rectangle, to scale."""
    axes = plot(figure, xlabel="rows of the batch's tensor, one per token")
    lengths, longest = list(RAGGED.values()), max(RAGGED.values())
    names = [f"{name}: {length:,}" for name, length in RAGGED.items()]
    rest = [longest - length for length in lengths]
    axes.barh(names, lengths, color=color("generated", scheme), label="tokens", height=0.72)
    axes.barh(
        names,
        rest,
        left=lengths,
        color=color("wasted", scheme),
        edgecolor=INK[scheme],
        linewidth=0,
        hatch="//",
        label="padding",
        height=0.72,
    )
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, longest)
    axes.set_title(
        f"{sum(lengths):,} tokens, {padded_rows(lengths):,} rows: {padding_share(lengths):.0%} padding", loc="right"
    )
    figure.legend(loc="outside upper left", ncols=2)


# --- theory 3: buddies ----------------------------------------------------------------------------------------------


def buddy_split(figure: Figure, scheme: Scheme) -> None:
    """A memory of 16 after allocating 3, 5 and 2: every run that was halved, and what is at the leaves."""
    allocator = BuddyAllocator(16)
    asked = {allocator.allocate(count): count for count in (3, 5, 2)}
    taken, free = dict(allocator.allocations()), dict(allocator.free_runs())
    diagram = Diagram(figure, scheme, width=18, height=10)
    left, scale = 2.2, 0.95
    levels = (16, 8, 4, 2)
    for row, size in enumerate(levels):
        top = 0.6 + row * 2.0
        diagram.text(0.3, top + 0.5, f"{size} slots", fontsize=SMALL)
        for start in range(0, 16, size):
            box = (left + start * scale, top)
            if taken.get(start) == size:
                diagram.cell(
                    *box,
                    f"asked for {asked[start]}" if size > 2 else "2",
                    "generated",
                    width=size * scale,
                    fontsize=SMALL,
                )
            elif free.get(start) == size:
                diagram.cell(*box, "free", "free", width=size * scale, fontsize=SMALL)
            elif _is_split(start, size, (taken, free)):
                diagram.cell(*box, "halved", None, width=size * scale, fontsize=SMALL)
                for half in (0.25, 0.75):
                    x = left + (start + size * half) * scale
                    diagram.arrow((left + (start + size / 2) * scale, top + 1.0), (x, top + 1.95))
    for slot in range(0, 17, 2):
        diagram.text(left + slot * scale, 8.15, str(slot), align="center", fontsize=SMALL)
    diagram.cell(left, 9.0, "", "generated", width=0.5, height=0.5)
    diagram.text(left + 0.65, 9.25, "allocated", fontsize=SMALL)
    diagram.cell(left + 3.5, 9.0, "", "free", width=0.5, height=0.5)
    diagram.text(left + 4.15, 9.25, "free run", fontsize=SMALL)
    diagram.cell(left + 7.0, 9.0, "", None, width=0.5, height=0.5)
    diagram.text(left + 7.65, 9.25, "no longer a run: its two halves are buddies", fontsize=SMALL)


def _is_split(start: int, size: int, runs: Sequence[dict[int, int]]) -> bool:
    """Whether runs shorter than `size` lie where this aligned piece is."""
    return any(start <= at < start + size and length < size for held in runs for at, length in held.items())


def buddy_merge(figure: Figure, scheme: Scheme) -> None:
    """The same memory as three runs are freed one after the other."""
    allocator = BuddyAllocator(16)
    names = {allocator.allocate(count): name for name, count in (("a", 3), ("b", 5), ("c", 2))}
    diagram = Diagram(figure, scheme, width=18, height=11)
    steps = (
        (None, "1  three allocations"),
        (0, "2  free(0): its buddy, 4 to 7, is split in two. No merge."),
        (4, "3  free(4): merges with 6, then with 0. The next buddy, 8, is allocated."),
        (8, "4  free(8): merges with 0. One run again."),
    )
    left, scale = 1.0, 1.0
    for row, (freed, title) in enumerate(steps):
        if freed is not None:
            allocator.free(freed)
        top = 0.4 + row * 2.5
        diagram.text(left, top, title, bold=True)
        for start, size in allocator.allocations():
            diagram.cell(left + start * scale, top + 0.5, f"{names[start]}  {size}", "generated", width=size * scale)
        for start, size in allocator.free_runs():
            diagram.cell(left + start * scale, top + 0.5, str(size), "free", width=size * scale)
        for slot in range(0, 17, 2):
            diagram.text(left + slot * scale, top + 1.75, str(slot), align="center", fontsize=SMALL * 0.9)


# --- theory 4: policies and holes -----------------------------------------------------------------------------------

PROMPT, OUTPUT, MODEL_LIMIT = 161, 338, 2048
"""A request of the mean lengths of ShareGPT, and OPT's limit."""


def policies_one_request(figure: Figure, scheme: Scheme) -> None:
    """The same request, half generated, under the three policies."""
    axes = plot(figure, xlabel="slots of its run")
    for row, policy in enumerate(POLICIES):
        memory = ContiguousReservation(MODEL_LIMIT, policy, MODEL_LIMIT)
        memory.admit("A", PROMPT, OUTPUT)
        memory.grow("A", OUTPUT // 2)
        for state, start, count in parts(memory.reservations()[0], PROMPT):
            slots(axes, scheme, state, (start, row - 0.33), count, 0.66)
        held = memory.reservations()[0]
        axes.text(held.num_slots + 20, row, f"{held.num_tokens / held.num_slots:.0%}\nused", va="center", size=SMALL)
    axes.set(xlim=(0, MODEL_LIMIT + 160), ylim=(2.5, -0.5), yticks=range(3), yticklabels=POLICIES)
    axes.set_xticks([0, 512, 1024, 1536, 2048])
    axes.grid(axis="y", visible=False)
    _state_legend(figure, scheme, ("prompt", "generated", "reserved", "internal"))


def _state_legend(
    figure: Figure, scheme: Scheme, states: Sequence[str], named: Mapping[str, str] | None = None, *, columns: int = 2
) -> None:
    """A legend above a plot of slots; `named` has other names for some of the states."""
    names = {state: STATES[state][0] for state in states} | dict(named or {})
    handles = [Rectangle((0, 0), 1, 1, label=names[state], **_look(state, scheme)) for state in states]
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, fontsize=SMALL)


QUEUE = {
    "A": (4, 7),
    "B": (5, 9),
    "C": (5, 10),
    "D": (3, 6),
    "E": (2, 8),
    "F": (4, 5),
    "G": (4, 10),
    "H": (3, 7),
    "I": (10, 13),
    "J": (7, 9),
    "K": (5, 10),
    "L": (2, 11),
    "M": (7, 10),
    "N": (3, 3),
    "O": (4, 10),
    "P": (12, 12),
}
"""Requests that all wait from the start: prompt and output tokens."""

NUM_SLOTS, NUM_STEPS = 128, 20
"""Of the run that is drawn."""

STILL = 13
"""The step shown by the moving picture if the system asks for reduced motion."""


@dataclass(frozen=True)
class Moment:
    """The memory after one step: the running requests, the waiting one and its size, and the slots."""

    step: int
    held: list[Reservation]
    waits: str
    wanted: int
    use: MemoryUse


def moments() -> list[Moment]:
    """`QUEUE` served in order under "oracle": each step admits all that fit, and each request generates a token."""
    memory = ContiguousReservation(NUM_SLOTS, "oracle", LIMIT)
    waiting, left, seen = list(QUEUE), dict[str, int](), list[Moment]()
    for step in range(NUM_STEPS):
        for name in [name for name, tokens in left.items() if tokens == 0]:
            memory.release(name)
            del left[name]
        try:
            while True:
                memory.admit(waiting[0], *QUEUE[waiting[0]])
                left[waiting[0]] = QUEUE[waiting[0]][1]
                waiting.pop(0)
        except OutOfSlotsError:
            pass  # the head of the queue waits, and so do all behind it
        for name in left:
            memory.grow(name)
            left[name] -= 1
        wanted = reservation("oracle", *QUEUE[waiting[0]], LIMIT)
        seen.append(Moment(step, memory.reservations(), waiting[0], wanted, memory.memory_use(wanted)))
    return seen


def holes_over_time(figure: Figure, scheme: Scheme) -> None:
    """Slots to the right, steps downwards: every request is a box; the rest is free."""
    axes = plot(figure, xlabel="slot", ylabel="step")
    seen = moments()
    axes.add_patch(Rectangle((0, 0), NUM_SLOTS, NUM_STEPS, facecolor=color("free", scheme), linewidth=0))
    for name, (num_prompt_tokens, _) in QUEUE.items():
        lives = [(moment.step, held) for moment in seen for held in moment.held if held.request_id == name]
        if lives:
            _life(axes, scheme, name, num_prompt_tokens, lives)
    in_vain = [moment for moment in seen if moment.use.external >= moment.wanted]
    for name, waits in groupby(in_vain, key=lambda moment: moment.waits):
        steps = list(waits)
        first, last, most = steps[0].step, steps[-1].step, max(moment.use.external for moment in steps)
        axes.plot(
            [NUM_SLOTS + 2] * 2, [first + 0.1, last + 0.9], color=color("end", scheme), linewidth=3, clip_on=False
        )
        words = f"{name} needs {steps[0].wanted},\n{steps[0].use.external}"
        words += f" to {most} free" if most > steps[0].use.external else " free"
        axes.text(NUM_SLOTS + 4, (first + last + 1) / 2, words, size=SMALL, va="center")
    axes.set(
        xlim=(0, NUM_SLOTS), ylim=(NUM_STEPS, 0), xticks=range(0, NUM_SLOTS + 1, 16), yticks=range(0, NUM_STEPS, 2)
    )
    axes.grid(False)
    states = ("generated", "reserved", "internal", "free")
    _state_legend(figure, scheme, states, {"generated": "used: holds a token"})


def _life(
    axes: Axes, scheme: Scheme, name: str, num_prompt_tokens: int, lives: Sequence[tuple[int, Reservation]]
) -> None:
    """One request's box: its used slots grow downwards, the unused part stays."""
    (first, held), (last, _) = lives[0], lives[-1]
    start, end, expected = held.start, held.start + held.num_slots, held.start + held.num_expected
    axes.add_patch(Rectangle((start, first), end - start, last + 1 - first, facecolor=_page(scheme), linewidth=0))
    slots(axes, scheme, "reserved", (start, first), expected - start, last + 1 - first)
    slots(axes, scheme, "internal", (expected, first), end - expected, last + 1 - first)
    stairs = [start + now.num_tokens for _, now in lives]
    axes.fill_betweenx(
        range(first, last + 2), start, [*stairs, stairs[-1]], step="post", color=color("generated", scheme), linewidth=0
    )
    axes.add_patch(
        Rectangle((start, first), end - start, last + 1 - first, fill=False, edgecolor=INK[scheme], linewidth=0.9)
    )
    shade = PALETTE["generated"].on_light if scheme == "light" else PALETTE["generated"].on_dark
    axes.text(start + 2.5, last + 0.45, name, color=shade, size=SMALL, ha="center", va="center")


def _page(scheme: Scheme) -> str:
    """What a page is made of, under an outline that lies on something else."""
    return "#FFFFFF" if scheme == "light" else "#14171F"


# --- theory 4: what was simulated -------------------------------------------------------------------------------------

NAMES = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged"}

SHARES = {
    "used": "generated",
    "reserved": "reserved",
    "surplus": "internal",
    "rounding": "rounding",
    "external": "external",
    "free": "free",
}
"""Part of memory in the results → the state that it is drawn as."""

PAPER_SHARES = {"used": "generated", "reserved": "reserved", "internal": "internal", "external_and_others": "external"}


def measured() -> dict[str, Any]:
    """The results of benchmarks/memory_use.py."""
    found: dict[str, Any] = json.loads((RESULTS / "memory_use.json").read_text(encoding="utf-8"))
    return found


def memory_use(figure: Figure, scheme: Scheme) -> None:
    """Stacked bars in pairs, a pair a policy: ours above, the paper's below."""
    found = measured()
    axes = plot(figure, xlabel="percent of the slots")
    ticks: list[tuple[float, str]] = []
    for pair, (policy, name) in enumerate(NAMES.items()):
        for offset, whose, shares, states in (
            (0.0, "ours", found["at_2_per_s"][policy], SHARES),
            (0.42, "paper", found["paper"][policy], PAPER_SHARES),
        ):
            y, left = pair + offset, 0.0
            for part, state in states.items():
                slots(axes, scheme, state, (left, y - 0.19), shares.get(part, 0.0), 0.38)
                left += shares.get(part, 0.0)
            shade = PALETTE["generated"].on_light if scheme == "light" else PALETTE["generated"].on_dark
            axes.text(1, y, f"{shares['used']:.1f}", color=shade, size=SMALL, va="center")
            ticks.append((y, f"{name}, {whose}" if whose == "ours" else whose))
    axes.set(xlim=(0, 100), ylim=(3.75, -0.35), yticks=[y for y, _ in ticks], yticklabels=[name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    named = {"generated": "used", "internal": "internal: by the policy", "external": "external (paper: and others)"}
    _state_legend(figure, scheme, list(SHARES.values()), named)


def memory_over_time(figure: Figure, scheme: Scheme) -> None:
    """The shares over the simulated hour, under the best reservation and under blocks."""
    found = measured()
    panels = figure.subplots(1, 2, sharey=True)
    for axes, policy in zip(panels, ("oracle", "paged"), strict=True):
        series = found["series"][policy]
        minutes = [found["series_seconds"] * index / 60 for index in range(len(series["used"]))]
        below = [0.0] * len(minutes)
        for part, state in SHARES.items():
            above = [low + share for low, share in zip(below, series[part], strict=True)]
            axes.fill_between(minutes, below, above, **_look(state, scheme) | {"linewidth": 0.0})
            below = above
        axes.set(xlim=(0, minutes[-1]), ylim=(0, 100), title=NAMES[policy], xlabel="minutes")
        axes.grid(False)
    panels[0].set_ylabel("percent of the slots")
    named = {"generated": "used", "external": "external"}
    _state_legend(figure, scheme, ["generated", "reserved", "rounding", "external", "free"], named, columns=5)


# --- theory 5: workloads --------------------------------------------------------------------------------------------


def workload_lengths(figure: Figure, scheme: Scheme) -> None:
    """How often each length occurs, in and out, for the chats and the code completions."""
    panels = figure.subplots(1, 2, sharey=True)
    edges = [1.0, *(2 ** (half / 2) for half in range(2, 29))]  # no whole number lies between 1.4 and 2
    for axes, workload in zip(panels, (SHAREGPT, AZURE_CODE), strict=True):
        arrivals = generate(workload, 20_000, seed=0)
        weights = [100 / len(arrivals)] * len(arrivals)
        prompts = [each.num_prompt_tokens for each in arrivals]
        outputs = [each.num_output_tokens for each in arrivals]
        axes.hist(prompts, edges, weights=weights, color=color("prompt", scheme), label="prompt")
        shade = color("generated", scheme)
        axes.hist(outputs, edges, weights=weights, histtype="step", color=shade, linewidth=2.2, label="output")
        for row, (name, lengths) in enumerate({"prompt": prompts, "output": outputs}.items()):
            words = f"{name}: median {median(lengths):,.0f}, mean {mean(lengths):,.0f}"
            axes.text(1.3, 24 - 2.2 * row, words, size=SMALL)
        axes.set(xscale="log", xlabel="tokens", title=workload.name, xlim=(1, 16_384), ylim=(0, 26))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.minorticks_off()
    panels[0].set_ylabel("percent of the requests")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)


def workload_arrivals(figure: Figure, scheme: Scheme) -> None:
    """A minute of arrivals at 2 a second, even, Poisson and in bursts."""
    axes = plot(figure, xlabel="seconds")
    rows = {"cv 0.3": 0.3, "cv 1, Poisson": 1.0, "cv 4": 4.0, "cv 13.2, as\nAzure code": 13.2}
    for row, cv in enumerate(rows.values()):
        times = list(takewhile(lambda time: time < 60, gamma_arrivals(2.0, cv, Random(4))))
        axes.vlines(times, row - 0.36, row + 0.36, color=color("generated", scheme), linewidth=1.2)
        axes.text(61, row, f"{len(times)} requests", size=SMALL, va="center")
    axes.set(xlim=(0, 60), ylim=(3.6, -0.6), yticks=range(4), yticklabels=list(rows))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


# --- the moving picture ---------------------------------------------------------------------------------------------

SECONDS = 1.2
"""Per step."""

WIDTH, HEIGHT, LEFT, TOP, TALL = 720, 200, 12, 62, 56
"""Of the picture, and of the strip in it, in pixels."""


def animate_holes() -> None:
    """The same run as a strip that changes: an SVG that moves by its own style sheet, one group of shapes a step."""
    for scheme in SCHEMES:
        for lang, say in (("", str), (".es", labels.spanish)):
            picture = moving(moments(), scheme, say)
            (FIGURES / f"holes-moving{lang}.{scheme}.svg").write_text(picture, encoding="utf-8")


def moving(seen: Sequence[Moment], scheme: Scheme, say: Callable[[str], str]) -> str:
    """The picture: what does not move, then a frame a step, of which the style sheet shows one at a time.

    `say` puts its words into a language.
    """
    scale, share = (WIDTH - 2 * LEFT) / NUM_SLOTS, 100 / len(seen)
    frames = "\n".join(_frame(moment, scale, say) for moment in seen)
    ticks = "".join(
        _words(LEFT + slot * scale, TOP + TALL + 18, str(slot), "tick") for slot in range(0, NUM_SLOTS + 1, 16)
    )
    legend = "".join(
        f'<rect class="{state}" x="{LEFT + index * 175}" y="166" width="16" height="14"/>'
        + _words(LEFT + index * 175 + 24, 178, say(name))
        for index, (state, name) in enumerate(
            {"generated": "used", "reserved": "reserved", "internal": "internal", "free": "free"}.items()
        )
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">
<style>
rect {{ shape-rendering: crispEdges; }}
text {{ font: 14px "DejaVu Sans", Verdana, sans-serif; fill: {INK[scheme]}; }}
.tick {{ font-size: 12px; text-anchor: middle; }}
.name {{ text-anchor: middle; font-weight: bold; }}
.bold {{ font-weight: bold; }}
.generated {{ fill: {color("generated", scheme)}; }}
.reserved {{ fill: url(#lines); stroke: {color("generated", scheme)}; }}
.internal {{ fill: {color("wasted", scheme)}; }}
.free {{ fill: {color("free", scheme)}; }}
.run {{ fill: none; stroke: {INK[scheme]}; stroke-width: 1.5; }}
.frame {{ opacity: 0; animation: turn {SECONDS * len(seen):.1f}s step-end infinite; }}
@keyframes turn {{ 0% {{ opacity: 1; }} {share:.3f}% {{ opacity: 0; }} }}
@media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none; }} .still {{ opacity: 1; }} }}
</style>
<pattern id="lines" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="7" height="7" fill="{_page(scheme)}"/>
<rect width="1.5" height="7" fill="{color("generated", scheme)}"/>
</pattern>
<rect class="free" x="{LEFT}" y="{TOP}" width="{WIDTH - 2 * LEFT}" height="{TALL}"/>
{ticks}{legend}
{frames}
</svg>
"""


def _frame(moment: Moment, scale: float, say: Callable[[str], str]) -> str:
    """The memory after one step, with a line of text."""
    shapes = []
    for held in moment.held:
        for state, start, count in parts(held, QUEUE[str(held.request_id)][0]):
            shapes.append(_box("generated" if state == "prompt" else state, start, count, scale))
        shapes.append(_box("run", held.start, held.num_slots, scale))
        shapes.append(_words(LEFT + (held.start + held.num_slots / 2) * scale, TOP - 6, str(held.request_id), "name"))
    free = moment.use.external + moment.use.free
    counts, wish = f"{free} of {NUM_SLOTS} slots are free.", f"waits for {moment.wanted} in one run."
    doing = f"{say(counts)} {moment.waits} {say(wish)}"
    still = " still" if moment.step == STILL else ""
    return (
        f'<g class="frame{still}" style="animation-delay: {moment.step * SECONDS:.1f}s">'
        + _words(LEFT, 22, say(f"Step {moment.step}"), "bold")
        + _words(LEFT + 75, 22, doing)
        + "".join(shapes)
        + "</g>"
    )


def _box(kind: str, start: int, count: int, scale: float) -> str:
    """Slots of the strip."""
    x, width = LEFT + start * scale, count * scale
    return f'<rect class="{kind}" x="{x:.2f}" y="{TOP}" width="{width:.2f}" height="{TALL}"/>'


def _words(x: float, y: float, words: str, kind: str = "") -> str:
    """Text with its left end, or for ticks and names its middle, at x."""
    return f'<text x="{x:.1f}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{words}</text>'


if __name__ == "__main__":
    main()
