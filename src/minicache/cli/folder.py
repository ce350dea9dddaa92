"""What a learner types who installed the package: `minicache init` and `update`; and `docs`, for the pages."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from minicache.errors import MissingExtraError

app = typer.Typer()
console = Console()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder, such as my-course.")],
) -> None:
    """Make a folder with the course: labs, tests and notebooks of this version."""
    install = _course()
    install.init(folder)
    go = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))}\n"
    console.print(f"{folder} has the course: your files are in labs/, the tests that grade them in tests/.")
    console.print(
        f"\n{go}minicache status\nminicache docs 0    # the pages of phase 0\nminicache grade 0", style="bold"
    )


@app.command()
def update() -> None:
    """Bring this version's starters, tests and notebooks. What you have edited stays as it is."""
    from minicache import __version__
    from minicache.course.workspace import find_workspace

    install = _course()
    workspace = find_workspace()
    root, before = workspace.root, workspace.version
    changes = install.update(root)
    for change in changes:
        console.print(f"{change.file}: {change.what}", soft_wrap=True, highlight=False)
        if change.beside:
            mine, new = (shlex.quote(os.path.relpath(root / each)) for each in (change.file, change.beside))
            console.print(f"    to see the difference: diff -u {mine} {new}", soft_wrap=True, highlight=False)
    came = f", from {before}" if before != __version__ else ""
    count = f"{len(changes)} file{'s' * (len(changes) != 1)} changed" if changes else "nothing to do"
    console.print(f"{root} is of minicache {__version__}{came}: {count}.", soft_wrap=True, highlight=False)


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="[N|N.K]", help="A phase or a task; default: the first page.")
    ] = None,
) -> None:
    """Show the pages in your browser, from this machine. Stop with Ctrl-C."""
    _course()
    from minicache.course import pages

    where = pages.address(page)
    with pages.server(pages.site_folder()) as server:
        url = f"http://127.0.0.1:{server.server_port}/{where}"
        console.print(f"Open [bold]{url}[/] in your browser. Press Ctrl-C to stop.", soft_wrap=True, highlight=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print()


def _course() -> ModuleType:
    """The module that makes folders, if the packages that it needs are there."""
    try:
        from minicache.course import install
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the course needs {error.name}: pip install 'minicache[course]'") from error
    return install
