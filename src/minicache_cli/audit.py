"""`minicache audit`: the scheduler of another engine, from a checkout, under this project's rules."""

from __future__ import annotations

from dataclasses import asdict
from gettext import gettext as _
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from minicache_cli.show import progress

if TYPE_CHECKING:
    from minicache.foreign.rules import Finding, Step

app = typer.Typer()


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="Folder of a checkout.", metavar="PATH")],
    engine: Annotated[
        str | None,
        typer.Option(
            help="nano-vllm, mini-sglang, or a .py file with your own adapter; default: as the checkout's files tell.",
            metavar="ENGINE",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each workload.", metavar="N")] = 6,
    seeds: Annotated[int, typer.Option(min=1, help="Number of random workloads.", metavar="N")] = 300,
) -> None:
    """Audit the scheduler of another engine, without a model, step by step over random workloads."""
    from minicache.foreign.checkout import find_adapter
    from minicache.foreign.search import audit as audited

    console = Console(highlight=False)
    adapter = find_adapter(path, engine)
    with progress(console, _("Auditing"), seeds) as tell:
        report = audited(adapter, requests, range(seeds), tell)
    ran = _("{workloads:,} workloads, {steps:,} steps, {preemptions:,} preemptions").format(
        workloads=report.num_workloads, steps=report.num_steps, preemptions=report.num_preemptions
    )
    console.print(f"[bold]{escape(adapter.name)}[/] · {escape(str(path))} · {ran}", soft_wrap=True)
    if not report.findings:
        console.print("[green]" + _("No rule was broken.") + "[/]")
        return
    for finding in report.findings:
        console.print()
        _tell(console, finding, report.counts[finding.kind])
    raise typer.Exit(1)


def _tell(console: Console, finding: Finding, count: int) -> None:
    """A finding as a story: the limits, the requests, each step, and what broke the rule."""
    heading = _("{kind}: broken in {count:,} workloads; the smallest found:").format(kind=finding.kind, count=count)
    console.print(f"[red]{escape(heading)}[/]", soft_wrap=True)
    limits = ", ".join(f"{name}={value}" for name, value in asdict(finding.workload.limits).items())
    console.print(f"  {limits}", soft_wrap=True)
    for request_id, each in enumerate(finding.workload.arrivals):
        asks = _("request {number}: prompt {prompt}, {count} to generate").format(
            number=request_id, prompt=" ".join(map(str, each.prompt)), count=each.max_tokens
        )
        if each.aborted_after is not None:
            asks += _(", aborted after {count} steps").format(count=each.aborted_after)
        console.print(f"  {asks}", soft_wrap=True)
    for number, step in enumerate(finding.steps):
        told = _("step {number}: {events}").format(number=number, events=_events(step))
        console.print(f"  {escape(told)}", soft_wrap=True)
    console.print(f"  [bold]{escape(finding.message)}[/]", soft_wrap=True)


def _events(step: Step) -> str:
    """What happened in a step, in its order."""
    events = [_("{number} arrives").format(number=each) for each in step.added]
    events += [_("{number} is aborted").format(number=each) for each in step.aborted]
    events += [_("{number} is preempted").format(number=each) for each in step.preempted]
    for each in step.work:
        blocks = " ".join(map(str, step.block_ids.get(each.request_id, ())))
        end = each.start + each.num_tokens - 1
        positions = str(each.start) if end == each.start else f"{each.start}–{end}" if end > each.start else "–"
        computes = _("{number} computes {positions} in blocks {blocks}")
        events.append(computes.format(number=each.request_id, positions=positions, blocks=blocks or "–"))
    events += [_("{number} finishes").format(number=each) for each in step.finished]
    return "; ".join(events) or "–"
