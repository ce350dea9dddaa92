"""The figures of phase 12.

Schedules, block tables, hits and masks are read off the real schedulers, groups and automata; times of tiers are from
benchmarks/results/kv_tiers.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from minicache.memory.groups import NULL_BLOCK, BlockGroups, GroupedBlockPool, Tables
from minicache.memory.prefix import block_hash, root_hash
from minicache.palette import INK, Scheme, color
from minicache.request import Request
from minicache.scheduler import AsyncChunkedScheduler, create_scheduler
from minicache.scheduler.grouped import GroupedScheduler
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("async-one-step-late", one_step_late, size=(7.2, 3.42))
    draw("groups-tables", tables_of_two_groups, size=(7.2, 1.85))
    draw("groups-hit", hit_of_two_groups, size=(7.2, 3.0))
    draw("token-masks-walk", walk, size=(7.2, 3.9))
    draw("token-masks-steps", steps, size=(7.2, 3.6))
    draw("tiers-break-even", break_even, size=(7.2, 3.2))
    draw("tiers-killed", killed, size=(7.2, 2.7))
    draw("tiers-waiting", waiting, size=(7.2, 3.0))


# --- theory 1: one step ahead -----------------------------------------------------------------------------------------

STOP = 9
ANSWERS = (7, STOP, 5)


@dataclass(frozen=True)
class Known:
    """What is known when a step has been scheduled: of the first request its tokens, and what the step computes."""

    labels: list[str]
    computes: dict[str, int]


def stopped_late() -> list[Known]:
    """A request with a prompt of four tokens, whose second token is a stop token, and one that waits for its blocks."""
    scheduler = AsyncChunkedScheduler(num_blocks=2, block_size=4)
    first = Request("a", [1, 2, 3, 4], 9, stop_token_ids=[STOP])
    for request in (first, Request("b", [1, 2, 3, 4, 5], 9)):
        scheduler.add_request(request)
    steps, before = list[Known](), None
    for number in range(4):
        output = scheduler.schedule()
        labels = [*"pppp", *map(str, first.output_token_ids), *"?" * first.num_placeholders]
        steps.append(Known(labels, {str(name): count for name, count in output.num_scheduled_tokens.items()}))
        if before is not None:
            scheduler.update_from_output(before, dict.fromkeys(before.num_scheduled_tokens, ANSWERS[number - 1]))
        before = output
    return steps


def one_step_late(figure: Figure, scheme: Scheme) -> None:
    """Four steps, what the CPU does while each runs, and what it knows of a request that stops."""
    steps = stopped_late()
    assert [step.computes for step in steps] == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 5}]
    diagram = Diagram(figure, scheme, width=24, height=11.4)
    left, wide, cpu, gpu, known = 5.0, 4.72, 1.0, 3.9, 7.4
    diagram.text(0.2, cpu + 0.6, "CPU", bold=True)
    diagram.text(0.2, gpu + 0.8, "GPU", bold=True)
    diagram.text(0.2, known - 0.75, "what schedule() knows of a", fontsize=SMALL)
    diagram.cell(left - 2.4, cpu, "schedule 1", "shared", width=2.3, height=1.2, fontsize=SMALL)
    looks = (("a: prompt", "prompt"), ("a: token 1", "generated"), ("a: in vain", "wasted"), ("b: prompt", "prompt"))
    for number, (label, role) in enumerate(looks):
        x = left + number * wide
        diagram.cell(x, gpu, f"step {number + 1}\n{label}", role, width=wide, height=1.7, fontsize=SMALL)
        if number:
            diagram.cell(
                x, cpu, f"commit {number}", "end" if number == 2 else None, width=2.15, height=1.2, fontsize=SMALL
            )
            diagram.arrow((x, gpu - 0.05), (x + 0.8, cpu + 1.3))
        at = x + (2.2 if number else 0.0)
        if number < 3:
            diagram.cell(at, cpu, f"schedule {number + 2}", "shared", width=2.4, height=1.2, fontsize=SMALL)
            roles = {"p": "prompt", "?": "free", str(STOP): "end"}
            labels = steps[number + 1].labels
            diagram.row(
                x,
                known,
                labels,
                [roles.get(each, "generated") for each in labels],
                width=0.68,
                height=1.0,
                fontsize=SMALL,
            )
    diagram.text(left + 2 * wide + 0.1, 0.55, "a leaves, its blocks are free", fontsize=SMALL)
    diagram.text(23.8, 2.75, "drops a's token", align="right", fontsize=SMALL)
    diagram.arrow((left, 9.4), (23.8, 9.4))
    diagram.text(23.8, 9.9, "time", align="right", fontsize=SMALL)
    diagram.legend(
        {"free": "placeholder", "end": "stop token", "wasted": "computed in vain"}, 0.2, 10.3, step=4.6, size=0.7
    )


# --- theory 2: several kinds of cache ---------------------------------------------------------------------------------

WINDOW, PROMPT, MOMENTS = 32, 32, (32, 64, 96)


def run_tables() -> list[Tables]:
    """The tables of a request after so many tokens as `MOMENTS` says, in steps of one token behind its prompt."""
    scheduler = GroupedScheduler(windows=(None, WINDOW), num_blocks=20, max_num_batched_tokens=64)
    request = Request("r", [0] * PROMPT, 99)
    scheduler.add_request(request)
    found: list[Tables] = []
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


RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


# --- theory 4: only what is allowed -----------------------------------------------------------------------------------

TOKENS = ('{"', "age", '":', "1", "4", "42", "2}", "}", "0")
"""The vocabulary of the page's example, from token 1 on."""

EXPRESSION, READ = r"(0|[1-9]\d?)\}", "4"
"""Its expression, and the number's first digit, which has been read."""


NAMES = {" ": "␣", "": "∎"}


def walk(figure: Figure, scheme: Scheme) -> None:
    """The trie of nine tokens, walked from the state behind one digit."""
    from minicache.structured import Automaton, TokenTrie

    trie, automaton = TokenTrie([b"", *(token.encode() for token in TOKENS)]), Automaton(EXPRESSION)
    state = automaton.read(automaton.start, READ.encode())
    assert state is not None
    diagram = Diagram(figure, scheme, width=24, height=13)
    column, height, width = 7.6, 1.05, 2.6
    order = sorted(trie.children[0], key=lambda byte: (automaton.read(state, bytes([byte])) is None, byte))
    diagram.cell(0.4, 4.5, "root", "prompt", width=width, height=height)
    diagram.text(0.4, 6.1, f"next: {_next(automaton, state)}", fontsize=SMALL)
    for row, byte in enumerate(order):
        node, text, at, before = trie.children[0][byte], bytes([byte]), state, (3.0, 4.5 + height / 2)
        depth = 0
        while True:
            x, y = 6.4 + column * depth, 0.5 + 1.3 * row
            following = automaton.read(at, text[-1:])
            role = None if following is None else "shared" if trie.token_ids[node] else "prompt"
            diagram.cell(x, y, text.decode(), role, width=width, height=height)
            diagram.arrow(before, (x, y + height / 2))
            if following is None:
                names = [TOKENS[each - 1] for each in _behind(trie, node)]
                diagram.text(x + 3.0, y + height / 2, f"out: {'   '.join(names)}", fontsize=SMALL)
                break
            at, before = following, (x + width, y + height / 2)
            if not trie.children[node]:
                break
            diagram.text(x + width + 0.3, y + 0.1, f"next: {_next(automaton, at)}", fontsize=SMALL)
            [(byte, node)] = trie.children[node].items()
            text, depth = text + bytes([byte]), depth + 1
    for (role, meaning), x in zip(
        {"shared": "a token: allowed", "prompt": "looked at, no token ends here"}.items(), (0.4, 7.0), strict=True
    ):
        diagram.legend({role: meaning}, x, 12.1, size=0.6)
    diagram.cell(16.9, 12.1, width=0.6, height=0.6)
    diagram.text(17.7, 12.4, "its last byte may not come", fontsize=TYPE_SIZE * 0.9)


def _next(automaton: Any, state: int) -> str:
    """The bytes that may come next, digits in short."""
    text = "".join(map(chr, sorted(automaton.next_states(state))))
    return " ".join(text.replace("0123456789", "0-9 ").split())


def _behind(trie: Any, node: int) -> list[int]:
    """The tokens of a node and of those behind it."""
    found = [*trie.token_ids[node]]
    for child in trie.children[node].values():
        found += _behind(trie, child)
    return found


def steps(figure: Figure, scheme: Scheme) -> None:
    """How many tokens are allowed and how many nodes are looked at, token by token of an answer."""
    found: dict[str, Any] = json.loads((RESULTS / "token_masks.json").read_text(encoding="utf-8"))
    each = found["steps"]
    axes = plot(figure, xlabel="the next token of the answer", ylabel="tokens, or nodes")
    places = range(len(each))
    axes.axhline(found["vocabulary"], color=INK[scheme], linewidth=1.2, linestyle="--")
    axes.annotate(
        f"{found['vocabulary']:,} tokens: every one tried",
        (0.98, found["vocabulary"]),
        (0, 4),
        ("axes fraction", "data"),
        "offset points",
        size=SMALL,
        ha="right",
    )
    axes.plot(places, [step["asked"] for step in each], "s--", color=color("end", scheme), label="nodes walked through")
    axes.plot(
        places, [step["allowed"] for step in each], "o-", color=color("generated", scheme), label="tokens allowed"
    )
    axes.set(yscale="log", ylim=(0.7, 400_000))
    axes.set_yticks([10**power for power in range(6)], [f"{10**power:,}" for power in range(6)])
    axes.minorticks_off()
    axes.set_xticks(list(places), [NAMES.get(step["token"], step["token"].strip()) for step in each])
    axes.tick_params(axis="x", rotation=60, labelsize=SMALL)
    axes.legend(loc="center right")


# --- theory 3: below the prefix cache ---------------------------------------------------------------------------------


def break_even(figure: Figure, scheme: Scheme) -> None:
    """Time to first token with a slowed disk, over that without one."""
    found: dict[str, Any] = json.loads((RESULTS / "kv_tiers.json").read_text(encoding="utf-8"))
    axes = plot(
        figure, xlabel="the disk's bandwidth / break-even bandwidth", ylabel="time to first token / without a disk"
    )
    times = [each["times_break_even"] for each in found["by_bandwidth"]]
    ratios = [each["ratio"] for each in found["by_bandwidth"]]
    axes.plot(times, ratios, marker="o", color=color("generated", scheme), label="measured")
    axes.plot(times, [1 / each for each in times], "--", color=color("shared", scheme), label="loading alone")
    axes.axhline(1.0, color=INK[scheme], linewidth=1.2)
    axes.text(4.0, 1.06, "computed, without a disk", ha="right", color=INK[scheme], fontsize=SMALL)
    axes.set(xscale="log", ylim=(0, 2.4))
    axes.set_xticks(times, [f"{each:g}" for each in times])
    axes.minorticks_off()
    axes.legend(loc="upper right")


WAYS = {
    "under its own name": (("nothing", None), ("half a record", "end"), ("the record", "generated")),
    "then renamed": (("nothing", None), ("half a file", "wasted"), ("the record", "generated")),
    "to a log, with a checksum": (("nothing", None), ("half an entry", "wasted"), ("the record", "generated")),
}


def killed(figure: Figure, scheme: Scheme) -> None:
    """What is found in the folder, by how a record is written and when the process dies."""
    diagram = Diagram(figure, scheme, width=24, height=9.0)
    for place, title in enumerate(("before it writes", "in the middle of it", "after the call")):
        diagram.text(10.1 + place * 5.6, 0.7, title, align="center", bold=True)
    for row, (name, cells) in enumerate(WAYS.items()):
        y = 1.4 + row * 2.0
        diagram.text(0.2, y + 0.8, name)
        for place, (label, role) in enumerate(cells):
            diagram.cell(7.4 + place * 5.6, y, label, role, width=5.4, height=1.6)
    roles = {"end": "found, and broken", "wasted": "never found, and takes space", "generated": "found, and whole"}
    diagram.legend(roles, 0.2, 8.1, step=8.0, size=0.6)


@dataclass
class _Load:
    """A load that gets a block a step."""

    hashes: Sequence[bytes]
    blocks: list[bytes] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.blocks) == len(self.hashes)


class _Tiers:
    """Tiers that have everything, of the first request only."""

    def __init__(self) -> None:
        self.loads: list[_Load] = []

    def fetch(self, hashes: Sequence[bytes]) -> _Load:
        self.loads.append(_Load(hashes if not self.loads else ()))
        return self.loads[-1]

    def give_up(self, load: _Load) -> None: ...

    def touch(self, hashes: Sequence[bytes]) -> None: ...

    def discard(self, hashes: Sequence[bytes]) -> None: ...


def waiting(figure: Figure, scheme: Scheme) -> None:
    """Six steps: a request waits for three blocks, two others pass it."""
    tiers = _Tiers()
    scheduler = create_scheduler("chunked", num_blocks=20, block_size=4, tiers=tiers)
    arrivals = {0: Request("b", [1, 2, 3], 9), 1: Request("a", list(range(10, 23)), 9), 2: Request("c", [4, 5], 9)}
    computes, in_memory, in_pool = [], [], []
    for number in range(6):
        if number in arrivals:
            scheduler.add_request(arrivals[number])
        if number > 1 and not tiers.loads[0].is_done:
            tiers.loads[0].blocks.append(b"")
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        computes.append(dict(output.num_scheduled_tokens))
        is_waiting = "a" in scheduler.waiting
        in_memory.append(len(tiers.loads[0].blocks) if is_waiting else 0)
        in_pool.append(len(arrivals[1].block_ids))
    both = {"b": 1, "c": 1}
    assert computes == [{"b": 3}, {"b": 1}, {"b": 1, "c": 2}, both, {**both, "a": 1}, {**both, "a": 1}]
    diagram = Diagram(figure, scheme, width=24, height=10.0)
    width, left = 2.75, 7.3
    lines = {"b computes": 1.3, "c computes": 2.7, "a computes": 4.1, "a: blocks in CPU memory": 6.0}
    lines["a: blocks of the pool"] = 7.4
    for name, y in lines.items():
        diagram.text(0.2, y + 0.6, name)
    for step in range(6):
        x = left + step * width
        diagram.text(x + width / 2, 0.6, f"step {step + 1}", align="center", bold=True)
        for name in "bca":
            if count := computes[step].get(name):
                role = "prompt" if step == 0 or (name == "c" and step == 2) else "generated"
                diagram.cell(x, lines[f"{name} computes"], str(count), role, width=width - 0.1, height=1.2)
        if 1 <= step < 4:
            diagram.cell(x, lines["a computes"], "waits", "free", width=width - 0.1, height=1.2)
        if step >= 1:
            held = ((in_memory[step], "shared", 6.0), (in_pool[step], "shared", 7.4))
            for count, role, y in held:
                diagram.cell(x, y, str(count), role if count else None, width=width - 0.1, height=1.2)
    diagram.legend({"prompt": "prompt", "generated": "decode, or a's last token"}, 0.2, 9.2, step=4.0, size=0.6)


if __name__ == "__main__":
    main()
