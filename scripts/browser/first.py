"""The home page's first minute: one line of the engine to write, and the picture that moves once it is right."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path
from typing import Any

from minicache_course.symbols import find_symbol
from minicache_course.table import load_course
from minicache_course.workspace import TABLE, reference_file

ROOT = Path(__file__).resolve().parents[2]
TASK, TARGET = "3.3", "BlockTable.slot"

BLOCK_SIZE, NUM_BLOCKS, BLOCK_IDS = 4, 12, (7, 2, 5)
NUM_PROMPT, NUM_TOKENS = 6, 10
"""The example of the task's tests."""

CELL, GAP, IN_A_ROW = 20, 14, 4  # in units of the picture: a slot, between blocks; blocks
TABLE_Y, MEMORY_Y, ROW = 42, 108, 46
WIDTH = IN_A_ROW * (BLOCK_SIZE * CELL + GAP)


def line_to_write() -> dict[str, Any]:
    """The task whose tests check the line, and the reference before and after the line: what its function returns."""
    phase, number = map(int, TASK.split("."))
    task = load_course(ROOT / TABLE).phase(phase).task(number)
    folder = load_course(ROOT / TABLE).phase(phase).folder
    source = reference_file(task.module).read_text(encoding="utf-8")
    function = find_symbol(ast.parse(source), TARGET)
    assert isinstance(function, ast.FunctionDef)
    last = function.body[-1]
    assert isinstance(last, ast.Return)
    before, after = source.split(ast.get_source_segment(source, last) or "", 1)
    return {
        "phase": phase,
        "task": number,
        "file": f"labs/{folder}/{task.file}",
        "before": f"{before}return ",
        "after": after,
    }


def picture(alt: str) -> str:
    """A sequence, its block table, and the memory, as SVG in the page: each token knows its way to its slot.

    Style sheets colour it, and move the tokens.
    """
    parts = []
    for block in range(NUM_BLOCKS):
        x, y = _memory(block)
        parts.append(_text(x + 1, y - 4, block, "block"))
        parts += [_cell(x + CELL * offset, y, "slot", BLOCK_SIZE * block + offset) for offset in range(BLOCK_SIZE)]
    for index, block in enumerate(BLOCK_IDS):
        x = _sequence(BLOCK_SIZE * index)
        parts.append(
            f'<rect class="entry" x="{x + 1}" y="{TABLE_Y}" width="{BLOCK_SIZE * CELL - 2}" height="{CELL}" rx="2"/>'
        )
        parts.append(_text(x + BLOCK_SIZE * CELL / 2, TABLE_Y + 14, block, "entry"))
    for position in range(NUM_TOKENS):
        x, y = _memory(BLOCK_IDS[position // BLOCK_SIZE])
        start = _sequence(position)
        dx, dy = x + CELL * (position % BLOCK_SIZE) - start, y - 1
        role = "prompt" if position < NUM_PROMPT else "generated"
        parts.append(_cell(start, 1, "slot"))
        way = f"--dx:{dx}px;--dy:{dy}px;--at:{position}"
        parts.append(f'<g class="token {role}" style="{way}">{_cell(start, 1, "", position)}</g>')
    height = MEMORY_Y + NUM_BLOCKS // IN_A_ROW * ROW - GAP
    inside = "".join(parts)
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(alt)}">{inside}</svg>'
    return f'<div class="picture">{svg}</div>'


def _sequence(position: int) -> int:
    """Where the token at a position begins, from the left."""
    num_groups = len(BLOCK_IDS)
    left = (WIDTH - num_groups * BLOCK_SIZE * CELL - (num_groups - 1) * GAP) // 2
    return left + CELL * position + GAP * (position // BLOCK_SIZE)


def _memory(block: int) -> tuple[int, int]:
    """Where a block of the memory begins."""
    row, column = divmod(block, IN_A_ROW)
    return GAP // 2 + column * (BLOCK_SIZE * CELL + GAP), MEMORY_Y + row * ROW


def _cell(x: float, y: float, kind: str, number: int | None = None) -> str:
    square = f'<rect class="{kind}" x="{x + 1}" y="{y}" width="{CELL - 2}" height="{CELL}" rx="2"/>'
    return square if number is None else square + _text(x + CELL / 2, y + 14, number, kind)


def _text(x: float, y: float, number: int, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{number}</text>'
