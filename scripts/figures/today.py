"""The figures of "What the field does today": absorbed matrices, the tiers of a cache, overlapped scheduling."""

from __future__ import annotations

from matplotlib.figure import Figure

from minicache.palette import Scheme
from scripts.figures.style import TYPE_SIZE, Diagram, draw

SMALL = TYPE_SIZE * 0.9


def main() -> None:
    """Draw them all."""
    draw("latent-attention", latent_attention, (7.2, 4.2))
    draw("kv-tiers", tiers, (7.2, 4.2))
    draw("async-scheduling", async_scheduling, (7.2, 3.6))


def latent_attention(figure: Figure, scheme: Scheme) -> None:
    """One head: a matrix for each cached token, or one for the query."""
    diagram = Diagram(figure, scheme, width=24, height=14)
    diagram.text(0.4, 0.8, "keys rebuilt", bold=True)
    diagram.text(0.4, 8.0, "absorbed", bold=True)
    for index in range(4):
        x = 8.2 + index * 4.0
        diagram.cell(x, 0.4, "latent", "shared", width=3.2, height=1.3)
        diagram.cell(x, 2.5, "$W^{UK}$", width=3.2, height=1.3)
        diagram.cell(x, 4.6, "key", "free", width=3.2, height=1.3)
        diagram.arrow((x + 1.6, 1.8), (x + 1.6, 2.4))
        diagram.arrow((x + 1.6, 3.9), (x + 1.6, 4.5))
        diagram.cell(x, 11.4, "latent", "shared", width=3.2, height=1.3)
    diagram.cell(0.4, 4.6, "query", "generated", width=3.2, height=1.3)
    diagram.arrow((3.7, 5.25), (8.1, 5.25), "compare")
    diagram.cell(0.4, 8.9, "query", "generated", width=3.2, height=1.3)
    diagram.cell(4.4, 8.9, "$(W^{UK})^T$", width=3.4, height=1.3)
    diagram.arrow((3.7, 9.55), (4.3, 9.55))
    diagram.cell(0.4, 11.4, "512 numbers", "generated", width=4.6, height=1.3)
    diagram.arrow((6.1, 10.3), (4.4, 11.3))
    diagram.arrow((5.1, 12.05), (8.1, 12.05), "compare")


def tiers(figure: Figure, scheme: Scheme) -> None:
    """What each tier holds of Llama-3-8B's cache, and how fast it gives it back."""
    diagram = Diagram(figure, scheme, width=24, height=14)
    for y, label, role in (
        (0.4, "GPU memory, 60 GB\n458 thousand tokens", "generated"),
        (4.2, "host memory, 512 GB\n3.9 million tokens", "shared"),
        (8.0, "disk, 4 TB\n31 million tokens", "free"),
        (11.8, "compute again: 31 thousand tokens/s", None),
    ):
        diagram.cell(6.0, y, label, role, width=12.0, height=2.0)
    for y in (2.5, 6.3):
        diagram.arrow((8.4, y), (8.4, y + 1.6))
        diagram.text(7.9, y + 0.8, "evict", align="right", fontsize=SMALL)
    for y, label in ((2.5, "420 thousand tokens/s"), (6.3, "53 thousand tokens/s, by way of the host")):
        diagram.arrow((12.0, y + 1.6), (12.0, y))
        diagram.text(12.5, y + 0.8, label, fontsize=SMALL)


def async_scheduling(figure: Figure, scheme: Scheme) -> None:
    """Three steps, one after the other, and overlapped."""
    diagram = Diagram(figure, scheme, width=24, height=12)
    cpu, gpu, left = 1.9, 4.4, 3.4
    for top, title, starts, scheduled in (
        (0.6, "one after the other", (1.9, 8.2, 14.5), (0.0, 6.3, 12.6)),
        (6.4, "overlapped", (1.9, 6.3, 10.7), (0.0, 3.1, 7.5)),
    ):
        diagram.text(0.2, top, title, bold=True)
        diagram.text(0.2, top + 1.5, "CPU")
        diagram.text(0.2, top + 3.3, "GPU")
        for number, (start, schedule) in enumerate(zip(starts, scheduled, strict=True), start=1):
            diagram.cell(left + schedule, top + 0.8, f"plan {number}", "prompt", width=cpu, height=1.4)
            diagram.cell(left + start, top + 2.6, f"step {number}", "generated", width=gpu, height=1.4)
    diagram.arrow((left, 11.4), (23.4, 11.4))
    diagram.text(23.4, 11.8, "time", align="right", fontsize=SMALL)
