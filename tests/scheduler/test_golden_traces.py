"""The schedules of vLLM 0.33's own scheduler, step for step: `golden/README.md` says what they are."""

from __future__ import annotations

import gzip
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from minicache.memory.groups import NULL_BLOCK
from minicache.request import Request
from minicache.scheduler import SchedulerOutput, create_scheduler
from minicache.scheduler.audit_grouped import GroupedAuditor
from minicache.scheduler.observe import observe

GOLDEN = Path(__file__).parent / "golden"
OPTIONS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")


TOKEN, STOP = 7, 3


def cases(*names: str) -> list[Any]:
    """Each workload of these files in each of the two modes."""
    return [
        pytest.param(workload, mode, id=f"{name}-{workload['seed']}-{workload['prefix_caching']}-{mode}")
        for name in names
        for workload in json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))
        for mode in workload["steps"]
    ]


def prompt(request: int, prefix: int, length: int) -> list[int]:
    return [p % 500 if p < prefix else (request * 7919 + p * 31 + 1) % 30000 + 500 for p in range(length)]


def schedule_of(workload: dict[str, Any], *, reserve_full_prompt: bool, most: int) -> list[Any]:
    """Of each step the scheduled tokens and the preempted requests; of at most so many steps."""
    scheduler = create_scheduler(
        "chunked", reserve_full_prompt=reserve_full_prompt, **{name: workload[name] for name in OPTIONS}
    )
    coming = sorted((step, number) for number, (_, _, _, step) in enumerate(workload["requests"]))
    steps: list[Any] = []
    while (coming or scheduler.has_unfinished) and len(steps) < most:
        while coming and coming[0][0] <= len(steps):
            arrival, number = coming.pop(0)
            prefix, length, max_tokens, _ = workload["requests"][number]
            scheduler.add_request(
                Request(str(number), prompt(number, prefix, length), max_tokens, arrival_time=arrival + number * 1e-6)
            )
        output = scheduler.schedule()
        steps.append([dict(output.num_scheduled_tokens), output.preempted])
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
        scheduler.check()
    return steps


def overlapping_schedule_of(workload: dict[str, Any], *, reserve_full_prompt: bool, most: int) -> list[Any]:
    """As `schedule_of`, with one step always in flight, and with all columns of the recordings."""
    options = {name: workload[name] for name in (*OPTIONS, "max_model_len")}
    scheduler = create_scheduler("async", reserve_full_prompt=reserve_full_prompt, **options)
    coming = sorted((row[3], number) for number, row in enumerate(workload["requests"]))
    steps: list[Any] = []
    before: SchedulerOutput | None = None
    while (coming or scheduler.has_unfinished) and len(steps) < most:
        while coming and coming[0][0] <= len(steps):
            arrival, number = coming.pop(0)
            prefix, length, max_tokens, _, _ = workload["requests"][number]
            options = {"stop_token_ids": [STOP], "arrival_time": arrival + number * 1e-6}
            scheduler.add_request(Request(str(number), prompt(number, prefix, length), max_tokens, **options))
        output = scheduler.schedule()
        num_free = scheduler.pool.num_free
        finished: list[Request] = []
        if before is not None:
            tokens = {}
            for request in before.scheduled:
                stops_at = workload["requests"][int(request.request_id)][4]
                tokens[request.request_id] = STOP if len(request.output_token_ids) == stops_at else TOKEN
            finished = scheduler.update_from_output(before, tokens)
        before = output
        steps.append(
            [
                dict(output.num_scheduled_tokens),
                sorted(output.preempted),
                [request.request_id for request in finished],
                num_free,
                scheduler.pool.num_free,
            ]
        )
        scheduler.check()
    return steps


def chosen_schedule_of(workload: dict[str, Any], *, reserve_full_prompt: bool, most: int) -> list[Any]:
    """As `schedule_of`, with all columns; by vLLM's priorities, or with a threshold and a watermark."""
    more: dict[str, Any] = {"policy": "priority"}
    if workload["mode"] == "options":
        more = {name: workload[name] for name in ("long_prefill_threshold", "watermark")}
    options = {name: workload[name] for name in (*OPTIONS, "max_model_len")} | more
    scheduler = create_scheduler("chunked", reserve_full_prompt=reserve_full_prompt, **options)
    coming = sorted((row[3], number) for number, row in enumerate(workload["requests"]))
    rows: list[Any] = []
    while (coming or scheduler.has_unfinished) and len(rows) < most:
        while coming and coming[0][0] <= len(rows):
            arrival, number = coming.pop(0)
            prefix, length, max_tokens, _, *priority = workload["requests"][number]
            options = {"priority": priority[0] if priority else 0, "arrival_time": arrival + number * 1e-6}
            scheduler.add_request(Request(str(number), prompt(number, prefix, length), max_tokens, **options))
        output = scheduler.schedule()
        num_free = scheduler.pool.num_free
        finished = scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
        scheduler.check()
        ids = [each.request_id for each in finished]
        preempted = sorted(output.preempted)
        rows.append([dict(output.num_scheduled_tokens), preempted, ids, num_free, scheduler.pool.num_free])
    return rows


@pytest.mark.parametrize(
    ("schedule", "workload", "mode"),
    [
        *(pytest.param(schedule_of, *case.values, id=case.id) for case in cases("first_come", "unusual")),
        *(pytest.param(overlapping_schedule_of, *case.values, id=case.id) for case in cases("async", "async_short")),
        *(pytest.param(chosen_schedule_of, *case.values, id=case.id) for case in cases("priority", "options")),
    ],
)
def test_every_step_is_the_one_that_vllm_schedules(schedule, workload, mode):
    expected = workload["steps"][mode]
    got = schedule(workload, reserve_full_prompt=mode == "full_prompt_must_fit", most=len(expected) + 1)
    for step, (theirs, ours) in enumerate(zip_longest(expected, got)):
        assert ours == theirs, (
            f"step {step} of {len(expected)}\nexpected {theirs}\n     got {ours}\n"
            f"workload { {name: workload[name] for name in OPTIONS} }, {mode}\nrequests {workload['requests']}"
        )


def grouped_schedule_of(workload: dict[str, Any], *, reserve_full_prompt: bool, most: int) -> list[Any]:
    """The rows of `hybrid.json.gz`, of at most so many steps; blocks are numbered from 1, the null block is 0."""
    scheduler = create_scheduler(
        "chunked",
        reserve_full_prompt=reserve_full_prompt,
        windows=(None, workload["sliding_window"]),
        prefix_cache_retention=workload["prefix_cache_retention_interval"],
        **{name: workload[name] for name in (*OPTIONS, "max_model_len")},
    )
    if workload["seed"] % 8 in (1, 7):  # of the others the books are checked, not every rule
        scheduler = observe(scheduler, GroupedAuditor())
    coming = sorted((step, number) for number, (_, _, _, step) in enumerate(workload["requests"]))
    rows: list[Any] = []
    shown: dict[Any, Any] = {}
    while (coming or scheduler.has_unfinished) and len(rows) < most:
        while coming and coming[0][0] <= len(rows):
            arrival, number = coming.pop(0)
            prefix, length, max_tokens, _ = workload["requests"][number]
            request = Request(
                str(number), prompt(number, prefix, length), max_tokens, arrival_time=arrival + number * 1e-6
            )
            scheduler.add_request(request)
        if not scheduler.has_unfinished:
            rows.append([{}, [], [], scheduler.pool.num_free, scheduler.pool.num_free, {}])
            continue
        output = scheduler.schedule()
        row = [dict(output.num_scheduled_tokens), sorted(output.preempted), scheduler.pool.num_free]
        tables = {}
        for request_id in output.preempted:
            shown.pop(request_id, None)
        for request in output.scheduled:
            table = [[block_id - NULL_BLOCK for block_id in group] for group in request.group_block_ids]
            if shown.get(request.request_id) != table:
                shown[request.request_id] = tables[request.request_id] = table
        finished = scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        scheduler.check()
        row.insert(2, [each.request_id for each in finished])
        rows.append([*row, scheduler.pool.num_free, tables])
    return rows


@pytest.mark.parametrize(("workload", "mode"), cases("hybrid"))
def test_every_block_of_every_group_is_the_one_that_vllm_takes(workload, mode):
    expected = workload["steps"][mode]
    got = grouped_schedule_of(workload, reserve_full_prompt=mode == "full_prompt_must_fit", most=len(expected) + 1)
    for step, (theirs, ours) in enumerate(zip_longest(expected, got)):
        assert ours == theirs, (
            f"step {step} of {len(expected)}\nexpected {theirs}\n     got {ours}\n"
            f"workload { {name: value for name, value in workload.items() if name != 'steps'} }, {mode}"
        )


def test_what_learners_get_is_what_was_recorded() -> None:
    """Phase 12's tests have a few of the workloads."""
    few = GOLDEN.parents[1] / "phase-12-production-defaults/recorded_tables.json.gz"
    all_of_them = json.loads(gzip.decompress((GOLDEN / "hybrid.json.gz").read_bytes()))
    for workload in json.loads(gzip.decompress(few.read_bytes())):
        assert workload in all_of_them


def test_what_the_rule_saves() -> None:
    """The table of phase 9's page on admission: vLLM's own schedules of the workloads without a prefix cache."""
    workloads = json.loads(gzip.decompress((GOLDEN / "first_come.json.gz").read_bytes()))
    workloads = [each for each in workloads if not each["prefix_caching"]]
    # The last token of a request is generated and never computed.
    needed = sum(length + max_tokens - 1 for each in workloads for _, length, max_tokens, _ in each["requests"])
    counted = {}
    for mode in ("first_chunk_must_fit", "full_prompt_must_fit"):
        steps = [step for each in workloads for step in each["steps"][mode]]
        computed = sum(sum(tokens.values()) for tokens, _ in steps)
        counted[mode] = sum(len(preempted) for _, preempted in steps), computed - needed, len(steps)
    assert (len(workloads), needed) == (60, 69_422)
    assert counted == {"first_chunk_must_fit": (468, 42_356, 9_816), "full_prompt_must_fit": (38, 3_880, 9_851)}
