"""The figures of phase 7: a scheduler that wastes a slot, one that thrashes, one that starves; order and bound.

All are drawn from traces that real schedulers left, broken ones among them. `tests/site/test_worked_examples.py`
recomputes the numbers that the pages state from the runs of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from benchmarks.incidents import NUM_REQUESTS, TIMEOUT, make, requests
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.palette import INK, Scheme, color
from minicache.request import Request, RequestId
from minicache.scheduler import FairScheduler, PagedScheduler, Scheduler
from minicache.scheduler.drive import Tally, drive
from minicache.scheduler.fair import STARVATION_BOUND, PriorityScheduler
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.trace import TraceStep
from minicache.verifier.cases import cases
from minicache.verifier.explore import Case, explore, own_state
from minicache.verifier.world import World
from minicache_course.incidents.broken import CapScheduler, ThrashScheduler
from minicache_course.incidents.case_1_cap import FixedCapScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler
from scripts.figures.phase_05 import role_of, slots_of
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

SMALL = TYPE_SIZE * 0.8

Arrivals = list[tuple[int, Request]]
"""(step, request): added before that step."""


def main() -> None:
    """Draw them all."""
    draw("cap-grid", cap_grid, size=(6.2, 4.0))
    draw("thrash-grid", thrash_grid, size=(7.2, 3.0))
    draw("thrash-tokens", thrash_tokens, size=(6.0, 2.8))
    draw("thrash-four", thrash_four, size=(7.2, 5.0))
    draw("starvation-who-runs", who_runs, size=(7.2, 5.2))
    draw("starvation-latencies", latencies, size=(7.0, 3.4))
    draw("one-order", one_order, size=(7.2, 4.5))
    draw("fair-grid", fair_grid, size=(7.0, 3.7))
    draw("bypasses", bypasses, size=(7.0, 3.2))
    draw("victim-slot", victim_slot, size=(7.2, 3.75))
    draw("every-interleaving", every_interleaving, size=(7.0, 3.2))


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a scheduler: its trace, what it cost, and who was there."""

    steps: list[TraceStep]
    tally: Tally
    arrivals: Arrivals


def run(scheduler: Scheduler, arrivals: Arrivals, *observers: Observer, max_steps: int = 10_000) -> Run:
    """Serve requests and keep the trace."""
    steps: list[TraceStep] = []
    watched = observe(scheduler, Recorder(steps.append), *observers)
    return Run(steps, drive(watched, arrivals=arrivals, max_steps=max_steps), arrivals)


THRASH: dict[str, type[PagedScheduler]] = {"with the bug": ThrashScheduler, "right": FixedThrashScheduler}
"""Incident 3, broken and mended, on the same engine."""


def run_thrash(kind: type[PagedScheduler], *, late: int = 0) -> Run:
    """A with 120 tokens and B with 50, 100 new each; B comes `late` steps after A."""
    return run(kind(num_blocks=64), [(0, Request("A", [1] * 120, 100)), (late, Request("B", [1] * 50, 100))])


def run_four(kind: type[PagedScheduler]) -> Run:
    """A long request in decode, and three shorter ones that come one step later."""
    lengths = {"L": (0, 100), "50": (1, 50), "51": (1, 51), "52": (1, 52)}
    arrivals = [(step, Request(name, [1] * prompt, 100)) for name, (step, prompt) in lengths.items()]
    return run(kind(num_blocks=64), arrivals)


def run_forty(name: str) -> Run:
    """The benchmark's 40 equal requests, "before" or "after"."""
    return run(make(name), [(0, request) for request in requests()])


class TwoOrdersScheduler(PriorityScheduler):
    """Admits by priority, and still preempts the newest: what a fair order must not be."""

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """Into the batch, at its end."""
        super().admit(request, output, found)
        self.running.remove(request)
        self.running.append(request)


ORDERS: dict[str, type[PagedScheduler]] = {
    "by arrival": PagedScheduler,
    "admitted by priority, the newest preempted": TwoOrdersScheduler,
    "one order": PriorityScheduler,
}


def run_order(kind: type[PagedScheduler]) -> Run:
    """Three lowly requests, and an urgent one a step later, in a pool too small for four."""
    arrivals = [(0, Request(name, [1] * 6, 16, priority=1)) for name in "ABC"]
    return run(kind(num_blocks=8, block_size=4), [*arrivals, (1, Request("U", [1] * 6, 16, priority=0))])


def run_five(kind: type[PagedScheduler] = FairScheduler) -> Run:
    """Texts and images with priorities, on two batch slots."""
    arrivals = [
        (0, Request("A", [1] * 4, 5, priority=1, group="text")),
        (0, Request("B", [1] * 3, 3, priority=1, group="image")),
        (0, Request("C", [1] * 2, 4, priority=0, group="text")),
        (1, Request("D", [1] * 5, 3, priority=2, group="text")),
        (2, Request("E", [1] * 3, 3, priority=0, group="image")),
    ]
    return run(kind(num_blocks=64, max_num_seqs=2), arrivals)


class Bypasses(Observer):
    """Counts, at every admission, how many in a row bypassed a request that had arrived earlier. Sees no internals."""

    def __init__(self) -> None:
        self.counts: list[int] = []  # after each step
        self._count = 0
        self._waiting: dict[RequestId, Request] = {}

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """One more waits."""
        self._waiting[request.request_id] = request

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Look at those that wait no longer."""
        for request in output.scheduled:
            if self._waiting.pop(request.request_id, None):
                passed = any(each.arrival_index < request.arrival_index for each in self._waiting.values())
                self._count = self._count + 1 if passed else 0
        self._waiting = dict(scheduler.waiting)
        self.counts.append(self._count)


def run_endless(kind: type[PagedScheduler], num_steps: int = 1500) -> tuple[Run, list[int]]:
    """Three lowly requests, and an urgent one of five tokens every five steps: with the bypasses after each step."""
    lowly = [(0, Request(f"lowly {number}", [1] * 10, 5, priority=9)) for number in range(3)]
    urgent = [(step, Request(step, [1] * 10, 5)) for step in range(0, num_steps, 5)]
    watching = Bypasses()
    served = run(kind(num_blocks=64, max_num_seqs=1), lowly + urgent, watching, max_steps=num_steps)
    return served, watching.counts


def run_texts(kind: type[PagedScheduler]) -> Run:
    """A text in every step, 600 of them, on four batch slots, and one image before step 1."""
    texts = [(step, Request(step, [1] * 10, 5, group="text")) for step in range(600)]
    image = (1, Request("image", [1] * 10, 5, group="image"))
    return run(kind(num_blocks=64, max_num_seqs=4), [image, *texts])


# --- grids ----------------------------------------------------------------------------------------------------------

MEANINGS = {"prompt": "prefill", "generated": "decode", "end": "last token", "free": "waits"}


@dataclass(frozen=True, slots=True)
class Grid:
    """Where requests × steps are drawn: the left edge of step 0, and the size of a cell."""

    left: float
    width: float = 1.0
    height: float = 1.0

    def numbers(self, diagram: Diagram, y: float, steps: Iterable[int]) -> None:
        """The numbers of steps over their columns."""
        diagram.text(0.15, y, "step", fontsize=SMALL)
        for step in steps:
            diagram.text(self.left + (step + 0.5) * self.width, y, str(step), align="center", fontsize=SMALL)

    def paint(self, diagram: Diagram, y: float, served: Run, names: Mapping[RequestId, str], limit: int = 1000) -> None:
        """A row a request: what each of the first `limit` steps did for it, and how many tokens of it it computed."""
        came = {request.request_id: step for step, request in served.arrivals}
        for row, (request_id, name) in enumerate(names.items()):
            top = y + row * self.height
            diagram.text(0.15, top + self.height / 2, name, fontsize=SMALL)
            for step in served.steps[came[request_id] : min(limit, served.tally.finished[request_id] + 1)]:
                entry = next((entry for entry in step.batch if entry.request_id == request_id), None)
                diagram.cell(
                    self.left + step.step * self.width,
                    top,
                    "" if entry is None else str(entry.num_new_tokens),
                    role_of(step, request_id) or "free",
                    width=self.width,
                    height=self.height,
                    fontsize=min(SMALL, 0.62 * TYPE_SIZE if self.width < 0.6 else SMALL),
                )


def cap_grid(figure: Figure, scheme: Scheme) -> None:
    """Incident 1 with four batch slots and eight requests: the slot that stays empty, and the steps it costs."""
    diagram = Diagram(figure, scheme, width=18.4, height=11.87)
    y = 0.5
    for name, kind in (("with the bug", CapScheduler), ("right", FixedCapScheduler)):
        served = run(kind(max_num_seqs=4, num_blocks=16), [(0, Request(name, [1] * 10, 5)) for name in "ABCDEFGH"])
        slots, largest = slots_of(served.steps), max(len(step.batch) for step in served.steps)
        diagram.text(0.2, y, f"{name}: {len(served.steps)} steps, the largest batch is {largest}", bold=True)
        for slot in range(4):
            diagram.text(0.2, y + 1.1 + slot, f"slot {slot + 1}")
            for column, step in enumerate(served.steps):
                here = [entry.request_id for entry in step.batch if slots[entry.request_id] == slot]
                label, role = (str(here[0]), role_of(step, here[0])) if here else ("", "wasted")
                diagram.cell(2.8 + column, y + 0.6 + slot, label, role)
        y += 5.5
    roles = {"prompt": "prefill", "generated": "decode", "end": "last token", "wasted": "idle"}
    diagram.legend(roles, 0.2, 11.0, step=4.2, size=0.55, fontsize=TYPE_SIZE)


def thrash_grid(figure: Figure, scheme: Scheme) -> None:
    """The two requests of incident 3, with the bug and without."""
    shown, grid = 20, Grid(left=2.3, width=1.05)
    diagram = Diagram(figure, scheme, width=24, height=10)
    grid.numbers(diagram, 0.5, range(shown))
    for y, (name, kind) in zip((1.6, 5.2), THRASH.items(), strict=True):
        served = run_thrash(kind)
        tokens = served.tally.num_prefill_tokens
        diagram.text(0.15, y, f"{name}: {served.tally.num_steps} steps, {tokens:,} prefill tokens in all", bold=True)
        grid.paint(diagram, y + 0.6, served, {"A": "A, 120", "B": "B, 50"}, shown)
    diagram.legend({role: MEANINGS[role] for role in ("prompt", "generated", "free")}, 0.15, 8.7, step=4.6, size=0.8)


def thrash_four(figure: Figure, scheme: Scheme) -> None:
    """Four requests of incident 3, with the bug and without."""
    shown, grid = 16, Grid(left=2.3, width=1.3, height=1.1)
    diagram = Diagram(figure, scheme, width=23.4, height=16.25)
    grid.numbers(diagram, 0.5, range(shown))
    for y, (name, kind) in zip((1.6, 8.0), THRASH.items(), strict=True):
        served = run_four(kind)
        diagram.text(0.15, y, f"{name}: {served.tally.num_steps} steps in all", bold=True)
        grid.paint(diagram, y + 0.6, served, {"L": "L, 100", "50": "50", "51": "51", "52": "52"}, shown)
    diagram.legend({role: MEANINGS[role] for role in ("prompt", "generated", "free")}, 0.15, 14.6, step=4.6, size=0.8)


def one_order(figure: Figure, scheme: Scheme) -> None:
    """One urgent request among three, under three orders of admission and preemption."""
    grid = Grid(left=2.0, width=0.55, height=0.75)
    diagram = Diagram(figure, scheme, width=24.3, height=15.2)
    grid.numbers(diagram, 0.4, range(0, 40, 5))
    for y, (name, kind) in zip((1.4, 5.8, 10.2), ORDERS.items(), strict=True):
        served = run_order(kind)
        urgent = served.arrivals[-1][1]
        told = f"{name}: U ends after {served.tally.finished['U'] + 1} steps, preempted {urgent.num_preemptions} times"
        diagram.text(0.15, y, told, bold=True)
        grid.paint(diagram, y + 0.5, served, {"A": "A", "B": "B", "C": "C", "U": "U, urgent"})
    diagram.legend(MEANINGS, 0.15, 14.3, step=4.2, size=0.6)


def fair_grid(figure: Figure, scheme: Scheme) -> None:
    """Priorities and groups on two batch slots."""
    served = run_five()
    grid = Grid(left=5.3)
    diagram = Diagram(figure, scheme, width=15.8, height=8.35)
    grid.numbers(diagram, 0.5, range(len(served.steps)))
    names = {
        request.request_id: f"{request.request_id}: {request.group}, priority {request.priority}"
        for _, request in served.arrivals
    }
    grid.paint(diagram, 1.0, served, names)
    for group, first in (("texts", 0), ("images", 7)):
        last = {"texts": 7, "images": 10}[group]
        diagram.span(grid.left + first + 0.1, grid.left + last - 0.1, 6.35, f"batches of {group}")
    diagram.legend(MEANINGS, 0.15, 7.5, step=3.9, size=0.6)


def victim_slot(figure: Figure, scheme: Scheme) -> None:
    """Incident 4: which request is looked at, which evicted, which gets the blocks, and which the batch slot."""
    diagram = Diagram(figure, scheme, width=24, height=12.5)
    roles: dict[str, str | None] = {"newest": "generated", "head": "prompt", "": None}
    panels = [
        ("1. it looks at head", ["newest"], ["head"], ["newest"] * 5 + [""] * 2),
        ("2. it evicts newest", [], ["newest", "head"], [""] * 7),
        ("3. with the bug", ["newest"], ["head"], ["head"] * 7),
        ("4. right", ["head"], ["newest"], ["head"] * 7),
    ]
    for place, (title, batch, queue, blocks) in enumerate(panels):
        x, y = 0.3 + 12 * (place % 2), 0.6 + 5.9 * (place // 2)
        diagram.text(x, y, title, bold=True)
        for row, (name, members) in enumerate((("batch", batch), ("queue", queue))):
            top = y + 0.8 + 1.3 * row
            diagram.text(x, top + 0.5, name, fontsize=SMALL)
            for slot in range(max(1, len(members))):
                member = members[slot] if members else ""
                diagram.cell(x + 2.2 + 3.0 * slot, top, member, roles[member], width=3.0, fontsize=SMALL)
        diagram.text(x, y + 3.9, "blocks", fontsize=SMALL)
        shades = [roles[owner] or "free" for owner in blocks]
        diagram.row(x + 2.2, y + 3.4, [""] * 7, shades, width=1.2)


# --- plots ----------------------------------------------------------------------------------------------------------


def prefill_tokens(step: TraceStep) -> int:
    """Tokens that a step computed of requests of which nothing was in the cache."""
    return sum(entry.num_new_tokens for entry in step.batch if not entry.num_computed_tokens)


def thrash_tokens(figure: Figure, scheme: Scheme) -> None:
    """Prefill tokens so far, step by step."""
    axes = plot(figure, xlabel="step", ylabel="prefill tokens so far")
    for (name, kind), role in zip(THRASH.items(), ("wasted", "generated"), strict=True):
        totals = list(accumulate(map(prefill_tokens, run_thrash(kind).steps)))
        axes.plot(totals, color=color(role, scheme), label=f"{name}: {totals[-1]:,}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def who_runs(figure: Figure, scheme: Scheme) -> None:
    """40 requests before and after: a mark wherever one computed something."""
    panels: Sequence[Axes] = figure.subplots(2, 1, sharex=True)
    for axes, name in zip(panels, ("before", "after"), strict=True):
        served = run_forty(name)
        for role, of_prefill in (("generated", False), ("prompt", True)):
            marks: Any = [
                [step.step for step in served.steps for entry in step.batch if is_mark(entry, number, of_prefill)]
                for number in range(NUM_REQUESTS)
            ]
            axes.eventplot(marks, colors=color(role, scheme), linelengths=0.9, linewidths=0.7)
        axes.set_title(f"{name}: {served.tally.num_steps:,} steps")
        axes.set(ylabel="request", ylim=(NUM_REQUESTS - 0.5, -0.5), xlim=(-10, None))
        axes.grid(axis="y", visible=False)
    panels[1].set_xlabel("step")


def is_mark(entry: Any, request_id: RequestId, of_prefill: bool) -> bool:
    """Whether an entry of a trace is this request's, and of this kind."""
    return entry.request_id == request_id and entry.is_prefill is of_prefill


def latencies(figure: Figure, scheme: Scheme) -> None:
    """Steps until each of the 40 requests has finished, before and after."""
    axes = plot(figure, xlabel="request, in the order of arrival", ylabel="steps until its last token")
    timeout = TIMEOUT * run_forty("after").tally.num_steps
    for (name, role), marker in zip({"before": "wasted", "after": "generated"}.items(), "so", strict=True):
        finished = run_forty(name).tally.finished
        ends = [finished[number] + 1 for number in range(NUM_REQUESTS)]
        starved = sum(end > timeout for end in ends)
        axes.plot(ends, marker, color=color(role, scheme), markersize=5, label=f"{name}: {starved} of 40 starved")
    axes.axhline(timeout, color=INK[scheme], linestyle=":", linewidth=1.2)
    axes.text(0, timeout + 20, "timeout", color=INK[scheme], size=SMALL)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def bypasses(figure: Figure, scheme: Scheme) -> None:
    """Admissions in a row that bypassed an older request, under endless urgent requests."""
    axes = plot(figure, xlabel="step", ylabel="bypasses in a row")
    kinds: list[tuple[Callable[..., PagedScheduler], str]] = [
        (PriorityScheduler, "wasted"),
        (FairScheduler, "generated"),
    ]
    for kind, role in kinds:
        _, counts = run_endless(kind)  # type: ignore[arg-type]
        axes.plot(counts, color=color(role, scheme), label=kind.__name__, linewidth=1.6)
    axes.axhline(STARVATION_BOUND, color=INK[scheme], linestyle=":", linewidth=1.2)
    axes.text(1495, STARVATION_BOUND + 6, "the bound, 64", color=INK[scheme], size=SMALL, ha="right")
    axes.set_ylim(0, 250)
    axes.legend(loc="upper left")


# --- every interleaving -----------------------------------------------------------------------------------------------


def by_walking(case: Case, num_actions: int, seed: int = 0) -> list[int]:
    """The states that a random client has met after each of its actions; it begins again where nothing can happen."""
    rng, seen, counts = Random(seed), set[int](), list[int]()
    world = World(case.make(), case.num_requests)
    while len(counts) < num_actions:
        possible = list(world.actions(case.shapes))
        if not possible:
            world = World(case.make(), case.num_requests)
            continue
        moment = world.do(rng.choice(possible), case.shapes)
        assert moment is not None
        seen.add(world.key(moment.after, own_state(world.scheduler)))
        counts.append(len(seen))
    return counts


def every_interleaving(figure: Figure, scheme: Scheme) -> None:
    """How many states of a scheduler a random client meets, against how many there are."""
    axes = plot(figure, xlabel="actions", ylabel="states met")
    case = next(each for each in cases("paged") if each.name == "paged recompute")
    report = explore(case)
    counts = by_walking(case, 60_000)
    axes.plot(range(1, len(counts) + 1), counts, color=color("prompt", scheme), label="random client", linewidth=1.6)
    axes.axhline(report.num_states, color=INK[scheme], linestyle=":", linewidth=1.2)
    axes.plot(report.num_actions, report.num_states, "o", color=color("generated", scheme), label="breadth first: done")
    axes.set_xscale("log")
    axes.set_xlim(10, len(counts))
    axes.set_ylim(0, report.num_states * 1.15)
    axes.legend(loc="center left")


if __name__ == "__main__":
    main()
