"""The figures of phase 12: the block tables of two groups, and a prefix that both can continue from.

Both are read off the real scheduler and block groups.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from minicache.memory.groups import NULL_BLOCK, BlockGroups, GroupedBlockPool, Tables
from minicache.memory.prefix import block_hash, root_hash
from minicache.palette import INK, Scheme
from minicache.request import Request
from minicache.scheduler.grouped import GroupedScheduler
from scripts.figures.style import TYPE_SIZE, Diagram, draw

SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("groups-tables", tables_of_two_groups, size=(7.2, 1.85))
    draw("groups-hit", hit_of_two_groups, size=(7.2, 3.0))


# --- theory 2: several kinds of cache ---------------------------------------------------------------------------------

WINDOW, PROMPT, MOMENTS = 32, 32, (32, 64, 96)


def run_tables() -> list[Tables]:
    """The tables of a request after so many tokens as `MOMENTS` says, in steps of one token behind its prompt."""
    scheduler = GroupedScheduler(windows=(None, WINDOW), num_blocks=20, max_num_batched_tokens=64)
    request = Request("r", [0] * PROMPT, 99)
    scheduler.add_request(request)
    found = []
    while len(found) < len(MOMENTS):
        output = scheduler.schedule()
        if request.num_computed_tokens + output.num_scheduled_tokens["r"] in MOMENTS:
            found.append([list(table) for table in request.group_block_ids])
        scheduler.update_from_output(output, {"r": 0})
    return found


def tables_of_two_groups(figure: Figure, scheme: Scheme) -> None:
    """The tables of full attention and of a window, at three moments."""
    diagram = Diagram(figure, scheme, width=21.6, height=5.55)
    for row, label in enumerate(("all tokens", f"window of {WINDOW}")):
        diagram.text(0.2, 1.9 + 1.3 * row, label)
    x = 4.6
    for num_tokens, tables in zip(MOMENTS, run_tables(), strict=True):
        diagram.text(x + len(tables[0]) * 0.6, 0.7, f"{num_tokens} tokens", align="center", fontsize=SMALL)
        for row, table in enumerate(tables):
            for index, block_id in enumerate(table):
                role = None if block_id == NULL_BLOCK else "prompt" if index < PROMPT // 16 else "generated"
                label = "" if block_id == NULL_BLOCK else str(block_id)
                diagram.cell(x + 1.2 * index, 1.3 + 1.3 * row, label, role, width=1.2, height=1.2)
        x += 1.2 * len(tables[0]) + 1.0
    diagram.legend({"prompt": "of its prompt", "generated": "generated"}, 4.6, 4.55, step=5.0, size=0.6)


FULL, WINDOWED, NUM_SEEN = range(10), (3, 4, 7, 10, 11), 2


def find_of_two_groups() -> tuple[Tables, int]:
    """What two groups find that have cached `FULL` and `WINDOWED`, with blocks of 4 and a window of 6."""
    groups = BlockGroups(GroupedBlockPool(40, 4), (None, 6), max_step_tokens=8, retention=None)
    hashes = [root_hash()]
    for index in range(12):
        hashes.append(block_hash(hashes[-1], [index]))
    tables = groups.empty()
    groups.grow(tables, 48)
    groups.cache(tables, hashes[1:], 0, 12)
    for table, kept in zip(tables, (FULL, WINDOWED), strict=True):
        groups.pool.uncache([block_id for index, block_id in enumerate(table) if index not in kept])
    found, junction = groups.find(hashes[1:])
    return [
        [NULL_BLOCK if each == NULL_BLOCK else table.index(each) for each in one]
        for one, table in zip(found, tables, strict=True)
    ], junction


def hit_of_two_groups(figure: Figure, scheme: Scheme) -> None:
    """Cached blocks of both, where each could continue, and the hit."""
    diagram = Diagram(figure, scheme, width=21.6, height=9.0)
    found, junction = find_of_two_groups()
    length, left = len(found[0]), 5.4
    for row, (label, kept) in enumerate((("all tokens", FULL), (f"needs {NUM_SEEN} in a row", WINDOWED))):
        y = 1.3 + 2.5 * row
        diagram.text(0.2, y + 0.6, label)
        for index in range(12):
            diagram.cell(
                left + 1.3 * index,
                y,
                str(index) if index in kept else "",
                "prompt" if index in kept else None,
                width=1.3,
                height=1.2,
            )
        for count in range(13):
            seen = range(count) if row == 0 else range(max(0, count - NUM_SEEN), count)
            if all(index in kept for index in seen):
                diagram.axes.plot(left + 1.3 * count, y + 1.6, "o", color=INK[scheme], markersize=4)
    diagram.text(0.2, 6.9, "found", bold=True)
    for row, table in enumerate(found):
        for index, block in enumerate(table):
            label, role = ("", None) if block == NULL_BLOCK else (str(block), "shared")
            diagram.cell(left + 1.3 * index, 6.3 + 1.3 * row, label, role, width=1.3, height=1.2)
    for count, label in ((length, "hit"), (junction, "junction")):
        x = left + 1.3 * count
        diagram.axes.plot([x, x], [1.0, 5.9 if count != length else 8.9], color=INK[scheme], linewidth=1, linestyle=":")
        diagram.text(x, 0.6, label, align="center", fontsize=SMALL)


if __name__ == "__main__":
    main()
