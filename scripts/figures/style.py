"""How a figure of the docs is drawn: the same picture twice, on a light and on a dark page.

`draw` calls one painting function once per scheme and writes `docs/shared/figures/<name>.light.svg` and `.dark.svg`; a
figure with words that `labels` translates is written in Spanish too, as `<name>.es.light.svg` and `.dark.svg`.
Colours come from `minicache.palette` only. The same script gives the same bytes, so a redrawn figure that did not
change shows no diff.

A plot:

    def intensity(figure: Figure, scheme: Scheme) -> None:
        axes = plot(figure, xlabel="batch size", ylabel="FLOP per byte")
        axes.plot(batches, intensities, color=color("generated", scheme))

    draw("intensity", intensity)

A diagram, in units of its own, x to the right and y **down**:

    def table(figure: Figure, scheme: Scheme) -> None:
        diagram = Diagram(figure, scheme, width=12, height=4)
        diagram.row(1, 1, ["Yesterday", "I", "worked", ""], ["prompt", "prompt", "generated", "free"])
        diagram.legend(["prompt", "generated", "free"], 1, 3)

    draw("table", table, size=(7.2, 2.4))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from minicache.palette import GRID, INK, PALETTE, Scheme, color
from scripts.figures import labels

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "shared" / "figures"
"""Where the pictures are written."""

SCHEMES: tuple[Scheme, Scheme] = ("light", "dark")

TYPE_SIZE = 10.0
"""Points. A figure 7.2 inches wide fills a page's column, where 10 points are as large as the text around it."""


def draw(name: str, paint: Callable[[Figure, Scheme], None], size: tuple[float, float] = (7.2, 3.6)) -> None:
    """Paint the same picture for light and for dark pages.

    Args:
        name: file name without its ending; pages call it with `figure("name", …)`.
        paint: draws on the empty figure it is given, in the colours of the scheme it is given.
        size: width and height in inches. 7.2 is the width of a page's column.
    """
    FIGURES.mkdir(parents=True, exist_ok=True)
    for scheme in SCHEMES:
        with mpl.rc_context(_settings(scheme)):
            figure = Figure(figsize=size, layout="constrained")
            paint(figure, scheme)
            _save(figure, FIGURES / f"{name}.{scheme}.svg")
            if labels.translate(figure):
                _save(figure, FIGURES / f"{name}.es.{scheme}.svg")


def save(name: str, scheme: Scheme, picture: str) -> None:
    """Write a picture that a script has made as SVG, in English and in Spanish."""
    (FIGURES / f"{name}.{scheme}.svg").write_text(picture, encoding="utf-8")
    (FIGURES / f"{name}.es.{scheme}.svg").write_text(labels.in_svg(picture), encoding="utf-8")


def _save(figure: Figure, path: Path) -> None:
    # No date and no version in the file, and fixed ids: redrawing changes nothing.
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def plot(figure: Figure, *, xlabel: str = "", ylabel: str = "", title: str = "") -> Axes:
    """One pair of axes that fills the figure, with labels."""
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return axes


def _settings(scheme: Scheme) -> dict[Any, Any]:
    """Matplotlib's settings for one scheme."""
    ink, grid = INK[scheme], GRID[scheme]
    return {
        "svg.hashsalt": "minicache",
        "svg.fonttype": "path",  # the same letters on every machine
        "font.family": "DejaVu Sans",  # comes with matplotlib
        "font.size": TYPE_SIZE,
        "text.color": ink,
        "axes.edgecolor": grid,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.titlesize": TYPE_SIZE * 1.1,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=[color(r, scheme) for r in ("generated", "end", "shared", "wasted")]),
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "lines.linewidth": 2.0,
        "xtick.color": grid,
        "ytick.color": grid,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "legend.frameon": False,
        "legend.labelcolor": ink,
    }


class Diagram:
    """A drawing of memory: cells, arrows and labels, in units of its own.

    A unit is as long across as down; (0, 0) is the top left corner and y grows downwards, the way memory is listed.
    Choose `size` in `draw` with the proportions of `width` and `height`.
    """

    def __init__(self, figure: Figure, scheme: Scheme, width: float, height: float) -> None:
        self.scheme = scheme
        figure.set_layout_engine("none")  # the drawing has the whole figure; nothing is left to arrange
        self.axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        self.axes.set_axis_off()

    def cell(
        self,
        x: float,
        y: float,
        label: str = "",
        role: str | None = None,
        *,
        width: float = 1.0,
        height: float = 1.0,
        fontsize: float = TYPE_SIZE,
    ) -> None:
        """A box with its top left corner at (x, y); without a role it is an outline."""
        gap = 0.04 * min(width, height)
        face, text = ("none", INK[self.scheme]) if role is None else self._colors(role)
        self.axes.add_patch(
            FancyBboxPatch(
                (x + gap, y + gap),
                width - 2 * gap,
                height - 2 * gap,
                boxstyle=f"round,pad=0,rounding_size={0.12 * min(width, height)}",
                facecolor=face,
                edgecolor=GRID[self.scheme] if role is None else "none",
                linewidth=1.2,
            )
        )
        self.axes.text(x + width / 2, y + height / 2, label, color=text, size=fontsize, ha="center", va="center")

    def row(
        self,
        x: float,
        y: float,
        labels: Sequence[str],
        roles: Sequence[str | None],
        *,
        width: float = 1.0,
        height: float = 1.0,
        fontsize: float = TYPE_SIZE,
    ) -> None:
        """Cells side by side from (x, y), one per label, each `width` wide."""
        for index, (label, role) in enumerate(zip(labels, roles, strict=True)):
            self.cell(x + index * width, y, label, role, width=width, height=height, fontsize=fontsize)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        align: Literal["left", "center", "right"] = "left",
        bold: bool = False,
        fontsize: float = TYPE_SIZE,
    ) -> None:
        """Words at (x, y), centred on that height."""
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, color=INK[self.scheme], size=fontsize, ha=align, va="center", weight=weight)

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], label: str = "", *, bend: float = 0.0
    ) -> None:
        """An arrow, with words just above its middle; `bend` curves it (0 is straight, 0.3 is a clear bow)."""
        self._line(start, end, "-|>", bend)
        if label:
            self.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 0.3, label, align="center")

    def span(self, x0: float, x1: float, y: float, label: str) -> None:
        """A dimension line from x0 to x1 at height y, with words under it."""
        self._line((x0, y), (x1, y), "|-|,widthA=0.25,widthB=0.25", 0.0)
        self.text((x0 + x1) / 2, y + 0.42, label, align="center")

    def legend(
        self,
        roles: Sequence[str] | Mapping[str, str],
        x: float,
        y: float,
        *,
        step: float = 4.0,
        size: float = 0.5,
        fontsize: float = TYPE_SIZE * 0.9,
    ) -> None:
        """A swatch and its meaning for each role, side by side from (x, y), `step` units apart.

        Args:
            roles: of the palette; a mapping has meanings of this picture's own.
            x: left edge.
            y: top of the swatches.
            step: from one swatch to the next.
            size: of a swatch.
            fontsize: of the meanings, in points.
        """
        for index, role in enumerate(roles):
            left = x + index * step
            meaning = roles[role] if isinstance(roles, Mapping) else PALETTE[role].meaning
            self.cell(left, y, "", role, width=size, height=size)
            self.text(left + 1.3 * size, y + size / 2, meaning, fontsize=fontsize)

    def _colors(self, role: str) -> tuple[str, str]:
        """Face and text colour of a role."""
        shade = PALETTE[role]
        return color(role, self.scheme), shade.on_light if self.scheme == "light" else shade.on_dark

    def _line(self, start: tuple[float, float], end: tuple[float, float], head: str, bend: float) -> None:
        self.axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle=head,
                connectionstyle=f"arc3,rad={bend}",
                mutation_scale=11,
                shrinkA=0,
                shrinkB=0,
                color=INK[self.scheme],
                linewidth=1.2,
            )
        )
