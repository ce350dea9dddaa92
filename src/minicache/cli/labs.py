"""`--mine`: a command runs on the learner's finished lab files, and says whose every module is."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

Mine = Annotated[bool, typer.Option("--mine", help="Run on the lab files that you have finished.")]
"""The option, the same for every command that has it."""


def use_labs(console: Console) -> None:
    """Put the learner's finished files in place of the reference's modules. Call it before any of them is imported."""
    from minicache.course.finder import install_finished_labs, show

    for lab in install_finished_labs():
        whose = f"yours, {show(lab.file)}" if lab.mine else f"the reference ({lab.reason})"
        console.print(f"{lab.module}: {whose}", style="dim", soft_wrap=True)
