"""The figures of phase 3: addresses, slots, a pool over time, sharing, waste, ways to attend, and the ragged step.

The diagrams are drawn from real pools, tables and steps, so they always match the code. The bars come from
benchmarks/results/paged_attention.json.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.errors import SharedBlockError
from minicache.grammar import sample_text
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache.palette import INK, Scheme, color
from minicache.simulator.workload import ALPACA, SHAREGPT, generate
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
BLOCK = 4
"""Tokens a block, in every diagram: few enough to draw each one."""

TEXT = ("Yesterday", "I", "cooked", "fish", ".", "Tomorrow", "we", "will", "cook")
NUM_PROMPT = 6


def main() -> None:
    """Draw them all."""
    draw("translated-twice", translated_twice, size=(6.2, 3.4))
    draw("block-slots", block_slots, size=(7.2, 3.7))
    draw("pool-over-time", pool_over_time, size=(7.2, 3.9))
    draw("fork-sharing", fork_sharing, size=(7.2, 3.6))
    draw("dense-and-paged", dense_and_paged, size=(7.2, 3.3))
    draw("waste-by-block-size", waste_by_block_size, size=(7.2, 3.5))
    draw("four-ways", four_ways, size=(6.2, 4.55))
    draw("ways-to-attend", ways_to_attend, size=(7.2, 3.2))
    draw("ragged-step", ragged_step, size=(7.2, 4.2))


def translated_twice(figure: Figure, scheme: Scheme) -> None:
    """An address of a process and a token of a sequence: index and offset, an entry of a table, a place in memory."""
    diagram = Diagram(figure, scheme, width=18, height=9.87)
    sides = (
        (0.3, "a process reads address 9,000", "page", "page table", "frame", "address", 4096, 9000),
        (9.5, "a sequence reads token 37", "block", "block table", "block", "slot", 16, 37),
    )
    for left, title, page, table, frame, unit, size, place in sides:
        index, offset, found = place // size, place % size, 7
        diagram.text(left, 0.5, title, bold=True)
        for number in range(3):
            role = "generated" if number == index else None
            diagram.cell(left + number * 2.6, 1.1, f"{page} {number}", role, width=2.6)
        diagram.text(left, 3.0, f"offset {offset}")
        diagram.text(left, 4.3, table)
        diagram.row(left + 4.2, 3.8, ["", "", str(found)], [None, None, "generated"], width=1.2)
        for number in range(3):
            at = found - 1 + number
            role = "generated" if at == found else "free"
            diagram.cell(left + number * 2.6, 6.5, f"{frame} {at}", role, width=2.6)
        diagram.text(left, 8.4, f"offset {offset}: {unit} {found * size + offset:,}")
        diagram.arrow((left + 7.2, 2.15), (left + 7.2, 3.75))
        diagram.arrow((left + 7.0, 4.85), (left + 4.6, 6.45))
        for x, y in ((left + index * 2.6, 1.1), (left + 2.6, 6.5)):
            _mark(diagram, x + 2.6 * offset / size, y + 1.05)
    _mark(diagram, 0.5, 9.15)
    diagram.text(0.9, 9.4, "the offset: the same before and after")


def _mark(diagram: Diagram, x: float, y: float) -> None:
    """A short thick line, from y downwards."""
    diagram.axes.plot([x, x], [y, y + 0.5], color=INK[diagram.scheme], linewidth=3, solid_capstyle="butt")


def block_slots(figure: Figure, scheme: Scheme) -> None:
    """Nine tokens, their block table, and their slots in memory next to another sequence's."""
    pool = BlockPool(6, BLOCK)
    table, other = BlockTable(pool), BlockTable(pool)
    slots = table.append(NUM_PROMPT)
    others = other.append(5)
    slots += table.append(len(TEXT) - NUM_PROMPT)
    roles = ["prompt"] * NUM_PROMPT + ["generated"] * (len(TEXT) - NUM_PROMPT)

    diagram = Diagram(figure, scheme, width=18, height=9.25)
    left, width = 0.6, 1.78
    diagram.text(left, 0.5, f"the sequence: {len(TEXT)} tokens, in blocks of {BLOCK}", bold=True)
    for position, (word, role) in enumerate(zip(TEXT, roles, strict=True)):
        x = left + position * width + position // BLOCK * 0.35
        diagram.cell(x, 1.0, word, role, width=width, fontsize=SMALL)
        diagram.text(x + width / 2, 2.3, str(position), align="center", fontsize=SMALL)
    diagram.text(left, 3.5, "its block table", bold=True)
    for entry, block_id in enumerate(table.block_ids):
        diagram.cell(5.0 + entry, 3.0, str(block_id), None)
    diagram.text(8.6, 3.5, f"token 8: entry 8 div 4 = 2, block 4; slot 4 · 4 + 0 = {table.slot(8)}", fontsize=SMALL)

    diagram.text(left, 5.0, f"the memory: {pool.num_blocks} blocks, {pool.num_blocks * BLOCK} slots", bold=True)
    size = 0.66
    at = dict(zip(slots, range(len(TEXT)), strict=True))
    for block_id in range(pool.num_blocks):
        x = left + block_id * (BLOCK * size + 0.18)
        diagram.text(x + BLOCK * size / 2, 5.75, f"block {block_id}", align="center", fontsize=SMALL)
        for slot in range(block_id * BLOCK, (block_id + 1) * BLOCK):
            label = str(at[slot]) if slot in at else ""
            fill = roles[at[slot]] if slot in at else None if slot in others else "free"
            place = x + slot % BLOCK * size
            diagram.cell(place, 6.1, label, fill, width=size, height=1.0, fontsize=SMALL)
            diagram.text(place + size / 2, 7.4, str(slot), align="center", fontsize=SMALL)
    diagram.legend(["prompt", "generated"], left, 8.4, step=3.9)
    diagram.cell(left + 8.2, 8.4, "", None, width=0.5, height=0.5)
    diagram.text(left + 8.85, 8.65, "another sequence's", fontsize=TYPE_SIZE * 0.9)
    diagram.cell(left + 13.2, 8.4, "", "free", width=0.5, height=0.5)
    diagram.text(left + 13.85, 8.65, "empty", fontsize=TYPE_SIZE * 0.9)


def pool_over_time(figure: Figure, scheme: Scheme) -> None:
    """Five moments of one pool: the blocks of each sequence, how full they are, and the free list."""
    pool = BlockPool(8, BLOCK)
    a, b, c = BlockTable(pool), BlockTable(pool), BlockTable(pool)
    tables = {"A": a, "B": b, "C": c}
    diagram = Diagram(figure, scheme, width=18, height=9.75)
    left, size = 3.9, 0.32
    for block_id in range(pool.num_blocks):
        middle = left + block_id * (BLOCK * size + 0.1) + BLOCK * size / 2
        diagram.text(middle, 0.5, str(block_id), align="center", fontsize=SMALL)
    diagram.text(0.4, 0.5, "block", fontsize=SMALL)
    diagram.text(15.3, 0.5, "free, next first", fontsize=SMALL)
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("A appends 6", lambda: a.append(6)),
        ("B appends 5", lambda: b.append(5)),
        ("A appends 3", lambda: a.append(3)),
        ("B is released", b.release),
        ("C appends 13", lambda: c.append(13)),
    )
    for moment, (name, call) in enumerate(calls):
        call()
        y = 1.0 + moment * 1.55
        diagram.text(0.4, y + 0.6, name)
        full = {
            block_id: (name_of, min(BLOCK, table.num_tokens - entry * BLOCK))
            for name_of, table in tables.items()
            for entry, block_id in enumerate(table.block_ids)
        }
        for block_id in range(pool.num_blocks):
            holder, held = full.get(block_id, ("", 0))
            for offset in range(BLOCK):
                x = left + block_id * (BLOCK * size + 0.1) + offset * size
                role = "generated" if offset < held else "wasted" if holder else "free"
                diagram.cell(x, y, holder if offset < held else "", role, width=size, height=1.2, fontsize=SMALL)
        diagram.text(15.3, y + 0.6, " ".join(map(str, _free_list(pool))) or "none", fontsize=SMALL)
    diagram.cell(left, 8.95, "", "generated", width=0.5, height=0.5)
    diagram.text(left + 0.65, 9.2, "holds a token", fontsize=SMALL)
    diagram.cell(left + 4.2, 8.95, "", "wasted", width=0.5, height=0.5)
    diagram.text(left + 4.85, 9.2, "allocated, still empty", fontsize=SMALL)
    diagram.cell(left + 10, 8.95, "", "free", width=0.5, height=0.5)
    diagram.text(left + 10.65, 9.2, "free", fontsize=SMALL)


def _free_list(pool: BlockPool) -> list[int]:
    """The free blocks in the order of their allocation: a copy of the pool allocates all of them."""
    drained = copy.deepcopy(pool)
    return drained.allocate(drained.num_free)


def fork_sharing(figure: Figure, scheme: Scheme) -> None:
    """A fork at a block's end, after which both append; and one in the middle of a block, after which neither can."""
    diagram = Diagram(figure, scheme, width=18, height=9)
    for left, num_tokens in ((0.5, 8), (10.1, 6)):
        pool = BlockPool(4, BLOCK)
        parent = BlockTable(pool)
        parent.append(num_tokens)
        child = parent.fork()
        refused = False
        for table in (parent, child):
            try:
                table.append(1)
            except SharedBlockError:
                refused = True
        diagram.text(left, 0.5, f"fork at {num_tokens} tokens", bold=True)
        for y, name, table in ((1.1, "parent", parent), (7.0, "child", child)):
            diagram.text(left, y + 0.5, name)
            diagram.row(left + 2.2, y, [str(block_id) for block_id in table.block_ids], [None] * len(table.block_ids))
        size = 0.42
        for block_id in range(4 if not refused else 2):
            x = left + block_id * (BLOCK * size + 0.2)
            refs = pool.ref_count(block_id)
            held = max(
                min(BLOCK, table.num_tokens - table.block_ids.index(block_id) * BLOCK)
                for table in (parent, child)
                if block_id in table.block_ids
            )
            for offset in range(BLOCK):
                role = "free" if offset >= held else "shared" if refs > 1 else "generated"
                diagram.cell(x + offset * size, 4.0, "", role, width=size)
            diagram.text(x, 5.35, f"block {block_id}", fontsize=SMALL)
            for table, start, end in ((parent, 2.2, 3.9), (child, 6.9, 5.75)):
                if block_id in table.block_ids:
                    entry = left + 2.2 + table.block_ids.index(block_id) + 0.5
                    diagram.arrow((entry, start), (x + BLOCK * size / 2, end))
        told = "one more token each: separate blocks" if not refused else "both would write slot 6: append is refused"
        diagram.text(left, 8.5, told, fontsize=SMALL)
    diagram.cell(10.1 + 4.4, 4.0, "", "shared", width=0.5, height=0.5)
    diagram.text(10.1 + 5.05, 4.25, "two references", fontsize=SMALL)
    diagram.cell(10.1 + 4.4, 4.7, "", "generated", width=0.5, height=0.5)
    diagram.text(10.1 + 5.05, 4.95, "one reference", fontsize=SMALL)
    diagram.cell(10.1 + 4.4, 5.4, "", "free", width=0.5, height=0.5)
    diagram.text(10.1 + 5.05, 5.65, "empty slot", fontsize=SMALL)


def dense_and_paged(figure: Figure, scheme: Scheme) -> None:
    """The same 96 slots, 24 reserved for each sequence, and in blocks of 4."""
    rows, reserved = 96, 24
    lengths = {"A": 10, "B": 4, "C": 21, "D": 7, "E": 13, "F": 15}
    diagram = Diagram(figure, scheme, width=18, height=8.25)
    left, scale = 1.0, 16 / rows
    diagram.text(left, 0.5, f"dense: {reserved} slots reserved for each of four; E and F wait", bold=True)
    for place, (name, length) in enumerate(list(lengths.items())[: rows // reserved]):
        x = left + place * reserved * scale
        diagram.cell(x, 1.0, name, "generated", width=length * scale, height=1.2, fontsize=SMALL)
        unused = (reserved - length) * scale
        diagram.cell(x + length * scale, 1.0, "", "wasted", width=unused, height=1.2)

    pool = BlockPool(rows // BLOCK, BLOCK)
    tables = {name: BlockTable(pool) for name in lengths}
    for _ in range(max(lengths.values())):  # they grow together, to interleave their blocks
        for name, table in tables.items():
            if table.num_tokens < lengths[name]:
                table.append(1)
    held = {
        block_id: (name, min(BLOCK, table.num_tokens - entry * BLOCK))
        for name, table in tables.items()
        for entry, block_id in enumerate(table.block_ids)
    }
    used = sum(lengths.values())
    diagram.text(left, 3.6, f"paged, in blocks of {BLOCK}: all six fit, and {pool.num_free} blocks are left", bold=True)
    for block_id in range(pool.num_blocks):
        x = left + block_id * BLOCK * scale
        name, tokens = held.get(block_id, ("", 0))
        if not name:
            diagram.cell(x, 4.1, "", "free", width=BLOCK * scale, height=1.2)
            continue
        filled = tokens * scale
        diagram.cell(x, 4.1, "", "generated", width=filled, height=1.2)
        if tokens < BLOCK:
            diagram.cell(x + filled, 4.1, "", "wasted", width=BLOCK * scale - filled, height=1.2)
        # Below the block, as the part with tokens may be too narrow for a letter.
        diagram.text(x + BLOCK * scale / 2, 5.65, name, align="center", fontsize=SMALL)
    dense_used = sum(list(lengths.values())[: rows // reserved])
    taken = pool.num_used * BLOCK
    diagram.text(
        left,
        6.5,
        f"allocated slots that hold a token: {dense_used} of {rows}, {dense_used / rows:.0%}; "
        f"{used} of {taken}, {used / taken:.0%}",
        fontsize=SMALL,
    )
    diagram.cell(left, 7.2, "", "generated", width=0.5, height=0.5)
    diagram.text(left + 0.65, 7.45, "holds a token", fontsize=SMALL)
    diagram.cell(left + 4.6, 7.2, "", "wasted", width=0.5, height=0.5)
    diagram.text(left + 5.25, 7.45, "allocated, empty", fontsize=SMALL)
    diagram.cell(left + 10, 7.2, "", "free", width=0.5, height=0.5)
    diagram.text(left + 10.65, 7.45, "free", fontsize=SMALL)


def waste_by_block_size(figure: Figure, scheme: Scheme) -> None:
    """Counted on sampled lengths, and estimated as (b − 1) / 2 slots a sequence."""
    sizes = [2**power for power in range(9)]
    axes = plot(figure, xlabel="block size, tokens", ylabel="allocated slots that are empty")
    for (name, lengths), role, marker in zip(_lengths().items(), ("end", "generated", "shared"), "osD", strict=True):
        mean = sum(lengths) / len(lengths)
        counted = []
        for size in sizes:
            taken = sum(blocks_for(length, size) * size for length in lengths)
            counted.append(1 - sum(lengths) / taken)
        estimated = [(size - 1) / 2 / (mean + (size - 1) / 2) for size in sizes]
        shade = color(role, scheme)
        axes.plot(sizes, counted, marker, color=shade, markersize=6, label=f"{name}: {mean:,.0f} tokens on average")
        axes.plot(sizes, estimated, color=shade, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")


def _lengths() -> dict[str, list[int]]:
    """Whole lengths, prompt and output, of 1,000 sequences from each of three sources."""
    rng = random.Random(0)
    texts = {"MiniGPT's texts": [len(sample_text(rng)) for _ in range(1000)]}
    return texts | {
        workload.name: [
            arrival.num_prompt_tokens + arrival.num_output_tokens for arrival in generate(workload, 1000, 0)
        ]
        for workload in (ALPACA, SHAREGPT)
    }


def four_ways(figure: Figure, scheme: Scheme) -> None:
    """Four sequences in blocks of four: what each way to attend copies, pads, and calls."""
    lengths = {"A": 7, "B": 2, "C": 8, "D": 3}
    diagram = Diagram(figure, scheme, width=18, height=13.2)
    size = 0.62
    ways: tuple[tuple[str, list[str]], ...] = (
        ("everything at once", ["ABCD"]),
        ("in buckets", ["AC", "BD"]),
        ("one sequence at a time", ["A", "B", "C", "D"]),
        ("block by block", []),
    )
    for place, (title, calls) in enumerate(ways):
        left, top = 0.3 + 9.2 * (place % 2), 0.5 + 6.1 * (place // 2)
        y, padded = top + 1.5, 0
        parts = 0
        for call in calls:
            longest = max(lengths[name] for name in call)
            start = y
            for name in call:
                roles = ["generated"] * lengths[name] + ["wasted"] * (longest - lengths[name])
                padded += longest - lengths[name]
                diagram.text(left, y + size / 2, name)
                diagram.row(left + 0.9, y, [""] * longest, roles, width=size, height=size)
                y += size
            _frame(diagram, left + 0.9, start, longest * size, y - start)
            y += 0.3
        for name in [] if calls else lengths:
            diagram.text(left, y + size / 2, name)
            for first in range(0, lengths[name], BLOCK):
                held, x = min(BLOCK, lengths[name] - first), left + 0.9 + first * size + first // BLOCK * 0.9
                diagram.row(x, y, [""] * held, ["prompt"] * held, width=size, height=size)
                _frame(diagram, x, y, held * size, size)
                if first:
                    diagram.text(x - 0.45, y + size / 2, "+", align="center", bold=True)
                parts += 1
            y += size + 0.3
        told = f"{len(calls)} calls, {padded} padded" if len(calls) > 1 else f"1 call, {padded} padded"
        diagram.text(left, top, title, bold=True)
        diagram.text(left, top + 0.75, told if calls else f"{parts} parts, merged")
    meanings = {"generated": "copied", "wasted": "padding", "prompt": "read in its block"}
    for (role, meaning), x in zip(meanings.items(), (0.3, 3.9, 7.6), strict=True):
        diagram.legend({role: meaning}, x, 12.4, size=0.55, fontsize=TYPE_SIZE)
    _frame(diagram, 13.8, 12.4, 0.9, 0.55)
    diagram.text(15.0, 12.67, "one call")


def _frame(diagram: Diagram, x: float, y: float, width: float, height: float) -> None:
    """A line around cells."""
    line = INK[diagram.scheme]
    diagram.axes.add_patch(Rectangle((x, y), width, height, facecolor="none", edgecolor=line, linewidth=1.6))


def ways_to_attend(figure: Figure, scheme: Scheme) -> None:
    """Measured: one decode step of attention over 32 sequences, each method in the same run."""
    measured = json.loads((RESULTS / "paged_attention.json").read_text(encoding="utf-8"))
    axes = plot(figure, xlabel="milliseconds for one decode step of one layer")
    bars = {
        "contiguous, no paging": ("contiguous", "free"),
        "one at a time, group folded": ("folded", "generated"),
        "one at a time, paged_decode_attention": ("pytorch", "generated"),
        "one at a time, enable_gqa=True": ("enable_gqa", "generated"),
        "buckets, padded": ("buckets", "wasted"),
        "all padded, with a mask": ("padded", "wasted"),
        "compiled, nothing copied": ("minicache", "generated"),
    }
    colours = {"free": "no paging", "generated": "paged, one at a time", "wasted": "paged, with padding"}
    times = [measured["minimum_ms"][key] for key, _ in bars.values()]
    drawn = axes.barh(list(bars), times, color=[color(role, scheme) for _, role in bars.values()])
    axes.bar_label(drawn, fmt="%.1f", padding=3)
    axes.legend(handles=[Patch(color=color(role, scheme), label=label) for role, label in colours.items()])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(visible=False)  # each bar has its number


def ragged_step(figure: Figure, scheme: Scheme) -> None:
    """Nine new tokens of three sequences in one flat batch, and the tensors that tell them apart."""
    pool = BlockPool(8, BLOCK)
    a, b, c = BlockTable(pool), BlockTable(pool), BlockTable(pool)
    b.append(9)
    c.append(4)
    new = [5, 1, 3]
    step = RaggedStep(PagedStorage(pool, 1, 1, 1), [a, b, c], new)
    positions = step.positions(sum(new)).tolist()
    slots = step.slot_mapping.tolist()
    starts = step.query_start_loc.tolist()
    contexts = step.context_lens.tolist()

    diagram = Diagram(figure, scheme, width=18, height=10.5)
    left, width = 4.4, 1.35
    diagram.text(0.4, 1.6, "token of")
    diagram.text(0.4, 2.9, "position")
    diagram.text(0.4, 3.8, "slot_mapping")
    for row, (position, slot) in enumerate(zip(positions, slots, strict=True)):
        sequence = max(i for i, start in enumerate(starts[:-1]) if start <= row)
        x = left + row * width
        role = "generated" if sequence == 1 else "prompt"
        diagram.cell(x, 1.1, "ABC"[sequence], role, width=width)
        diagram.text(x + width / 2, 2.9, str(position), align="center")
        diagram.text(x + width / 2, 3.8, str(slot), align="center")
    diagram.text(0.4, 0.5, "query_start_loc")
    for start in starts:
        diagram.text(left + start * width, 0.5, str(start), align="center", bold=True)
    diagram.text(0.4, 5.6, "context_lens")
    diagram.text(0.4, 7.1, "block_tables")
    kinds = ("prefill of 5", "decode of 1", "chunk of 3")
    for sequence, (table, kind) in enumerate(zip((a, b, c), kinds, strict=True)):
        x = left + sequence * 4.5
        diagram.text(x, 4.8, f"{'ABC'[sequence]}: {kind}", bold=True, fontsize=SMALL)
        diagram.text(x, 5.6, str(contexts[sequence]))
        for entry in range(step.block_tables.shape[1]):
            real = entry < len(table.block_ids)
            diagram.cell(x + entry, 6.6, str(table.block_ids[entry]) if real else "·", None)
    diagram.text(left, 8.2, "· is never read: context_lens gives the number of valid entries", fontsize=SMALL)
    diagram.legend(["prompt", "generated"], left, 9.3, step=4.6)
