"""`minicache sweep`: a simulated fleet, or server, at many rates: policies, schedulers and sizes side by side."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from minicache.palette import color
from minicache.plots import save_plot
from minicache_cli.folders import make_folder
from minicache_cli.labs import Mine, labs_on_ray, use_labs
from minicache_cli.options import asked, usage_errors, with_options
from minicache_cli.show import REPORT, progress, show_files
from minicache_cli.simulate import AcceleratorName, ModelName, WorkloadName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.simulator.sweep import Point, Result

app = typer.Typer()

Value = TypeVar("Value", float, int, str)
RESULTS, PLOT = "results.jsonl", "sweep.png"
METRICS = (
    ("ttft_p50", "TTFT\np50, s", ".3g"),
    ("ttft_p99", "TTFT\np99, s", ".3g"),
    ("hit_rate", "hits", ".1%"),
    ("requests_per_second", "done/s", ".2f"),
    ("num_refused", "refused", ",.0f"),
)
"""Of a result: its name, its heading, its digits."""
ROLES = ("generated", "end", "shared", "wasted")
MARKERS = "osD^v"
"""Lines of a plot take their colors from the first, and when those are used up, the next marker."""


@dataclass(frozen=True)
class Grid:
    """The values of which every combination is run."""

    rates: str = asked("1,2,4,8", "Requests per second to the whole fleet.", "R,R")
    policies: str = asked(
        "round_robin,power_of_two,prefix_affinity",
        "Routers, of round_robin, power_of_two, prefix_affinity; default: all.",
        "P,P",
        show_default=False,
    )
    schedulers: str = asked("chunked", "Schedulers, of static, continuous, paged, fair, chunked.", "S,S")
    sizes: str = asked("2,4", "Numbers of replicas; 1: a server without a router.", "N,N")
    seeds: str = asked("0", "Seeds; one run each, and the table shows their mean.", "S,S")


@dataclass(frozen=True)
class Common:
    """What all runs have in common: fields of `minicache.simulator.sweep.Point`."""

    workload: WorkloadName = asked(
        "chats", "chats, system-prompt; or lengths alone: sharegpt, alpaca, azure-code, azure-conversation.", "WORKLOAD"
    )
    count: int = asked(1000, "Requests per run.", "N", min=1)
    model: ModelName = asked("llama-3-8b", "The model, as for `minicache simulate`.", "MODEL")
    accelerator: AcceleratorName = asked(
        "a100-40gb", "Each replica's accelerator, as for `minicache simulate`.", "NAME"
    )
    num_blocks: int | None = asked(None, "Cache blocks per replica; default: as many as fit.", "N", min=1)
    max_num_seqs: int = asked(64, "Batch slots per replica.", "N", min=1)
    max_num_batched_tokens: int | None = asked(
        None, "Token budget of a step; default: 2048, or the longest whole prompt.", "N", min=1
    )


@app.command()
@with_options()
def sweep(
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help=f"Where {RESULTS} and {PLOT} are written; an interrupted sweep resumes there."
        ),
    ],
    varied: Grid,
    common: Common,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of processes; default: one per processor.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Run on Ray (extra scale) instead of a process pool.")] = False,
    mine: Mine = False,
) -> None:
    """Simulate a fleet at many rates: policies, schedulers and sizes side by side.

    Each result is written as it comes: a sweep that was stopped goes on
    where it was when the same command is given again. Replicas have
    prefix caches, where prompts have tokens and the scheduler can share.
    """
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    from minicache.simulator.sweep import Point, ResultsFile, grid

    jobs = jobs or os.cpu_count() or 1
    with usage_errors():
        points = grid(
            Point(**asdict(common), code=_fingerprint(mine)),
            _values("--rates", varied.rates, float),
            _values("--policies", varied.policies, str),
            _values("--schedulers", varied.schedulers, str),
            _values("--sizes", varied.sizes, int),
            _values("--seeds", varied.seeds, int),
        )
        for point in points:
            point.check()
    make_folder(out)
    with ResultsFile(out / RESULTS) as results:
        missing = [point for point in points if point not in results]
        num_done = len(points) - len(missing)
        if num_done:
            message = f"{num_done} of {len(points)} runs are in {out / RESULTS} already"
            console.print(message, style="dim", soft_wrap=True)
        try:
            with progress(console, "Simulating", len(points), num_done) as tell:
                for number, (point, result) in enumerate(_run(missing, jobs, ray, mine), start=num_done + 1):
                    results.add(point, result)
                    tell(number)
        except KeyboardInterrupt:
            kept = sum(point in results for point in points)
            console.print(f"Stopped: {kept} of {len(points)} runs are kept. Run the same command to resume.")
            raise typer.Exit(130) from None
        found = [(point, results[point]) for point in points]
    what = f"{common.count:,} × {common.workload}"
    console.print(_table(found, f"{what} · {common.model} on {common.accelerator}"))
    title = f"{what}, {common.model} on {common.accelerator}: a simulated fleet"
    save_plot(partial(_plot, found=found), title, out / PLOT)
    show_files(console, (out / RESULTS, out / PLOT))


# --- what was asked for ---------------------------------------------------------------------------------------------


def _values(option: str, text: str, kind: Callable[[str], Value]) -> list[Value]:
    """The values of a list with commas.

    Raises:
        ValueError: one is none, or there is none.
    """
    try:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values:
        example = "1,2,4" if kind is not str else "this,that"
        raise ValueError(f"{option} must be a list such as {example}; got {text!r}")
    return values


def _fingerprint(mine: bool) -> str:
    """Of the code that runs, the learner's finished files included."""
    import minicache
    from minicache_course.workspace import find_workspace, fingerprint

    package = Path(minicache.__file__).parent
    rooms = ("arithmetic", "fleet", "memory", "scheduler", "simulator")
    files = [package / "request.py", *(file for room in rooms for file in sorted((package / room).rglob("*.py")))]
    if mine:
        workspace = find_workspace()
        files += [file for phase in workspace.course for file in workspace.lab_files(phase).values()]
    return hashlib.sha256("".join(map(fingerprint, files)).encode()).hexdigest()[:12]


# --- the runs -------------------------------------------------------------------------------------------------------


def _run(points: Sequence[Point], jobs: int, on_ray: bool, mine: bool) -> Iterator[tuple[Point, Result]]:
    """Points with their results as they end. Nothing is started for none."""
    if not points:
        return
    if not on_ray:
        from minicache.simulator.sweep import in_processes

        yield from in_processes(points, min(jobs, len(points)), _use_finished_labs if mine else os.getpid)
        return
    from minicache.plugins.ray_local import in_ray, ray_running

    with ray_running(jobs, runtime_env=labs_on_ray() if mine else None):
        yield from in_ray(points)


def _use_finished_labs() -> None:
    from minicache_course.finder import install_finished_labs

    install_finished_labs()


# --- what came of them ----------------------------------------------------------------------------------------------


def _means(found: Sequence[tuple[Point, Result]]) -> dict[tuple[int, str, str, float], Result]:
    """Size, policy, scheduler and rate → each figure's mean over the seeds."""
    runs: dict[tuple[int, str, str, float], list[Result]] = {}
    for point, result in found:
        runs.setdefault((point.num_replicas, point.policy, point.scheduler, point.rate), []).append(result)
    return {
        key: {name: sum(each[name] for each in results) / len(results) for name in results[0]}
        for key, results in runs.items()
    }


def _table(found: Sequence[tuple[Point, Result]], title: str) -> Table:
    metrics = [each for each in METRICS if each[0] != "num_refused" or any(result[each[0]] for _, result in found)]
    table = Table(title=title, collapse_padding=True, **REPORT)
    table.add_column("replicas", justify="right")
    table.add_column("policy", no_wrap=True)
    table.add_column("scheduler", no_wrap=True)
    for heading in ("rate\n1/s", *(heading for _, heading, _ in metrics)):
        table.add_column(heading, justify="right")
    before: int | None = None
    for (size, policy, scheduler, rate), means in _means(found).items():
        if before not in (None, size):
            table.add_section()
        before = size
        figures = (format(means[name], digits) for name, _, digits in metrics)
        table.add_row(str(size), policy if size > 1 else "–", scheduler, f"{rate:g}", *figures)
    return table


def _plot(figure: Figure, found: Sequence[tuple[Point, Result]]) -> None:
    """The time to the first token against the rate: a panel for each size, a line for each policy and scheduler."""
    from matplotlib.ticker import LogLocator

    means = _means(found)
    sizes = list(dict.fromkeys(size for size, _, _, _ in means))
    lines = list(dict.fromkeys((policy, scheduler) for _, policy, scheduler, _ in means))
    varying = [place for place in (0, 1) if len({line[place] for line in lines}) > 1] or [0]
    styles = [(color(role), marker) for marker in MARKERS for role in ROLES]
    legend: dict[str, Any] = {}
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for line, (shade, marker) in zip(lines, styles, strict=False):
            points = sorted((key[3], mean) for key, mean in means.items() if key[:3] == (size, *line))
            if not points:
                continue
            rates = [rate for rate, _ in points]
            axes.plot(rates, [mean["ttft_p50"] for _, mean in points], marker + "--", color=shade)
            drawn = axes.plot(rates, [mean["ttft_p99"] for _, mean in points], marker + "-", color=shade)
            legend[", ".join(line[place] for place in varying)] = drawn[0]
        axes.set(title=f"{size} replicas" if size > 1 else "1 replica", xlabel="requests a second", yscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter("")
    panels[0].set_ylabel("time to first token in s: p99 solid, p50 dashed")
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=min(len(legend), 3), fontsize=8)
