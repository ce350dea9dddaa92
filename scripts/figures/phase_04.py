"""The figures of phase 4: programs and masks, what each kernel loads, the online softmax, packing, merging, bytes.

Loads and stores are not drawn by hand: the kernels run under the access tracer, in Triton's interpreter, and the
figures show its log. Bytes come from the predictions of `benchmarks.kernels`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from minicache.palette import Scheme, color
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
TINY = TYPE_SIZE * 0.7

NUM_BLOCKS, BLOCK_SIZE = 6, 4
TABLE, NUM_TOKENS = (5, 1, 3), 9
"""The sequence of nine tokens that phase 1 drew, in blocks of four."""

SLOTS = (7, 12, 17, -1)
"""The slots of the four new tokens of one step: two of one sequence, one of another, and padding."""

SCORES = (0.0, math.log(2), math.log(4), 0.0, math.log(8))
VALUES = (16.0, 0.0, 4.0, 16.0, 2.0)
SCORE_NAMES = ("0", "ln 2", "ln 4", "0", "ln 8")
"""Five tokens whose exponentials are 1, 2, 4, 1 and 8."""


def main() -> None:
    """Draw them all."""
    os.environ["TRITON_INTERPRET"] = "1"  # the tracer works in the interpreter only, with a GPU or without
    draw("kernel-programs", programs, size=(7.2, 2.6))
    draw("kernel-store", store, size=(7.2, 3.0))
    draw("kernel-gather", gather, size=(7.2, 2.8))
    draw("kernel-decode", decode, size=(7.2, 3.96))
    draw("online-softmax", online_softmax, size=(7.2, 3.0))
    draw("gqa-packing", gqa_packing, size=(7.2, 3.9))
    draw("split-merge", split_merge, size=(7.2, 3.7))
    draw("ladder-bytes", ladder_bytes, size=(7.2, 3.0))
    draw("prefill-tiles", prefill_tiles, size=(7.2, 5.5))
    draw("weight-groups", weight_groups, size=(7.2, 3.4))


# --- what the tracer saw --------------------------------------------------------------------------------------------


def programs(figure: Figure, scheme: Scheme) -> None:
    """Ten numbers, three programs of four lanes: the last two lanes are masked."""
    diagram = Diagram(figure, scheme, width=18, height=6.5)
    left, tile, count = 4.0, 4, 10
    diagram.text(0.4, 0.95, "x, ten numbers")
    diagram.row(left, 0.45, [str(i) for i in range(count)], ["free"] * count, fontsize=SMALL)
    for pid in range(3):
        y = 1.9 + pid * 1.2
        diagram.text(0.4, y + 0.5, f"program {pid}, 4 lanes")
        for lane in range(tile):
            offset = pid * tile + lane
            inside = offset < count
            diagram.cell(left + offset, y, str(offset), "generated" if inside else "wasted", fontsize=SMALL)
    meanings: list[tuple[str | None, str]] = [("generated", "a lane that loads"), ("wasted", "a masked lane")]
    _legend(diagram, meanings, left, 5.75, 5.0)


def store(figure: Figure, scheme: Scheme) -> None:
    """Four new tokens, and the slots that the tracer saw their programs write."""
    import torch

    from minicache.kernels import store_kv
    from minicache_course.kernels.tracer import trace

    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 8)
    rows = torch.ones(len(SLOTS), 2, 8)
    with trace(k_cache=cache, v_cache=cache.clone()) as log:
        store_kv(rows, rows, cache, cache.clone(), torch.tensor(SLOTS), backend="triton")
    stored = {program[0]: touched[0] for program, touched in log.rows("k_cache", "store").items() if touched}

    diagram = Diagram(figure, scheme, width=18, height=7.5)
    diagram.text(0.6, 0.5, "k, four new rows: one program each", bold=True)
    for row, slot in enumerate(SLOTS):
        x = 0.6 + row * 4.2
        label, role = f"row {row}: slot {slot}".replace("-", "−"), "generated" if row in stored else "wasted"
        diagram.cell(x, 0.95, label, role, width=3.9, fontsize=SMALL)
    starts = _blocks(diagram, 0.6, 4.6, NUM_BLOCKS, BLOCK_SIZE, 2.6)
    for block in range(NUM_BLOCKS):
        for offset in range(BLOCK_SIZE):
            owner = [row for row, place in stored.items() if place == (block, offset)]
            label = str(block * BLOCK_SIZE + offset)
            x = starts[block] + offset * 2.6 / BLOCK_SIZE
            diagram.cell(x, 4.6, label, "generated" if owner else "free", width=2.6 / BLOCK_SIZE, fontsize=SMALL)
            for row in owner:
                diagram.arrow((0.6 + row * 4.2 + 1.95, 2.0), (x + 1.3 / BLOCK_SIZE, 4.5))
    _legend(
        diagram,
        [("generated", "stored"), ("wasted", "slot −1: not stored"), ("free", "unchanged slots of k_cache")],
        0.6,
        6.6,
        4.6,
    )


def gather(figure: Figure, scheme: Scheme) -> None:
    """Nine tokens, two programs of eight: what each loads from the table and the cache."""
    import torch
    from triton import cdiv

    from minicache.kernels import gather as module
    from minicache_course.kernels.tracer import trace

    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 8)
    table = torch.tensor([*TABLE, 77])  # the last entry is undefined
    out = torch.zeros(NUM_TOKENS, 1, 8)
    tile = 8
    with trace(cache=cache, block_table=table) as log:
        module.gather_kernel[(1, cdiv(NUM_TOKENS, tile))](
            cache,
            table,
            out,
            NUM_TOKENS,
            *cache.stride(),
            *out.stride(),
            HEAD_DIM=8,
            BLOCK_SIZE=BLOCK_SIZE,
            PADDED_HEAD_DIM=8,
            TILE=tile,
        )

    diagram = Diagram(figure, scheme, width=18, height=7.0)
    diagram.text(4.0, 0.5, "block_table", bold=True)
    diagram.text(7.6, 0.5, "cache: one cell per slot, with its token", bold=True)
    for pid in range(2):
        y = 1.1 + pid * 2.3
        diagram.text(0.3, y + 0.25, f"program {pid}:")
        diagram.text(0.3, y + 0.85, f"tokens {pid * tile} … {pid * tile + tile - 1}", fontsize=SMALL)
        touched, masked = _marks(log, "block_table", (0, pid, 0))
        for entry, block in enumerate([*TABLE, "?"]):
            role = "generated" if (entry,) in touched else "wasted" if (entry,) in masked else None
            diagram.cell(4.0 + entry * 0.75, y, str(block), role, width=0.75, fontsize=SMALL)
        touched, masked = _marks(log, "cache", (0, pid, 0))
        starts = _blocks(diagram, 7.6, y, NUM_BLOCKS, BLOCK_SIZE, 1.6)
        for block, offset in np.ndindex(NUM_BLOCKS, BLOCK_SIZE):
            loaded = (block, offset) in touched
            role = "generated" if loaded else "wasted" if (block, offset) in masked else None
            label = str(TABLE.index(block) * BLOCK_SIZE + offset) if loaded else ""
            diagram.cell(starts[block] + offset * 0.4, y, label, role, width=0.4, fontsize=TINY)
    entries: list[tuple[str | None, str]] = [
        ("generated", "loaded"),
        ("wasted", "where masked lanes point: not loaded"),
        (None, "neither"),
    ]
    _legend(diagram, entries, 4.0, 5.95, 3.0, steps=(2.6, 8.0))


def decode(figure: Figure, scheme: Scheme) -> None:
    """Two sequences in tiles of sixteen tokens: which slots each tile loads."""
    import torch

    from minicache.kernels import decode as module
    from minicache_course.kernels.tracer import trace

    num_blocks, block_size, head_dim = 8, 8, 256  # keys of 1,024 bytes: tiles of sixteen tokens
    tables = torch.tensor([[5, 1, 6, 3, 0], [2, 7, -1, -1, -1]])
    lengths = torch.tensor([37, 12])
    cache = torch.zeros(num_blocks, block_size, 1, head_dim)
    with trace(k_cache=cache, block_tables=tables) as log:
        module.paged_decode_attention(torch.zeros(2, 4, head_dim), cache, cache.clone(), tables, lengths, scale=1.0)

    diagram = Diagram(figure, scheme, width=18, height=9.9)
    left, width = 3.0, 1.8
    diagram.text(left, 0.5, "k_cache: eight blocks of eight slots", bold=True)
    y = 1.1
    for seq, (name, length) in enumerate((("A", 37), ("B", 12))):
        used = [block for block in tables[seq].tolist() if block >= 0]
        diagram.text(0.2, y + 0.3, f"{name}: {length} tokens, table {', '.join(map(str, used))}", bold=True)
        y += 0.75
        loads = [a for a in log.accesses if a.tensor == "k_cache" and a.program[1] == seq]
        for number, access in enumerate(loads):
            rows = {tuple(row) for row in access.indices[~access.masked][:, :2].tolist()}
            starts = _blocks(diagram, left, y, num_blocks, block_size, width, gap=0.06, above=False, names=False)
            diagram.text(0.2, y + 0.35, f"tile {number}", fontsize=SMALL)
            for block in range(num_blocks):
                for offset in range(block_size):
                    token = used.index(block) * block_size + offset if block in used else length
                    role = "generated" if (block, offset) in rows else "free" if token < length else None
                    x = starts[block] + offset * width / block_size
                    diagram.cell(x, y, "", role, width=width / block_size, height=0.7)
            masked = int(access.masked.reshape(-1, access.masked.size // 16)[:, 0].sum())
            note = f"{len(rows)} slots" + (f", {masked} lanes masked" if masked else "")
            diagram.text(left + 8 * (width + 0.06) - 0.06, y + 0.95, note, align="right", fontsize=TINY)
            y += 1.25
        y += 0.15
    for block, start in enumerate(starts):
        diagram.text(start + width / 2, y + 0.1, f"block {block}", align="center", fontsize=TINY)
    _legend(
        diagram,
        [("generated", "loaded by this tile"), ("free", "same sequence, another tile"), (None, "not this sequence")],
        0.2,
        y + 0.75,
        6.2,
    )


def prefill_tiles(figure: Figure, scheme: Scheme) -> None:
    """Three sequences in one launch: which keys each tile of four queries loads, and what its rows see."""
    import torch

    from minicache.kernels.decode import launch_options
    from minicache.kernels.prefill import paged_prefill_attention
    from minicache_course.kernels.tracer import trace

    sequences = {"A": (37, 6), "B": (20, 1), "C": (18, 18)}  # tokens, and how many of them are new
    lengths, counts = zip(*sequences.values(), strict=True)
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    cache = torch.zeros(10, 8, 1, 256)
    tables = torch.tensor([[5, 1, 6, 3, 0], [2, 7, 9, 0, 0], [8, 4, 2, 0, 0]])
    paged = (cache, cache.clone(), tables, torch.tensor(lengths), torch.tensor(starts))
    with trace(k_cache=cache) as log:
        paged_prefill_attention(torch.zeros(starts[-1], 8, 256), *paged, scale=1.0)
    queries = launch_options(torch.zeros(1, 8, 256), cache, "prefill")["ROWS"] // 8

    diagram = Diagram(figure, scheme, width=18, height=13.75)
    left, size, y = 3.4, 0.375, 0.4
    for i, (name, (length, count)) in enumerate(sequences.items()):
        what = "a chunk after 31 cached tokens" if name == "A" else "a decode step" if name == "B" else "a whole prompt"
        diagram.text(0.3, y, f"{name}: {what}", bold=True)
        y += 0.5
        for query in range(count):
            tile = starts[i] // queries + i + query // queries
            loaded = _positions_loaded(log, tile, tables[i].tolist(), 8)
            top = y + query * size + query // queries * 0.14
            if query % queries == 0:
                diagram.text(left - 0.3, top + size / 2, f"program {tile}", align="right", fontsize=TINY)
            for key in range(length):
                seen = key <= length - count + query
                role = None if key not in loaded else "generated" if seen else "wasted"
                x = left + key * size + key // 16 * 0.14
                diagram.cell(x, top, "", role, width=size, height=size)
        y += count * size + (count - 1) // queries * 0.14 + 0.75
    entries = (("generated", "loaded and visible"), ("wasted", "loaded, masked for this query"), (None, "not loaded"))
    for line, (role, meaning) in enumerate(entries):
        diagram.cell(11.4, 8.0 + line * 0.9, "", role, width=0.5, height=0.5)
        diagram.text(12.05, 8.25 + line * 0.9, meaning, fontsize=SMALL)
    diagram.text(11.4, 6.6, "rows: new tokens, 4 per tile", fontsize=SMALL)
    diagram.text(11.4, 7.2, "columns: keys, 16 per tile", fontsize=SMALL)


# --- worked by hand -------------------------------------------------------------------------------------------------


def online_softmax(figure: Figure, scheme: Scheme) -> None:
    """Five scores in tiles of two: m, l and acc after each."""
    diagram = Diagram(figure, scheme, width=18, height=7.5)
    tile, step = 2, 5.0
    m, total, acc = -math.inf, 0.0, 0.0
    diagram.text(0.3, 1.3, "score", fontsize=SMALL)
    diagram.text(0.3, 2.35, "value", fontsize=SMALL)
    for number in range(3):
        x = 2.2 + number * step
        diagram.text(x, 0.4, f"tile {number}", bold=True)
        rows = range(number * tile, number * tile + tile)
        for lane, row in enumerate(rows):
            there = row < len(SCORES)
            role = "generated" if there else "wasted"
            diagram.cell(x + lane * 1.5, 0.8, SCORE_NAMES[row] if there else "−∞", role, width=1.5, fontsize=SMALL)
            diagram.cell(x + lane * 1.5, 1.85, f"{VALUES[row]:g}" if there else "0", role, width=1.5, fontsize=SMALL)
        seen = [row for row in rows if row < len(SCORES)]
        new_m = max(m, *(SCORES[row] for row in seen))
        alpha = math.exp(m - new_m)
        p = [math.exp(SCORES[row] - new_m) for row in seen]
        total = alpha * total + sum(p)
        acc = alpha * acc + sum(weight * VALUES[row] for weight, row in zip(p, seen, strict=True))
        m = new_m
        diagram.arrow((x + 1.5, 2.95), (x + 1.5, 3.65))
        for line, text in enumerate((f"m = ln {math.exp(m):g}", f"l = {total:g}", f"acc = {acc:g}")):
            diagram.cell(x, 3.75 + line * 0.85, text, "prompt", width=3.0, height=0.8, fontsize=SMALL)
        if number < 2:
            diagram.arrow((x + 3.1, 5.0), (x + step - 0.1, 5.0))
            diagram.text(x + 3.0 + (step - 3.0) / 2, 4.6, "× ½", align="center")
    diagram.text(2.2 + 2 * step, 6.85, f"out = acc / l = {acc:g} / {total:g} = {acc / total:g}", bold=True)
    diagram.text(2.2, 6.85, "the state: m, l and acc, in fp32", fontsize=SMALL)


def gqa_packing(figure: Figure, scheme: Scheme) -> None:
    """Four query heads of one group: a program each, or the rows of one matrix of sixteen."""
    diagram = Diagram(figure, scheme, width=18, height=9.75)
    diagram.text(0.4, 0.5, "one program per head: keys read 4 times", bold=True)
    for head in range(4):
        y = 1.2 + head * 1.9
        diagram.cell(0.4, y + 0.25, f"q of h{head}", "generated", width=1.8, fontsize=SMALL)
        diagram.arrow((2.3, y + 0.75), (3.3, y + 0.75))
        diagram.row(3.4, y + 0.25, ["k"] * 4, ["prompt"] * 4, width=0.9, fontsize=SMALL)
    left, height = 9.6, 0.47
    diagram.text(left, 0.5, "one program for the group: once", bold=True)
    for row in range(16):
        label, role = (f"q of h{row}", "generated") if row < 4 else ("", "wasted")
        diagram.cell(left, 1.2 + row * height, label, role, width=2.4, height=height, fontsize=TINY)
    diagram.text(left + 1.2, 1.2 + 16 * height + 0.35, "[16, d]", align="center", fontsize=SMALL)
    diagram.text(left + 2.75, 1.2 + 8 * height, "·", align="center", bold=True)
    diagram.row(left + 3.1, 1.2, ["k"] * 4, ["prompt"] * 4, width=0.55, height=2.4, fontsize=SMALL)
    diagram.text(left + 4.2, 3.9, "kᵀ [d, TILE]", align="center", fontsize=SMALL)
    diagram.text(left + 5.65, 1.2 + 8 * height, "=", align="center", bold=True)
    for row in range(16):
        for column in range(4):
            role = "generated" if row < 4 else "wasted"
            diagram.cell(left + 6.0 + column * 0.5, 1.2 + row * height, "", role, width=0.5, height=height)
    diagram.text(left + 7.0, 1.2 + 16 * height + 0.35, "[16, TILE]", align="center", fontsize=SMALL)
    diagram.cell(left + 2.9, 5.6, "", "wasted", width=0.45, height=0.45)
    diagram.text(left + 3.45, 5.82, "padding", fontsize=SMALL)


def split_merge(figure: Figure, scheme: Scheme) -> None:
    """The five tokens in two splits, a third that is empty, and the merge."""
    diagram = Diagram(figure, scheme, width=18, height=9.25)
    splits = ((0, 1, 2), (3, 4), ())
    merged_m = max(SCORES)
    merged_l = merged_acc = 0.0
    for number, rows in enumerate(splits):
        x = 0.5 + number * 5.9
        diagram.text(x, 0.5, f"split {number}", bold=True)
        for place, row in enumerate(rows):
            diagram.cell(x + place * 1.35, 0.95, SCORE_NAMES[row], "generated", width=1.35, fontsize=SMALL)
            diagram.cell(x + place * 1.35, 1.95, f"{VALUES[row]:g}", "generated", width=1.35, fontsize=SMALL)
        if not rows:
            diagram.text(x, 1.9, "no tokens", fontsize=SMALL)
        m = max((SCORES[row] for row in rows), default=-math.inf)
        p = [math.exp(SCORES[row] - m) for row in rows]
        total, acc = sum(p), sum(weight * VALUES[row] for weight, row in zip(p, rows, strict=True))
        name = f"ln {math.exp(m):g}" if rows else "−∞"
        for line, text in enumerate((f"m = {name}", f"l = {total:g}", f"acc = {acc:g}")):
            diagram.cell(x, 3.2 + line * 0.85, text, "prompt", width=3.2, height=0.8, fontsize=SMALL)
        alpha = math.exp(m - merged_m)
        merged_l += alpha * total
        merged_acc += alpha * acc
        target = (7.6 + number * 0.9, 6.9)
        diagram.arrow((x + 1.6, 5.85), target)
        word = {0.5: "× ½", 1.0: "× 1", 0.0: "× 0"}[round(alpha, 6)]
        diagram.text((5.75, 8.8, 14.2)[number], 6.2, word, align="center")
    for column, text in enumerate((f"m = ln {math.exp(merged_m):g}", f"l = {merged_l:g}", f"acc = {merged_acc:g}")):
        diagram.cell(4.2 + column * 3.2, 7.0, text, "prompt", width=3.1, height=0.8, fontsize=SMALL)
    diagram.text(0.5, 7.4, "merged", bold=True)
    diagram.text(4.2, 8.55, f"out = {merged_acc:g} / {merged_l:g} = {merged_acc / merged_l:g}", bold=True)


# --- predicted ------------------------------------------------------------------------------------------------------


def ladder_bytes(figure: Figure, scheme: Scheme) -> None:
    """Bytes that each rung of the ladder requests, and the least time that they take."""
    rungs = json.loads((RESULTS / "kernels.json").read_text(encoding="utf-8"))["rungs"]
    axes = plot(figure, xlabel="megabytes requested by its programs")
    megabytes = [rung["bytes"] / 1e6 for rung in rungs]
    axes.barh([rung["name"] for rung in rungs], megabytes, color=color("generated", scheme))
    for place, (rung, size) in enumerate(zip(rungs, megabytes, strict=True)):
        told = f"{size:,.0f} MB: {rung['prediction']}"
        axes.annotate(told, (size, place), xytext=(5, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(megabytes) * 1.35)
    axes.invert_yaxis()
    axes.grid(visible=False)


# --- helpers --------------------------------------------------------------------------------------------------------


def _marks(log: Any, tensor: str, program: tuple[int, int, int]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The rows of a tensor that a program accessed, and those that only its masked lanes point to."""
    touched: set[tuple[int, ...]] = set()
    masked: set[tuple[int, ...]] = set()
    for access in log.accesses:
        if access.tensor == tensor and access.program == program:
            dims = 1 if access.indices.shape[1] == 1 else 2
            touched |= {tuple(row) for row in access.indices[~access.masked][:, :dims].tolist()}
            masked |= {tuple(row) for row in access.indices[access.masked][:, :dims].tolist()}
    return touched, masked - touched


def _positions_loaded(log: Any, tile: int, table: list[int], block_size: int) -> set[int]:
    """The positions of a sequence whose keys the programs of a tile of queries load."""
    rows = {
        (block, offset)
        for access in log.accesses
        if access.tensor == "k_cache" and access.program[1] == tile
        for block, offset in access.indices[~access.masked][:, :2].tolist()
    }
    return {table.index(block) * block_size + offset for block, offset in rows}


def _blocks(
    diagram: Diagram,
    left: float,
    y: float,
    num_blocks: int,
    block_size: int,
    width: float,
    *,
    gap: float = 0.1,
    above: bool = False,
    names: bool = True,
) -> list[float]:
    """The left edge of each block of a cache, drawn next to each other from `left`, with their names below."""
    starts = [left + block * (width + gap) for block in range(num_blocks)]
    for block, start in enumerate(starts):
        if names and not above:
            diagram.text(start + width / 2, y + 1.35, f"block {block}", align="center", fontsize=TINY)
    return starts


def _legend(
    diagram: Diagram,
    entries: list[tuple[str | None, str]],
    x: float,
    y: float,
    step: float,
    *,
    steps: tuple[float, ...] = (),
) -> None:
    """A legend of swatches: `step` apart, or `steps[i]` after entry i."""
    for index, (role, meaning) in enumerate(entries):
        diagram.cell(x, y, "", role, width=0.5, height=0.5)
        diagram.text(x + 0.65, y + 0.25, meaning, fontsize=TYPE_SIZE * 0.9)
        x += steps[index] if index < len(steps) else step


# --- weights of few bits ----------------------------------------------------------------------------------------------

LAYER, OUTPUT = "layers.2.self_attn.o_proj.weight", 102
"""The output of MiniGPT's whose groups differ most in range."""


def weight_groups(figure: Figure, scheme: Scheme) -> None:
    """The weights of an output, and the sixteen values that four bits have: one scale for all, and one for a group."""
    from minicache.kernels.group_quantize import GROUP
    from minicache.model import load_minigpt

    row = load_minigpt().state_dict()[LAYER][OUTPUT].numpy()
    panels = figure.subplots(1, 2, sharey=True)
    for axes, size, title in zip(panels, (len(row), GROUP), ("one scale", "a scale for each group"), strict=True):
        for start in range(0, len(row), size):
            group = row[start : start + size]
            values = np.linspace(group.min(), group.max(), 16)
            axes.hlines(values, start - 0.5, start + size - 0.5, color=color("wasted", scheme), linewidth=0.8)
        axes.plot(row, ".", color=color("generated", scheme), markersize=5)
        axes.set(xlabel="input", title=title, xticks=range(0, len(row) + 1, GROUP))
        axes.grid(visible=False)
    panels[0].set_ylabel("weight")
