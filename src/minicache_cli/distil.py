"""`minicache distil`: an engine as one file."""

from __future__ import annotations

import sys
from gettext import gettext as _

import typer
from rich.console import Console

from minicache.errors import MissingExtraError
from minicache_cli.help import Group
from minicache_cli.labs import Mine, tell, tell_whether_any

app = typer.Typer(cls=Group, pretty_exceptions_show_locals=False)


@app.command()
def distil(mine: Mine = False) -> None:
    """Print an engine as one readable file that needs only torch and safetensors."""
    try:
        from minicache_course.distil.write import MAX_LINES, course_modules, distilled
    except ModuleNotFoundError as error:
        message = _("{package} is not installed: {command}")
        command = "pip install 'minicache-course[course]'"
        raise MissingExtraError(message.format(package=error.name, command=command)) from error
    from minicache_course.finder import find_labs

    console = Console(stderr=True)
    labs = [lab for lab in find_labs() if lab.module in course_modules()] if mine else []
    if mine:
        for lab in labs:
            tell(console, lab)
        tell_whether_any(console, labs)
    text = distilled({lab.module: lab.file for lab in labs if not lab.missing})
    if (count := text.count("\n")) > MAX_LINES:
        longer = _("{count} lines, more than {most}: your files are longer than the reference")
        console.print(longer.format(count=count, most=MAX_LINES), style="yellow")
    sys.stdout.write(text)
