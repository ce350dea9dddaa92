"""What several commands show alike: tables of figures, facts in two columns, a progress bar, the files written."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from gettext import gettext as _
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from minicache.simulator.report import Summary

REPORT: dict[str, Any] = {"title_justify": "left", "box": SIMPLE_HEAD, "show_edge": False}
"""The style of a report's tables."""


def figures(*headings: str, **style: Any) -> Table:
    """A table of numbers; columns without a heading have words."""
    table = Table(**style)
    for heading in headings:
        table.add_column(heading, justify="right" if heading.strip() else "left")
    return table


def latencies(title: str, rows: Iterable[tuple[str, Summary, float]]) -> Table:
    """Distributions: the name of each, what it is, and what its numbers are multiplied with."""
    table = figures("", _("mean"), "p50", "p90", "p99", _("max"), title=title, **REPORT)
    for name, summary, scale in rows:
        table.add_row(name, *[digits(scale * value) for value in astuple(summary)])
    return table


def digits(value: float) -> str:
    """Three digits, and never a power of ten: 0.0412, 41.2, 8,990."""
    return f"{value:,.0f}" if abs(value) >= 100 or abs(value) < 1e-4 else f"{value:.3g}"


def facts(rows: Iterable[tuple[str, str]], *, dim: bool = False) -> Table:
    """Names and what they are; dim names, at the edge, are those of a server that listens."""
    table = Table(box=None, show_header=False, pad_edge=not dim)
    table.add_column(style="dim" if dim else None)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress(console: Console, doing: str, total: int, num_done: int = 0) -> Iterator[Callable[[int], None]]:
    """A progress bar, and what moves it: it is called with how many are done."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=total, completed=num_done)
        yield lambda num_done: bar.update(task, completed=num_done)


def machine() -> str:
    """The CPU's model."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        cpu = next(names, cpu)
    return cpu


def save_json(value: Any, file: Path) -> None:
    """Write what `json.dump` takes, to be read by people too."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def show_files(console: Console, files: Iterable[Path]) -> None:
    """The files that were written, a line each."""
    for file in files:
        console.print(f"[bold]{escape(str(file))}[/]", soft_wrap=True)
