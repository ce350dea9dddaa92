"""All commands of `minicache`: one module for each group of them."""

from __future__ import annotations

from typing import Annotated

import typer

from minicache import __version__
from minicache_cli import (
    arena,
    audit,
    author,
    bench,
    calibrate,
    chat,
    demo,
    distil,
    fleet,
    folder,
    learn,
    model,
    route,
    serve,
    shelf,
    simulate,
    sweep,
    teach,
    verify,
)
from minicache_cli.help import Group

app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_show_locals=False)
for group in (
    folder,
    learn,
    distil,
    model,
    shelf,
    chat,
    serve,
    route,
    fleet,
    simulate,
    sweep,
    verify,
    calibrate,
    audit,
    demo,
    teach,
):
    app.add_typer(group.app)
app.add_typer(bench.app, name="bench")
app.add_typer(arena.app, name="arena")
app.add_typer(author.app, name="course", rich_help_panel="For teachers and authors")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minicache {__version__}")
        raise typer.Exit


@app.callback()
def minicache(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    lang: Annotated[
        str | None, typer.Option(help="Speak this language, en or es, instead of that of LANG: put it first.")
    ] = None,  # `minicache_cli.main` has taken it already
) -> None:
    """Build an LLM serving engine yourself. Start with `minicache status`."""
