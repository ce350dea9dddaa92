"""What one types in the arena: run, verify, board, grade."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from gettext import gettext as _
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from minicache import __version__
from minicache_cli.folders import make_folder
from minicache_cli.help import Group
from minicache_cli.show import REPORT, progress, save_json, show_files
from minicache_course.errors import CourseError

if TYPE_CHECKING:
    from types import FrameType

    from minicache_course.arena.score import Score

app = typer.Typer(cls=Group, no_args_is_help=True, help="The arena: score a scheduling policy of your own.")
console = Console(highlight=False)

LOAD_SECONDS = 60.0
"""Seconds of the processor that a policy may take for one load, of which a baseline takes about one."""

League = Annotated[
    Literal["scheduler", "fleet"],
    typer.Option(metavar="LEAGUE", help="scheduler, or fleet: a router and an autoscaler."),
]

Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Requests of a trace instead: Azure's CSV, Mooncake's JSONL.")
]

PolicyFile = Annotated[
    Path | None, typer.Argument(metavar="[POLICY]", help="The policy; default: policy.py or fleet.py in labs/arena/.")
]


@app.command()
def run(
    policy: PolicyFile = None,
    league: League = "scheduler",
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run a baseline, such as chunked, instead.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    trace: Trace = None,
    author: Annotated[str, typer.Option(metavar="NAME", help="Your name, for the board.")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the score file here.")] = None,
) -> None:
    """Score a policy: the share of the requests that could be served within their limits."""
    from minicache_course.arena.baselines import FLEETS, text_of
    from minicache_course.arena.record import as_record

    if baseline is not None and policy is not None:
        raise typer.BadParameter(_("name a policy or --baseline, not both"))
    if baseline in FLEETS:
        league = "fleet"
    elif baseline is not None and league == "fleet":
        message = _("{baseline} is no baseline of the fleet league: there are {names}")
        raise typer.BadParameter(message.format(baseline=baseline, names=", ".join(FLEETS)))
    if league == "fleet" and trace is not None:
        raise typer.BadParameter(_("--trace is for schedulers"))
    try:
        file = policy or _own(league) if baseline is None else None
        text = text_of(baseline or "") if file is None else _text(file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = _score(text, league, seed, baseline, trace, file)
    console.print(_table(found))
    console.print(_("[bold]Score: {percent:.2f} % of the bound[/]").format(percent=found.percent))
    if out is not None:
        name = author or (policy or Path(baseline or "policy")).stem
        save_json(as_record(found, __version__, name, league), out)
        show_files(console, [out])


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The score file.")],
    policy: Annotated[Path, typer.Argument(metavar="POLICY", help="The policy that is said to have it.")],
    trace: Trace = None,
) -> None:
    """Recompute a score file. The exit status is 1 if anything differs."""
    from minicache_course.arena.record import differences, read
    from minicache_course.arena.score import digest

    claimed, text = read(file), _text(policy)
    if claimed["policy"] != digest(text):
        message = _("{policy} is not the policy that {file} is about")
        console.print(message.format(policy=policy, file=file), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    found = _score(text, claimed["league"], claimed["seed"], trace=trace, file=policy)
    if told := differences(claimed, found, __version__):
        for line in told:
            console.print(line, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    message = _("Verified: {percent:.2f} %, and all {count} schedules are the same")
    console.print(message.format(percent=found.percent, count=len(found.cells)))


@app.command()
def board(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Score files, each with its policy: ada.json, ada.py.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where index.html and the policies are written.")],
    title: Annotated[str, typer.Option(metavar="TEXT", help="The page's title.")] = "minicache arena",
) -> None:
    """Make a static page of score files: the policies in their order, and their goodput against the load."""
    from minicache_cli.board import write_board

    make_folder(out)
    show_files(console, [write_board(folder, out, title)])


@app.command()
def grade(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A policy for each student: ada.py, bob.py.")],
    curve: Annotated[str, typer.Option(metavar="S:P,S:P", help="Scores and their points, such as 40:0,70:6,85:10.")],
    league: League = "scheduler",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the workloads.")] = 0,
    out: Annotated[Path, typer.Option("--csv", metavar="FILE", help="Write the points here.")] = Path("arena.csv"),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a policy counts as an endless loop.")] = 120,
) -> None:
    """Give a class points for its policies, each scored in a sandbox."""
    from minicache_teach.arena import mark, read_curve
    from minicache_teach.sandbox import why_unavailable

    points = read_curve(curve)
    if not (files := sorted(folder.glob("*.py"))):
        raise CourseError(_("{folder} has no policies").format(folder=folder))
    if why := why_unavailable():
        console.print(_("Policies are not isolated: {why}").format(why=why), style="yellow", soft_wrap=True)
    with out.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(("student", "points", "score", "note"))
        with progress(console, _("Serving"), len(files)) as tell:
            for number, file in enumerate(files, start=1):
                found = mark(file, points, league=league, seed=seed, timeout=timeout)
                score = "" if found.score is None else f"{found.score:.2f}"
                rows.writerow((found.student, f"{found.points:g}", score, found.note))
                tell(number)
    show_files(console, [out])


def _score(
    text: str,
    league: str,
    seed: int,
    baseline: str | None = None,
    trace: Path | None = None,
    file: Path | None = None,
) -> Score:
    """Run a policy, with a progress bar. What it is refused for names its file."""
    from minicache_course.arena import fleet, score
    from minicache_course.arena.baselines import ORACLES
    from minicache_course.arena.loop import PolicyRefusedError
    from minicache_course.arena.traces import read_trace

    given = None if trace is None else [read_trace(trace)]
    count = len(fleet.WAVES) if league == "fleet" else score.NUM_LOADS if given is None else 1
    try:
        with progress(console, _("Serving"), count) as tell, _no_longer_than(LOAD_SECONDS * (trace is None)) as again:

            def done(number: int) -> None:
                again()
                tell(number)

            if league == "fleet":
                return fleet.score(text, seed=seed, tell=done)
            return score.score(text, seed=seed, given=given, oracle=baseline in ORACLES, tell=done)
    except PolicyRefusedError as error:
        raise CourseError(f"{file}: {error}" if file else str(error)) from error


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[Callable[[], object]]:
    """Refuse a policy of which a call does not return: after so much time of the processor for one load.

    The time is the processor's: a busy machine makes no difference. Where there is no such timer, nothing is refused.

    Args:
        seconds: 0: as many as it takes.

    Yields:
        What begins the time anew.
    """
    from minicache_course.arena.loop import POLICY_FILE, PolicyRefusedError, PolicyStopped

    if not seconds or not hasattr(signal, "setitimer"):
        yield lambda: None
        return

    def late(_signal: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != POLICY_FILE:
            frame = frame.f_back
        line = frame.f_lineno if frame is not None else None
        where = _("line {line}: ").format(line=line) if line else ""
        what = _("a call has not returned after {seconds} s of computing").format(seconds=f"{seconds:g}")
        raise PolicyStopped(PolicyRefusedError("endless", where + what, line))

    def again() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # each second more, in case the policy goes on

    before = signal.signal(signal.SIGVTALRM, late)
    again()
    try:
        yield again
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _own(league: str) -> Path:
    """The learner's own policy."""
    from minicache_course.workspace import find_workspace

    return find_workspace().labs / "arena" / ("fleet.py" if league == "fleet" else "policy.py")


def _text(policy: Path) -> str:
    try:
        return policy.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(_("{policy} cannot be read: {error}").format(policy=policy, error=error)) from error


def _table(score: Score) -> Table:
    """A row for each workload and load."""
    headings = (_("rate"), _("requests"), _("good"), _("bound"), "TTFT p90", "TPOT p90", _("share"))
    table = Table(_("workload"), *[f"[bold]{heading}[/]" for heading in headings], **REPORT)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in groupby(score.cells, key=lambda cell: cell.workload):
        for number, cell in enumerate(cells):
            table.add_row(
                "" if number else name,
                f"{cell.rate:g}",
                f"{cell.num_requests}",
                f"{cell.num_good}" + (f" - {cell.cost:.0f}" if cell.cost else ""),
                f"{cell.bound:.0f}",
                f"{cell.ttft_p90:.2f} s",
                f"{1e3 * cell.tpot_p90:.0f} ms",
                f"{cell.share:.1%}",
            )
    return table
