"""The demo's third part: what a scheduler is for. A burst of requests, served by static and by continuous batching.

All requests arrive at once and want answers of different lengths. Both schedulers have the same batch slots and the
same memory. The grids are drawn from the traces of the two runs: a row a request, a column a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from gettext import gettext as _
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from minicache.errors import MinicacheError
from minicache.palette import PALETTE, color
from minicache.plots import save_plot
from minicache.trace import to_chrome_trace
from minicache_cli.show import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.grammar import Tokenizer
    from minicache.model import MiniGPT
    from minicache.trace import TraceStep

MAX_NUM_SEQS = 3
NUM_TURNS = 3
ANSWER_LENS = (8, 60, 21, 14, 44, 9, 30, 12, 52, 17)
"""Tokens that each request of the burst asks for: no batch is of one length."""

STAGES = ("static", "continuous")

GLYPHS = {"prompt": "▒", "generated": "█", "end": "▌"}
"""What a step of a request looks like: unlike each other without colours, too."""

NUM_CHATS = 200
"""Requests of the simulated burst, of ShareGPT's lengths."""

NUM_SLOTS = 15_728
"""Tokens that the 12 GB hold which OPT-13B's weights leave on an A100-40GB (phase 2), at 16 bits a number."""


@dataclass(frozen=True)
class Run:
    """The burst, served by one scheduler.

    Attributes:
        steps: the trace, on a clock of real seconds.
        token_ids: the answers, a list a request.
        seconds: from the first step to the last.
    """

    steps: list[TraceStep]
    token_ids: list[list[int]]
    seconds: float

    @property
    def busy_share(self) -> float:
        """Batch slots that computed a token, of all slots of all steps."""
        return sum(len(step.batch) for step in self.steps) / (MAX_NUM_SEQS * len(self.steps))

    @property
    def finish_steps(self) -> list[int]:
        """The steps after which each request finished."""
        return [step.step + 1 for step in self.steps for event in step.events if event.kind == "finish"]


def show(model: MiniGPT, tokenizer: Tokenizer, texts: Sequence[str], out: Path, console: Console) -> None:
    """Serve the burst with both schedulers, print grids and throughput, and save plot and traces in `out`.

    Raises:
        MinicacheError: the schedulers disagree about a token.
    """
    prompts = [texts[index % len(texts)] for index in range(len(ANSWER_LENS))]
    runs = _best_of_turns(model, tokenizer, prompts, console)
    console.print(
        _("{num} requests arrive at once and request {least} to {most} tokens; {slots} batch slots.").format(
            num=len(prompts), least=min(ANSWER_LENS), most=max(ANSWER_LENS), slots=MAX_NUM_SEQS
        ),
        soft_wrap=True,
    )
    for stage, run in runs.items():
        console.print(_grid(stage, run, console.width, most_steps=max(len(run.steps) for run in runs.values())))
    console.print(_legend())
    console.print(_totals(runs))
    console.print(f"[bold]{verdict(runs)}[/]")
    console.print(_simulated())
    save_plot(partial(_plot, runs=runs), "A burst of requests: who computes at which step", out / "burst.png")
    console.print(_("Plot: {file}").format(file=f"[bold]{out / 'burst.png'}[/]"), soft_wrap=True)
    for stage, run in runs.items():
        file = out / f"burst-{stage}.trace.json"
        file.write_text(json.dumps(to_chrome_trace(run.steps)), encoding="utf-8")
        console.print(_("Trace, for a trace viewer: {file}").format(file=f"[bold]{file}[/]"), soft_wrap=True)


def _best_of_turns(model: MiniGPT, tokenizer: Tokenizer, prompts: list[str], console: Console) -> dict[str, Run]:
    """The schedulers take turns; of each, its quickest run: a busy moment of the machine decides nothing."""
    turns = [stage for _ in range(NUM_TURNS) for stage in STAGES]
    best: dict[str, Run] = {}
    for stage in track(turns, description=_("Serving the burst"), console=console, transient=True):
        run = _serve(model, tokenizer, prompts, stage)
        if any(run.token_ids != other.token_ids for other in best.values()):
            raise MinicacheError(_("the scheduler changed the tokens. That is a bug: please report it."))
        best[stage] = min(run, best.get(stage, run), key=lambda each: each.seconds)
    return best


def verdict(runs: Mapping[str, Run]) -> str:
    """What the totals show: the steps follow from the answers' lengths, the time from the machine too."""
    static, continuous = (runs[stage] for stage in STAGES)
    speed_up = static.seconds / continuous.seconds
    if round(speed_up, 1) > 1:
        message = _("Same tokens, in {steps} steps instead of {more}, {speed_up:.1f} times as fast.")
    else:
        message = _(
            "Same tokens, in {steps} steps instead of {more}, but in no less time ({speed_up:.1f} ×), which depends on "
            "the machine's other load."
        )
    return message.format(steps=len(continuous.steps), more=len(static.steps), speed_up=speed_up)


def _serve(model: MiniGPT, tokenizer: Tokenizer, prompts: list[str], stage: str) -> Run:
    from minicache.engine.llm import LLM
    from minicache.engine.sampling import SamplingParams
    from minicache.scheduler.observe import Recorder

    steps: list[TraceStep] = []
    start = time.perf_counter()
    recorder = Recorder(steps.append, clock=lambda: time.perf_counter() - start)
    llm = LLM(model, tokenizer=tokenizer, scheduler=stage, max_num_seqs=MAX_NUM_SEQS, observers=[recorder])
    params = [
        SamplingParams(max_tokens=length, temperature=1.0, seed=index, ignore_eos=True)
        for index, length in enumerate(ANSWER_LENS)
    ]
    completions = llm.generate(prompts, params)
    return Run(steps, [list(completion.token_ids) for completion in completions], steps[-1].time + steps[-1].seconds)


def cells(steps: Sequence[TraceStep], num_requests: int) -> list[list[str | None]]:
    """What each request did at each step: "prompt", "generated", "end", "waiting" or None, once it is gone."""
    rows: list[list[str | None]] = [["waiting"] * len(steps) for _ in range(num_requests)]
    numbers: dict[object, int] = {}  # the engine names the requests; they arrive in the order of the prompts
    for column, step in enumerate(steps):
        for event in step.events:
            if event.kind == "arrive":
                numbers[event.request_id] = len(numbers)
        for entry in step.batch:
            rows[numbers[entry.request_id]][column] = "prompt" if entry.is_prefill else "generated"
        for event in step.events:
            if event.kind == "finish":
                row = rows[numbers[event.request_id]]
                row[column] = "end"
                row[column + 1 :] = [None] * (len(steps) - column - 1)
    return rows


def _grid(stage: str, run: Run, width: int, most_steps: int) -> Text:
    """The run as coloured characters, as many steps to a character as the terminal makes necessary."""
    per_cell = -(-most_steps // max(20, width - 8))
    text = Text(_("{stage} batching, {num} steps").format(stage=stage, num=len(run.steps)), style="bold")
    text.append(_(" ({num} to a character)").format(num=per_cell) if per_cell > 1 else "", style="dim")
    text.append("\n")
    for index, row in enumerate(cells(run.steps, len(ANSWER_LENS))):
        text.append(f"  {index:2}  ", style="dim")
        for start in range(0, len(row), per_cell):
            text.append(*_cell(row[start : start + per_cell]))
        text.append("\n")
    return text


def _cell(kinds: Sequence[str | None]) -> tuple[str, str]:
    """One character and its style: the end if it falls here, else the prompt, else a generated token."""
    for kind in ("end", "prompt", "generated"):
        if kind in kinds:
            return GLYPHS[kind], color(kind, "dark")
    return ("·", "dim") if "waiting" in kinds else (" ", "dim")


def _legend() -> Text:
    text = Text("  ")
    for role, said in {"prompt": _("prompt"), "generated": _("a token"), "end": _("the last token")}.items():
        text.append(GLYPHS[role], style=color(role, "dark"))
        text.append(f" {said}   ", style="dim")
    return text.append(_("· waits"), style="dim")


def _totals(runs: dict[str, Run]) -> Table:
    headings = ("", _("steps"), _("busy slots"), _("mean steps to finish"), _("seconds"), _("tokens / s"))
    caption = _("best of three runs · busy slots: share of all steps' batch slots that computed a token")
    table = figures(*headings, caption=caption)
    for stage, run in runs.items():
        table.add_row(
            stage,
            str(len(run.steps)),
            f"{100 * run.busy_share:.0f} %",
            f"{fmean(run.finish_steps):.0f}",
            f"{run.seconds:.2f}",
            f"{sum(map(len, run.token_ids)) / run.seconds:,.0f}",
        )
    return table


def _simulated() -> Table:
    """What the same schedulers would do with many chats on a GPU: simulated, not measured."""
    from minicache.arithmetic.specs import A100_40GB, OPT_13B
    from minicache.scheduler import create_scheduler
    from minicache.simulator.costs import RooflineCost, kv_token_bytes
    from minicache.simulator.serving import ServingSimulation
    from minicache.simulator.workload import SHAREGPT, generate

    chats = [replace(chat, time=0.0) for chat in generate(SHAREGPT, NUM_CHATS, seed=0)]
    headings = ("", _("minutes"), _("tokens / s"), _("requests at once"), _("preempted"))
    table = figures(
        *headings,
        title=_("simulated: {num} chats at once, OPT-13B on one {gpu}").format(num=NUM_CHATS, gpu=A100_40GB.name),
        caption=_("the same schedulers, with step times from a formula; the first two know every answer's length"),
    )
    for stage, kv_cache_dtype in ((STAGES[0], None), (STAGES[1], None), ("paged", None), ("paged", "int8")):
        num_slots = NUM_SLOTS * kv_token_bytes(OPT_13B) // kv_token_bytes(OPT_13B, kv_cache_dtype=kv_cache_dtype)
        scheduler = create_scheduler(stage, num_blocks=num_slots // 16, max_model_len=SHAREGPT.max_model_len)
        cost = RooflineCost(OPT_13B, A100_40GB, kv_cache_dtype=kv_cache_dtype)
        report = ServingSimulation(scheduler, cost, chats).run()
        table.add_row(
            _("{stage}, {dtype} cache").format(stage=stage, dtype=kv_cache_dtype) if kv_cache_dtype else stage,
            f"{report.makespan / 60:.1f}",
            f"{report.tokens_per_second:,.0f}",
            f"{report.mean_batch_size:.1f}",
            str(report.num_preemptions),
        )
    return table


def _plot(figure: Figure, runs: dict[str, Run]) -> None:
    """Both grids, one above the other on the same axis of steps."""
    from matplotlib.patches import Patch

    panels = figure.subplots(len(runs), sharex=True)
    for axes, (stage, run) in zip(panels, runs.items(), strict=True):
        for index, row in enumerate(cells(run.steps, len(ANSWER_LENS))):
            for role in GLYPHS:
                spans = [(column, 1) for column, kind in enumerate(row) if kind == role]
                axes.broken_barh(spans, (index - 0.4, 0.8), color=color(role))
        axes.set_title(f"{stage} batching: {len(run.steps)} steps", loc="left")
        axes.set_ylabel("request")
        axes.invert_yaxis()
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="y")
    panels[-1].set_xlabel("step")
    labels = [Patch(color=color(role), label=PALETTE[role].meaning) for role in GLYPHS]
    figure.legend(handles=labels, loc="outside lower center", ncols=len(labels))
