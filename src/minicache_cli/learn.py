"""What a learner types: status, grade, hint, watch, reset, python, doctor."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from gettext import gettext as _
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from minicache import __version__
from minicache_cli.folders import course_meant
from minicache_cli.help import Group
from minicache_course import grading, report
from minicache_course.errors import CourseError
from minicache_course.files import replace_file
from minicache_course.finder import show
from minicache_course.journal import Event
from minicache_course.language import translated
from minicache_course.progress import Progress as Saved
from minicache_course.record import TIMEOUT
from minicache_course.results import PhaseResult
from minicache_course.route import place
from minicache_course.table import Phase, Task
from minicache_course.workspace import Workspace, find_workspace, is_elsewhere

app = typer.Typer(cls=Group, pretty_exceptions_show_locals=False)
console = Console()

PhaseName = Annotated[str, typer.Argument(metavar="N", help="The phase: 1, 01 or dense-cache.")]
PhaseOrTask = Annotated[str, typer.Argument(metavar="N|N.K", help="A phase, such as 1, or a task, such as 1.3.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed for other random test cases.")]
Timeout = Annotated[
    float, typer.Option(min=1, help="Seconds of computing or sleeping until a test counts as an endless loop.")
]


def names() -> set[str]:
    """What one types to call each of these commands."""
    functions = [command.callback.__name__ for command in app.registered_commands if command.callback]
    return {name.replace("_", "-") for name in functions}


@app.command()
def status(
    export: Annotated[Path | None, typer.Option(help="Write a record of points, versions and seeds here.")] = None,
    key: Annotated[Path | None, typer.Option(help="Sign the record with the key in this file.")] = None,
) -> None:
    """Show phases, tasks, points, and what has been edited since it was graded."""
    if key and not export:
        raise CourseError(_("--key signs what --export writes: give both"))
    workspace = find_workspace()
    saved = _load(workspace)
    if export:
        _export(workspace, saved, export, key)
    table = Table("", "", _("file"), _("points"), "")
    for phase in workspace.course:
        earned = sum(map(saved.earned, phase.tasks))
        points = f"[bold]{earned}/{phase.points}[/]" if phase.tasks else ""
        title = translated(phase.title)
        table.add_row(f"[bold]{phase.number}[/]", f"[bold]{title}[/]", "", points, "" if points else _("planned"))
        files = workspace.lab_files(phase)
        for task in phase.tasks:
            points = f"{saved.earned(task)}/{task.points}"
            state = _state(saved, phase, task, files[task.module])
            table.add_row(task.id, translated(task.title), str(task.file), points, state)
    console.print(table)
    console.print(_("Your files: {folder}").format(folder=show(workspace.labs)), soft_wrap=True)
    _print_place(workspace, saved)


@app.command()
def grade(
    wanted: PhaseOrTask,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    gradescope: Annotated[Path | None, typer.Option(help="Write Gradescope's results.json here.")] = None,
    labs: Annotated[Path | None, typer.Option(help="Grade the files in this folder instead of labs/.")] = None,
    timeout: Timeout = TIMEOUT,
    seed: Seed = None,
) -> None:
    """Grade your files of a phase, or a task of it. The exit status is 1 if anything did not pass."""
    workspace = course_meant(labs)
    phase, task = _phase_and_task(workspace, wanted)
    result = _grade(workspace, phase, task.number if task else None, timeout, save=labs is None, seed=seed)
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
    console.print(f"[bold]{found.id} {translated(found.title)}[/]   {translated(found.page)}", soft_wrap=True)
    for number, text in enumerate(found.hints[:shown], start=1):
        console.print(f"{number}. {escape(translated(text))}", highlight=False)
    left = len(found.hints) - shown
    more = _("{count} more: {command}").format(count=left, command=f"minicache hint {found.id}")
    last = _("That was the last hint.")
    console.print(f"[dim]{more if left else last}[/]")
    saved.hints[found.id] = shown
    saved.save()


@app.command()
def compare(
    wanted: PhaseOrTask,
    html: Annotated[Path | None, typer.Option(help="Write a page here, and print nothing.")] = None,
) -> None:
    """Show your functions next to the reference's, for tasks that have passed."""
    from rich.syntax import Syntax

    from minicache_course import compare as comparing

    workspace = find_workspace()
    (found, task), saved = _phase_and_task(workspace, wanted), _load(workspace)
    passed = [each for each in ([task] if task else found.tasks) if saved.earned(each) == each.points]
    if not passed:
        message = _("no task to compare has passed yet: {command}")
        raise CourseError(message.format(command=f"minicache grade {found.number}"))
    pairs = comparing.pairs(workspace, found, passed)
    if html:
        replace_file(html, comparing.page(pairs, _("yours"), _("reference")).encode())
        return
    for done, group in groupby(pairs, attrgetter("task")):
        for pair in group:
            table = Table(_("yours"), _("reference"), title=f"{done.id} {translated(done.title)}: {pair.target}")
            table.add_row(*(Syntax(side, "python", word_wrap=True) for side in (pair.yours, pair.ours)))
            console.print(table)
        console.print(escape(translated(done.why)), highlight=False)


@app.command()
def watch(
    phase: Annotated[str | None, typer.Argument(metavar="[N]", help="One phase; all by default.")] = None,
) -> None:
    """Grade a phase each time you save one of its files. Stop with Ctrl-C."""
    from watchfiles import PythonFilter
    from watchfiles import watch as changes

    workspace = find_workspace()
    watched = [workspace.course.phase(phase)] if phase else [each for each in workspace.course if each.tasks]
    watching = _("Watching {folder}. It is graded on every save; press Ctrl-C to stop.")
    console.print(watching.format(folder=show(workspace.labs)), soft_wrap=True)
    for changed in changes(workspace.labs, watch_filter=PythonFilter(), raise_interrupt=False):
        for each in phases_of(workspace, watched, {Path(path) for _change, path in changed}):
            _grade(workspace, each, None, TIMEOUT, save=True)


def phases_of(workspace: Workspace, phases: Iterable[Phase], changed: set[Path]) -> list[Phase]:
    """Those of `phases` that have a lab file among `changed`."""
    return [phase for phase in phases if changed & set(workspace.lab_files(phase).values())]


@app.command()
def reset(
    phase: PhaseName,
    file: Annotated[str | None, typer.Option(help="Only this file, such as cache/dense.py.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, even outside the course's folder.")] = False,
) -> None:
    """Put the starters back. What you wrote is copied to .minicache/backups first."""
    from minicache_course.starters import restore

    workspace = course_meant()
    found = workspace.course.phase(phase)
    modules = [module for module, name in found.files.items() if file in (None, str(name), module)]
    if not modules:
        there = ", ".join(str(name) for name in found.files.values()) or _("none yet")
        message = _("phase {number} has no file {file}: there are {there}")
        raise CourseError(message.format(number=found.number, file=file or "", there=there))
    if not yes and is_elsewhere(workspace):
        typer.confirm(_("Put the starters back in {folder}?").format(folder=workspace.labs / found.folder), abort=True)
    written = restore(workspace, found, modules)
    for path, copy in written.items():
        done = _("{file} has been reset to the starter").format(file=show(path))
        if copy:
            done += _("; yours is kept. To restore it: {command}").format(command=_copy_command(copy, path))
        console.print(escape(done), soft_wrap=True, highlight=False)
    if len(written) > 1:
        single = _("To reset a single file: {command}").format(command=found.restoring(modules[0]))
        console.print(single, soft_wrap=True, highlight=False)
    if not written:
        console.print(_("Nothing to do: these files are the starters."))


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
    from minicache_course.doctor import examine

    healthy = True
    for finding in examine():
        style, word = (
            ("green", _("ok")) if finding.ok else ("red", _("no")) if finding.required else ("yellow", _("none"))
        )
        name, detail, remedy = map(translated, (finding.name, finding.detail, finding.remedy))
        line = f"{word:<4} {name:<16} {escape(detail)}" + ("" if finding.ok else f"  → {escape(remedy)}")
        console.print(f"[{style}]{line[:4]}[/]{line[4:]}", soft_wrap=True, highlight=False)
        healthy &= finding.ok or not finding.required
    if not healthy:
        raise typer.Exit(1)


def _print_place(workspace: Workspace, saved: Saved) -> None:
    """Where the learner is on the way through the course, and the page of what comes next."""
    here, following = place(workspace.course, saved.passed_at())
    if here:
        at = f"{here.id} {translated(here.title)}"
        console.print(_("You are here: {task}").format(task=at), soft_wrap=True, highlight=False)
    if following:
        to = f"[bold]{following.id} {translated(following.title)}[/]   {translated(following.page)}"
        console.print(_("Next: {task}").format(task=to), soft_wrap=True, highlight=False)


def _export(workspace: Workspace, saved: Saved, file: Path, key: Path | None) -> None:
    """Write the signed record."""
    from minicache_course.export import read_key, record_of, signed
    from minicache_course.files import replace_file

    record = record_of(workspace, saved)
    replace_file(file, signed(record, read_key(key)).encode())
    done = _("{file}: {earned} of {points} points").format(file=file, earned=record["earned"], points=record["points"])
    console.print(escape(done), soft_wrap=True, highlight=False)


def _grade(
    workspace: Workspace, phase: Phase, task: int | None, timeout: float, *, save: bool, seed: int | None = None
) -> PhaseResult:
    """Grade with a progress bar, print the report, remember the result."""
    with progress_bar(Console(stderr=True)) as progress:  # to be seen even if the report goes into a file
        bar = progress.add_task(_("starting"), total=None)

        def on_event(event: Event) -> None:
            if event.kind == "collected":
                progress.update(bar, total=event.total + progress.tasks[bar].completed)
            elif event.kind in ("import", "test"):
                doing = translated(event.title) or _("importing {module}").format(module=event.name)
                progress.update(bar, description=escape(doing[:60]))
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
    os.execv(sys.executable, [sys.executable, *options, "-m", "minicache_course.interpreter", *arguments])


def _copy_command(source: Path, target: Path) -> str:
    """The command that copies a file, as it can be typed where one is."""
    return shlex.join(["cp", os.path.relpath(source), os.path.relpath(target)])


def progress_bar(console: Console) -> Progress:
    """How far the work is, in one line that goes when it is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<60}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def _load(workspace: Workspace) -> Saved:
    if workspace.version not in ("", __version__):
        message = _(
            "This folder was made by minicache {version}, and {installed} is installed: `minicache update` installs "
            "new starters and tests, and keeps your files."
        ).format(version=workspace.version, installed=__version__)
        console.print(f"[yellow]{message}[/]", soft_wrap=True)
    saved = Saved.load(workspace)
    if saved.warning:
        console.print(f"[yellow]{escape(translated(saved.warning))}[/]", soft_wrap=True)
    return saved


def _state(saved: Saved, phase: Phase, task: Task, file: Path) -> str:
    """One word or two on where a task stands."""
    if not file.is_file():
        missing = _("no file: rename it back, or {command}").format(command=phase.restoring(task.module))
        return f"[red]{missing}[/]"
    if task.id not in saved.tasks:
        return "[dim]" + _("not graded yet") + "[/]"
    outcome = saved.tasks[task.id].outcome
    style = report.STYLES[outcome]
    return f"[{style}]{translated(outcome)}[/]" + (_(", edited since") if saved.is_stale(task, file) else "")


def _phase_and_task(workspace: Workspace, name: str) -> tuple[Phase, Task | None]:
    """The phase that is asked for, by itself or by one of its tasks."""
    task = _find_task(workspace, name) if "." in name else None
    return workspace.course.phase(task.phase if task else name), task


def _find_task(workspace: Workspace, name: str) -> Task:
    phase, _dot, number = name.partition(".")
    if not number.isdecimal():
        raise CourseError(_("{name!r} is no task: expected phase and task, such as 1.3").format(name=name))
    return workspace.course.phase(phase).task(int(number))
