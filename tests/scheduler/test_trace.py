"""Traces: what is written is read back, what is no trace is refused by line, and what a trace viewer is given."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minicache.request import Request
from minicache.scheduler import create_scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.trace import (
    TraceEntry,
    TraceEvent,
    TraceStep,
    from_json,
    read_trace,
    to_chrome_trace,
    to_json,
    write_trace,
)

STEP = TraceStep(
    step=3,
    time=1.25,
    seconds=0.5,
    batch=(TraceEntry("größe", 0, 12, 12, 0), TraceEntry(7, 20, 1, 18, 3)),
    num_running=2,
    num_waiting=4,
    num_swapped=1,
    num_used_blocks=5,
    num_free_blocks=3,
    events=(
        TraceEvent("arrive", "größe"),
        TraceEvent("refuse", 9, "too large\nby 2 lines"),
        TraceEvent("admit", "größe"),
        TraceEvent("finish", 7, "stop"),
    ),
)


def recorded(stage: str = "paged", clock: Any = None, **options: Any) -> list[TraceStep]:
    """The trace of a run in which six requests come, join late, are preempted and end."""
    steps: list[TraceStep] = []
    scheduler = create_scheduler(stage, **{"num_blocks": 12, "block_size": 4, "max_num_seqs": 3} | options)
    requests = [(number, Request(number, [1] * (9 + number), 6 + 3 * (number % 2))) for number in range(6)]
    tally = drive(observe(scheduler, Recorder(steps.append, clock)), arrivals=requests)
    assert len(tally.finished) == 6
    return steps


# JSON lines


def test_a_step_is_one_line() -> None:
    line = to_json(STEP)
    assert "\n" not in line
    assert from_json(line) == STEP
    assert json.loads(line)["num_tokens"] == STEP.num_tokens == 13


def test_a_step_that_computed_nothing() -> None:
    empty = replace(STEP, batch=(), events=())
    assert from_json(to_json(empty)) == empty
    assert empty.num_tokens == 0


def test_the_fields_have_the_names_of_the_format() -> None:
    fields = json.loads(to_json(STEP))
    assert fields.pop("batch")[1] == {
        "request_id": 7,
        "num_computed_tokens": 20,
        "num_new_tokens": 1,
        "num_prompt_tokens": 18,
        "num_output_tokens": 3,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
    }
    assert fields.pop("events")[3] == {"kind": "finish", "request_id": 7, "reason": "stop"}
    assert fields == {
        "step": 3,
        "time": 1.25,
        "seconds": 0.5,
        "num_running": 2,
        "num_waiting": 4,
        "num_swapped": 1,
        "num_used_blocks": 5,
        "num_free_blocks": 3,
        "num_tokens": 13,
    }


def test_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="strings or ints"):
        to_json(replace(STEP, events=(TraceEvent("arrive", b"bytes"),)))
    for time in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            to_json(replace(STEP, time=time))


def test_a_run_goes_to_disk_and_back(tmp_path: Path) -> None:
    steps = recorded()
    file = tmp_path / "trace.jsonl"
    write_trace(file, iter(steps))
    assert file.read_text(encoding="utf-8").count("\n") == len(steps)
    assert list(read_trace(file)) == steps
    write_trace(file, [])
    assert list(read_trace(file)) == []


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(to_json(STEP)) | fields)


def without(name: str) -> str:
    return json.dumps({key: value for key, value in json.loads(to_json(STEP)).items() if key != name})


ENTRY = {
    "request_id": 7,
    "num_computed_tokens": 0,
    "num_new_tokens": 13,
    "num_prompt_tokens": 13,
    "num_output_tokens": 0,
}
BAD_LINES = [
    pytest.param("", "not a step", id="empty"),
    pytest.param("{", "not a step", id="cut off"),
    pytest.param("[]", "not a step", id="a list"),
    pytest.param("3", "not a step", id="a number"),
    pytest.param("{}", "num_tokens", id="no fields"),
    pytest.param(without("num_waiting"), "num_waiting", id="a field is missing"),
    pytest.param(without("num_tokens"), "num_tokens", id="the sum is missing"),
    pytest.param(changed(colour="red"), "colour", id="a field too many"),
    pytest.param(changed(num_tokens=12), "says 12 tokens.*has 13", id="the sum is wrong"),
    pytest.param(changed(step="3"), "step cannot be '3'", id="a step that is text"),
    pytest.param(changed(step=True), "step cannot be True", id="a step that is true"),
    pytest.param(changed(time=None), "time cannot be None", id="no time"),
    pytest.param(changed(num_running=1.5), "num_running cannot be 1.5", id="one and a half requests"),
    pytest.param(changed(batch=3), "not a step", id="a batch that is a number"),
    pytest.param(changed(batch=[{"request_id": 7}]), "num_computed_tokens", id="half an entry"),
    pytest.param(changed(batch=[ENTRY | {"num_new_tokens": "13"}]), "num_new_tokens", id="a count that is text"),
    pytest.param(changed(batch=[ENTRY | {"request_id": [7]}]), "request_id", id="an id that is a list"),
    pytest.param(changed(events=[{"kind": "vanish", "request_id": 7}]), "vanish", id="an event that there is not"),
    pytest.param(changed(events=[{"kind": ["admit"], "request_id": 7}]), "kind", id="two kinds"),
    pytest.param(changed(events=[{"kind": "admit"}]), "request_id", id="an event without a request"),
    pytest.param(changed(events=[{"kind": "finish", "request_id": 7, "reason": 3}]), "reason", id="no words"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_line_that_is_no_step(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(line)
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{to_json(STEP)}\n{to_json(STEP)}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"(?s)trace.jsonl, line 3: .*{message}"):
        list(read_trace(file))


def test_a_trace_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{to_json(STEP)}\nnot a step\n", encoding="utf-8")
    steps = read_trace(file)
    assert next(steps) == STEP
    with pytest.raises(ValueError, match="line 2"):
        next(steps)


def test_prefill_or_decode() -> None:
    """A step is a prefill of a request if it computes any but the newest of its tokens."""
    assert TraceEntry(0, 0, 12, 12, 0).is_prefill
    assert TraceEntry(0, 0, 1, 1, 0).is_prefill  # a prompt of one token
    assert TraceEntry(0, 8, 4, 12, 0).is_prefill  # the last part of a prompt
    assert TraceEntry(0, 0, 15, 12, 3).is_prefill  # computed again after a preemption
    assert not TraceEntry(0, 12, 1, 12, 1).is_prefill
    assert not TraceEntry(0, 30, 1, 12, 19).is_prefill


# Chrome's trace event format


def of_phase(chrome: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in chrome["traceEvents"] if event["ph"] == phase]


def test_a_step_in_a_trace_viewer() -> None:
    chrome = to_chrome_trace([STEP])
    tracks = {event["args"]["name"]: event["tid"] for event in of_phase(chrome, "M") if event["name"] == "thread_name"}
    assert list(tracks) == ["request größe", "request 9", "request 7"]
    slices = of_phase(chrome, "X")
    assert [(each["name"], each["tid"], each["ts"], each["dur"]) for each in slices] == [
        ("prefill", tracks["request größe"], 1_250_000, 500_000),
        ("decode", tracks["request 7"], 1_250_000, 500_000),
    ]
    assert slices[0]["args"]["num_new_tokens"] == 12
    assert [(each["name"], each["tid"], each["ts"], each.get("args")) for each in of_phase(chrome, "i")] == [
        ("arrive", tracks["request größe"], 1_250_000, None),
        ("refuse", tracks["request 9"], 1_250_000, {"reason": "too large\nby 2 lines"}),
        ("admit", tracks["request größe"], 1_250_000, None),
        ("finish", tracks["request 7"], 1_750_000, {"reason": "stop"}),
    ]
    assert {each["name"]: each["args"] for each in of_phase(chrome, "C")} == {
        "requests": {"running": 2, "waiting": 4, "swapped": 1},
        "blocks": {"used": 5, "free": 3},
    }


def a_clock() -> Any:
    """A tenth of a second later each time that it is asked."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.1
        return now

    return clock


def test_a_run_in_a_trace_viewer() -> None:
    steps = recorded(clock=a_clock())
    chrome = json.loads(json.dumps(to_chrome_trace(steps), allow_nan=False), parse_float=Decimal)
    names = {event["tid"]: event["args"]["name"] for event in of_phase(chrome, "M") if event["name"] == "thread_name"}
    order = {
        event["tid"]: event["args"]["sort_index"] for event in of_phase(chrome, "M") if "sort_index" in event["args"]
    }
    assert sorted(names.values()) == [f"request {number}" for number in range(6)]  # one track a request
    assert [names[track] for track in sorted(order, key=order.__getitem__)] == [f"request {each}" for each in range(6)]
    slices = of_phase(chrome, "X")
    assert len(slices) == sum(len(step.batch) for step in steps)
    for track in names:
        mine = [each for each in slices if each["tid"] == track]
        assert mine
        for earlier, later in pairwise(mine):
            assert earlier["ts"] + earlier["dur"] <= later["ts"]
    assert len(of_phase(chrome, "i")) == sum(len(step.events) for step in steps)
    assert len(of_phase(chrome, "C")) == 2 * len(steps)
    assert {event["pid"] for event in chrome["traceEvents"]} == {1}


def test_steps_that_follow_at_once_do_not_overlap() -> None:
    """Simulated steps begin when the one before ends, up to a float's last digit: in the file, to the digit."""
    steps, time = [], 0.0
    for number in range(200):
        steps.append(replace(STEP, step=number, time=time, seconds=0.1))
        time += 0.1
    chrome = json.loads(json.dumps(to_chrome_trace(steps)), parse_float=Decimal)
    slices = [each for each in of_phase(chrome, "X") if each["name"] == "decode"]
    assert len(slices) == 200
    assert all(earlier["ts"] + earlier["dur"] == later["ts"] for earlier, later in pairwise(slices))


def test_an_empty_trace_in_a_trace_viewer() -> None:
    assert to_chrome_trace([])["traceEvents"] == []
