"""`minicache verify`: everything that can happen to a scheduler with a few requests on a few blocks."""

from __future__ import annotations

import importlib.util
import sys
from gettext import gettext as _
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from minicache_cli.help import Group
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import usage_errors
from minicache_cli.show import REPORT, figures

if TYPE_CHECKING:
    from minicache.scheduler import Scheduler
    from minicache.verifier.explore import Report

app = typer.Typer(cls=Group)


@app.command()
def verify(
    policy: Annotated[
        Path | None, typer.Argument(help="A file with a scheduler of your own, the last one in it.", exists=True)
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(metavar="STAGE", help="Scheduler: static, continuous, paged, fair or chunked."),
    ] = "chunked",
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="The most requests that arrive.")] = 3,
    blocks: Annotated[int, typer.Option(metavar="N", min=3, help="Blocks of the pool, two tokens each.")] = 4,
    mine: Mine = False,
) -> None:
    """Try every order of arrivals, aborts, failures and stop tokens on a small server, and check every step."""
    console = Console(highlight=False)
    if mine:
        use_labs(console)
    from minicache.verifier.cases import cases
    from minicache.verifier.rules import PROPERTIES, STAGE_PROPERTIES
    from minicache.verifier.story import story
    from minicache.verifier.together import explore_all

    with usage_errors():
        todo = cases(scheduler if policy is None else scheduler_in(policy), requests, blocks)
        for one in todo:
            one.make()  # or it raises what is wrong with the file
    begun = perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("")

        def tell(count: int) -> None:
            bar.update(line, description=_("{count} states").format(count=f"{count:,}"))

        reports = list(explore_all(todo, STAGE_PROPERTIES if policy is None else PROPERTIES, tell=tell))
    _show(reports, perf_counter() - begun, console)
    wrong = [report for report in reports if report.violation]
    if not wrong:
        console.print(_("[bold green]No rule is broken[/], whatever happens within these bounds."))
        return
    shortest = min(wrong, key=lambda report: len(report.violation.actions) if report.violation else 0)
    assert shortest.violation is not None
    case = next(each for each in todo if each.name == shortest.case)
    console.print(_("[bold red]A rule is broken[/]. The shortest way there, {case}:").format(case=shortest.case))
    for each in story(case, shortest.violation):
        console.print(escape(each), soft_wrap=True)
    raise typer.Exit(1)


def _show(reports: list[Report], seconds: float, console: Console) -> None:
    """A table of what was explored."""
    table = figures("", _("states"), _("actions"), _("depth"), _("seconds"), **REPORT)
    for report in sorted(reports, key=lambda each: each.case):
        counts = (f"{report.num_states:,}", f"{report.num_actions:,}", f"{report.depth}", f"{report.seconds:.1f}")
        table.add_row(report.case, *counts)
    console.print(table)
    count = sum(report.num_states for report in reports)
    words = _("{count} states in {seconds} s: {rate} a second")
    console.print(words.format(count=f"{count:,}", seconds=f"{seconds:.1f}", rate=f"{count / seconds:,.0f}"))


def scheduler_in(file: Path) -> type[Scheduler]:
    """The last scheduler that a file defines.

    Raises:
        ValueError: it defines none.
    """
    from minicache.scheduler import Scheduler

    spec = importlib.util.spec_from_file_location(f"policy_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file}: this is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a state that is saved finds its class
    spec.loader.exec_module(module)
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Scheduler) and each.__module__ == spec.name
    ]
    if not found:
        raise ValueError(f"{file} defines no scheduler: a subclass of a stage, such as PagedScheduler")
    return found[-1]
