"""What an author types: `minicache course starters` and `minicache course gates`."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer
from rich.console import Console

from minicache_cli.help import Group
from minicache_course.errors import CourseError
from minicache_course.finder import show
from minicache_course.workspace import find_workspace

app = typer.Typer(cls=Group, no_args_is_help=True, help="For authors: starters and gates.")
console = Console()


@app.command()
def starters(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file differs.")] = False,
) -> None:
    """Generate the learner's files from the reference. An edited file is copied to .minicache/backups first."""
    from minicache_course.starters import drifted, write_all

    workspace = find_workspace()
    if check:
        if found := drifted(workspace):
            raise CourseError("\n".join(["the starters are out of date:", *found]))
        console.print("The starters are up to date.")
        return
    for file, copy in write_all(workspace).items():
        kept = f"; the old file is kept as {show(copy)}" if copy else ""
        console.print(f"{show(file)} written{kept}", soft_wrap=True, highlight=False)


@app.command()
def gates(
    phase: Annotated[str | None, typer.Argument(metavar="[N]", help="One phase; all by default.")] = None,
) -> None:
    """Run the author gates: starters fail, the reference passes, each wrong solution is caught by its task."""
    workspace = find_workspace()
    test_files = [workspace.root / "tests" / "course" / "test_gates.py"]
    if not test_files[0].is_file():
        raise CourseError(
            f"{workspace.root} has no tests/course/test_gates.py: the gates run in a clone of the repository"
        )
    selected = []
    if phase:
        folder = workspace.course.phase(phase).folder
        selected = ["-k", folder]
        test_files.append(workspace.root / "tests" / folder)
    else:
        test_files += [workspace.tests(each) for each in workspace.course if each.tasks]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *selected, *map(str, test_files)]
    raise typer.Exit(subprocess.run(command, cwd=workspace.root, check=False).returncode)
