"""`--mine`: a command runs on the learner's finished lab files, and says which they are."""

from __future__ import annotations

import sys
from gettext import gettext as _
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from minicache_course.language import translated

if TYPE_CHECKING:
    from minicache_course.finder import Lab

Mine = Annotated[bool, typer.Option("--mine", help="Use your finished lab files.")]
"""The option, the same for every command that has it."""


def use_labs(console: Console) -> list[Lab]:
    """Put the learner's finished files in place of the reference's modules. Call it before any of them is imported.

    Args:
        console: told of each module that the learner has begun when the command loads it: whose it is, and why.

    Returns:
        Every module that has tasks.
    """
    from minicache_course.finder import install_finished_labs

    labs = install_finished_labs(lambda lab: tell(console, lab))
    tell_whether_any(console, labs)
    return labs


def loaded_files(labs: list[Lab]) -> dict[str, str]:
    """Of a learner's files those that this process has loaded: module → SHA-256."""
    from minicache_course.workspace import fingerprint

    return {lab.module: fingerprint(lab.file) for lab in labs if not lab.missing and lab.module in sys.modules}


def tell(console: Console, lab: Lab) -> None:
    """Say of a module that the learner has begun whose it is, and why."""
    from minicache_course.finder import show

    if lab.begun:
        file, style = show(lab.file), "yellow" if lab.missing else "dim"
        message = _("reference, not {file}: {missing}") if lab.missing else _("yours: {file}")
        message = message.format(file=file, missing=translated(lab.missing))
        console.print(escape(message), style=style, soft_wrap=True, highlight=False)


def tell_whether_any(console: Console, labs: list[Lab]) -> None:
    """Say if none of the learner's files is finished, or whose those are that were not begun."""
    if all(lab.missing for lab in labs):
        console.print(_("None of your files is finished; `minicache status` lists what is left"), style="yellow")
    elif not all(lab.begun for lab in labs):
        console.print(_("reference: all files that you have not started"), style="dim")


def labs_on_ray() -> dict[str, Any]:
    """What has each process of Ray use the learner's finished files: its `runtime_env`."""
    from minicache_course.finder import install_finished_labs
    from minicache_course.workspace import find_workspace

    hook = f"{install_finished_labs.__module__}.{install_finished_labs.__qualname__}"
    return {"env_vars": {"MINICACHE_ROOT": str(find_workspace().root)}, "worker_process_setup_hook": hook}
