"""The numbers on phase 7's pages, computed again: the pages must not drift from what schedulers do."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from minicache.request import Request
from minicache.scheduler import FairScheduler, fair
from minicache.scheduler.drive import drive
from minicache.scheduler.fair import PriorityScheduler
from minicache.scheduler.queue import RequestQueue
from minicache_course.incidents.broken import ReversedScheduler, StarvingScheduler, ThrashScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler
from minicache_course.incidents.table import INCIDENTS, measure

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/en/phase-07-fairness"


@pytest.fixture(scope="module")
def figures():
    """The module that draws the figures: its runs are those that the pages describe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("scripts.figures.phase_07")


@cache
def page(name: str) -> str:
    """A page as one line, wherever its lines are broken."""
    return " ".join((PAGES / name).read_text(encoding="utf-8").split())


def missing_on(name: str, *stated: str) -> list[str]:
    return [number for number in stated if number not in page(name)]


def table(name: str, heading: str) -> list[list[str]]:
    """The cells of the table whose heading row is given, row by row."""
    lines = (PAGES / name).read_text(encoding="utf-8").splitlines()
    first = lines.index(heading) + 2
    rows: list[list[str]] = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def numbers(count: int, *values: float | str) -> str:
    """The end of a table's row."""
    assert len(values) == count
    return "| " + " | ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values) + " |"


# --- the incident room ----------------------------------------------------------------------------------------------


def test_the_table_of_the_eight():
    """Broken and right, as `measure` counts them; and the workload has the numbers that the table gives."""
    rows = table("theory/01-the-incident-room.md", "| # | what it did | smallest workload | counter | broken | right |")
    assert len(rows) == len(INCIDENTS)
    for incident, (number, _, workload, _, *cells) in zip(INCIDENTS, rows, strict=True):
        assert int(number) == incident.number
        counted = [
            getattr(measure(incident.workload, kind), incident.counter) for kind in (incident.broken, incident.fixed)
        ]
        if incident.slug == "copy":
            assert counted == ["OutOfBlocksError", ""]
            counted = [1, 0]  # what the error says: the block that is missing
        elif incident.slug == "livelock":
            assert counted == ["LivelockError", ""]
            counted = ["no end", "at most 1"]
        elif incident.counter == "first_preempted":
            counted = [f"request {name}" for name in counted]
        assert cells == [f"{value:,}" if isinstance(value, int) else value for value in counted]
        told = [int(each) for each in re.findall(r"\d+", workload)]
        known = [*incident.workload.options.values(), len(incident.workload.requests), 2]
        known += [each for _, prompt, tokens, _ in incident.workload.requests for each in (prompt, tokens)]
        assert set(told) <= set(known), (workload, known)


def test_the_example_of_the_incident_room():
    """One batch slot: five steps and a batch of 1 where it is right, and a batch of 0 after 100 steps with the bug."""
    cap = INCIDENTS[0]
    right = measure(cap.workload, cap.fixed)
    broken = measure(cap.workload, cap.broken)
    assert (right.num_steps, right.max_batch_size, broken.max_batch_size, cap.workload.max_steps) == (5, 1, 0, 100)
    assert not missing_on("theory/01-the-incident-room.md", "finishes it after 5 steps", "is asked 100 times")


# --- the thrash -----------------------------------------------------------------------------------------------------


def test_the_thrash_step_by_step(figures):
    served = figures.run_thrash(ThrashScheduler)
    rows = table("theory/02-the-thrash.md", "| step | could compute | computes | preempted | blocks used |")
    assert len(rows) == 9
    for step, _, computes, preempted, used in rows:
        if step == "…":
            continue
        record = served.steps[int(step)]
        (entry,) = record.batch
        lost = [event.request_id for event in record.events if event.kind == "preempt"]
        assert computes.split(",")[0] == f"{entry.request_id}: {entry.num_new_tokens}"
        assert (", its last" in computes) is any(event.kind == "finish" for event in record.events)
        assert ([preempted] if preempted else [], int(used)) == (lost, record.num_used_blocks)
    assert max(step.num_used_blocks for step in served.steps) < 64 / 2, "the page says: never half full"


@pytest.mark.parametrize(("run", "rows"), [("run_thrash", 5), ("run_four", 4)])
def test_what_the_thrash_costs(figures, run, rows):
    tallies = [getattr(figures, run)(kind).tally for kind in (ThrashScheduler, FixedThrashScheduler)]
    told = {
        "steps": [each.num_steps for each in tallies],
        "prefill tokens": [each.num_prefill_tokens for each in tallies],
        "of them computed before": [each.num_recomputed_tokens for each in tallies],
        "preemptions": [each.num_preemptions for each in tallies],
        "mean batch": [f"{each.mean_batch_size:.2f}" if rows == 4 else int(each.mean_batch_size) for each in tallies],
    }
    if rows == 4:
        del told["of them computed before"]
    stated = [f"| {name} {numbers(2, *values)}" for name, values in told.items()]
    assert not missing_on("theory/02-the-thrash.md", " ".join(stated))


def test_the_arithmetic_of_the_thrash():
    """Prefill tokens for N new ones, pairs of query and key, and what a prefix cache would leave."""
    of_a = range(120, 220)
    assert sum(of_a) == 16_950 == 100 * 120 + 100 * 99 // 2
    pairs, right = sum(n * (n + 1) // 2 for n in of_a), 120 * 121 // 2 + sum(range(121, 220))
    left = {size: 170 + sum(n - (n - 1) // size * size for n in of_a[1:]) for size in (16, 32)}
    rows = [f"| {n:,} | {n * 120 + n * (n - 1) // 2:,} |" for n in (10, 100, 200, 400, 1000)]
    assert round((1000 * 120 + 1000 * 999 // 2) / 16_950) == 37
    assert not missing_on(
        "theory/02-the-thrash.md",
        " ".join(rows),
        f"{pairs:,} pairs where {right:,} would do: {pairs / right:.0f} times",
        f"| prefill tokens | 17,000 | {left[16]:,} | {left[32]:,} | 170 |",
        f"{50} + {sum(range(51, 151)):,} + {sum(range(52, 152)):,} + {sum(range(100, 200)):,} = 35,200",
    )


def test_the_checks_of_the_thrash():
    def thrash(*prompts: int, tokens: int = 100) -> tuple[int, int, int]:
        requests = [Request(number, [1] * prompt, tokens) for number, prompt in enumerate(prompts)]
        tally = drive(ThrashScheduler(num_blocks=64), requests)
        return tally.num_steps, tally.num_prefill_tokens, tally.num_preemptions

    assert thrash(20, 10, tokens=3) == (6, 73, 3)
    assert thrash(50, 50) == (100, 100, 0)
    assert thrash(51, 50)[:2] == (200, 10_100)


# --- starvation -----------------------------------------------------------------------------------------------------


def test_forty_requests_step_by_step(figures):
    before, after = figures.run_forty("before"), figures.run_forty("after")

    def preempted(served, step):
        return [event.request_id for event in served.steps[step].events if event.kind == "preempt"]

    def ending(served, step):
        return sorted(event.request_id for event in served.steps[step].events if event.kind == "finish")

    assert [len(served.steps[0].batch) for served in (before, after)] == [20, 20]
    assert preempted(before, 5) == [0, 1, 2, 3]
    assert preempted(after, 5) == [19, 18, 17, 16]
    assert preempted(before, 21)
    assert preempted(before, 37)
    assert preempted(after, 21)
    assert preempted(after, 37)
    assert ending(before, 99) == list(range(12, 20))
    assert ending(after, 99) == list(range(8))
    in_step_100 = {entry.request_id for step in before.steps[100:105] for entry in step.batch}
    lengths = {entry.num_new_tokens for step in before.steps[100:105] for entry in step.batch}
    assert (in_step_100, lengths) == (set(range(12)), {65, 81, 97, 113, 129})
    assert [entry.request_id for entry in after.steps[100].batch] == list(range(8, 20))
    assert sum(request.num_preemptions for _, request in after.arrivals[:8]) == 0
    assert after.tally.num_preemptions == 36
    assert "36 preemptions remain" in page("theory/03-starvation.md")
    assert list(before.tally.finished)[-1] == 39
    first_of_the_queue = min(before.tally.first_token[number] for number in range(20, 40))
    assert first_of_the_queue > 370
    resumed = [step.step for step in before.steps for event in step.events if event.kind == "resume"]
    assert min(resumed) == 100, "the page says: up to step 99 no token is computed twice"
    assert "20 to 39 begin after step 370" in page("theory/03-starvation.md")


def test_which_of_the_two_bugs_starves(figures):
    rows = table("theory/03-starvation.md", "| | steps | prefill tokens | starved | request 0 finishes after |")
    kinds = (ReversedScheduler, ThrashScheduler, StarvingScheduler, FairScheduler)
    timeout = figures.TIMEOUT * 394
    for kind, (_, *cells) in zip(kinds, rows, strict=True):
        tally = figures.run(kind(num_blocks=80), [(0, request) for request in figures.requests()]).tally
        starved = sum(end + 1 > timeout for end in tally.finished.values())
        counted = [tally.num_steps, tally.num_prefill_tokens, starved, tally.finished[0] + 1]
        assert [int(cell.strip("*").replace(",", "")) for cell in cells] == counted


def test_what_was_recorded_is_what_is_counted(figures):
    """The benchmark's file has counts; they are those of a run now, and the page's words fit its numbers."""
    told = json.loads((ROOT / "benchmarks/results/incidents.json").read_text(encoding="utf-8"))["starvation"]
    for name in ("before", "after"):
        tally = figures.run_forty(name).tally
        assert told["work"][name]["num_prefill_tokens"] == tally.num_prefill_tokens
        assert told["steps"][name]["requests"] == [tally.finished[number] + 1 for number in range(40)]
        assert told["steps"][name]["slowest"] == tally.num_steps
    starved = [number for number, end in enumerate(told["steps"]["before"]["requests"]) if end > 591]
    assert (starved, told["steps"]["after"]["starved"]) == (list(range(20, 40)), 0)
    factors = {
        clock: told[clock]["before"]["slowest"] / told[clock]["after"]["slowest"]
        for clock in ("steps", "modelled_seconds", "measured_seconds")
    }
    assert round(factors["steps"]) == 3
    assert factors["steps"] < factors["modelled_seconds"] < 1.5 * factors["steps"], "a little more than that"
    assert factors["measured_seconds"] > factors["steps"], "longer too"


# --- order and bound ------------------------------------------------------------------------------------------------


def test_the_table_of_priority_keys():
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    rows = table("theory/04-a-fair-order.md", "| request | priority | arrival_time | arrival_index | key | position |")
    requests = []
    for name, priority, time, *_ in rows:
        request = Request(
            name, [1], 1, priority=int(priority.replace("−", "-")), arrival_time=float(time.replace("−", "-"))
        )
        scheduler.add_request(request)
        requests.append(request)
    served = list(drive(scheduler).finished)
    assert ", ".join(served) in page("theory/04-a-fair-order.md")
    for request, (_, _, _, index, key, position) in zip(requests, rows, strict=True):
        assert int(index) == request.arrival_index
        assert key.replace("−", "-") == str(scheduler.priority_key(request)[:3])
        assert int(position) == served.index(request.request_id) + 1


def test_one_order_against_two(figures):
    stated = []
    for kind in figures.ORDERS.values():
        served = figures.run_order(kind)
        tally, urgent = served.tally, served.arrivals[-1][1]
        stated.append(
            (urgent.num_preemptions, tally.finished["U"] + 1, tally.num_preemptions, tally.num_prefill_tokens)
        )
    rows = table(
        "theory/04-a-fair-order.md",
        "| | U preempted | U's last token after | preemptions in all | prefill tokens |",
    )
    told = [tuple(int(re.findall(r"\d+", cell)[0]) for cell in row[1:]) for row in rows]
    assert told == stated
    lost = [
        step.step
        for step in figures.run_order(figures.TwoOrdersScheduler).steps
        if any(event.kind == "preempt" and event.request_id == "U" for event in step.events)
    ]
    assert lost == [3, 5, 15]


def test_an_urgent_one_waits_for_the_slot():
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    lowly = [(0, Request(number, [1] * 10, 3, priority=5)) for number in range(3)]
    tally = drive(scheduler, arrivals=[*lowly, (1, Request("U", [1] * 10, 3))])
    assert [ids[0] for ids in tally.order] == [0, 0, 0, "U", "U", "U", 1, 1, 1, 2, 2, 2]
    assert "0, 0, 0, **U, U, U**, 1, 1, 1, 2, 2, 2" in page("theory/04-a-fair-order.md")


def test_five_requests_of_two_groups(figures):
    served = figures.run_five()
    assert [[entry.request_id for entry in step.batch] for step in served.steps] == [
        *[["C", "A"]] * 4,
        ["A", "D"],
        *[["D"]] * 2,
        *[["E", "B"]] * 3,
    ]
    rows = table(
        "theory/05-groups-and-the-bound.md", "| | class | priority | arrives before step | prompt | new tokens |"
    )
    told = [(name, group, *map(int, rest)) for name, group, *rest in rows]
    assert told == [
        (each.request_id, each.group, each.priority, step, each.num_prompt_tokens, each.max_tokens)
        for step, each in served.arrivals
    ]


def test_an_image_among_endless_texts(figures):
    told = []
    for kind in (PriorityScheduler, FairScheduler):
        served = figures.run_texts(kind)
        first = served.tally.first_token["image"]
        texts = {each for ids in served.tally.order[:first] for each in ids}
        told.append((kind.__name__, first, len(texts), served))
    assert not missing_on(
        "theory/05-groups-and-the-bound.md",
        f"| `{told[0][0]}` | {told[0][1]} | all {told[0][2]} |",
        f"| `{told[1][0]}` | {told[1][1]} | {told[1][2]} |",
        f"took {told[1][3].tally.num_steps} steps; without the bound {told[0][3].tally.num_steps}",
    )
    fair_run = told[1][3]
    assert fair_run.tally.batch_sizes[80:86] == [4, 3, 2, 1, 1, 1]
    assert [ids for ids in fair_run.tally.order if "image" in ids] == [["image"]] * 5


def test_lowly_requests_among_endless_urgent_ones(figures):
    served, counts = figures.run_endless(FairScheduler)
    assert [served.tally.first_token[f"lowly {number}"] for number in range(3)] == [320, 645, 970]
    assert max(counts) == fair.STARVATION_BOUND
    falls = [step for step, (now, later) in enumerate(pairwise([*counts, 0]), start=1) if later < now]
    assert falls[:3] == [320, 645, 970]
    served, counts = figures.run_endless(PriorityScheduler)
    assert "lowly 0" not in served.tally.first_token
    assert len(served.tally.finished) == 300
    assert counts[-1] > 200


def test_the_worked_examples_of_the_lab():
    """What the lab's page shows at the prompt is what comes out."""
    text = (PAGES / "lab/01-a-fair-scheduler.md").read_text(encoding="utf-8")
    examples = "\n\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
    names = {"Request": Request, "RequestQueue": RequestQueue}
    names |= {name: getattr(fair, name) for name in dir(fair) if name.endswith("Scheduler")}
    case = doctest.DocTestParser().get_doctest(examples, names, "lab", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(case)
    assert runner.summarize() == (0, len(case.examples))
    assert len(case.examples) > 10


def test_the_promise_is_tested_as_the_page_says():
    """Pools down to one block, runs of 40 moves, a bound of 2."""
    source = (ROOT / "tests/scheduler/test_promise_state_machine.py").read_text(encoding="utf-8")
    for stated in ("num_blocks=st.integers(1, ", "stateful_step_count=40", "bound = 2"):
        assert stated in source
