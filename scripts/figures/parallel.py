"""The figure of tensor parallelism: MiniGPT's layer on two ranks."""

from __future__ import annotations

from matplotlib.figure import Figure

from minicache.palette import Scheme
from scripts.figures.style import TYPE_SIZE, Diagram, draw

SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw it."""
    draw("tensor-parallel-layer", layer, size=(7.2, 3.3))


def layer(figure: Figure, scheme: Scheme) -> None:
    """Two lanes, a rank each; what both have is as high as the two."""
    diagram = Diagram(figure, scheme, width=24, height=11)
    top, high, gap = 2.2, 2.4, 1.2
    bottom = top + high + gap
    middle = top + high + gap / 2
    lanes = (
        (top, "generated", "heads 0, 1\nKV head 0", "columns\n0 – 175"),
        (bottom, "prompt", "heads 2, 3\nKV head 1", "columns\n176 – 351"),
    )
    for y, words in ((top, "rank 0"), (bottom, "rank 1")):
        diagram.text(0.2, y + high / 2, words, bold=True)
    for x, words in ((2.7, "residual"), (11.0, "+"), (19.6, "+")):
        diagram.cell(
            x, top, words, "shared", width=1.5 if words == "+" else 2.2, height=bottom + high - top, fontsize=SMALL
        )
    for start, first, second in ((5.6, "attention", "o_proj"), (13.2, "gate, up", "down_proj")):
        diagram.text(start + 1.4, top - 0.5, first, align="center", fontsize=SMALL)
        diagram.text(start + 4.0, top - 0.5, second, align="center", fontsize=SMALL)
    for y, role, heads, columns in lanes:
        for start, end, words in ((5.6, 11.0, heads), (13.2, 19.6, columns)):
            diagram.cell(start, y, words, role, width=2.8, height=high, fontsize=SMALL)
            diagram.cell(start + 3.2, y, "its\nrows", role, width=1.6, height=high, fontsize=SMALL)
            diagram.arrow((start - 0.6, y + high / 2), (start - 0.05, y + high / 2))
            diagram.arrow((start + 4.9, y + high / 2), (end - 0.05, y + high / 2))
    diagram.arrow((21.2, middle), (22.0, middle))
    diagram.text(22.2, middle, "next\nlayer", fontsize=SMALL)
    for x in (11.75, 20.35):
        diagram.text(x, bottom + high + 0.6, "all-reduce", align="center", fontsize=SMALL)
    legend = {"shared": "the same on both ranks", "generated": "rank 0's part", "prompt": "rank 1's part"}
    diagram.legend(legend, 2.7, 9.9, step=7.0, size=0.6)


if __name__ == "__main__":
    main()
