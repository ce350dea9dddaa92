"""What a learner types who installed the package: `minicache init` and `update`; and `docs`, for the pages."""

from __future__ import annotations

import os
import shlex
from gettext import gettext as _
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from minicache.errors import MissingExtraError
from minicache_cli.folders import course_meant
from minicache_course.language import translated

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
    made = _("{folder} has the course: your files are in labs/, the tests that grade them in tests/.")
    console.print(made.format(folder=folder))
    pages = _("the pages of phase 0")
    console.print(f"\n{go}minicache status\nminicache docs 0    # {pages}\nminicache grade 0", style="bold")


@app.command()
def update() -> None:
    """Bring this version's starters, tests and notebooks. What you have edited stays as it is."""
    from minicache import __version__

    install = _course()
    workspace = course_meant()
    root, before = workspace.root, workspace.version
    changes = install.update(root)
    for change in changes:
        console.print(f"{change.file}: {translated(change.what)}", soft_wrap=True, highlight=False)
        if change.beside:
            mine, new = (shlex.quote(os.path.relpath(root / each)) for each in (change.file, change.beside))
            difference = _("to see the difference: {command}").format(command=f"diff -u {mine} {new}")
            console.print(f"    {difference}", soft_wrap=True, highlight=False)
    version = __version__ if before == __version__ else _("{new}, from {old}").format(new=__version__, old=before)
    changed = _("files changed: {count}").format(count=len(changes)) if changes else _("nothing to do")
    message = _("{root} is of minicache {version}; {changed}.")
    console.print(message.format(root=root, version=version, changed=changed), soft_wrap=True, highlight=False)


@app.command()
def docs(
    page: Annotated[
        str | None, typer.Argument(metavar="[N|N.K]", help="A phase or a task; default: the first page.")
    ] = None,
) -> None:
    """Show the pages in your browser, from this machine. Stop with Ctrl-C."""
    _course()
    from minicache_course import pages

    where = pages.address(page)
    with pages.server(pages.site_folder()) as server:
        url = f"http://127.0.0.1:{server.server_port}/{where}"
        message = _("Open {url} in your browser. Press Ctrl-C to stop.").format(url=f"[bold]{url}[/]")
        console.print(message, soft_wrap=True, highlight=False)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print()


def _course() -> ModuleType:
    """The module that makes folders, if the packages that it needs are there."""
    try:
        from minicache_course import install
    except ModuleNotFoundError as error:
        message = _("the course needs {name}: {command}")
        raise MissingExtraError(
            message.format(name=error.name, command="pip install 'minicache-course[course]'")
        ) from error
    return install
