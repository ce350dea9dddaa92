"""The figures of the general pages: the course map and the colour code."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from minicache.palette import PALETTE, Scheme
from minicache_course.table import load_course
from scripts.figures.style import TYPE_SIZE, Diagram, draw

COURSE = load_course(Path(__file__).resolve().parents[2] / "labs" / "course.toml")

ROWS = {
    "One sequence": range(0, 2),
    "Memory for many": range(2, 5),
    "Scheduling": range(5, 10),
    "Serving": range(10, 13),
}
"""What a row of the map is about → its phases."""


def course_map(figure: Figure, scheme: Scheme) -> None:
    """Thirteen boxes in four rows; ready phases are filled."""
    diagram = Diagram(figure, scheme, width=18, height=8.4)
    for row, (title, numbers) in enumerate(ROWS.items()):
        top = 0.2 + 2.1 * row
        diagram.text(0.1, top + 0.2, title, bold=True)
        for column, number in enumerate(numbers):
            phase = COURSE.phase(number)
            left = 3.6 * column
            role = "generated" if phase.tasks else None
            label = f"{number}  " + phase.slug.replace("-", "\n", 1)
            diagram.cell(left, top + 0.55, label, role, width=3.1, height=1.2, fontsize=TYPE_SIZE * 0.92)
            if column:
                diagram.arrow((left - 0.46, top + 1.15), (left - 0.04, top + 1.15))


def colour_code(figure: Figure, scheme: Scheme) -> None:
    """Each role as a labelled box, and one dense cache that uses them."""
    diagram = Diagram(figure, scheme, width=18, height=6.3)
    for index, (name, role) in enumerate(PALETTE.items()):
        left, top = 9 * (index % 2), 1.1 * (index // 2)
        diagram.cell(left, top, name, name, width=2.2, height=0.9)
        diagram.text(left + 2.4, top + 0.45, role.meaning, fontsize=TYPE_SIZE * 0.92)
    words = ["Yesterday", "I", "worked", "and", "she", "danced", "too", "end", "", "", "", ""]
    cells = ["prompt"] * 4 + ["generated"] * 3 + ["end"] + ["wasted"] * 4
    diagram.text(0.1, 3.95, "A dense cache of 12 slots", bold=True)
    diagram.row(0, 4.3, words, cells, width=1.5, fontsize=TYPE_SIZE * 0.8)
    diagram.span(0.05, 6, 5.6, "prompt")
    diagram.span(6.05, 12, 5.6, "generated, until the end")
    diagram.span(12.05, 17.95, 5.6, "reserved, never used")


def main() -> None:
    draw("course-map", course_map, size=(7.2, 3.36))
    draw("colour-code", colour_code, size=(7.2, 2.52))
