"""`--mine`: a command runs on the learner's finished lab files, and says which they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from minicache.course.finder import Lab

Mine = Annotated[bool, typer.Option("--mine", help="Run on the lab files that you have finished.")]
"""The option, the same for every command that has it."""


def use_labs(console: Console) -> None:
    """Put the learner's finished files in place of the reference's modules. Call it before any of them is imported.

    Args:
        console: told of each module that has tasks when the command loads it: whose it is, and why it is not theirs.
    """
    from minicache.course.finder import install_finished_labs, show

    def tell(lab: Lab) -> None:
        told = escape(f"reference, not {show(lab.file)}: {lab.missing}" if lab.missing else f"yours: {show(lab.file)}")
        console.print(told, style="yellow" if "edited" in lab.missing else "dim", soft_wrap=True, highlight=False)

    labs = install_finished_labs(tell)
    if all(lab.missing for lab in labs):
        console.print("None of your files is finished; `minicache status` says what is left", style="yellow")
