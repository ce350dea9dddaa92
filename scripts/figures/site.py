"""The figures of the general pages and of the README: the course map, the colour code, two batches that fill."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from minicache.palette import INK, PALETTE, Scheme
from minicache_course.table import load_course
from scripts.figures.phase_05 import SLOTS, role_of, run_six, slots_of, utilisation
from scripts.figures.style import SCHEMES, TYPE_SIZE, Diagram, draw, save

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


CELL, ROWS_LEFT, SECONDS, PAUSE = 40, 70, 0.6, 4
"""Pixels of a cell and of the names on its left; seconds of a step, and the steps for which the whole is shown."""


def batching(scheme: Scheme) -> str:
    """Phase 5's six requests under its two schedulers, step by step: an SVG whose cells appear by a style sheet."""
    runs = {name: run_six(name)[0] for name in ("static", "continuous")}
    num_steps = max(map(len, runs.values()))
    turns = num_steps + PAUSE
    shapes = []
    for run, (name, steps) in enumerate(runs.items()):
        top, slots = 20 + run * (SLOTS + 1.2) * CELL, slots_of(steps)
        told = f"{name}: {len(steps)} steps, {utilisation(steps, SLOTS):.0%} of the slots used"
        shapes.append(f'<text class="bold" x="0" y="{top}">{told}</text>')
        for slot in range(SLOTS):
            y = top + 12 + slot * CELL
            shapes.append(f'<text x="0" y="{y + 25}">slot {slot + 1}</text>')
            for column, step in enumerate(steps):
                here = next((entry.request_id for entry in step.batch if slots[entry.request_id] == slot), None)
                role = PALETTE["wasted" if here is None else role_of(step, here) or "wasted"]
                x = ROWS_LEFT + column * CELL
                shapes.append(
                    f'<g class="step-{column}"><rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" '
                    f'fill="{role.shade(scheme)}"/><text class="name" x="{x + CELL / 2 - 1:g}" y="{y + 25}" '
                    f'fill="{role.on_light if scheme == "light" else role.on_dark}">{here or ""}</text></g>'
                )
    bottom = round(20 + (2 * SLOTS + 1.6) * CELL)
    for place, (kind, meaning) in enumerate(
        {"prompt": "prefill", "generated": "decode", "end": "last token", "wasted": "idle"}.items()
    ):
        x = ROWS_LEFT + place * 140
        shapes.append(f'<rect x="{x}" y="{bottom}" width="18" height="18" fill="{PALETTE[kind].shade(scheme)}"/>')
        shapes.append(f'<text x="{x + 26}" y="{bottom + 14}">{meaning}</text>')
    moves = "\n".join(
        f".step-{step} {{ animation-name: s{step}; }} "
        f"@keyframes s{step} {{ 0% {{ opacity: 0; }} {100 * step / turns:.2f}% {{ opacity: 1; }} }}"
        for step in range(1, num_steps)
    )
    width, height = ROWS_LEFT + num_steps * CELL, bottom + 24
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
text {{ font: 15px "DejaVu Sans", Verdana, sans-serif; }}
text:not(.name) {{ fill: {INK[scheme]}; }}
.bold {{ font-weight: bold; }}
.name {{ text-anchor: middle; }}
[class^="step-"] {{ animation: {turns * SECONDS:.1f}s step-end infinite; }}
{moves}
@media (prefers-reduced-motion: reduce) {{ [class^="step-"] {{ animation: none; }} }}
</style>
{chr(10).join(shapes)}
</svg>
"""


def main() -> None:
    for scheme in SCHEMES:
        save("batching-moving", scheme, batching(scheme))
    draw("course-map", course_map, size=(7.2, 3.36))
    draw("colour-code", colour_code, size=(7.2, 2.52))
