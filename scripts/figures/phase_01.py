"""The figures of phase 1: prefill and decode, the mask, the cache, what it saves and costs, its layout, its waste.

The measured curves come from benchmarks/results/decode_cost.json; every other number is computed here.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from minicache.palette import GRID, Scheme, color
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot
from scripts.numbers import decode_steps

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
TEXT = ("Yesterday", "I", "cooked", "fish", ".", "end")
ROLES = ("prompt", "prompt", "generated", "generated", "generated", "end")
NUM_PROMPT = 2

RESERVED_SLOTS = 2048
LENGTHS = (137, 520, 61, 1893, 250, 905, 48, 330)
"""Final lengths of eight requests, in tokens, of which each reserved RESERVED_SLOTS."""

RAGGED = (200, 1500, 60)
"""Tokens so far of three sequences in one batch."""


def main() -> None:
    """Draw them all."""
    draw("prefill-decode", prefill_decode, size=(7.2, 4.1))
    draw("causal-mask", causal_mask, size=(7.2, 3.1))
    draw("cache-cursor", cache_cursor, size=(7.2, 2.8))
    draw("positions-computed", positions_computed, size=(7.2, 3.5))
    draw("decode-cost", decode_cost, size=(7.2, 3.6))
    draw("bytes-per-new-token", bytes_per_new_token, size=(6.2, 2.5))
    draw("cache-layouts", cache_layouts, size=(7.2, 3.9))
    draw("reservation-waste", reservation_waste, size=(7.2, 3.4))
    draw("holes", holes, size=(7.2, 3.6))
    draw("ragged-padding", ragged_padding, size=(7.2, 2.6))
    draw("block-table", block_table, size=(7.2, 3.3))


def prefill_decode(figure: Figure, scheme: Scheme) -> None:
    """One row per step: the input tokens, the cached ones, and the token picked."""
    diagram = Diagram(figure, scheme, width=18, height=10.2)
    width, left = 2.0, 3.4
    diagram.text(left + 2.5 * width, 0.5, "computed in this step, or already in the cache", align="center")
    diagram.text(left + 6.35 * width, 0.5, "picked", align="center")
    for step in range(len(TEXT) - NUM_PROMPT):
        y = 1.1 + step * 1.6
        name = "prefill" if step == 0 else f"decode {step}"
        diagram.text(0.3, y + 0.5, f"step {step}: {name}")
        first = 0 if step == 0 else NUM_PROMPT + step - 1
        for position in range(len(TEXT) - 1):
            x = left + position * width
            if position < first:
                diagram.cell(x, y, "cached", "free", width=width, fontsize=SMALL)
            elif position < NUM_PROMPT + step:
                diagram.cell(x, y, TEXT[position], ROLES[position], width=width, fontsize=SMALL)
            else:
                diagram.cell(x, y, "", None, width=width)
        picked = NUM_PROMPT + step
        diagram.arrow((left + 5 * width + 0.1, y + 0.5), (left + 5.7 * width, y + 0.5))
        diagram.cell(left + 5.8 * width, y, TEXT[picked], ROLES[picked], width=width, fontsize=SMALL)
    y = 1.1 + 4 * 1.6 + 0.1
    for position in range(len(TEXT) - 1):
        diagram.text(left + (position + 0.5) * width, y + 0.2, f"position {position}", align="center", fontsize=SMALL)
    diagram.legend(["prompt", "generated", "end"], 0.3, y + 1.3, step=4.2)
    diagram.cell(12.9, y + 1.3, "", "free", width=0.5, height=0.5)
    diagram.text(13.55, y + 1.55, "in the cache", fontsize=TYPE_SIZE * 0.9)


def causal_mask(figure: Figure, scheme: Scheme) -> None:
    """Three masks over the same five tokens: a prefill, a chunk of two, and one token."""
    diagram = Diagram(figure, scheme, width=18, height=7.75)
    num_tokens, size = 5, 0.9
    for left, num_new, title in (
        (1.0, 5, "T = 5, S = 5: prefill"),
        (7.0, 2, "T = 2, S = 5"),
        (13.0, 1, "T = 1: decode"),
    ):
        diagram.text(left, 0.5, title, bold=True)
        for s in range(num_tokens):
            diagram.text(left + (s + 0.5) * size, 1.3, str(s), align="center", fontsize=SMALL)
        for t in range(num_new):
            position = num_tokens - num_new + t
            y = 1.65 + t * size
            diagram.text(left - 0.2, y + size / 2, str(position), align="right", fontsize=SMALL)
            for s in range(num_tokens):
                seen = s <= position
                diagram.cell(left + s * size, y, "", "generated" if seen else None, width=size, height=size)
    diagram.cell(1.0, 6.75, "", "generated", width=0.5, height=0.5)
    diagram.text(1.65, 7.0, "seen", fontsize=SMALL)
    diagram.cell(3.2, 6.75, "", None, width=0.5, height=0.5)
    diagram.text(3.85, 7.0, "hidden", fontsize=SMALL)
    diagram.text(7.0, 7.0, "rows: positions of the queries · columns: positions of the keys", fontsize=SMALL)


def cache_cursor(figure: Figure, scheme: Scheme) -> None:
    """The slots of one layer, one sequence and one head, and the cursor."""
    diagram = Diagram(figure, scheme, width=18, height=7)
    used = ("prompt", "prompt", "generated", "generated")
    roles = (*used, *["free"] * 6)
    left, width = 2.6, 1.4
    for y, name in ((1.5, "keys"), (2.8, "values")):
        diagram.text(2.2, y + 0.5, name, align="right")
        diagram.row(left, y, [str(slot) for slot in range(10)], roles, width=width, fontsize=SMALL)
    diagram.arrow((left + 4.5 * width, 0.6), (left + 4.5 * width, 1.45))
    diagram.text(left + 4.8 * width, 0.7, "num_tokens = 4: the next slot to write")
    diagram.span(left, left + 4 * width, 4.3, "nbytes_used counts these")
    diagram.span(left, left + 10 * width, 5.4, "nbytes counts all max_seq_len = 10")
    diagram.legend(["prompt", "generated", "free"], left, 6.35, step=4.6)


def positions_computed(figure: Figure, scheme: Scheme) -> None:
    """P = 2, N = 6: a triangle of positions without a cache, a diagonal with one."""
    num_new = 6
    diagram = Diagram(figure, scheme, width=18, height=8.75)
    for left, cached in ((1.6, False), (10.6, True)):
        counts = [NUM_PROMPT + step if not cached or step == 0 else 1 for step in range(num_new)]
        diagram.text(left, 0.5, "with a cache" if cached else "without a cache", bold=True)
        for step, count in enumerate(counts):
            y = 1.1 + step
            last = NUM_PROMPT + step
            diagram.text(left - 0.25, y + 0.5, str(step), align="right", fontsize=SMALL)
            for position in range(last):
                role = "prompt" if position < NUM_PROMPT else "generated"
                diagram.cell(left + position, y, "", role if position >= last - count else None, height=0.95)
        diagram.text(left, 7.5, f"{' + '.join(map(str, counts))} = {sum(counts)} positions")
    diagram.legend(["prompt", "generated"], 1.6, 8.05, step=4.0)
    diagram.text(10.6, 8.3, "rows: steps · columns: positions", fontsize=SMALL)


def decode_cost(figure: Figure, scheme: Scheme) -> None:
    """Measured: milliseconds of a step against its position."""
    measured = json.loads((RESULTS / "decode_cost.json").read_text(encoding="utf-8"))
    axes = plot(figure, xlabel="position of the token", ylabel="milliseconds for one more token")
    for key, role, label in (
        ("recomputed_ms", "wasted", "full\nrecomputation"),
        ("cached_ms", "generated", "KV cache"),
    ):
        times = measured[key]
        axes.plot(range(1, len(times) + 1), times, color=color(role, scheme), linewidth=1.4)
        at_end = (len(times), times[-1])
        axes.annotate(f"{label}\n{at_end[1]:.3g} ms", at_end, xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_yscale("log")
    axes.set_xlim(0, 615)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def bytes_per_new_token(figure: Figure, scheme: Scheme) -> None:
    """A decode step's bytes for each new token: the weights' part shrinks with the batch, the cache's does not."""
    axes = plot(figure, xlabel="MB read or written for each new token")
    steps = decode_steps()["minigpt"]
    for row, step in enumerate(steps):
        weights, cache = (step[key] / step["batch"] / 1e6 for key in ("weights", "caches"))
        axes.barh(row, cache, color=color("shared", scheme), height=0.62, label="its own cache")
        axes.barh(row, weights, left=cache, color=GRID[scheme], height=0.62, label="its part of the weights")
        axes.text(cache + weights, row, f"  {cache + weights:.2f}", va="center")
    names = ["1 sequence" if step["batch"] == 1 else f"{step['batch']} sequences" for step in steps]
    axes.set(yticks=range(len(steps)), yticklabels=names, xlim=(0, 4.7))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2], loc="lower right")


def cache_layouts(figure: Figure, scheme: Scheme) -> None:
    """Two heads, four tokens, in memory order: head 0 reads a contiguous range, or pieces."""
    diagram = Diagram(figure, scheme, width=18, height=9.75)
    heads, tokens, left, width = 2, 4, 1.0, 2.0
    by_head = [(h, s) for h in range(heads) for s in range(tokens)]
    by_token = [(h, s) for s in range(tokens) for h in range(heads)]
    for top, order, title in (
        (0.5, by_head, "[H_kv, S_max, d]: strides (4d, d, 1). The vectors of one head are contiguous."),
        (4.9, by_token, "[S_max, H_kv, d]: strides (2d, d, 1). The heads of one token are contiguous."),
    ):
        diagram.text(left, top, title, bold=True)
        for place, (h, s) in enumerate(order):
            role = "generated" if h == 0 else "free"
            diagram.cell(left + place * width, top + 0.6, f"h{h} s{s}", role, width=width, fontsize=SMALL)
            diagram.text(
                left + place * width, top + 1.95, f"{place}d" if place else "0", align="center", fontsize=SMALL
            )
        starts = [place for place, (h, _) in enumerate(order) if h == 0]
        diagram.span(left + starts[0] * width, left + (starts[0] + 1) * width, top + 2.5, "d numbers")
        step = starts[1] - starts[0]
        told = "next vector of h0: adjacent" if step == 1 else f"next vector of h0: {step}d further"
        diagram.text(left + 4.2 * width, top + 2.75, told, fontsize=SMALL)
    diagram.cell(left, 9.0, "", "generated", width=0.5, height=0.5)
    diagram.text(left + 0.65, 9.25, "head 0, read by one attention head", fontsize=SMALL)
    diagram.cell(left + 8, 9.0, "", "free", width=0.5, height=0.5)
    diagram.text(left + 8.65, 9.25, "head 1", fontsize=SMALL)


def reservation_waste(figure: Figure, scheme: Scheme) -> None:
    """Eight requests, 2,048 slots reserved for each, and how many they used."""
    axes = plot(figure, xlabel="slots of the cache (tokens)", ylabel="request")
    names = [f"{number + 1}" for number in range(len(LENGTHS))]
    unused = [RESERVED_SLOTS - length for length in LENGTHS]
    axes.barh(names, LENGTHS, color=color("generated", scheme), label="slots that held a token in the end")
    axes.barh(names, unused, left=LENGTHS, color=color("wasted", scheme), label="reserved and never used", hatch="//")
    for row, length in enumerate(LENGTHS):
        axes.text(RESERVED_SLOTS + 25, row, f"{length / RESERVED_SLOTS:.0%}", va="center", size=SMALL)
    axes.invert_yaxis()
    axes.set_xlim(0, RESERVED_SLOTS + 200)
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper left", ncols=2)


def holes(figure: Figure, scheme: Scheme) -> None:
    """A memory of 8,192 slots before and after two sequences finish, and one that does not fit."""
    requests = {"A": 2048, "B": 1024, "C": 3072, "D": 1024, "E": 1024}
    left_us, newcomer = ("B", "D"), 1536
    diagram = Diagram(figure, scheme, width=18, height=9)
    scale, left = 16 / sum(requests.values()), 1.0
    starts = dict(zip(requests, accumulate(requests.values(), initial=0), strict=False))
    for top, gone, title in (
        (0.4, (), "Five sequences, each with its reserved slots"),
        (3.4, left_us, "B and D have finished: 2,048 slots are free, in two holes"),
    ):
        diagram.text(left, top, title, bold=True)
        for name, count in requests.items():
            label = f"{count:,}" if name in gone else f"{name}  {count:,}"
            role = "free" if name in gone else "generated"
            diagram.cell(left + starts[name] * scale, top + 0.6, label, role, width=count * scale, fontsize=SMALL)
    diagram.text(left, 6.4, f"F needs {newcomer:,} contiguous slots: no hole is large enough", bold=True)
    diagram.cell(left + starts["B"] * scale, 7.0, f"F  {newcomer:,}", "wasted", width=newcomer * scale, fontsize=SMALL)
    diagram.cell(left, 8.3, "", "free", width=0.5, height=0.5)
    diagram.text(left + 0.65, 8.55, "free memory", fontsize=SMALL)
    diagram.cell(left + 5, 8.3, "", "wasted", width=0.5, height=0.5)
    diagram.text(left + 5.65, 8.55, "has to wait", fontsize=SMALL)


def ragged_padding(figure: Figure, scheme: Scheme) -> None:
    """Three sequences of unequal length in one tensor: most of it is padding."""
    axes = plot(figure, xlabel="slots in the batch's tensor")
    longest, names = max(RAGGED), [f"{length:,} tokens" for length in RAGGED]
    axes.barh(names, RAGGED, color=color("generated", scheme), label="tokens")
    padding = [longest - length for length in RAGGED]
    axes.barh(names, padding, left=RAGGED, color=color("wasted", scheme), hatch="//", label="padding")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    share = sum(padding) / (longest * len(RAGGED))
    figure.legend(loc="outside upper left", ncols=2, title=None)
    axes.set_title(f"{sum(RAGGED):,} of {longest * len(RAGGED):,} slots: {share:.0%} padding", loc="right")


def block_table(figure: Figure, scheme: Scheme) -> None:
    """A sequence of nine tokens in blocks of four: three blocks anywhere, found through a list of their numbers."""
    diagram = Diagram(figure, scheme, width=18, height=8.25)
    size, table = 4, (5, 1, 3)
    diagram.text(1.0, 0.5, "the sequence: 9 tokens", bold=True)
    roles = ["prompt"] * 5 + ["generated"] * 4
    for token, role in enumerate(roles):
        diagram.cell(1.0 + token + (token // size) * 0.4, 0.9, str(token), role, fontsize=SMALL)
    diagram.text(12.6, 0.5, "its block table", bold=True)
    diagram.row(12.6, 0.9, [str(block) for block in table], [None] * 3)
    diagram.text(1.0, 3.1, "the memory: 6 blocks of 4 slots, in any order", bold=True)
    width = 2.6
    for block in range(6):
        x = 1.0 + block * (width + 0.1)
        diagram.text(x + width / 2, 5.0, f"block {block}", align="center", fontsize=SMALL)
        for offset in range(size):
            token = table.index(block) * size + offset if block in table else len(roles)
            label, role = (str(token), roles[token]) if token < len(roles) else ("", "free")
            diagram.cell(x + offset * width / size, 3.6, label, role, width=width / size, fontsize=SMALL)
    diagram.text(
        1.0,
        6.2,
        f"token 6 is in slot 6 mod 4 = 2 of the table's entry 6 div 4 = 1: block {table[6 // size]}",
        fontsize=SMALL,
    )
    diagram.legend(["prompt", "generated", "free"], 1.0, 7.2, step=4.6)
