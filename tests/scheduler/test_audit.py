"""An auditor where ids and schedulers change hands, and what can be seen of a broken run in its trace.

Phase 6's tests have a broken scheduler for each of the auditor's rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler import PagedScheduler, Scheduler, create_scheduler
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.trace import TraceEvent, TraceStep


def requests_of(*sizes: tuple[int, int]) -> list[Request]:
    return [Request(n, [1] * num_prompt, max_tokens) for n, (num_prompt, max_tokens) in enumerate(sizes)]


def audited(cls: type[Scheduler], **options: Any) -> Scheduler:
    return observe(cls(**{"num_blocks": 4, "block_size": 4} | options), Auditor())


FOUR = [(4, 9)] * 4


def test_an_id_may_be_used_again_while_a_step_runs() -> None:
    scheduler = audited(PagedScheduler)
    scheduler.add_request(Request("r", [1, 1], 5))
    output = scheduler.schedule()
    scheduler.abort_request("r")
    scheduler.add_request(Request("r", [1, 1, 1], 2))
    assert scheduler.update_from_output(output, {}) == []
    assert drive(scheduler, max_steps=10).finished == {"r": 1}


def test_one_auditor_after_the_other_scheduler() -> None:
    auditor = Auditor()
    for _ in range(2):
        scheduler = observe(PagedScheduler(num_blocks=4, block_size=4), auditor)
        tally = drive(scheduler, requests_of((4, 3)), max_steps=20)
        assert auditor.step == tally.num_steps - 1 == 2


# Traces


def recorded(**options: Any) -> list[TraceStep]:
    """Four requests in four blocks: steps with preemptions, swaps, resumptions, ends."""
    steps: list[TraceStep] = []
    limits = {"num_blocks": 4, "block_size": 4, "preemption": "swap", "num_host_blocks": 1}
    scheduler = observe(create_scheduler("paged", **limits | options), Recorder(steps.append))
    drive(scheduler, requests_of(*FOUR), max_steps=200)
    return steps


def test_a_right_trace() -> None:
    steps = recorded()
    assert audit_trace(steps, max_num_seqs=4, max_num_batched_tokens=16, first_come=True) == len(steps)
    assert audit_trace([]) == 0


def test_a_request_that_has_outgrown_the_step() -> None:
    steps = recorded(max_num_batched_tokens=5, num_host_blocks=1, preemption="recompute")
    assert max(step.num_tokens for step in steps) > 5
    assert audit_trace(steps, max_num_batched_tokens=5) == len(steps)
    with pytest.raises(InvariantError, match=r"limits: .* tokens, at most 4"):
        audit_trace(steps, max_num_batched_tokens=4)


def without(kind: str) -> Callable[[TraceStep], TraceStep]:
    return lambda step: replace(step, events=tuple(event for event in step.events if event.kind != kind))


def entries(**changes: int) -> Callable[[TraceStep], TraceStep]:
    """The first entry's numbers, each changed by so much."""

    def change(step: TraceStep) -> TraceStep:
        first, *others = step.batch
        numbers = {name: getattr(first, name) + by for name, by in changes.items()}
        return replace(step, batch=(replace(first, **numbers), *others))

    return change


def with_event(kind: Any, request_id: int) -> Callable[[TraceStep], TraceStep]:
    return lambda step: replace(step, events=(*step.events, TraceEvent(kind, request_id)))


@pytest.mark.parametrize(
    ("number", "change", "says"),
    [
        (3, lambda step: replace(step, step=4), "step 3, steps"),
        (3, lambda step: replace(step, time=1.0), "step 3, steps"),
        (3, lambda step: replace(step, num_free_blocks=step.num_free_blocks + 1), "step 3, steps: .* blocks"),
        (0, without("arrive"), "step 0, events: admit of request 0, which is not here"),
        (0, without("admit"), "step 0, batch: request 0 is in it"),
        (1, without("preempt"), "step 1, events: swap_out"),
        (1, without("swap_out"), "step 1, counts: num_swapped"),
        (1, with_event("admit", 3), "step 1, events: admit of request 3, which is 'swapped'"),
        (1, with_event("resume", 3), "step 1, events: a request is admitted in a step that preempts"),
        (1, with_event("finish", 9), "step 1, events: finish of request 9, which is not here"),
        (2, with_event("arrive", 0), "step 2, events: arrive of request 0, which is 'in'"),
        (2, entries(num_computed_tokens=1), "step 2, tokens: request 0"),
        (2, entries(num_output_tokens=1), "step 2, tokens: request 0"),
        (2, entries(num_prompt_tokens=1), "step 2, tokens: request 0"),
        (2, entries(num_new_tokens=1), "step 2, tokens: request 0 computes 2"),
        (2, entries(num_new_tokens=-1), "step 2, tokens: request 0 computes 0"),
        (2, lambda step: replace(step, batch=step.batch[:1]), r"step 2, batch: requests \[1\]"),
        (2, lambda step: replace(step, batch=step.batch * 2), "step 2, batch: a request is in it twice"),
        (2, lambda step: replace(step, num_running=3), "step 2, counts: num_running is 3"),
        (2, lambda step: replace(step, num_waiting=1), "step 2, counts: num_waiting is 1"),
        (2, lambda step: replace(step, num_swapped=0), "step 2, counts: num_swapped is 0"),
    ],
)
def test_a_trace_that_cannot_be(number: int, change: Callable[[TraceStep], TraceStep], says: str) -> None:
    steps = recorded()
    steps[number] = change(steps[number])
    with pytest.raises(InvariantError, match=says):
        audit_trace(steps)


def of_failed_steps() -> list[TraceStep]:
    """Steps 2, 5 and 6 fail: while requests are swapped out, when none is, and at once again."""
    steps: list[TraceStep] = []
    recorder = Recorder(steps.append)
    options: dict[str, Any] = {"num_blocks": 4, "block_size": 4, "preemption": "swap", "num_host_blocks": 4}
    scheduler = observe(create_scheduler("paged", **options), recorder)
    for request in requests_of(*FOUR):
        scheduler.add_request(request)
    for number in range(60):
        output = scheduler.schedule()
        if number == 2:
            scheduler.recover()
        elif number not in (5, 6):
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    assert not scheduler.has_unfinished
    return steps


def test_steps_that_failed() -> None:
    steps = of_failed_steps()
    assert audit_trace(steps, max_num_seqs=4, max_num_batched_tokens=16, first_come=True) == len(steps)
    lost = [
        (step.step, event.request_id) for step in steps for event in step.events if event.reason == "the step failed"
    ]
    assert lost == [(2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1)]
    assert [event.kind for event in steps[2].events] == [*4 * ["preempt"], "resume", "resume"]
    assert {entry.num_computed_tokens for entry in steps[2].batch} == {0}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda event: None, "step 2, events: resume of request 0, which is 'in'"),
        (lambda event: replace(event, reason=None), "step 2, events: preempt of request 2, which is 'swapped'"),
        (lambda event: None if event.request_id == 3 else event, "step 2, counts: num_swapped is 0"),
    ],
    ids=["it did not fail", "for lack of memory", "not for one that was swapped out"],
)
def test_a_failed_step_that_is_not_told(change: Callable[[TraceEvent], TraceEvent | None], says: str) -> None:
    steps = of_failed_steps()
    events = [change(event) if event.reason == "the step failed" else event for event in steps[2].events]
    steps[2] = replace(steps[2], events=tuple(event for event in events if event is not None))
    with pytest.raises(InvariantError, match=says):
        audit_trace(steps)


def test_a_way_back_that_is_not_told() -> None:
    steps = recorded()
    number = next(step.step for step in steps if any(event.kind == "swap_in" for event in step.events))
    steps[number] = without("swap_in")(steps[number])
    with pytest.raises(InvariantError, match=f"step {number}, events: request 3 was swapped out, and resumes"):
        audit_trace(steps)


def test_limits_of_a_trace() -> None:
    steps = recorded()
    with pytest.raises(InvariantError, match="step 0, limits: 4 requests"):
        audit_trace(steps, max_num_seqs=3)
    with pytest.raises(InvariantError, match="step 0, limits: 16 tokens"):
        audit_trace(steps, max_num_batched_tokens=15)
    first = steps[0]
    still = replace(first, batch=(), num_running=0, num_waiting=4, events=first.events[:4])
    with pytest.raises(InvariantError, match="step 0, limits: no progress"):
        audit_trace([still])


def test_who_came_first() -> None:
    steps: list[TraceStep] = []
    scheduler = observe(create_scheduler("fair", num_blocks=9, max_num_seqs=1), Recorder(steps.append))
    drive(scheduler, [Request("low", [1], 2, priority=1), Request("high", [1], 2)], max_steps=20)
    assert audit_trace(steps) == 4
    with pytest.raises(InvariantError, match="step 0, limits: request 'high' is in the batch, and 'low' waits"):
        audit_trace(steps, first_come=True)
