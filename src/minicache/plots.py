"""How the plots of commands and notebooks look. No phase builds this module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minicache.palette import GRID, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.grid": True,
    "grid.color": GRID["light"],
    "axes.edgecolor": GRID["light"],
    "text.color": INK["light"],
    "axes.labelcolor": INK["light"],
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
"""matplotlib's settings for all plots: of commands, and of notebooks (`minicache_course.notebook`)."""


def save_plot(paint: Callable[[Figure], None], title: str, file: Path) -> None:
    """Draw one figure of 8 by 4.5 inches, and write it to a file.

    Args:
        paint: draws into it.
        title: stands above it.
        file: its suffix says the format; 150 dots an inch, if it has dots.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        paint(figure)
        figure.savefig(file, dpi=150)
