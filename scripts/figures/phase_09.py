"""The figures of phase 9: the stall, prompts in chunks, the protected request, what a budget trades, and draft tokens.

The grids and the verified pass are traces that the real schedulers and MiniGPT left. The rest is drawn from
benchmarks/results/chunked.json and speculative.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.palette import INK, Scheme, color
from minicache.request import Request, RequestId
from minicache.scheduler import ChunkedPrefillScheduler, create_scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.trace import TraceStep
from scripts.figures.style import TYPE_SIZE, Diagram, draw

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85

NAMES = {"fair": "whole prompts", "chunked": "in chunks"}
ROLES = {"fair": "end", "phased": "wasted", "chunked": "generated"}


def main() -> None:
    """Draw them all."""
    draw("chunked-stall", stall, size=(7.2, 3.5))
    draw("chunked-steps", steps_of_both, size=(7.2, 4.3))
    draw("chunked-protected", protected, size=(7.2, 3.0))
    draw("chunked-ttft-tpot", ttft_against_tpot, size=(7.2, 3.5))
    draw("chunked-goodput", goodput, size=(7.2, 3.5))
    draw("speculative-pass", verified_pass, size=(7.2, 3.2))
    draw("speculative-speed", speculative_speed, size=(7.2, 3.4))


def results(name: str) -> dict[str, Any]:
    """What a benchmark found."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# --- theory 1: the stall ----------------------------------------------------------------------------------------------


def stall(figure: Figure, scheme: Scheme) -> None:
    """One request's ITL while another request's long prompt is computed, modelled and measured."""
    found = results("chunked")
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"simulated": "an A100, modelled", "measured": "this course's engine, measured"}
    for axes, (where, title) in zip(panels, titles.items(), strict=True):
        for way, marker in (("fair", "s"), ("chunked", "o")):
            points = [point for point in found[where][way]["points"] if point[0] > -200]
            when, latencies = zip(*points, strict=True)
            axes.plot(
                [each / 1e3 for each in when],
                latencies,
                marker,
                color=color(ROLES[way], scheme),
                markersize=3.2,
                label=NAMES[way],
            )
        axes.axvline(0, color=INK[scheme], linewidth=1, linestyle=":")
        axes.set(yscale="log", xlabel="seconds since the long prompt arrived", title=title)
    panels[0].set_xlim(-0.25, 1.3)
    panels[1].set_xlim(-0.25, 2.6)
    panels[0].set_ylabel("inter-token latency, ms")
    panels[0].set_yticks([10, 20, 50, 100, 200, 500, 1000], ["10", "20", "50", "100", "200", "500", "1,000"])
    panels[0].minorticks_off()
    panels[0].legend(loc="center right", bbox_to_anchor=(1.0, 0.62), markerscale=1.6)


# --- theory 2: one budget ---------------------------------------------------------------------------------------------

BUDGET, PROMPTS, NUM_ANSWERED = 1024, {"A": 800, "B": 800, "C": 800}, 4


def run_three(name: str) -> list[TraceStep]:
    """Three prompts of 800 tokens, all there from the start, with a budget of 1,024."""
    steps: list[TraceStep] = []
    scheduler = create_scheduler(name, num_blocks=256, max_num_batched_tokens=BUDGET)
    requests = (Request(request_id, [0] * prompt, NUM_ANSWERED) for request_id, prompt in PROMPTS.items())
    drive(observe(scheduler, Recorder(steps.append)), requests)
    return steps


def steps_of_both(figure: Figure, scheme: Scheme) -> None:
    """How many tokens of each request each step computes, whole and in chunks."""
    diagram = Diagram(figure, scheme, width=24, height=14.4)
    left, width = 5.2, 2.9
    for y, name in ((0.5, "fair"), (7.0, "chunked")):
        steps = run_three(name)
        diagram.text(0.3, y, NAMES[name], bold=True)
        for column, step in enumerate(steps):
            x = left + column * width
            diagram.text(x + width / 2, y, f"step {step.step}", align="center", fontsize=SMALL)
            diagram.text(x + width / 2, y + 5.05, f"{step.num_tokens:,}", align="center", bold=step.num_tokens > 999)
            for row, request_id in enumerate(PROMPTS):
                _share(diagram, x, y + 0.7 + 1.3 * row, width, step, request_id)
        for row, request_id in enumerate(PROMPTS):
            diagram.text(0.3, y + 1.35 + 1.3 * row, f"{request_id}: {PROMPTS[request_id]} tokens", fontsize=SMALL)
        diagram.text(0.3, y + 5.05, "tokens of the step", fontsize=SMALL)
    roles = {"prompt": "of its prompt", "generated": "decode", "end": "its last token", "free": "waits"}
    diagram.legend(roles, 0.3, 13.3, step=5.4, size=0.7)


def _share(diagram: Diagram, x: float, y: float, width: float, step: TraceStep, request_id: RequestId) -> None:
    """What a request computes in a step: a cell with the number of tokens; an empty one if it waits."""
    entry = next((each for each in step.batch if each.request_id == request_id), None)
    ends = any(event.kind == "finish" and event.request_id == request_id for event in step.events)
    if entry is not None:
        role = "end" if ends else "prompt" if entry.is_prefill else "generated"
        diagram.cell(x, y, str(entry.num_new_tokens), role, width=width, height=1.2)
    elif step.num_waiting and step.step < 3:
        diagram.cell(x, y, "", "free", width=width, height=1.2)


# --- theory 3: the protected request ----------------------------------------------------------------------------------


@dataclass
class Watched(Observer):
    """Notes the protected request when a step is scheduled, and which were preempted in it."""

    protected: list[RequestId | None]
    preempted: list[list[RequestId]]

    def on_schedule(self, scheduler: Any, output: SchedulerOutput) -> None:
        """One more step."""
        self.protected.append(scheduler.protected.request_id if scheduler.protected else None)
        self.preempted.append(list(output.preempted))


LATER = {0: [("A", 24, 2, 1)], 1: [("B", 6, 5, 0)], 2: [("C", 6, 5, 0)], 4: [("D", 4, 3, 0)]}
"""Step → requests that arrive before it: name, tokens of the prompt, tokens to generate, priority (lower first)."""


def run_protected() -> tuple[list[TraceStep], Watched]:
    """A arrives first, with the lowest priority. Its prompt goes on in chunks until later arrivals need its blocks."""
    steps: list[TraceStep] = []
    watched = Watched([], [])
    scheduler = observe(
        ChunkedPrefillScheduler(num_blocks=8, block_size=4, max_num_batched_tokens=12, long_prefill_threshold=4),
        watched,
        Recorder(steps.append),
    )
    arrivals = [
        (step, Request(name, [0] * prompt, output, priority=priority, ignore_eos=True, arrival_time=float(step)))
        for step, coming in LATER.items()
        for name, prompt, output, priority in coming
    ]
    drive(scheduler, arrivals=arrivals)
    return steps, watched


def protected(figure: Figure, scheme: Scheme) -> None:
    """What each computes, which is preempted in the middle of its prompt, and which is protected."""
    steps, watched = run_protected()
    names = [(name, step, priority) for step, coming in LATER.items() for name, _, _, priority in coming]
    diagram = Diagram(figure, scheme, width=24, height=10.0)
    left = 5.6
    width = (24 - left - 0.3) / len(steps)
    ends = {event.request_id: step.step for step in steps for event in step.events if event.kind == "finish"}
    diagram.text(0.3, 0.5, "step", fontsize=SMALL)
    for column, step in enumerate(steps):
        diagram.text(left + (column + 0.5) * width, 0.5, str(step.step), align="center", fontsize=SMALL)
    for row, (name, came, priority) in enumerate(names):
        y = 1.1 + row * 1.3
        diagram.text(0.3, y + 0.6, f"{name}, priority {priority}", fontsize=SMALL)
        for column, step in enumerate(steps):
            x = left + column * width
            entry = next((each for each in step.batch if each.request_id == name), None)
            if name in watched.preempted[column]:
                diagram.cell(x, y, "lost", "wasted", width=width, height=1.2, fontsize=SMALL)
            elif entry is not None:
                role = "end" if ends[name] == column else "prompt" if entry.is_prefill else "generated"
                diagram.cell(x, y, str(entry.num_new_tokens), role, width=width, height=1.2)
            elif came <= column < ends[name]:
                diagram.cell(x, y, "", "free", width=width, height=1.2)
    y = 1.1 + len(names) * 1.3
    diagram.text(0.3, y + 0.6, "protected", bold=True)
    for column, request_id in enumerate(watched.protected):
        diagram.text(left + (column + 0.5) * width, y + 0.6, str(request_id or "–"), align="center", fontsize=SMALL)
    roles = {"prompt": "prompt", "generated": "decode", "end": "last token", "free": "waits", "wasted": "preempted"}
    diagram.legend(roles, 0.3, 8.9, step=4.6, size=0.7)


# --- theory 4: what it costs and gains --------------------------------------------------------------------------------


def ttft_against_tpot(figure: Figure, scheme: Scheme) -> None:
    """TTFT and ITL as the budget moves: p99 of each, and p99 of TPOT."""
    found = results("chunked")["budget"]
    panels = figure.subplots(1, 2, sharey=True)
    looks = {"gap_p99_ms": "ITL, p99, ms", "tpot_p99_ms": "a request's TPOT, p99, ms"}
    for axes, (key, label) in zip(panels, looks.items(), strict=True):
        points = [(point[key], point["ttft_p99_ms"] / 1e3, point["budget"]) for point in found["points"]]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=color("generated", scheme))
        for x, y, budget in points:
            if budget <= (2048 if key == "gap_p99_ms" else 512):  # beyond this they overlap
                axes.annotate(f"{budget:,}", (x, y), (4, 6), textcoords="offset points", size=SMALL, color=INK[scheme])
        axes.plot(
            found["fair"][key],
            found["fair"]["ttft_p99_ms"] / 1e3,
            "s",
            color=color("end", scheme),
            markersize=8,
            label="whole prompts",
        )
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0, top=1.15 * max(y for _, y, _ in points))
    panels[0].set_xticks([20, 50, 100, 200, 400], ["20", "50", "100", "200", "400"])
    panels[1].set_xticks([20, 40, 60, 80], ["20", "40", "60", "80"])
    for axes in panels:
        axes.minorticks_off()
    panels[0].set_ylabel("time to first token, p99, s")
    panels[0].legend(loc="lower left")


def goodput(figure: Figure, scheme: Scheme) -> None:
    """Latencies against the rate, and the limits of the strict SLO."""
    found = results("chunked")["goodput"]
    ways, slo = found["conversation"]["ways"], found["slos"]["strict"]
    itl, ttft = figure.subplots(1, 2)
    labels = {
        "fair": ("whole, with decodes", "fair", "s"),
        "phased": ("whole, decodes wait", "phased", "^"),
        f"chunked_{slo['budget']}": (f"chunks of {slo['budget']}", "chunked", "o"),
    }
    for way, (label, role, marker) in labels.items():
        rates = [point["rate"] for point in ways[way]]
        shade = color(ROLES[role], scheme)
        style = {"color": shade, "marker": marker, "markersize": 4, "linewidth": 1.5}
        itl.plot(rates, [point["gap_p99_ms"] for point in ways[way]], label=label, **style)
        ttft.plot(rates, [point["ttft_p99_ms"] / 1e3 for point in ways[way]], **style)
    _limit(itl, slo["limit_ms"], f"at most {slo['limit_ms']:.0f} ms", scheme, right=0.98)
    _limit(ttft, found["ttft_p99_limit_s"], f"at most {found['ttft_p99_limit_s']:.0f} s", scheme, right=0.3)
    itl.set(yscale="log", xlabel="requests a second", title="ITL, p99, ms")
    ttft.set(xlabel="requests a second", title="time to first token, p99, s", ylim=(0, 12))
    itl.set_yticks([50, 100, 200, 500, 1000, 2000], ["50", "100", "200", "500", "1,000", "2,000"])
    itl.minorticks_off()
    itl.legend(loc="upper left", fontsize=SMALL)
    itl.set_ylim(30, 6000)


def _limit(axes: Axes, level: float, words: str, scheme: Scheme, right: float) -> None:
    """A dashed line, with words that end at a part `right` of it."""
    axes.axhline(level, color=INK[scheme], linewidth=1.2, linestyle="--")
    axes.annotate(words, (right, level), (0, 4), ("axes fraction", "data"), "offset points", size=SMALL, ha="right")


# --- theory 5: draft tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A forward pass that verified draft tokens: its tokens, what the model picked, and the KV entries before it."""

    num_cached: int
    shown: list[int]
    picked: list[int]
    num_accepted: int


def passes_of_a_run() -> Iterator[Pass]:
    """The passes behind the prompt of MiniGPT's answer to the first of the benchmark's repeating prompts."""
    import torch
    from benchmarks.speculative import NUM_NEW, make_prompts

    from minicache.engine.sampling import SamplingParams, TokenSampler
    from minicache.engine.speculative import NgramDrafter, verify
    from minicache.model import load_minigpt

    model, sampler = load_minigpt(), TokenSampler(SamplingParams())
    prompt = make_prompts(model, "again")[0]
    text, drafts = prompt, list[int]()
    while len(text) < len(prompt) + NUM_NEW:
        with torch.inference_mode():
            logits = model(torch.tensor([text + drafts]))[0, len(text) - 1 :]
        [tokens] = verify(logits, [drafts], [sampler])
        if text is not prompt:
            yield Pass(len(text) - 1, [text[-1], *drafts], logits.argmax(-1).tolist(), len(tokens) - 1)
        text = text + tokens
        drafts = NgramDrafter().draft(text, 5)


def verified_pass(figure: Figure, scheme: Scheme) -> None:
    """The first pass with five draft tokens of which some are accepted, and not all."""
    from minicache.grammar import Tokenizer

    each = next(each for each in passes_of_a_run() if len(each.shown) == 6 and 1 <= each.num_accepted <= 3)
    accepted = each.num_accepted
    words = Tokenizer().words
    diagram = Diagram(figure, scheme, width=24, height=10.6)
    left, width = 4.6, 3.15
    rows: dict[str, tuple[float, list[str | None], list[int]]] = {
        "shown": (1.2, ["generated", *["shared"] * accepted, *["wasted"] * (5 - accepted)], each.shown),
        "picked": (4.0, [*["generated"] * (accepted + 1), *[None] * (5 - accepted)], each.picked),
    }
    diagram.text(left + width / 2, 0.5, "newest token", align="center", fontsize=SMALL)
    diagram.text(left + 3.5 * width, 0.5, "five draft tokens", align="center", fontsize=SMALL)
    for name, (y, roles, tokens) in rows.items():
        diagram.text(0.3, y + 0.65, name, bold=True)
        labels = [words[token] for token in tokens]
        diagram.row(left, y, labels, roles, width=width, height=1.3)
    for place in range(6):
        diagram.arrow((left + (place + 0.5) * width, 2.55), (left + (place + 0.5) * width, 3.95))
    diagram.text(0.3, 7.15, "KV entries", bold=True)
    kept = ["generated", *["shared"] * accepted, *["free"] * (5 - accepted)]
    positions = [str(each.num_cached + place) for place in range(6)]
    diagram.row(left, 6.5, positions, kept, width=width, height=1.3)
    cut = left + (accepted + 1) * width
    diagram.span(left + 0.1, cut - 0.1, 8.2, "kept")
    diagram.span(cut + 0.1, left + 6 * width - 0.1, 8.2, f"truncate({each.num_cached + accepted + 1})")
    roles_told = {"generated": "the model's own", "shared": "accepted", "wasted": "rejected"}
    for (role, meaning), x in zip(roles_told.items(), (0.3, 7.2, 15.6), strict=True):
        diagram.legend({role: meaning}, x, 9.6, size=0.7)


def speculative_speed(figure: Figure, scheme: Scheme) -> None:
    """Acceptance, tokens a step and speed-up, over the number of draft tokens, on both kinds of texts."""
    found = results("speculative")
    panels = figure.subplots(1, 3)
    titles = {"acceptance": "share accepted", "tokens_per_step": "tokens a step", "speedup": "times as fast"}
    kinds = {"again": ("asked again", "shared", "o"), "new": ("new texts", "wasted", "s")}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for kind, (label, role, marker) in kinds.items():
            points = found[kind]["points"]
            xs, ys = [point["num_drafts"] for point in points], [point[key] for point in points]
            axes.plot(xs, ys, marker=marker, color=color(role, scheme), label=label, markersize=4.5)
        axes.set(xlabel="draft tokens a step", xticks=_ticks(found["new"]["points"]), ylim=(0, None))
        axes.set_title(title, fontsize=TYPE_SIZE)
        if key == "speedup":
            axes.axhline(1, color=INK[scheme], linewidth=1.2, linestyle="--")
    panels[0].set_ylim(0, 1)
    panels[1].legend(loc="upper left", fontsize=SMALL)


def _ticks(points: Sequence[dict[str, Any]]) -> list[int]:
    """Every number of draft tokens that is a multiple of 4."""
    return [point["num_drafts"] for point in points if point["num_drafts"] % 4 == 0]


if __name__ == "__main__":
    main()
