"""What a server did, step by step, in one format: every scheduler's trace, every picture's and auditor's source.

A trace is a sequence of `TraceStep`s; on disk it is JSON lines, one step a line. `minicache.scheduler.observe` records
traces. `to_chrome_trace` turns one into what chrome://tracing and https://ui.perfetto.dev show. Pure standard library.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from minicache.request import RequestId

EventKind = Literal["arrive", "refuse", "admit", "resume", "preempt", "swap_out", "swap_in", "finish"]
"""`admit` is the first time in the batch, `resume` any later one. There is a `preempt` for every request that loses its
batch slot, followed by a `swap_out` if its blocks move to CPU swap space; likewise `swap_in` after `resume`. For a step
that failed there is a `preempt` with a reason for every request of the batch and every one that is swapped out."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that happened to a request at a step.

    Attributes:
        kind: what.
        request_id: to whom.
        reason: of `finish` its finish_reason, of `refuse` the message, of `preempt` "the step failed" if it has; else
            None.
    """

    kind: EventKind
    request_id: RequestId
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request's share of a step.

    Attributes:
        request_id: whose.
        num_computed_tokens: tokens that were computed before the step.
        num_new_tokens: tokens that the step computed, ≥ 1, draft tokens included.
        num_prompt_tokens: tokens of its prompt.
        num_output_tokens: tokens that had been generated before the step. The step is a prefill of the request if it
            computes any but the newest of its tokens.
        num_draft_tokens: draft tokens among those that it computed.
        num_accepted_tokens: of these, the accepted ones: they stay computed, and are output.
    """

    request_id: RequestId
    num_computed_tokens: int
    num_new_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the step computed more of the request than its newest generated token and draft tokens."""
        return self.num_output_tokens == 0 or self.num_new_tokens - self.num_draft_tokens > 1


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of a server.

    Attributes:
        step: 0, 1, 2, …
        time: when it began, in seconds on the recorder's clock.
        seconds: how long it took.
        batch: what was computed, in batch order; empty if the step only ended requests.
        num_running: requests in the batch, once scheduled.
        num_waiting: requests in the line, once scheduled, those swapped out included.
        num_swapped: those of them that are swapped out.
        num_used_blocks: blocks with a reference, once scheduled.
        num_free_blocks: blocks without.
        events: what happened since the step before, in order: first arrivals, then the schedule, then who finished.
    """

    step: int
    time: float
    seconds: float
    batch: tuple[TraceEntry, ...]
    num_running: int
    num_waiting: int
    num_swapped: int
    num_used_blocks: int
    num_free_blocks: int
    events: tuple[TraceEvent, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(entry.num_new_tokens for entry in self.batch)


def to_json(step: TraceStep) -> str:
    """A step as one line of JSON, without the line's end. Ids come back as they were if they are strings or ints.

    Raises:
        TypeError: JSON has nothing for an id.
        ValueError: a time is not finite.
    """
    content = _fields(step) | {"num_tokens": step.num_tokens}
    return json.dumps(content, ensure_ascii=False, allow_nan=False, default=_fields)


def from_json(line: str) -> TraceStep:
    """The step that `to_json` made `line` of.

    Raises:
        ValueError: `line` is not one; the message says what is wrong with it.
    """
    try:
        given: dict[str, Any] = json.loads(line)
        num_tokens = given.pop("num_tokens")
        given["batch"] = tuple(TraceEntry(**entry) for entry in given["batch"])
        given["events"] = tuple(TraceEvent(**event) for event in given["events"])
        step = TraceStep(**given)
        for part in (step, *step.batch, *step.events):
            _check_types(part)
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a step of a trace ({type(error).__name__}: {error}): {line[:80]!r}") from error
    if unknown := {event.kind for event in step.events} - set(get_args(EventKind)):
        raise ValueError(f"unknown events {sorted(unknown)} in step {step.step}")
    if num_tokens != step.num_tokens:
        raise ValueError(f"step {step.step} says {num_tokens} tokens, and its batch has {step.num_tokens}")
    return step


def write_trace(file: Path, steps: Iterable[TraceStep]) -> None:
    """Write a trace as JSON lines, step by step as they come.

    Args:
        file: a `pathlib.Path`; what it held is replaced.
        steps: if they raise, those before are in `file`.
    """
    with file.open("w", encoding="utf-8") as lines:
        for step in steps:
            lines.write(to_json(step) + "\n")


def read_trace(file: Path) -> Iterator[TraceStep]:
    """The steps of a trace on disk, read as they are asked for.

    Args:
        file: a `pathlib.Path`, of `write_trace`.

    Raises:
        ValueError: a line is not a step; the message has its number.
    """
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(line)
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from error


def to_chrome_trace(steps: Iterable[TraceStep]) -> dict[str, Any]:
    """A trace in Chrome's Trace Event Format, to be saved with `json.dump` and opened in a trace viewer.

    One track a request, in the order of arrival, with a slice for each step in which it computed something ("prefill"
    or "decode") and an instant for each event; and counters of the batch, the line and the blocks. Times are in
    microseconds, rounded to the nanosecond: so steps that follow each other do not overlap by a float's last digit.
    """
    tracks: dict[RequestId, int] = {}
    events: list[dict[str, Any]] = []
    for step in steps:
        start, end = round(step.time * 1e6, 3), round((step.time + step.seconds) * 1e6, 3)
        for event in step.events:
            track = tracks.setdefault(event.request_id, len(tracks) + 1)
            when = end if event.kind == "finish" else start
            events.append({"name": event.kind, "ph": "i", "s": "t", "pid": 1, "tid": track, "ts": when} | _args(event))
        for entry in step.batch:
            track = tracks.setdefault(entry.request_id, len(tracks) + 1)
            name = "prefill" if entry.is_prefill else "decode"
            slice_ = {"name": name, "ph": "X", "pid": 1, "tid": track, "ts": start, "dur": round(end - start, 3)}
            events.append(slice_ | {"args": _fields(entry)})
        counters = {
            "requests": {"running": step.num_running, "waiting": step.num_waiting, "swapped": step.num_swapped},
            "blocks": {"used": step.num_used_blocks, "free": step.num_free_blocks},
        }
        events += [{"name": name, "ph": "C", "pid": 1, "ts": start, "args": args} for name, args in counters.items()]
    names = [
        {"name": key, "ph": "M", "pid": 1, "tid": track, "args": value}
        for request_id, track in tracks.items()
        for key, value in (
            ("thread_name", {"name": f"request {request_id}"}),
            ("thread_sort_index", {"sort_index": track}),  # viewers sort by name: request 10 before request 2
        )
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _args(event: TraceEvent) -> dict[str, Any]:
    return {} if event.reason is None else {"args": {"reason": event.reason}}


def _fields(part: Any) -> dict[str, Any]:
    """The fields of a step, an entry or an event, by name. (`dataclasses.asdict` would copy every number of them.)"""
    if not is_dataclass(part):
        raise TypeError(f"a trace has no place for {part!r}: ids are strings or ints")
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _check_types(part: object) -> None:
    """Raise TypeError unless each field of a step, an entry or an event has a value of a type that it can have."""
    for name, value in _fields(part).items():
        if name.startswith("num_") or name == "step":
            good = type(value) is int
        elif name in ("time", "seconds"):
            good = type(value) in (int, float)
        elif name in ("kind", "reason"):
            good = isinstance(value, str) or (value is None and name == "reason")
        else:
            good = isinstance(value, Hashable)
        if not good:
            raise TypeError(f"{name} cannot be {value!r}")
