"""`--mine`: a command runs on the learner's finished lab files, and says which they are."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

Mine = Annotated[bool, typer.Option("--mine", help="Run on the lab files that you have finished.")]
"""The option, the same for every command that has it."""


def use_labs(console: Console) -> None:
    """Put the learner's finished files in place of the reference's modules. Call it before any of them is imported."""
    from minicache.course.finder import install_finished_labs, show

    labs = install_finished_labs()
    for lab in labs:
        if lab.mine:
            console.print(f"{lab.module}: yours, {show(lab.file)}", style="dim", soft_wrap=True)
    others = sum(not lab.mine for lab in labs)
    console.print(f"{others} modules: the reference, where `minicache status` says what is left", style="dim")
