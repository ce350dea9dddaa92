"""What the notebooks share: whose files run, checks of answers, timing, and how plots look. No phase builds this.

A notebook's first cell calls `begin` before it imports anything else of the package, since a learner's file must take
its module's place first. So this module itself imports nothing that a phase builds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from minicache.model.shelf import on_this_machine
from minicache.palette import color
from minicache.plots import STYLE
from minicache_course.errors import CourseError
from minicache_course.finder import install, show
from minicache_course.workspace import find_workspace

if TYPE_CHECKING:
    from minicache.trace import TraceStep

Name = TypeVar("Name", bound=Hashable)

WIDTH = 6.4
"""Inches. At 120 dots an inch a plot fills a page's column; on a phone its letters are still 8 pixels high."""
CURVES = (("generated", "-", "o"), ("end", "--", "s"), ("shared", "-.", "^"), ("wasted", ":", "D"))
"""Role of the colour, dashes and marker of the first curve, the second …: they differ without colours too."""


def begin(phase: int, *, mine: bool = False) -> None:
    """Set up a phase's notebook, and say whose files it runs.

    Args:
        phase: its number.
        mine: run the learner's files of this phase, finished or not; otherwise the reference's.

    Raises:
        CourseError: a module of the phase is imported already. Restart the kernel.
    """
    whose = "the reference."
    if mine:
        workspace = find_workspace()
        files = workspace.lab_files(workspace.course.phase(phase))
        try:
            install(files)
        except CourseError as error:
            raise CourseError(f"{error}: restart the kernel, then run this cell first") from None
        whose = "\n  ".join(("your files.", *(show(file) for file in files.values())))
    # Steps this small are slower on two threads, and their times noisier. It counts once torch is imported.
    os.environ["OMP_NUM_THREADS"] = "1"
    mpl.rcParams.update(STYLE | {"font.size": 10.5, "axes.titlesize": 10.5, "figure.dpi": 120})
    mpl.rcParams.update({"figure.constrained_layout.use": True, "axes.titlelocation": "left"})
    # In an SVG, text stays text, in a font as wide as the first; drawn again, it is the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "minicache"})
    mpl.rcParams["font.sans-serif"] = ["DejaVu Sans", "Verdana"]
    print(f"Phase {phase}: {whose}")


def real_model() -> Path | None:
    """The file of SmolLM2, if `minicache pull smollm2` has put it on this machine; else None, and a line says so."""
    found = on_this_machine("smollm2")
    if found is None:
        print("This cell needs a real model. To run it: minicache pull smollm2 (93 MB), then this cell again.")
    return found


def check(answer: Any, right: Any, *, within: float = 0.0) -> None:
    """Say whether a learner's answer is right, and for a number in which direction it is off.

    Args:
        answer: None as long as there is none.
        right: what is computed.
        within: how far off a number may be, as a part of `right`.
    """
    if answer is None:
        print("No answer yet: write it in the cell above, then run that cell and this one.")
    elif answer == right or (within and abs(answer - right) <= within * abs(right)):
        print("Right.")
    elif isinstance(answer, int | float) and isinstance(right, int | float):
        print(f"Not yet: {answer:,} is too {'high' if answer > right else 'low'}.")
    else:
        print(f"Not yet: {answer} is not right.")


def fastest(contestants: Mapping[Name, Callable[[], object]], repeats: int) -> dict[Name, float]:
    """Milliseconds of each function: the minimum of many runs, taken in turns so a slow moment hits all."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def panels(rows: int, columns: int, *, height: float = 3.0, **options: Any) -> list[Axes]:
    """Axes side by side, row by row.

    Args:
        rows: of axes.
        columns: of axes.
        height: inches of the whole figure.
        options: for `plt.subplots`.
    """
    _, grid = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **options)
    return list(grid.flat)


def axes(xlabel: str = "", ylabel: str = "", *, height: float = 3.2, **settings: Any) -> Axes:
    """One pair of axes.

    Args:
        xlabel: what is from left to right.
        ylabel: what is upwards.
        height: inches of the whole figure.
        settings: for `Axes.set`.
    """
    (ax,) = panels(1, 1, height=height)
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    _plain_numbers(ax)
    return ax


def lines(
    x: Sequence[float] | Mapping[str, Sequence[float]],
    curves: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    *,
    roles: Sequence[str] = (),
    marks: bool = True,
    joined: bool = True,
    doubling: bool = False,
    legend: str = "",
    ax: Axes | None = None,
    **settings: Any,
) -> None:
    """Curves.

    Args:
        x: of all curves, or for each by its name.
        curves: what a curve is, for the legend → its values. A lone curve named "" has no legend.
        xlabel: what is from left to right.
        ylabel: what is upwards.
        roles: colours of the palette, curve by curve, in place of the usual ones. They come round again.
        marks: whether each value has a marker.
        joined: whether a line joins the values.
        doubling: the one x grows by factors: it has a logarithmic axis, with its own values as ticks.
        legend: its title.
        ax: where to draw, in place of a figure of their own.
        settings: for `Axes.set`.
    """
    ax = ax or axes()
    usual = [role for role, _, _ in CURVES]
    for (label, values), role, (_, dash, marker) in zip(curves.items(), cycle([*roles, *usual]), cycle(CURVES)):
        marker = marker if marks else ""
        its_x = x[label] if isinstance(x, Mapping) else x
        line = dash if joined else ""
        ax.plot(its_x, values, color=color(role), label=label, linestyle=line, marker=marker, markersize=4)
    if doubling:
        ax.set_xscale("log", base=2)
    ax.set(xlabel=xlabel, ylabel=ylabel, **settings)
    _plain_numbers(ax)
    if doubling and not isinstance(x, Mapping):
        ticks = x if len(x) < 6 else x[::2]
        ax.set_xticks(ticks, [f"{each:,}" for each in ticks])
    if any(curves):
        ax.legend(title=legend or None)


def bars(
    values: Mapping[str, float],
    xlabel: str,
    *,
    roles: Sequence[str] = (),
    text: str = "{:,.0f}",
    ax: Axes | None = None,
    **settings: Any,
) -> None:
    """Bars from left to right, one below the other, each with its number.

    Args:
        values: what a bar is → its length.
        xlabel: what the lengths are.
        roles: colours of the palette, bar by bar; else one colour for all.
        text: the format of the numbers.
        ax: where to draw, in place of a figure of their own.
        settings: for `Axes.set`.
    """
    ax = ax or axes(height=1.0 + 0.36 * len(values))
    drawn = ax.barh(list(values), list(values.values()), color=[color(role) for role in roles or ("generated",)])
    ax.bar_label(drawn, [text.format(each) for each in values.values()], padding=3)
    ax.set(xlabel=xlabel, xlim=(0, 1.15 * max(*values.values(), 1e-9)), **settings)
    if "xticks" not in settings:
        ax.locator_params(axis="x", nbins=5)
    _plain_numbers(ax)
    ax.grid(visible=False, axis="y")
    if not ax.yaxis_inverted():  # axes that share it share the direction too
        ax.invert_yaxis()


def stack(
    x: Sequence[float], parts: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, *, roles: Sequence[str]
) -> None:
    """Areas on top of each other.

    Args:
        x: of all areas.
        parts: what an area is → its heights, from the lowest area up.
        xlabel: what is from left to right.
        ylabel: what is upwards.
        roles: colours of the palette, area by area.
    """
    ax = axes(xlabel, ylabel, xlim=(x[0], x[-1]))
    ax.stackplot(x, list(parts.values()), labels=list(parts), colors=[color(role) for role in roles])
    ax.margins(y=0)
    _plain_numbers(ax)
    _legend_above(ax)


def groups(
    names: Sequence[str], bars_of: Mapping[str, Sequence[float]], ylabel: str, *, roles: Sequence[str] = ()
) -> None:
    """Bars side by side, a group for each name, each with its number.

    Args:
        names: of the groups.
        bars_of: what a bar of each group is, for the legend → its height in each group.
        ylabel: what the heights are.
        roles: colours of the palette, in place of the usual ones.
    """
    ax = axes("", ylabel)
    usual = [role for role, _, _ in CURVES]
    width = 0.84 / len(bars_of)
    for number, ((label, heights), role) in enumerate(zip(bars_of.items(), [*roles, *usual], strict=False)):
        places = [place + (number - (len(bars_of) - 1) / 2) * width for place in range(len(names))]
        drawn = ax.bar(places, heights, width=0.92 * width, color=color(role), label=label)
        ax.bar_label(drawn, [f"{height:,.0f}" for height in heights], padding=2, fontsize=9)
    ax.set(xticks=range(len(names)), xticklabels=names)
    ax.margins(y=0.12)
    ax.grid(visible=False, axis="x")
    _legend_above(ax)


def boxes(
    values: Sequence[Sequence[float]], names: Sequence[object], xlabel: str, ylabel: str, **settings: Any
) -> None:
    """Box plots: median, middle half and the rest of each list.

    Args:
        values: the lists.
        names: of the lists.
        xlabel: what the names are.
        ylabel: what the values are.
        settings: for `Axes.set`.
    """
    ax = axes(xlabel, ylabel, **settings)
    ax.boxplot(values, tick_labels=[str(name) for name in names], sym="", medianprops={"color": color("end"), "lw": 2})
    ax.grid(visible=False, axis="x")


def strips(rows: Mapping[str, tuple[Collection[tuple[int, int]], Collection[tuple[int, int]]]], num_slots: int) -> None:
    """Memories as strips of slots: taken runs in blue, free ones in grey, each with its length.

    Args:
        rows: what a strip is → its taken runs and its free runs, each (start, length).
        num_slots: of each.
    """
    ax = axes("slot", height=0.9 + 0.36 * len(rows))
    for row, (taken, free) in enumerate(rows.values()):
        for runs, role, ink in ((taken, "generated", "white"), (free, "free", "black")):
            for start, size in runs:
                ax.barh(row, size, left=start, height=0.7, color=color(role), edgecolor="white", linewidth=1.5)
                ax.text(start + size / 2, row, str(size), ha="center", va="center", color=ink)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set(xticks=range(0, num_slots + 1, num_slots // 8), xlim=(0, num_slots))
    ax.grid(visible=False)
    ax.invert_yaxis()


PARTS = {"used": ("generated", ""), "reserved": ("generated", "////"), "internal": ("wasted", "")} | {
    "external": ("free", "xxxx"),
    "free": ("free", ""),
}
"""Part of a memory: role of its colour, hatching."""


def shares(memories: Mapping[str, Mapping[str, float]], *, ax: Axes | None = None) -> None:
    """What memories are full of: a bar each, of parts that sum to 100 per cent.

    Args:
        memories: what a bar is → percent of used, reserved, internal, external and free.
        ax: where to draw, in place of a figure of their own.
    """
    ax = ax or axes(height=1.2 + 0.36 * len(memories))
    left = dict.fromkeys(memories, 0.0)
    for part in PARTS:
        widths = [memory[part] for memory in memories.values()]
        ax.barh(list(memories), widths, left=list(left.values()), label=part, **_look(part))
        left = {name: left[name] + width for name, width in zip(memories, widths, strict=True)}
    ax.set(xlabel="% of the slots", xlim=(0, 100))
    ax.grid(visible=False)
    ax.invert_yaxis()
    _legend_above(ax)


def shares_over_time(minutes: Sequence[float], parts: Mapping[str, Sequence[float]]) -> None:
    """What a memory is full of, as time goes on.

    Args:
        minutes: when it was looked at.
        parts: percent of used, reserved, internal, external and free at these times.
    """
    ax = axes("minutes", "% of the slots", xlim=(minutes[0], minutes[-1]), ylim=(0, 100))
    below = [0.0] * len(minutes)
    for part in PARTS:
        above = [low + share for low, share in zip(below, parts[part], strict=True)]
        ax.fill_between(minutes, below, above, label=part, **_look(part))
        below = above
    _legend_above(ax)


def cells(
    values: Sequence[Sequence[str]],
    xlabel: str,
    ylabel: str,
    *,
    rows: Sequence[object] = (),
    legend: Mapping[str, str] | None = None,
    ax: Axes | None = None,
    **settings: Any,
) -> None:
    """A table of colours.

    Args:
        values: row by row, from top to bottom, the role of each cell's colour; "" is an empty one.
        xlabel: what the columns are; they count from 0, or are named as the rows if there are as many.
        ylabel: what the rows are.
        rows: their names; they count from 0 if there are none.
        legend: role → what it means.
        ax: where to draw, in place of a figure of their own.
        settings: for `Axes.set`.
    """
    ax = ax or axes(height=1.4 + 0.36 * len(values))
    for row, line in enumerate(values):
        colors = [color(role) if role else "white" for role in line]
        left = [each - 0.46 for each in range(len(line))]
        ax.barh([row] * len(line), 0.92, left=left, height=0.92, color=colors, edgecolor=color("free"))
    ax.set(xlabel=xlabel, ylabel=ylabel, aspect="equal", **settings)
    names = [str(name) for name in rows or range(len(values))]
    ax.set_yticks(range(len(values)), names)
    if len(rows) == len(values[0]):
        ax.set_xticks(range(len(rows)), names, rotation=45, ha="right")
    else:
        ax.set_xticks(range(len(values[0])))
    ax.grid(visible=False)
    ax.invert_yaxis()
    if legend:
        handles = [
            Patch(facecolor=color(role) if role else "white", edgecolor=color("free"), label=meaning)
            for role, meaning in legend.items()
        ]
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1, 1))


STATES = {"prompt": "prefill", "generated": "decode", "end": "last token", "free": "waits"}
"""Role of the colour → what a request does in a step."""


def grid_of_steps(
    steps: Sequence[TraceStep],
    names: Sequence[Hashable],
    *,
    ax: Axes | None = None,
    title: str = "",
    legend: bool = True,
) -> None:
    """What each request does in each step, until its last.

    Args:
        steps: a trace.
        names: the requests' ids, from top to bottom.
        ax: where to draw, in place of a figure of their own.
        title: stands above it.
        legend: whether the colours are explained.
    """
    ax = ax or axes(height=1.2 + 0.26 * len(names))
    for row, name in enumerate(names):
        came = next((s.step for s in steps for e in s.events if (e.kind, e.request_id) == ("arrive", name)), 0)
        entries = {step.step: entry for step in steps for entry in step.batch if entry.request_id == name}
        last = max(entries, default=-1)
        for step in range(came, last + 1):
            entry = entries.get(step)
            role = "free" if entry is None else "prompt" if entry.is_prefill else "generated"
            ax.barh(row, 0.92, left=step + 0.04, height=0.86, color=color("end" if step == last else role))
    ax.set_title(title, pad=20 if legend else None)
    ax.set(xlabel="step", ylim=(len(names) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), [str(name) for name in names])
    ax.grid(visible=False, axis="y")
    if legend:
        handles = [Patch(color=color(role), label=state) for role, state in STATES.items()]
        ax.legend(handles=handles, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), columnspacing=2.0, borderpad=0)


def rows_touched(lines_of_rows: Sequence[Collection[int]], num_rows: int, block_size: int, ylabel: str) -> None:
    """Which slots of a cache each program touches: one line per program, touched slots in blue.

    Args:
        lines_of_rows: for each line, the slots, counted through all blocks.
        num_rows: slots of the cache.
        block_size: slots of a block; there is a tick at each block.
        ylabel: what a line represents.
    """
    ax = axes(f"slot of the cache ({block_size} per block)", ylabel, height=1.1 + 0.3 * len(lines_of_rows))
    for line, rows in enumerate(lines_of_rows):
        ax.barh(line, num_rows, height=0.8, color=color("free"))
        ax.barh([line] * len(rows), 1.0, left=sorted(rows), height=0.8, color=color("generated"))
    ax.set(xlim=(0, num_rows), xticks=range(0, num_rows + 1, block_size), yticks=range(len(lines_of_rows)))
    ax.grid(visible=False, axis="y")
    ax.set_axisbelow(False)  # the blocks' borders
    ax.invert_yaxis()


def _look(part: str) -> dict[str, Any]:
    """How a part of memory is drawn."""
    role, hatch = PARTS[part]
    outlined = part == "reserved"
    edge = color(role) if outlined else "black" if hatch else "none"
    return {"facecolor": "white" if outlined else color(role), "edgecolor": edge, "hatch": hatch, "linewidth": 0}


def _legend_above(ax: Axes) -> None:
    """A legend of one line over the axes."""
    ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=2.0, handlelength=1.4)


def _plain_numbers(ax: Axes) -> None:
    """1,000 on an axis, and neither 10³ nor 1000."""
    for axis in (ax.xaxis, ax.yaxis):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
        if axis.get_scale() == "log" or high >= 1000:
            axis.set_major_formatter("{x:,.12g}")
