"""`minicache verify`: everything that can happen to a scheduler with a few requests on a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
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
    from minicache.request import Request
    from minicache.scheduler import Scheduler
    from minicache.verifier.explore import Report
    from minicache_course.arena import Service

app = typer.Typer(cls=Group)


@app.command()
def verify(
    policy: Annotated[
        Path | None, typer.Argument(help="A policy of the arena: a file that defines create(arena).", exists=True)
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
    from minicache.verifier.link import fragment
    from minicache.verifier.rules import PROPERTIES, STAGE_PROPERTIES
    from minicache.verifier.story import story
    from minicache.verifier.together import explore_all
    from minicache_course.pages import PORT, address

    with usage_errors():
        todo = cases(scheduler if policy is None else policy_in(policy), requests, blocks)
    begun = perf_counter()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task("")

        def tell(count: int) -> None:
            bar.update(line, description=_("{count} states").format(count=f"{count:,}"))

        rules = STAGE_PROPERTIES if policy is None else PROPERTIES
        reports = []
        with closing(explore_all(todo, rules, tell=tell)) as ended:
            for report in ended:
                reports.append(report)
                if report.violation:
                    break
    _show(reports, console)
    violation = report.violation
    if violation is None:
        count, seconds = sum(each.num_states for each in reports), perf_counter() - begun
        words = _("{count} states in {seconds} s: {rate} a second")
        console.print(words.format(count=f"{count:,}", seconds=f"{seconds:.1f}", rate=f"{count / seconds:,.0f}"))
        console.print(_("[bold green]No rule is broken[/], whatever happens within these bounds."))
        return
    case = next(each for each in todo if each.name == report.case)
    console.print(
        _("[bold red]A rule is broken[/]. The shortest way there in this case, {case}:").format(case=report.case)
    )
    for each in story(case, violation):
        console.print(escape(each), soft_wrap=True)
    page = f"http://127.0.0.1:{PORT}/{address(None)}playground/#{fragment(case, violation.actions)}"
    console.print(_("Step by step, in the playground that `minicache docs` serves:"))
    console.print(escape(page), soft_wrap=True)
    if mine or policy is not None:
        console.print(_("It shows the reference there: put your own code into its editor."))
    raise typer.Exit(1)


def _show(reports: list[Report], console: Console) -> None:
    """A table of what was explored."""
    table = figures("", _("states"), _("actions"), _("depth"), _("seconds"), **REPORT)
    for report in sorted(reports, key=lambda each: each.case):
        counts = (f"{report.num_states:,}", f"{report.num_actions:,}", f"{report.depth}", f"{report.seconds:.1f}")
        table.add_row(report.case, *counts)
    console.print(table)


def policy_in(file: Path) -> Callable[..., Scheduler]:
    """What makes the scheduler of an arena policy from a server's options, as the arena does.

    Its clock stands still, and every request is of one class.

    Raises:
        PolicyRefusedError: the file is no policy, or, when called, makes no scheduler.
    """
    from minicache_course.arena import Arena
    from minicache_course.arena.limits import load_policy
    from minicache_course.arena.loop import made_by

    create = load_policy(file.read_text(encoding="utf-8"))
    return lambda **options: made_by(create, Arena(options, _now, _service, _step_seconds))


def _now() -> float:
    return 0.0


def _service(request: Request) -> Service:
    from minicache_course.arena import Service

    return Service("chats", ttft=1.0, tpot=1.0, max_tokens=request.max_tokens)


def _step_seconds(shares: Iterable[tuple[int, int]]) -> float:
    return float(sum(num_new for num_new, _ in shares))
