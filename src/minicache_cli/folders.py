"""Where a command reads and writes: looked at before the work, not after it."""

from __future__ import annotations

from gettext import gettext as _
from pathlib import Path

import typer
from rich.console import Console

from minicache_course.workspace import Workspace, find_workspace, is_elsewhere


def make_folder(folder: Path) -> None:
    """Make the folder of `--out`, if it is not there.

    Raises:
        BadParameter: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder} is no folder and cannot be created: {error.strerror}") from error


def course_meant(labs: Path | None = None) -> Workspace:
    """The course that a command works on, as `find_workspace` finds it.

    If its own labs are meant and the working directory is outside it, its folder is named on stderr first.
    """
    workspace = find_workspace(labs)
    if labs is None and is_elsewhere(workspace):
        message = _("You are outside a course folder. Used instead is the one minicache was installed from: {root}")
        Console(stderr=True).print(message.format(root=workspace.root), style="yellow", soft_wrap=True, highlight=False)
    return workspace
