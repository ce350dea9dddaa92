"""The figures of phase 8: blocks that two requests share, hashes of blocks, a pool that remembers, copies, beams.

What is drawn of blocks, hashes and beams is read off the real pool, scheduler and search. What sharing saves comes from
benchmarks/results/sharing.json and prefix_cache.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from benchmarks.prefix_cache import PAPER
from benchmarks.sharing import LOADS, SIZES
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minicache.engine.beam import BeamSearch, BeamSearchParams, Step
from minicache.grammar import Tokenizer
from minicache.memory.prefix import CachingBlockPool, block_hash, root_hash
from minicache.model import load_minigpt
from minicache.palette import INK, Scheme, color
from minicache.request import Request, RequestId
from minicache.scheduler.sharing import SharingScheduler
from scripts.figures.style import TYPE_SIZE, Diagram, draw, plot

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SMALL = TYPE_SIZE * 0.85
TINY = TYPE_SIZE * 0.7
BLOCK_SIZE = 4
"""Of every diagram."""

BEGINNING = "Later Anna worked in the garden . Did"
"""Two blocks."""
QUESTIONS = {"A": ("she read a book ?", "Yes , she"), "B": ("Tom go to school ?", "No , he")}
"""Request → how its prompt goes on, and what is generated."""


def main() -> None:
    """Draw them all."""
    draw("shared-blocks", shared_blocks, size=(7.2, 3.6))
    draw("hash-chain", hash_chain, size=(7.2, 4.2))
    draw("free-but-not-forgotten", free_but_not_forgotten, size=(7.2, 4.1))
    draw("a-victim-returns", a_victim_returns, size=(7.2, 3.6))
    draw("copy-on-write", copy_on_write, size=(7.2, 4.3))
    draw("a-filled-block", a_filled_block, size=(7.2, 3.4))
    draw("beams", beams, size=(7.2, 3.3))
    draw("sharing-saves", sharing_saves, size=(7.2, 3.6))
    draw("prefix-saves", prefix_saves, size=(7.2, 3.3))
    draw("hit-rate", hit_rate, size=(7.2, 3.3))


def results(name: str) -> dict[str, Any]:
    """What a benchmark found."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


# --- theory 1: two requests with one prefix ---------------------------------------------------------------------------


def two_requests() -> tuple[SharingScheduler, dict[RequestId, Request]]:
    """A and B, which begin alike, each with what it has generated."""
    tokenizer = Tokenizer()
    scheduler = SharingScheduler(num_blocks=10, block_size=BLOCK_SIZE, prefix_caching=True)
    requests: dict[RequestId, Request] = {}
    for name, (question, _) in QUESTIONS.items():
        requests[name] = Request(name, tokenizer.encode(f"{BEGINNING} {question}"), 9)
        scheduler.add_request(requests[name])
    answers = {name: tokenizer.encode(answer) for name, (_, answer) in QUESTIONS.items()}
    for step in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, {name: answers[str(name)][step] for name in output.num_scheduled_tokens})
    return scheduler, requests


def shared_blocks(figure: Figure, scheme: Scheme) -> None:
    """The tables of A and B over one pool."""
    scheduler, requests = two_requests()
    words = Tokenizer().words
    diagram = Diagram(figure, scheme, width=24, height=12)
    left, width, in_pool = 1.4, 1.4, 2.1
    holders: dict[int, str] = {}
    for (name, request), y, pool_side in zip(requests.items(), (0.9, 9.0), (4.9, 6.1), strict=True):
        diagram.text(0.3, y + 0.5, str(name), bold=True)
        texts = [words[token] for token in request.token_ids(0, request.num_computed_tokens)]
        for place, block_id in enumerate(request.block_ids):
            is_shared = scheduler.pool.ref_count(block_id) > 1
            holders[block_id] = "A, B" if is_shared else str(name)
            x = left + place * BLOCK_SIZE * width
            for slot, position in enumerate(range(place * BLOCK_SIZE, (place + 1) * BLOCK_SIZE)):
                text = texts[position] if position < len(texts) else ""
                generated = position >= request.num_prompt_tokens
                role = "shared" if is_shared else "generated" if generated else "prompt"
                diagram.cell(x + slot * width, y, text, role if text else None, width=width, fontsize=TINY * 0.9)
            side = y + 1.1 if y < pool_side else y - 0.1
            diagram.arrow((x + 2 * width, side), (left + (block_id + 0.5) * in_pool, pool_side))
    for block_id in range(scheduler.pool.num_blocks):
        role = {"A, B": "shared", "A": "prompt", "B": "prompt"}.get(holders.get(block_id, ""), "free")
        x = left + block_id * in_pool
        diagram.cell(x, 5.0, f"{block_id}: {holders.get(block_id, 'free')}", role, width=in_pool, fontsize=TINY)
    diagram.text(0.3, 5.5, "pool", fontsize=SMALL)
    diagram.legend({"shared": "shared", "prompt": "prompt", "generated": "generated"}, left, 11.0, step=4.6, size=0.7)


# --- theory 2: hashes -------------------------------------------------------------------------------------------------


def hash_chain(figure: Figure, scheme: Scheme) -> None:
    """Three sequences of three blocks: A; another second block; A's tokens under another salt."""
    first, second, third = "Yesterday Anna worked in", "the garden . Did", "she read a book"
    rows: dict[str, tuple[str | None, list[str]]] = {
        "A": (None, [first, second, third]),
        "B: one word is another": (None, [first, second.replace("garden", "school"), third]),
        'C: A\'s tokens, salt "tenant 2"': ("tenant 2", [first, second, third]),
    }
    diagram = Diagram(figure, scheme, width=24, height=14)
    tokenizer = Tokenizer()
    known: set[bytes] = set()
    for row, (name, (salt, blocks)) in enumerate(rows.items()):
        y = 0.6 + row * 4.3
        diagram.text(0.3, y, name, bold=True)
        parent = root_hash(salt, None)
        diagram.cell(
            0.3, y + 0.7, _digits(parent), "shared" if parent in known else "prompt", width=3.2, fontsize=SMALL
        )
        diagram.text(1.9, y + 2.2, "root", align="center", fontsize=SMALL)
        seen = {parent}
        for place, text in enumerate(blocks):
            x = 4.6 + place * 6.6
            name_of_block = block_hash(parent, tokenizer.encode(text))
            role = "shared" if name_of_block in known else "prompt"
            diagram.arrow((x - 1.0, y + 1.2), (x - 0.05, y + 1.2))
            diagram.cell(x, y + 0.7, _digits(name_of_block), role, width=5.5, fontsize=SMALL)
            diagram.text(x + 2.75, y + 2.2, text, align="center", fontsize=SMALL)
            parent = name_of_block
            seen.add(parent)
        known |= seen
    diagram.legend({"prompt": "a new hash", "shared": "the same hash as above"}, 0.3, 13.0, step=8, size=0.7)


def _digits(digest: bytes) -> str:
    """The first digits of a hash."""
    return f"{digest.hex()[:6]} …"


# --- theory 3: the free list ------------------------------------------------------------------------------------------


ALIKE = list(range(8))
"""What A and B begin with: two blocks."""


def moments_of_a_pool() -> list[tuple[str, SharingScheduler]]:
    """A comes and goes, B begins as A and goes, C takes nearly all: what happened, and the scheduler as it was then."""
    scheduler = SharingScheduler(num_blocks=6, block_size=BLOCK_SIZE, prefix_caching=True)
    moments: list[tuple[str, SharingScheduler]] = []

    def come(name: str, prompt: list[int]) -> None:
        scheduler.add_request(Request(name, prompt, 9))
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 99))

    def tell(what: str) -> None:
        moments.append((what, deepcopy(scheduler)))

    come("A", [*ALIKE, 20, 21])
    tell("A runs, with 10 tokens")
    scheduler.abort_request("A")
    tell("A has finished: its tail in front")
    come("B", [*ALIKE, 30])
    tell("B begins as A: 0 and 1 are found")
    scheduler.abort_request("B")
    tell("B has finished")
    come("C", list(range(40, 58)))
    tell("C takes five: 1 goes, 0 is left")
    return moments


def free_but_not_forgotten(figure: Figure, scheme: Scheme) -> None:
    """Used blocks on the left, the free list on the right, at five moments."""
    diagram = Diagram(figure, scheme, width=24, height=13.7)
    left, free, width = 9.4, 16.4, 1.2
    diagram.text(left, 0.6, "used", bold=True)
    diagram.text(free, 0.6, "free: next … last", bold=True)
    for row, (what, scheduler) in enumerate(moments_of_a_pool()):
        y = 1.3 + row * 2.1
        diagram.text(0.3, y + 0.5, what, fontsize=SMALL)
        used = [block_id for request in scheduler.running for block_id in request.block_ids]
        remembered = holding_the_prefix(scheduler)
        for x, block_ids, role in ((left, used, "generated"), (free, free_list(scheduler), "free")):
            roles = ["shared" if block_id in remembered else role for block_id in block_ids]
            diagram.row(x, y, list(map(str, block_ids)), roles, width=width)
    meanings = {"shared": "holds A's prefix", "generated": "used, holds other tokens", "free": "free, no hash"}
    for (role, meaning), x in zip(meanings.items(), (0.3, left, free + 2.2), strict=True):
        diagram.legend({role: meaning}, x, 12.5, size=0.7)


def free_list(scheduler: SharingScheduler) -> list[int]:
    """The free blocks in the order in which they would be handed out."""
    return deepcopy(scheduler.pool).allocate(scheduler.pool.num_free)


def holding_the_prefix(scheduler: SharingScheduler) -> set[int]:
    """The blocks that are found by the hashes of A's prefix."""
    assert isinstance(scheduler.pool, CachingBlockPool)
    hashes = scheduler.hashes(Request("A", ALIKE, 1), 2)
    return {block_id for each in hashes for block_id in scheduler.pool.find([each])}


# --- theory 4: a preempted request and its blocks ---------------------------------------------------------------------


def a_victim_returns(figure: Figure, scheme: Scheme) -> None:
    """Who uses which blocks, and the free list, when a request is preempted and when it is back."""
    scheduler = SharingScheduler(num_blocks=6, block_size=BLOCK_SIZE, prefix_caching=True)
    requests = {"old": Request("old", [5] * 8, 9), "young": Request("young", [6] * 6, 9)}
    for request in requests.values():
        scheduler.add_request(request)
    told = {
        4: "step 4: full",
        5: "step 5: young is preempted",
        8: "step 8: old has finished",
        9: "step 9: young is back",
    }
    diagram = Diagram(figure, scheme, width=24, height=12)
    left, middle, free, width = 8.4, 13.4, 17.0, 1.05
    for x, heading in ((left, "old"), (middle, "young"), (free, "free: next … last")):
        diagram.text(x, 0.6, heading, bold=True)
    row = 0
    for step in range(10):
        step_of(scheduler)
        if step not in told:
            continue
        y = 1.3 + row * 2.2
        row += 1
        diagram.text(0.3, y + 0.5, told[step], fontsize=SMALL)
        youngs = set(scheduler.find_prefix(Request("like young", [*requests["young"].token_ids(0, 8), 0], 1)))
        for x, block_ids, role in (
            (left, requests["old"].block_ids, "generated"),
            (middle, requests["young"].block_ids, "prompt"),
            (free, free_list(scheduler), "free"),
        ):
            roles = ["shared" if block_id in youngs else role for block_id in block_ids]
            diagram.row(x, y, list(map(str, block_ids)), roles, width=width)
    meanings = {"shared": "young's first 8 tokens", "prompt": "the rest of young", "generated": "old"}
    for (role, meaning), x in zip(meanings.items(), (0.3, left, middle + 2.4), strict=True):
        diagram.legend({role: meaning}, x, 10.9, size=0.7)


# --- theory 5: a copy before a write ----------------------------------------------------------------------------------


def copy_on_write(figure: Figure, scheme: Scheme) -> None:
    """A request and its child after the fork, in the step after it, and three steps later."""
    scheduler = SharingScheduler(num_blocks=5, block_size=BLOCK_SIZE)
    first = Request("A", [0] * 5, 9)
    scheduler.add_request(first)
    for _ in range(2):
        step_of(scheduler)
    child = scheduler.fork_request("A", "A'")
    both = {"A": first, "A'": child}
    diagram = Diagram(figure, scheme, width=24, height=14.3)
    _moment(diagram, 0.6, "after the fork", scheduler, both)
    copies = step_of(scheduler)
    _moment(diagram, 5.0, "a step later", scheduler, both, copies)
    for _ in range(3):
        step_of(scheduler)
    _moment(diagram, 9.4, "three steps later", scheduler, both)
    roles = {"prompt": "prompt", "generated": "generated", "shared": "in a shared block"}
    diagram.legend(roles, 0.3, 13.3, step=4.6, size=0.7)


def step_of(scheduler: SharingScheduler) -> list[tuple[int, int]]:
    """One step, and its copies."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    return output.blocks_to_copy


def _moment(
    diagram: Diagram,
    y: float,
    when: str,
    scheduler: SharingScheduler,
    requests: Mapping[str, Request],
    copies: Sequence[tuple[int, int]] = (),
) -> None:
    """Two tables, and what is in the blocks."""
    left, width = 5.4, 0.85
    diagram.text(0.3, y, when, bold=True)
    for row, (name, request) in enumerate(requests.items()):
        diagram.text(0.3, y + 1.2 + row, f"{name}: {', '.join(map(str, request.block_ids))}", fontsize=SMALL)
    for block_id in range(scheduler.pool.num_blocks):
        x = left + block_id * (BLOCK_SIZE + 0.4) * width
        holders = [name for name, request in requests.items() if block_id in request.block_ids]
        diagram.text(x, y, f"{block_id}: {', '.join(holders) or 'free'}", fontsize=SMALL)
        for slot in range(BLOCK_SIZE):
            text, role = _slot(requests, holders, block_id, slot)
            diagram.cell(x + slot * width, y + 0.7, text, role, width=width, height=1.5, fontsize=TINY)
    for source, target in copies:
        start, end = (left + (block * (BLOCK_SIZE + 0.4) + BLOCK_SIZE / 2) * width for block in (source, target))
        diagram.arrow((start, y + 2.3), (end, y + 2.3), bend=0.35)
        diagram.text((start + end) / 2, y + 3.4, "copied, then A writes", align="center", fontsize=SMALL)


def _slot(requests: Mapping[str, Request], holders: Sequence[str], block_id: int, slot: int) -> tuple[str, str | None]:
    """What is in a slot, and its colour."""
    for name in holders:
        request = requests[name]
        position = request.block_ids.index(block_id) * BLOCK_SIZE + slot
        if position < request.num_computed_tokens:
            role = "prompt" if position < request.num_prompt_tokens else "generated"
            return str(position), "shared" if len(holders) > 1 else role
    return "", "free" if not holders else None


# --- theory 6: a block that the parent has filled ---------------------------------------------------------------------


def a_filled_block(figure: Figure, scheme: Scheme) -> None:
    """Block 1 of parent and child at three moments: shared and overwritten; and as the scheduler does it."""
    parent, child, hashed = ("p", "p", "7", "7"), ("p", "p", "7", "8"), "hash: p p 7 7"
    scheduler = SharingScheduler(num_blocks=6, block_size=BLOCK_SIZE, prefix_caching=True)
    scheduler.add_request(Request("a", [0] * 6, 9))
    for _ in range(3):
        step_of(scheduler)
    own = scheduler.fork_request("a", "the child", [0, 1])
    step_of(scheduler)
    block = own.block_ids[1]
    diagram = Diagram(figure, scheme, width=24, height=11.4)
    width = 1.25
    columns = (("a has filled it", 0.3), ("a has finished, the child writes 8", 8.3), ("c looks for p p 7 7", 17.3))
    rows: tuple[tuple[str, float, tuple[tuple[str, tuple[str, ...], str], ...]], ...] = (
        (
            "If the child shared block 1",
            0.6,
            (
                (f"block 1, {hashed}", parent, "prompt"),
                (f"block 1, {hashed}", child, "end"),
                ("reads block 1: another text", child, "end"),
            ),
        ),
        (
            "As it is",
            6.6,
            (
                (f"block 1, {hashed}", parent, "prompt"),
                (f"block {block}, the child's own", child, "generated"),
                ("reads block 1", parent, "prompt"),
            ),
        ),
    )
    for title, y, cells in rows:
        diagram.text(0.3, y, title, bold=True)
        for (moment, x), (told, texts, role) in zip(columns, cells, strict=True):
            diagram.text(x, y + 1.1, moment, fontsize=SMALL)
            diagram.row(x, y + 1.8, list(texts), [role] * BLOCK_SIZE, width=width)
            diagram.text(x, y + 3.7, told, fontsize=SMALL)


# --- theory 7: beams --------------------------------------------------------------------------------------------------


def search_steps(prompt: str, width: int, num_steps: int) -> tuple[list[list[Step]], BeamSearch]:
    """A real beam search on MiniGPT: at each step where the beams come from."""
    import torch

    model, tokenizer = load_minigpt(), Tokenizer()
    search = BeamSearch(BeamSearchParams(width, num_steps + 1), [tokenizer.end_token_id], num_steps + 1)
    steps: list[list[Step]] = []
    while len(steps) < num_steps and not search.is_over:
        rows = [[*tokenizer.encode(prompt), *beam.token_ids] for beam in search.beams]
        with torch.inference_mode():
            best = torch.log_softmax(model(torch.tensor(rows))[:, -1].float(), -1).topk(search.num_candidates)
        candidates = [
            list(zip(ids, log_probs, strict=True))
            for ids, log_probs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        steps.append(search.advance(candidates))
    return steps, search


def beams(figure: Figure, scheme: Scheme) -> None:
    """Four beams over eleven tokens: which comes from which, and which go on."""
    steps, _ = search_steps("Yesterday Anna", 4, 11)
    words = Tokenizer().words
    alive = [set[int]() for _ in steps]
    alive[-1] = set(range(len(steps[-1])))
    for number in range(len(steps) - 1, 0, -1):
        alive[number - 1] = {steps[number][place].parent for place in alive[number]}
    diagram = Diagram(figure, scheme, width=24, height=11)
    left, column, row, width = 0.0, 2.1, 2.2, 1.5
    diagram.text(0.4, 0.5, "Yesterday Anna …", bold=True)
    for number, step in enumerate(steps):
        x = left + (number + 0.3) * column
        for place, each in enumerate(step):
            y = 1.4 + place * row
            if number:
                diagram.arrow((x - column + width, 1.9 + each.parent * row), (x, y + 0.5))
            is_common = place in alive[number] and len(alive[number]) == 1
            role = "shared" if is_common else "generated" if place in alive[number] else "free"
            diagram.cell(x, y, words[each.token_id], role, width=width, fontsize=TINY * 0.9)
    meanings = {
        "shared": "in all four beams of the end",
        "generated": "in some of them",
        "free": "in none: its blocks are free",
    }
    for (role, meaning), x in zip(meanings.items(), (0.6, 9.0, 15.0), strict=True):
        diagram.legend({role: meaning}, x, 10.1, size=0.6)


# --- theory 7 to 9: what it saves ------------------------------------------------------------------------------------

LOAD_NAMES = {"alpaca": ("Alpaca", "prompt"), "sharegpt": ("ShareGPT", "generated")}


def sharing_saves(figure: Figure, scheme: Scheme) -> None:
    """Blocks that sharing saves, two loads, three sizes, and the range that the paper reports."""
    found = results("sharing")
    panels = figure.subplots(1, 2)
    for axes, (way, title) in zip(
        panels, {"parallel": "parallel sampling", "beam": "beam search"}.items(), strict=True
    ):
        for shift, load in zip((-0.2, 0.2), LOADS, strict=True):
            label, role = LOAD_NAMES[load]
            places = [place + shift for place in range(len(SIZES))]
            values = [found[way][load][str(size)]["saved_percent"] for size in SIZES]
            bars = axes.bar(places, values, width=0.38, color=color(role, scheme), label=label)
            axes.bar_label(bars, [f"{value:.1f}" for value in values], size=TINY, color=INK[scheme], padding=2)
            paper = found["paper"][way][load]
            x = len(SIZES) - 0.25 + 0.3 * (shift > 0)
            axes.vlines(x, paper["least"], paper["most"], color=color(role, scheme), linewidth=5)
        axes.text(len(SIZES) - 0.1, -0.02, "paper", transform=axes.get_xaxis_transform(), ha="center", va="top")
        axes.set(xticks=range(len(SIZES)), xticklabels=SIZES, title=title)
        axes.set_xlabel("answers to a prompt" if way == "parallel" else "beams")
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    panels[0].set_ylabel("blocks saved, %")
    panels[0].legend(loc="upper left")


def prefix_saves(figure: Figure, scheme: Scheme) -> None:
    """Prefill tokens a request, and throughput over that of Orca (Oracle), with two system prompts."""
    found = results("prefix_cache")["system_prompt"]
    left, right = figure.subplots(1, 2)
    ways = {"oracle": ("Orca (Oracle)", "wasted"), "without": ("paged", "prompt"), "with": ("with the cache", "shared")}
    for way, (label, role) in list(ways.items())[1:]:
        values = [found[str(shared)][f"prefill_{way}"] / found["num_requests"] for shared in PAPER]
        _bars(left, values, -0.2 if way == "without" else 0.2, 0.38, label, color(role, scheme), scheme, "{:.0f}")
    for shift, (way, (label, role)) in zip((-0.27, 0.0, 0.27), ways.items(), strict=True):
        rates = [found[str(shared)]["requests_per_second"] for shared in PAPER]
        values = [rate[way] / rate["oracle"] for rate in rates]
        _bars(right, values, shift, 0.25, label, color(role, scheme), scheme, "{:.2f}")
    right.plot(
        [place + 0.27 for place in range(len(PAPER))],
        list(PAPER.values()),
        marker="D",
        linestyle="none",
        color=INK[scheme],
        label="the paper's",
    )
    left.set_title("prompt tokens computed, a request", fontsize=TYPE_SIZE)
    right.set_title("requests a second, over Orca's", fontsize=TYPE_SIZE)
    for axes in (left, right):
        axes.set(xticks=range(len(PAPER)), xticklabels=[f"{shared} shared" for shared in PAPER])
        axes.grid(visible=False, axis="x")
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.legend(loc="upper left", fontsize=SMALL)


def _bars(
    axes: Axes, values: Sequence[float], shift: float, width: float, label: str, shade: str, scheme: Scheme, form: str
) -> None:
    """Bars next to those of others, each with its number on it."""
    bars = axes.bar([place + shift for place in range(len(values))], values, width=width, color=shade, label=label)
    axes.bar_label(bars, [form.format(value) for value in values], size=TINY, color=INK[scheme], padding=2)


def hit_rate(figure: Figure, scheme: Scheme) -> None:
    """The share of prompt tokens that is found, over the size of the memory."""
    found = results("prefix_cache")["hit_rate"]
    axes = plot(figure, xlabel="memory, blocks of 16 tokens", ylabel="prompt tokens found, %")
    blocks = [point["num_blocks"] for point in found["points"]]
    percents = [point["percent"] for point in found["points"]]
    axes.plot(blocks, percents, color=color("shared", scheme), marker="o")
    axes.axhline(found["ceiling_percent"], color=INK[scheme], linestyle=":", linewidth=1.2)
    axes.text(blocks[0], found["ceiling_percent"] + 2, "unlimited memory", color=INK[scheme], size=SMALL)
    axes.set_xscale("log", base=2)
    axes.set_xticks(powers := [each for each in blocks if not each & (each - 1)], [f"{each:,}" for each in powers])
    axes.minorticks_off()
    axes.set_ylim(0, 100)


if __name__ == "__main__":
    main()
