"""What a learner types: status, grade, hint, watch, reset, python, doctor."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from minicache import __version__
from minicache.course import grading, report
from minicache.course.finder import show
from minicache.course.journal import Event
from minicache.course.progress import Progress as Saved
from minicache.course.record import TIMEOUT
from minicache.course.results import PhaseResult
from minicache.course.table import Phase, Task
from minicache.course.workspace import Workspace, find_workspace
from minicache.errors import CourseError

app = typer.Typer(pretty_exceptions_show_locals=False)
console = Console()

PhaseName = Annotated[str, typer.Argument(metavar="N", help="The phase: 1, 01 or dense-cache.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed for other random test cases.")]
Timeout = Annotated[
    float, typer.Option(min=1, help="Seconds of computing or sleeping until a test counts as an endless loop.")
]


def names() -> set[str]:
    """What one types to call each of these commands."""
    functions = [command.callback.__name__ for command in app.registered_commands if command.callback]
    return {name.replace("_", "-") for name in functions}


@app.command()
def status() -> None:
    """Show phases, tasks, points, and what has been edited since it was graded."""
    workspace = find_workspace()
    saved = _load(workspace)
    table = Table("", "", "file", "points", "")
    for phase in workspace.course:
        earned = sum(map(saved.earned, phase.tasks))
        points = f"[bold]{earned}/{phase.points}[/]" if phase.tasks else ""
        table.add_row(f"[bold]{phase.number}[/]", f"[bold]{phase.title}[/]", "", points, "" if points else "planned")
        files = workspace.lab_files(phase)
        for task in phase.tasks:
            points = f"{saved.earned(task)}/{task.points}"
            table.add_row(task.id, task.title, str(task.file), points, _state(saved, phase, task, files[task.module]))
    console.print(table)
    console.print(f"Your files: {show(workspace.labs)}", soft_wrap=True)


@app.command()
def grade(
    phase: PhaseName,
    task: Annotated[int | None, typer.Option(help="Grade this task only.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    gradescope: Annotated[Path | None, typer.Option(help="Write Gradescope's results.json here.")] = None,
    labs: Annotated[Path | None, typer.Option(help="Grade the files in this folder instead of labs/.")] = None,
    timeout: Timeout = TIMEOUT,
    seed: Seed = None,
) -> None:
    """Grade your files of a phase. The exit status is 1 if anything did not pass."""
    workspace = find_workspace(labs)
    result = _grade(workspace, workspace.course.phase(phase), task, timeout, save=labs is None, seed=seed)
    if junit:
        report.write_junit(result, junit)
    if gradescope:
        report.write_gradescope(result, gradescope)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def hint(
    task: Annotated[str, typer.Argument(metavar="N.K", help="Phase and task, such as 1.3.")],
    every: Annotated[bool, typer.Option("--all", help="Show all hints at once.")] = False,
) -> None:
    """Show a task's hints, one more each time."""
    workspace = find_workspace()
    found = _find_task(workspace, task)
    saved = _load(workspace)
    shown = len(found.hints) if every else min(saved.hints.get(found.id, 0) + 1, len(found.hints))
    console.print(f"[bold]{found.id} {found.title}[/]   {found.page}", soft_wrap=True)
    for number, text in enumerate(found.hints[:shown], start=1):
        console.print(f"{number}. {escape(text)}", highlight=False)
    left = len(found.hints) - shown
    console.print(f"[dim]{left} more: minicache hint {found.id}[/]" if left else "[dim]That was the last hint.[/]")
    saved.hints[found.id] = shown
    saved.save()


@app.command()
def watch(
    phase: Annotated[str | None, typer.Argument(metavar="[N]", help="One phase; all by default.")] = None,
) -> None:
    """Grade a phase each time you save one of its files. Stop with Ctrl-C."""
    from watchfiles import PythonFilter
    from watchfiles import watch as changes

    workspace = find_workspace()
    watched = [workspace.course.phase(phase)] if phase else [each for each in workspace.course if each.tasks]
    console.print(f"Watching {show(workspace.labs)}. It is graded on every save; press Ctrl-C to stop.", soft_wrap=True)
    for changed in changes(workspace.labs, watch_filter=PythonFilter(), raise_interrupt=False):
        for each in phases_of(workspace, watched, {Path(path) for _, path in changed}):
            _grade(workspace, each, None, TIMEOUT, save=True)


def phases_of(workspace: Workspace, phases: Iterable[Phase], changed: set[Path]) -> list[Phase]:
    """Those of `phases` that have a lab file among `changed`."""
    return [phase for phase in phases if changed & set(workspace.lab_files(phase).values())]


@app.command()
def reset(
    phase: PhaseName,
    file: Annotated[str | None, typer.Option(help="Only this file, such as cache/dense.py.")] = None,
) -> None:
    """Put the starters back. What you wrote is copied to .minicache/backups first."""
    from minicache.course.starters import restore

    workspace = find_workspace()
    found = workspace.course.phase(phase)
    modules = [module for module, name in found.files.items() if file in (None, str(name), module)]
    if not modules:
        there = ", ".join(str(name) for name in found.files.values()) or "none yet"
        raise CourseError(f"phase {found.number} has no file {file or ''}: there are {there}")
    written = restore(workspace, found, modules)
    for path, copy in written.items():
        kept = f"; yours is kept. To restore it: {_copy_command(copy, path)}" if copy else ""
        console.print(f"{show(path)} has been reset to the starter{escape(kept)}", soft_wrap=True, highlight=False)
    if len(written) > 1:
        one = found.restoring(modules[0])
        console.print(f"To reset a single file: {one}", soft_wrap=True, highlight=False)
    if not written:
        console.print("Nothing to do: these files are the starters.")


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command(context_settings=_PASS_ON)
def python(context: typer.Context) -> None:
    """Start Python with your files loaded, finished or not: a prompt, or a script, -c CODE, -m MODULE."""
    _interpret(["-i"] if not context.args else [], context.args)


@app.command(context_settings=_PASS_ON)
def ipython(context: typer.Context) -> None:
    """Start IPython with your files loaded, finished or not. What follows is passed on to it."""
    _interpret([], ["ipython", *context.args])


@app.command()
def doctor() -> None:
    """Check what the course needs, and say what to do about what is missing."""
    from minicache.course.doctor import examine

    healthy = True
    for finding in examine():
        mark = "[green]ok  [/]" if finding.ok else "[red]no  [/]" if finding.required else "[yellow]none[/]"
        remedy = "" if finding.ok else f"  → {escape(finding.remedy)}"
        console.print(f"{mark} {finding.name:<14} {escape(finding.detail)}{remedy}", soft_wrap=True, highlight=False)
        healthy &= finding.ok or not finding.required
    if not healthy:
        raise typer.Exit(1)


def _grade(
    workspace: Workspace, phase: Phase, task: int | None, timeout: float, *, save: bool, seed: int | None = None
) -> PhaseResult:
    """Grade with a progress bar, print the report, remember the result."""
    with progress_bar(Console(stderr=True)) as progress:  # to be seen even if the report goes into a file
        bar = progress.add_task("starting", total=None)

        def on_event(event: Event) -> None:
            if event.kind == "collected":
                progress.update(bar, total=event.total + progress.tasks[bar].completed)
            elif event.kind in ("import", "test"):
                progress.update(bar, description=escape((event.title or f"importing {event.name}")[:60]))
            elif event.kind in ("result", "lost"):
                progress.advance(bar)

        result = grading.grade(workspace, phase, task=task, timeout=timeout, seed=seed, on_event=on_event)
    report.print_result(result, console)
    report.print_way_on(result, workspace.course, console)
    if save:
        saved = _load(workspace)
        saved.record(result)
        saved.save()
    return result


def _interpret(options: list[str], arguments: list[str]) -> NoReturn:
    """Become a Python into which nothing has been imported yet that a learner's file could stand in for."""
    os.execv(sys.executable, [sys.executable, *options, "-m", "minicache.course.interpreter", *arguments])


def _copy_command(source: Path, target: Path) -> str:
    """The command that copies a file, as it can be typed where one is."""
    return shlex.join(["cp", os.path.relpath(source), os.path.relpath(target)])


def progress_bar(console: Console) -> Progress:
    """How far the work is, in one line that goes when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def _load(workspace: Workspace) -> Saved:
    if workspace.version not in ("", __version__):
        told = (
            f"This folder was made by minicache {workspace.version}, and {__version__} is installed: `minicache update`"
        )
        console.print(f"[yellow]{told} installs new starters and tests, and keeps your files.[/]", soft_wrap=True)
    saved = Saved.load(workspace)
    if saved.warning:
        console.print(f"[yellow]{escape(saved.warning)}[/]", soft_wrap=True)
    return saved


def _state(saved: Saved, phase: Phase, task: Task, file: Path) -> str:
    """One word or two on where a task stands."""
    if not file.is_file():
        return f"[red]no file: rename it back, or {phase.restoring(task.module)}[/]"
    if task.id not in saved.tasks:
        return "[dim]not graded yet[/]"
    outcome = saved.tasks[task.id].outcome
    style = report.STYLES[outcome]
    return f"[{style}]{outcome}[/]" + (", edited since" if saved.is_stale(task, file) else "")


def _find_task(workspace: Workspace, name: str) -> Task:
    phase, _, number = name.partition(".")
    if not number.isdecimal():
        raise CourseError(f"{name!r} is no task: expected phase and task, such as 1.3")
    return workspace.course.phase(phase).task(int(number))
