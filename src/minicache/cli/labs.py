"""`--mine`: a command runs on the learner's finished lab files, and says which they are."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console

Mine = Annotated[bool, typer.Option("--mine", help="Run on the lab files that you have finished.")]
"""The option, the same for every command that has it."""


def use_labs(console: Console) -> None:
    """Put the learner's finished files in place of the reference's modules. Call it before any of them is imported.

    Args:
        console: for the list of what is theirs.
    """
    from minicache.course.finder import install_finished_labs, show

    labs = install_finished_labs()
    # minicache.scheduler.base is scheduler/base.py in its phase's folder: as many steps up as the module has rooms.
    finished = ((lab.file.parents[lab.module.count(".") - 1], lab.file) for lab in labs if lab.mine)
    for folder, files in groupby(finished, key=lambda each: each[0]):
        names = ", ".join(file.relative_to(folder).as_posix() for _, file in files)
        console.print(f"Yours: {show(folder)}: {names}", style="dim", soft_wrap=True)
    if others := sum(not lab.mine for lab in labs):
        count = "1 module" if others == 1 else f"{others} modules"
        console.print(f"The reference: {count}; `minicache status` says what is left", style="dim")
