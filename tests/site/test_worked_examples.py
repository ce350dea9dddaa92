"""What the pages work out by hand is what the code does: examples at the prompt, and tables of runs.

A table is compared in both languages: the numbers of its cells, row by row. Figures that are computed or measured are
not here; a page gets those from `result()` when it is built.
"""

from __future__ import annotations

import doctest
import gzip
import importlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from textwrap import dedent
from typing import Any

import pytest
import torch
from scripts.figures import phase_05, phase_07

from minicache.engine.beam import BeamSearch, BeamSearchParams
from minicache.engine.decoding import decode
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.engine.speculative import NgramDrafter, verify
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.request import Request, RequestId
from minicache.scheduler import ChunkedPrefillScheduler, FairScheduler, Scheduler, SharingScheduler, create_scheduler
from minicache.scheduler.drive import Tally, drive
from minicache.scheduler.fair import PriorityScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.simulator.workload import SHAREGPT, generate
from minicache_course.incidents.broken import ReversedScheduler, StarvingScheduler, ThrashScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler
from minicache_course.incidents.table import INCIDENTS, measure

DOCS = Path(__file__).parents[2] / "docs"
ENGLISH = sorted(path.relative_to(DOCS / "en").as_posix() for path in (DOCS / "en").rglob("*.md"))


@cache
def text(page: str, language: str = "en") -> str:
    (name,) = [name for name in ENGLISH if name.startswith(page)]
    return (DOCS / language / name).read_text(encoding="utf-8")


# --- examples at the prompt -----------------------------------------------------------------------------------------

USED = (
    "minicache.cache.paged minicache.cache.selective minicache.engine.decoding minicache.engine.sampling",
    "minicache.grammar minicache.kernels minicache.memory.prefix minicache.model minicache.plugins.adapter",
    "minicache.request minicache.scheduler minicache.scheduler.output minicache.scheduler.queue",
)
"""Modules whose names the pages use without an import, besides those of the course's tasks."""


@cache
def names() -> dict[str, Any]:
    course = tomllib.loads((DOCS.parent / "labs" / "course.toml").read_text(encoding="utf-8"))
    tasks = {task["module"] for phase in course["phase"] for task in phase["task"]}
    modules = [importlib.import_module(module) for module in [*sorted(tasks), *" ".join(USED).split()]]
    found = ((name, getattr(module, name)) for module in modules for name in dir(module))  # some on first use
    return {name: value for name, value in found if type(value) is not type(math)}


def examples(page: str) -> str:
    """What a page shows at the prompt; in a fold it is indented."""
    blocks = re.findall(r"^( *)```pycon\n(.*?)^\1```", text(page), re.DOTALL | re.MULTILINE)
    return "\n\n".join(dedent(block) for _, block in blocks)


LABS = [name for name in ENGLISH if "/lab/" in name and "```pycon" in text(name)]


@pytest.mark.parametrize("page", [name for name in LABS if "await" not in examples(name)])  # no `python -m asyncio`
def test_an_example_at_the_prompt_gives_what_is_shown(page: str) -> None:
    given = names() | {"torch": torch, "math": math}
    case = doctest.DocTestParser().get_doctest(examples(page), given, page, None, 0)
    assert case.examples
    assert doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL).run(case).failed == 0


# --- tables ---------------------------------------------------------------------------------------------------------


def tables(page: str, language: str) -> list[list[list[str]]]:
    """Tables, rows, cells; a heading is row 0."""
    found = re.findall(r"(?:^ *\|.*\n)+", text(page, language), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.strip().splitlines()]
        for table in found
    ]


def row_of(cells: Sequence[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells)


def numbers(cell: str) -> list[str]:
    """The numbers of a cell, in order; that of a name, such as u1, is none of them."""
    found = re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?", cell.replace("−", "-"))
    return [each.replace(",", "") for each in found]


Expected = Iterable[Sequence[Any]] | Mapping[int, Sequence[Any]]
Table = tuple[str, str, Expected]
"""A page; how its table's heading begins; of each row, or of those whose first number is a key, what the cells after
the first say: a number, numbers, a text, 0 for an empty one, None for anything."""

TABLES: list[Callable[[], Table | list[Table]]] = []


def table(make: Callable[[], Table | list[Table]]) -> Callable[[], Table | list[Table]]:
    TABLES.append(make)
    return make


def differences(rows: Sequence[Sequence[str]], expected: Expected) -> list[tuple[Sequence[str], Sequence[Any]]]:
    """Rows that say something else than was expected, with what was expected."""
    if isinstance(expected, Mapping):
        shown = {int(numbers(row[0])[0]): row for row in rows if numbers(row[0])}
        pairs = [(shown[step], want) for step, want in expected.items() if step in shown]
    else:
        pairs = list(zip(rows, expected, strict=True))
    assert pairs
    return [(row, want) for row, want in pairs if not all(map(says, row[1:], want))]


def says(cell: str, want: Any) -> bool:
    if want is None:
        return True
    wanted = [str(each) for each in (want if isinstance(want, list | tuple) else [want])] or ["0"]
    return cell == want or (numbers(cell) or ["0"]) == wanted


@pytest.mark.parametrize("language", ["en", "es"])
@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_a_table_shows_what_happens(make: Callable[[], Table | list[Table]], language: str) -> None:
    made = make()
    for page, heading, expected in made if isinstance(made, list) else [made]:
        places = [place for place, rows in enumerate(tables(page, "en")) if row_of(rows[0]).startswith(heading)]
        rows = [row for place in places for row in tables(page, language)[place][2:]]
        assert differences(rows, expected) == []


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A step: the tokens of each request in it, 0 for a victim; blocks of all; free blocks, the next one first."""

    work: dict[RequestId, int]
    preempted: list[RequestId]
    copies: list[tuple[int, int]]
    blocks: dict[RequestId, list[int]]
    free: list[int]
    num_used: int

    def of(self, *names: RequestId) -> list[int]:
        return [self.work.get(name, 0) for name in names]


def follow(
    scheduler: Scheduler, *requests: Request, arrivals: Mapping[int, Request] = {}, most: int = 2000
) -> list[Seen]:
    """Serve these, and those that arrive before a step, until none is left or for `most` steps."""
    everyone = [*scheduler.running, *requests, *arrivals.values()]
    for request in requests:
        scheduler.add_request(request)
    seen: list[Seen] = []
    while len(seen) < most and (scheduler.has_unfinished or len(seen) <= max(arrivals, default=-1)):
        if len(seen) in arrivals:
            scheduler.add_request(arrivals[len(seen)])
        output = scheduler.schedule()
        work = dict.fromkeys(output.preempted, 0) | output.num_scheduled_tokens
        blocks = {each.request_id: each.block_ids.copy() for each in everyone}
        free = deepcopy(scheduler.pool).allocate(scheduler.pool.num_free)
        seen.append(Seen(work, output.preempted, output.blocks_to_copy, blocks, free, scheduler.pool.num_used))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return seen


def chunked(**options: Any) -> ChunkedPrefillScheduler:
    return ChunkedPrefillScheduler(**{"num_blocks": 1000} | options)


def sharing(num_blocks: int, **options: Any) -> SharingScheduler:
    return SharingScheduler(num_blocks=num_blocks, **{"block_size": 4, "prefix_caching": True} | options)


def computed(scheduler: Scheduler, *requests: Request) -> list[int]:
    """Serve these to their end; of each the tokens that its first step computed."""
    steps = follow(scheduler, *requests)
    return [
        next(each.work[request.request_id] for each in steps if request.request_id in each.work) for request in requests
    ]


# --- phase 5 ---


@table
def six_requests() -> Table:
    steps, _ = phase_05.run_six("continuous")
    rows: list[list[Any]] = []
    waiting = list(phase_05.SIX)
    for step in steps:
        batch, tokens = [], [entry.num_new_tokens for entry in step.batch]
        for entry in step.batch:
            batch.append("+" * (entry.request_id in waiting) + str(entry.request_id))
            waiting = [name for name in waiting if name != entry.request_id]
        ends = ", ".join(str(event.request_id) for event in step.events if event.kind == "finish")
        counted = [*tokens, sum(tokens)] if max(tokens) > 1 else sum(tokens)
        rows.append([" ".join(batch), counted, ends, " ".join(waiting)])
    return "phase-05-continuous-batching/theory/02", "| step | in the batch", rows


@table
def eighty_requests() -> Table:
    columns = []
    for name in ("static", "continuous"):
        steps, tally, coming = phase_05.run_burst(name)
        first = [tally.first_token[each.request_id] - step + 1 for step, each in coming]
        last = [tally.finished[each.request_id] - step + 1 for step, each in coming]
        used = phase_05.utilisation(steps, phase_05.BURST_SLOTS)
        means = [f"{fmean(first):.1f}", f"{fmean(last):.1f}"]
        columns.append([len(steps), f"{100 * used:.0f}", *means, max(last), max(step.num_waiting for step in steps)])
    return "phase-05-continuous-batching/further/01", "| | static | continuous", list(zip(*columns, strict=True))


@table
def static_batches() -> Table:
    rows = []
    drawn = [each.num_output_tokens for each in generate(SHAREGPT, 20_480, 0)]
    for slots in (2, 8, 32, 128):
        longest = sum(max(drawn[at : at + slots]) for at in range(0, len(drawn), slots))
        rows.append([f"{100 * sum(drawn) / (slots * longest):.0f}"])
    return "phase-05-continuous-batching/theory/01", "| slots |", rows


# --- phase 6 ---


def two_prompts(name: str = "paged", **options: Any) -> tuple[list[Seen], Tally]:
    """80 tokens each and 20 new ones, in 10 blocks: step by step, and counted."""
    schedulers = [create_scheduler(name, **{"num_blocks": 10} | options) for _ in range(2)]
    requests = [[Request(number, [1] * 80, 20) for number in range(2)] for _ in schedulers]
    return follow(schedulers[0], *requests[0]), drive(schedulers[1], requests[1])


@table
def reserving() -> Table:
    tallies = [two_prompts(name)[1] for name in ("continuous", "paged")]
    counted = [[each.batch_sizes[0], each.first_token[1], each.num_steps] for each in tallies]
    return "phase-06-preemption/theory/01", "| | reserved |", [[7, 5], *zip(*counted, strict=True)]


@table
def a_watermark() -> Table:
    rows = []
    for each in (two_prompts(watermark=watermark)[1] for watermark in (0, 0.1)):
        tokens = each.num_prefill_tokens
        rows.append([each.batch_sizes[0], each.num_preemptions, tokens, each.first_token[1], each.num_steps])
    return "phase-06-preemption/theory/01", "| watermark | running", rows


@table
def growing() -> Table:
    steps, _ = two_prompts()
    rows = {step: [None, None, steps[step].num_used, len(steps[step].free)] for step in (0, 1, 2, 17, 20)}
    assert [step for step, each in enumerate(steps) if each.preempted] == [1]
    return "phase-06-preemption/theory/02", "| step | batch |", rows


@table
def a_missing_line() -> Table:
    _, each = two_prompts()
    rows = [[each.num_steps] * 2, [40] * 2, [1] * 2, [each.num_prefill_tokens, each.num_prefill_tokens - 81]]
    return "phase-06-preemption/theory/04", "| | right | without", rows


# --- phase 7 ---


@table
def incidents() -> Table:
    rows = []
    for incident in INCIDENTS:
        kinds = (incident.broken, incident.fixed)
        counted = [getattr(measure(incident.workload, kind), incident.counter) for kind in kinds]
        known = {"OutOfBlocksError": 1, "LivelockError": 0, "": None}
        rows.append([None, None, None, *(known.get(each, each) for each in counted)])
    return "phase-07-fairness/lab/00", "| # | what it did", rows


@table
def the_thrash() -> Table:
    steps = follow(ThrashScheduler(num_blocks=64), Request("A", [1] * 120, 100), Request("B", [1] * 50, 100))
    rows = {
        number: [None, sum(step.work.values()), "A" if step.preempted else "", step.num_used]
        for number, step in enumerate(steps)
    }
    rows[0][2] = rows[1][2] = None  # a request that waits
    return "phase-07-fairness/theory/02", "| step | could compute", rows


@table
def what_the_thrash_costs() -> Table:
    rows: list[Any] = []
    for run, again, form in ((phase_07.run_thrash, ["num_recomputed_tokens"], ".0f"), (phase_07.run_four, [], ".2f")):
        tallies = [run(kind).tally for kind in (ThrashScheduler, FixedThrashScheduler)]
        counters = "num_steps", "num_prefill_tokens", *again, "num_preemptions"
        rows += [[getattr(each, name) for each in tallies] for name in counters]
        rows.append([format(each.mean_batch_size, form) for each in tallies])
    return "phase-07-fairness/theory/02", "| | with the bug | right", rows


@table
def two_bugs() -> Table:
    rows = []
    for kind in (ReversedScheduler, ThrashScheduler, StarvingScheduler, FairScheduler):
        tally = drive(kind(num_blocks=80), phase_07.requests())
        starved = sum(end + 1 > phase_07.TIMEOUT * 394 for end in tally.finished.values())
        rows.append([tally.num_steps, tally.num_prefill_tokens, starved, tally.finished[0] + 1])
    return "phase-07-fairness/further/01", "| | steps | prefill tokens", rows


@table
def priority_keys() -> Table:
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    told = {"a": (1, 0.0), "b": (0, 9.0), "c": (0, 3.5), "d": (-2, 100.0), "e": (0, 3.5), "f": (1, -1.0)}
    requests = [Request(name, [1], 1, priority=rank, arrival_time=time) for name, (rank, time) in told.items()]
    served = list(drive(scheduler, requests).finished)
    place = {name: position for position, name in enumerate(served, start=1)}
    keys = [(each.request_id, each.arrival_index, scheduler.priority_key(each)[:3]) for each in requests]
    rows = [[*told[name], index, key, place[name]] for name, index, key in keys]
    return "phase-07-fairness/theory/03", "| request | priority", rows


@table
def orders() -> Table:
    rows = []
    for kind in phase_07.ORDERS.values():
        run = phase_07.run_order(kind)
        urgent, tally = run.arrivals[-1][1], run.tally
        rows.append([urgent.num_preemptions, tally.finished["U"] + 1, tally.num_preemptions, tally.num_prefill_tokens])
    return "phase-07-fairness/theory/03", "| | U preempted", rows


@table
def an_image_among_texts() -> Table:
    rows = []
    for kind in (PriorityScheduler, FairScheduler):
        tally = phase_07.run_texts(kind).tally
        first = tally.first_token["image"]
        rows.append([first, len({name for names in tally.order[:first] for name in names})])
    return "phase-07-fairness/theory/04", "| | image's first token", rows


# --- phase 8 ---


@table
def turns_of_a_chat() -> Table:
    columns: list[list[int]] = []
    for prefix_caching in (False, True):
        scheduler, said, prompts = sharing(64, block_size=16, prefix_caching=prefix_caching), [0] * 0, [0] * 0
        columns.append([])
        for turn in range(4):
            said = [*said, *range(1000 * turn, 1000 * turn + 20)]
            request = Request(turn, said, 60)
            prompts.append(len(said))
            columns[-1] += computed(scheduler, request)
            said = [*said, *request.output_token_ids]
    rows = [list(row) for row in zip(prompts, *columns, strict=True)]
    return "phase-08-prefix-sharing/further/03", "| turn | prompt", [*rows, [None, *map(sum, columns)]]


@table
def what_is_found() -> Table:
    rows = []
    for length in (47, 48, 49):
        left = computed(sharing(20, block_size=16), *(Request(name, list(range(length)), 1) for name in "ab"))[1]
        rows.append([length // 16, length - left, left])
    return "phase-08-prefix-sharing/theory/01", "| prompt | full blocks", rows


@table
def a_tenant_who_guesses() -> Table:
    rows = []
    for mine, theirs in ((None, None), ("a", "b")):
        scheduler, found = sharing(500), [0] * 0
        follow(scheduler, Request("a", [5, 6, 3, 8, 1, 1], 3, cache_salt=mine))
        for guess in range(100):
            prompt = [5, 6, guess // 10, guess % 10, 1]
            follow(scheduler, request := Request(guess, prompt, 1, cache_salt=theirs))
            found += [*prompt[:4], request.num_cached_tokens] if request.num_cached_tokens else []
        rows.append([100, found])
    return "phase-08-prefix-sharing/further/01", "| | prompts tried", rows


@table
def where_lru_fails() -> Table:
    rows = []
    for num_blocks in range(17, 22):
        scheduler = sharing(num_blocks)
        for number in range(50):
            follow(scheduler, Request(number, [number % 5] * 16 + [9], 1))
        rows.append([f"{100 * scheduler.stats.hit_rate:.0f}"])
    return "phase-08-prefix-sharing/further/04", "| blocks of 4 | hit rate", rows


@table
def what_admission_counts() -> Table:
    scheduler, b = sharing(5), Request("b", [1] * 14, 3)
    follow(scheduler, Request("a", [1] * 9, 1))
    follow(scheduler, Request("x", [2] * 7, 9), most=1)
    found = scheduler.find_prefix(b)
    needs, takes = scheduler.blocks_to_admit(b), scheduler.blocks_to_take(b, found)
    rows = [[needs], [needs - len(found)], [takes], [scheduler.pool.num_free]]
    return "phase-08-prefix-sharing/theory/02", "| what B takes | blocks", rows


@table
def a_victim_with_a_partial_block() -> Table:
    steps = follow(sharing(6), Request("old", [5] * 8, 9), Request("young", [6] * 6, 9), most=10)
    rows = {at: [steps[at].blocks["old"], steps[at].blocks["young"], steps[at].free] for at in (4, 5, 9)}
    assert steps[9].work == {"young": 3}
    return "phase-08-prefix-sharing/further/02", "| step | old's blocks", rows


@table
def a_victim_comes_back() -> Table:
    rows = []
    for prefix_caching in (False, True):
        scheduler = sharing(10, block_size=16, prefix_caching=prefix_caching)
        rows.append([follow(scheduler, *(Request(number, [number] * 80, 20) for number in (0, 1)))[20].work[1]])
    return "phase-08-prefix-sharing/further/02", "| | tokens computed at the return", rows


@table
def a_first_write() -> Table:
    scheduler, a = sharing(20, prefix_caching=False), Request("a", [1] * 6, 20)
    follow(scheduler, a, most=1)
    b = scheduler.fork_request("a", "b")
    rows: list[list[Any]] = [[a.block_ids.copy(), b.block_ids.copy(), 0, scheduler.pool.num_used]]
    for each in follow(scheduler, most=3):
        copies = [block for pair in each.copies for block in pair]
        rows.append([each.blocks["a"], each.blocks["b"], copies, each.num_used])
    return "phase-08-prefix-sharing/theory/03", "| | a's blocks", rows


@table
def children() -> Table:
    rows = []
    for outputs in ([7, 7, 7], [7, 7, 8], [7, 7], [7, 8], []):
        scheduler, a = sharing(20), Request("a", [1] * 6, 20)
        follow(scheduler, a, most=3)
        both = 6 + next((n for n, (x, y) in enumerate(zip([7] * 3, outputs, strict=False)) if x != y), len(outputs))
        b = scheduler.fork_request("a", "b", outputs)
        rows.append([both, b.num_computed_tokens, b.block_ids.copy()])
    return "phase-08-prefix-sharing/theory/03", "| the child has", rows


@table
def siblings_run_out() -> list[Table]:
    returns = []
    for prefix_caching in (False, True):
        scheduler = sharing(5, prefix_caching=prefix_caching)
        follow(scheduler, Request("a", [1] * 8, 8), most=1)
        for name, token in (("b", 20), ("c", 30)):
            scheduler.fork_request("a", name, [token])
        steps = follow(scheduler, most=13)
        assert steps[4].preempted == ["c", "b"]
        returns.append([steps[7].work["b"], steps[10].work["c"]])
    rows = {step: [steps[step - 1].blocks[name] for name in "abc"] + [steps[step - 1].free] for step in (4, 5)}
    page = "phase-08-prefix-sharing/further/02"
    return [(page, "| step | a | b | c", rows), (page, "| tokens computed at the return", returns)]


@table
def a_beam_search() -> Table:
    words = ["fish", "rice", "`.`"]
    after = {
        (): {0: -1.0, 2: -2.25, 1: -4.0},
        (0,): {1: -2.0, 2: -5.0, 0: -9.0},
        (1,): {0: -1.0, 2: -1.5, 1: -9.0},
        (0, 1): {0: -4.0, 1: -9.0, 2: -9.0},
        (1, 0): {1: -1.5, 0: -9.0, 2: -9.0},
    }
    search, rows = BeamSearch(BeamSearchParams(2, length_penalty=1.0), [2], 3), []
    for num_shown in (3, 4, 2):
        ways = [
            (beam.log_prob + log_prob, [*beam.token_ids, token])
            for beam in search.beams
            for token, log_prob in after[beam.token_ids].items()
        ]
        ways.sort(reverse=True)
        rows += [[" ".join(words[token] for token in way), f"{total:g}"] for total, way in ways[:num_shown]]
        search.advance([list(after[beam.token_ids].items()) for beam in search.beams])
    assert [answer.token_ids for answer in search.answers] == [[1, 0, 1], [2]]
    return "phase-08-prefix-sharing/theory/04", "| rank | hypothesis", rows


# --- phase 9 ---


@table
def budgets() -> list[Table]:
    steps = follow(chunked(max_num_batched_tokens=1024), *(Request(each, [each] * 800, 9) for each in range(3)), most=3)
    page = "phase-09-chunked-prefill/theory/02"
    rows = [[*each.of(0, 1, 2), 1024 - sum(each.work.values())] for each in steps]
    a, b, c = Request("A", [1] * 4, 12), Request("B", [1] * 14, 9), Request("C", [2] * 30, 9)
    scheduler = chunked(max_num_batched_tokens=10)
    follow(scheduler, a, most=1)
    return [
        (page, "| step | request 0 | request 1", rows),
        (page, "| step | A | B | C", [each.of(*"ABC") for each in follow(scheduler, b, c, most=6)]),
    ]


@table
def prompts_that_must_fit() -> Table:
    found = json.loads(gzip.decompress((DOCS.parent / "tests/scheduler/golden/first_come.json.gz").read_bytes()))
    found = [each for each in found if not each["prefix_caching"]]
    needed = sum(prompt + most - 1 for each in found for _, prompt, most, _ in each["requests"])
    rows = []
    for mode in ("first_chunk_must_fit", "full_prompt_must_fit"):
        made = [step for each in found for step in each["steps"][mode]]
        tokens = sum(sum(tokens.values()) for tokens, _ in made)
        rows.append([sum(len(lost) for _, lost in made), tokens - needed, len(made)])
    return "phase-09-chunked-prefill/theory/02", "| must be free", rows


class Forgetful(ChunkedPrefillScheduler):
    """The scheduler without the rule."""

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        super().preempt(request, output)
        self.protected = None


@table
def the_protected_request() -> list[Table]:
    made = []
    for kind in (Forgetful, ChunkedPrefillScheduler):
        scheduler = kind(num_blocks=8, block_size=4, max_num_batched_tokens=16, long_prefill_threshold=8)
        arrivals = {at: Request(f"u{at // 4}", [2] * 8, 8) for at in range(1, 40, 4)}
        made.append(follow(scheduler, Request("old", [1] * 24, 4, priority=1), arrivals=arrivals, most=15))
    without, with_it = made
    page = "phase-09-chunked-prefill/theory/03"
    rows = {
        number: [[new for name, new in each.work.items() if name != "old"], each.work.get("old", 0)]
        for number, each in enumerate(without[:6])
        if number != 4
    }
    held = {
        first: [[each.work.get(name, 0) for each in with_it[first:last]] for name in ("u0", "old")]
        for first, last in ((2, 3), (3, 9), (9, 12), (12, 13), (13, 15))
    }
    few = {first: [each if any(each) else 0 for each in columns] for first, columns in held.items()}
    return [(page, "| step | urgent ones", rows), (page, "| step | u0", few)]


@table
def one_pass_over_drafts() -> Table:
    words, model = Tokenizer().words, load_minigpt()
    prompt = Tokenizer().encode("Yesterday I")
    tokens = prompt + [int(each) for each in decode(model, torch.tensor([prompt]), 29 - len(prompt))]
    drafts = NgramDrafter().draft(tokens, 4)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens + drafts]))[0, 28:]
    picked = logits.argmax(-1).tolist()
    assert verify(logits, [drafts], [TokenSampler(SamplingParams())]) == [picked[:2]]
    rows = [[28 + place, None, "" if place == 4 else words[drafts[place]]] for place in range(5)]
    assert [words[each] for each in picked] == ["not", "cooking", "to", "the", "river"]
    return "phase-09-chunked-prefill/theory/04", "| token | its position", rows


# --- a figure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.5}, {"top_k": 2}, {"temperature": 2.0, "top_p": 0.9}])
def test_the_figure_of_a_distribution_cuts_as_the_sampler_does(setting: dict[str, Any]) -> None:
    _, logits = phase_05.words_after("They")
    drawn = TokenSampler(SamplingParams(**{"temperature": 1.0} | setting)).probabilities(logits)
    torch.testing.assert_close(drawn, phase_05.kept(logits, **setting).double(), rtol=1e-4, atol=1e-6)


# --- what the text says of results, in words --------------------------------------------------------------------------


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS.parent / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    return found


def rises(values: Iterable[float]) -> bool:
    values = list(values)
    return values == sorted(values)


def test_words_about_preemption() -> None:
    told = results("preemption")
    by_size, recompute = told["modelled"]["by_block_size"], told["modelled"]["recompute_ms"]
    assert 10 < by_size["1"]["swap_ms_5_us"] / recompute < 11, "ten times as much"
    assert by_size["16"]["swap_ms_5_us"] > recompute > by_size["64"]["swap_ms_5_us"], "the lines cross"
    assert 1.2 < by_size["256"]["recompute_over_swap"] < 1.25, "one fifth more"
    marks, pressure = told["watermarks"]["recompute"], told["pressure"]["recompute"]
    assert marks["10"]["preemptions"] / marks["0"]["preemptions"] == pytest.approx(0.2, abs=0.03), "four fifths"
    assert marks["10"]["seconds"] == pytest.approx(marks["0"]["seconds"], rel=0.02), "almost no time"
    assert pressure["50"]["mean_latency_s"] / pressure["100"]["mean_latency_s"] == pytest.approx(1.5, rel=0.03)
    seconds = [{size: run["seconds"] for size, run in way.items()} for way in told["block_sizes"].values()]
    assert all(max(s[size] for s in seconds) / min(s[size] for s in seconds) < 1.04 for size in ("16", "32", "64"))
    assert all(each["256"] > 1.1 * each["16"] for each in seconds), "larger blocks are slower"


def test_words_about_starvation() -> None:
    told = results("incidents")["starvation"]
    for name in ("before", "after"):
        tally = phase_07.run_forty(name).tally
        assert told["steps"][name]["requests"] == [tally.finished[number] + 1 for number in range(40)]
        assert told["work"][name]["num_prefill_tokens"] == tally.num_prefill_tokens
    clocks = told["steps"], told["modelled_seconds"]
    factors = [each["before"]["slowest"] / each["after"]["slowest"] for each in clocks]
    assert round(factors[0]) == 3
    assert factors[0] < factors[1] < 1.5 * factors[0], "a little more than that"
    assert all((end > 591) == (number >= 20) for number, end in enumerate(told["steps"]["before"]["requests"]))


def test_words_about_sharing() -> None:
    told = results("sharing")
    saved = {
        (way, load): [told[way][load][size]["saved_percent"] for size in ("2", "4", "6")]
        for way in ("parallel", "beam")
        for load in ("alpaca", "sharegpt")
    }
    assert all(map(rises, saved.values())), "more answers save more"
    for load in ("alpaca", "sharegpt"):
        assert all(beams > 2 * each for beams, each in zip(saved["beam", load], saved["parallel", load], strict=True))
    for (way, load), values in saved.items():
        inside = told["paper"][way][load]["least"] <= values[0] <= told["paper"][way][load]["most"]
        assert inside == ((way, load) != ("beam", "alpaca")), "begins inside, but beams on short prompts"
    assert told["replayed"] == told["direct"], "the replay loses nothing"


def test_words_about_the_prefix_cache() -> None:
    told = results("prefix_cache")
    for shared in ("80", "341"):
        run = told["system_prompt"][shared]
        assert run["requests_per_second"]["without"] < 1.11 * run["requests_per_second"]["oracle"], "a tenth at most"
        by_answer = [told["by_answer"][answer][shared] for answer in ("80", "40", "20")]
        assert all(rises(each[key] for each in by_answer) for key in ("with_over_without", "with_over_oracle"))
    assert all(each["341"][key] > each["80"][key] for each in told["by_answer"].values() for key in each["80"])
    assert rises(-point["with"]["saved_percent"] for point in told["chat"]["points"]), "the busier, the less it saves"
    assert 1 < told["chat"]["throughput_ratio"] < told["chat"]["light"]["ttft_ratio"]
    points, ceiling = told["hit_rate"]["points"], told["hit_rate"]["ceiling_percent"]
    assert all((point["percent"] == ceiling) == (point["num_blocks"] >= 8192) for point in points)


def test_words_about_chunks() -> None:
    told = results("chunked")
    points, fair = told["budget"]["points"], told["budget"]["fair"]
    assert all(rises(each[key] for each in points) for key in ("gap_max_ms", "tpot_p99_ms"))
    assert rises(each["gap_p99_ms"] for each in points[:-1]), "up to 4,096"
    assert rises(-each["ttft_p50_ms"] for each in points[:5]), "up to 2,048"
    assert all(1.6 < two["gap_max_ms"] / one["gap_max_ms"] < 2.2 for one, two in pairwise(points)), "about twice"
    assert all(each["gap_p50_ms"] == pytest.approx(fair["gap_p50_ms"], rel=0.1) for each in points), "the same"
    late = [each["ttft_p99_ms"] for each in points]
    assert min(late) in late[1:-1], "lowest in the middle"
    assert max(late) == late[0]
    goodput = told["goodput"]
    for load in ("conversation", "code", "sharegpt"):
        assert goodput[load]["strict"]["ratio_to_phased"] > goodput[load]["relaxed"]["ratio_to_phased"], "tighter"
        assert goodput[load]["strict"]["ratio_to_phased"] >= goodput["sharegpt"]["strict"]["ratio_to_phased"], "long"
    strict = [goodput[load]["strict"]["ratio_to_phased"] for load in ("conversation", "code", "sharegpt")]
    assert min(strict) < goodput["paper"] < max(strict), "on both sides"


def test_words_about_drafts() -> None:
    told = results("speculative")
    again, new = (told[kind]["points"] for kind in ("again", "new"))
    assert rises(each["tokens_per_step"] for each in again), "more of them give more"
    assert all(1 < each["speedup"] < each["tokens_per_step"] for each in again), "smaller than that"
    assert all(each["speedup"] < 1 for each in new), "they lose"
    assert new[0]["acceptance"] == pytest.approx(0.2, abs=0.05), "one in five"


def test_words_about_disaggregation() -> None:
    told = results("disaggregation")
    together, apart, blind = told["together"]["tpot_p99"], told["prefill_2"], told["blind_2"]
    assert apart["5"]["tpot_p99"] > together > apart["10"]["tpot_p99"]
    assert blind["2"]["tpot_p99"] > 10 * apart["2"]["tpot_p99"]
    assert round(blind["2"]["num_moved"] / told["together"]["num_requests"], 1) == 0.8, "eight of ten"
