"""Watching a scheduler: a watched one does the same, and the recorder's trace is the one worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler import SCHEDULERS, Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.trace import TraceEntry, TraceEvent, TraceStep

TOKEN = 7

each_stage = pytest.mark.parametrize("stage", SCHEDULERS)


def request_of(request_id: Any, num_prompt_tokens: int = 5, max_tokens: int = 4, **more: Any) -> Request:
    return Request(request_id, [TOKEN] * num_prompt_tokens, max_tokens, **more)


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    return output


def watched(stage: str = "paged", **options: Any) -> tuple[Scheduler, list[TraceStep]]:
    """A scheduler, and the trace that is being recorded of it."""
    steps: list[TraceStep] = []
    return observe(create_scheduler(stage, **{"num_blocks": 10} | options), Recorder(steps.append)), steps


def events_of(steps: list[TraceStep]) -> list[list[tuple[Any, ...]]]:
    """(kind, id) or (kind, id, reason) of each step."""
    return [
        [(each.kind, each.request_id) + ((each.reason,) if each.reason else ()) for each in step.events]
        for step in steps
    ]


class Listener(Observer):
    """Writes down each call."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        self.heard.append(("add", request.request_id, scheduler.num_waiting))

    def on_refuse(self, scheduler: Scheduler, request: Request, error: RequestTooLargeError) -> None:
        self.heard.append(("refuse", request.request_id, type(error)))

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        computed = [request.num_computed_tokens for request in output.scheduled]
        self.heard.append(("schedule", dict(output.num_scheduled_tokens), computed))

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        self.heard.append(("update", [request.request_id for request in finished], scheduler.num_running))

    def on_recover(self, scheduler: Scheduler) -> None:
        self.heard.append(("recover", list(scheduler.waiting), scheduler.num_running))

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        self.heard.append(("finish", request.request_id, request.finish_reason))


# What a watched scheduler does


@each_stage
def test_a_watched_scheduler_does_the_same(stage: str) -> None:
    tallies = []
    for observers in ([], [Observer()], [Recorder(lambda _: None), Listener()]):
        rng = random.Random(1)
        arrivals = [(rng.randrange(40), request_of(each, rng.randint(1, 30), rng.randint(1, 30))) for each in range(40)]
        scheduler = observe(create_scheduler(stage, num_blocks=12, max_num_seqs=5), *observers)
        tallies.append(drive(scheduler, arrivals=arrivals))
        scheduler.check()
    assert tallies[0] == tallies[1] == tallies[2]


def test_its_attributes_are_the_schedulers() -> None:
    scheduler = create_scheduler("paged", num_blocks=10, max_num_seqs=3, preemption="swap", num_host_blocks=4)
    seen: Any = observe(scheduler, Observer())
    seen.add_request(request := request_of("a"))
    assert (seen.num_waiting, seen.num_running, seen.has_unfinished) == (1, 0, True)
    assert (seen.pool, seen.waiting, seen.running) == (scheduler.pool, scheduler.waiting, scheduler.running)
    assert (seen.max_num_seqs, seen.max_num_batched_tokens, seen.max_model_len) == (3, 8192, None)
    assert (seen.host_pool, seen.blocks_to_admit(request)) == (scheduler.host_pool, 1)  # type: ignore[attr-defined]
    step(seen)
    assert (seen.num_waiting, seen.num_running, seen.running) == (0, 1, [request])
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = seen.no_such_thing


@each_stage
def test_it_promises_what_the_scheduler_promises(stage: str) -> None:
    scheduler = create_scheduler(stage, num_blocks=10)
    assert observe(observe(scheduler, Observer()), Observer()).first_come is scheduler.first_come


def test_observers_are_added_to_those_there_are() -> None:
    """An observed scheduler that is observed again is the same one, and every observer sees the scheduler itself."""
    scheduler, seen = create_scheduler("paged", num_blocks=10), []

    class Noting(Observer):
        def on_add(self, scheduler: Scheduler, request: Request) -> None:
            seen.append((self, scheduler))

    first, second = Noting(), Noting()
    watched = observe(scheduler, first)
    assert observe(watched, second) is watched
    watched.add_request(request_of("a"))
    assert seen == [(first, scheduler), (second, scheduler)]


def test_what_an_observer_is_told() -> None:
    """After it has happened; the computed tokens of a scheduled step are those before it."""
    listener = Listener()
    scheduler = observe(create_scheduler("continuous", num_blocks=10, max_num_seqs=2), listener)
    for request_id in "abc":
        scheduler.add_request(request_of(request_id, 5, 2))
    with pytest.raises(RequestTooLargeError):
        scheduler.add_request(request_of("large", 500))
    with pytest.raises(ValueError, match="already here"):
        scheduler.add_request(request_of("a"))
    step(scheduler)
    assert scheduler.finish_request("b", RequestStatus.FINISHED_STOPPED)
    assert scheduler.abort_request("c")
    assert not scheduler.abort_request("c")
    step(scheduler)
    assert listener.heard == [
        ("add", "a", 1),
        ("add", "b", 2),
        ("add", "c", 3),
        ("refuse", "large", RequestTooLargeError),
        ("schedule", {"a": 5, "b": 5}, [0, 0]),
        ("update", [], 2),
        ("finish", "b", "stop"),
        ("finish", "c", "abort"),
        ("schedule", {"a": 1}, [5]),
        ("update", ["a"], 0),
    ]


def test_a_refused_report_is_not_told() -> None:
    listener = Listener()
    scheduler = observe(create_scheduler("continuous", num_blocks=10), listener)
    scheduler.add_request(request_of("a"))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="no token"):
        scheduler.update_from_output(output, {})
    assert [heard[0] for heard in listener.heard] == ["add", "schedule"]


def test_all_observers_are_told() -> None:
    first, second = Listener(), Listener()
    scheduler = observe(observe(create_scheduler("continuous", num_blocks=10), first), second)
    drive(scheduler, [request_of("a"), request_of("b")])
    assert first.heard == second.heard != []


# The recorder


def test_a_trace_worked_out_by_hand() -> None:
    """2 batch slots, blocks of 16, continuous: a has 2 tokens to generate, b 3, c 1."""
    scheduler, steps = watched("continuous", num_blocks=10, max_num_seqs=2)
    drive(scheduler, [request_of("a", 15, 2), request_of("b", 5, 3), request_of("c", 20, 1)])
    assert steps == [
        TraceStep(
            step=0,
            time=0.0,
            seconds=1.0,
            batch=(TraceEntry("a", 0, 15, 15, 0), TraceEntry("b", 0, 5, 5, 0)),
            num_running=2,
            num_waiting=1,
            num_swapped=0,
            num_used_blocks=3,  # 17 tokens and 8 tokens
            num_free_blocks=7,
            events=(
                *(TraceEvent("arrive", each) for each in "abc"),
                TraceEvent("admit", "a"),
                TraceEvent("admit", "b"),
            ),
        ),
        TraceStep(
            step=1,
            time=1.0,
            seconds=1.0,
            batch=(TraceEntry("a", 15, 1, 15, 1), TraceEntry("b", 5, 1, 5, 1)),
            num_running=2,
            num_waiting=1,
            num_swapped=0,
            num_used_blocks=3,
            num_free_blocks=7,
            events=(TraceEvent("finish", "a", "length"),),
        ),
        TraceStep(
            step=2,
            time=2.0,
            seconds=1.0,
            batch=(TraceEntry("b", 6, 1, 5, 2), TraceEntry("c", 0, 20, 20, 0)),
            num_running=2,
            num_waiting=0,
            num_swapped=0,
            num_used_blocks=3,  # 8 tokens and 21 tokens
            num_free_blocks=7,
            events=(TraceEvent("admit", "c"), TraceEvent("finish", "b", "length"), TraceEvent("finish", "c", "length")),
        ),
    ]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preemption_in_a_trace(preemption: str) -> None:
    """10 blocks, two prompts of 80 tokens: 1 loses its place in step 1 and comes back in step 20."""
    scheduler, steps = watched(preemption=preemption, num_host_blocks=5)
    drive(scheduler, [request_of(0, 80, 20), request_of(1, 80, 20)])
    swapped = preemption == "swap"
    moved_out = [("swap_out", 1)] if swapped else []
    moved_in = [("swap_in", 1)] if swapped else []
    events = events_of(steps)
    assert events[0] == [("arrive", 0), ("arrive", 1), ("admit", 0), ("admit", 1)]
    assert events[1] == [("preempt", 1), *moved_out]
    assert events[19] == [("finish", 0, "length")]
    assert events[20] == [("resume", 1), *moved_in]
    assert events[38] == [("finish", 1, "length")]
    assert [step for step, happened in enumerate(events) if happened] == [0, 1, 19, 20, 38]
    assert [step.num_waiting for step in steps] == [0] + 19 * [1] + 19 * [0]
    assert [step.num_swapped for step in steps] == [0] + 19 * [swapped] + 19 * [0]
    assert steps[20].batch == (TraceEntry(1, 80, 1, 80, 1) if swapped else TraceEntry(1, 0, 81, 80, 1),)
    assert [entry.is_prefill for entry in steps[20].batch] == [not swapped]
    assert [step.num_used_blocks for step in steps[:3]] == [10, 6, 6]
    assert all(step.num_used_blocks + step.num_free_blocks == 10 for step in steps)


def test_refused_and_aborted_in_a_trace() -> None:
    """What happens between steps is reported with the next, what happens during a step with that one."""
    scheduler, steps = watched(num_blocks=4)
    with pytest.raises(RequestTooLargeError) as refusal:
        scheduler.add_request(request_of("large", 100))
    for request_id in "abc":
        scheduler.add_request(request_of(request_id, 5, 9))
    scheduler.abort_request("b")
    output = scheduler.schedule()
    scheduler.abort_request("c")
    scheduler.update_from_output(output, {"a": TOKEN})
    step(scheduler)
    scheduler.abort_request("a")
    scheduler.add_request(request_of("b"))  # the name is free again, and this one is new
    step(scheduler)
    assert events_of(steps) == [
        [
            ("refuse", "large", str(refusal.value)),
            *(("arrive", each) for each in "abc"),
            ("finish", "b", "abort"),
            ("admit", "a"),
            ("admit", "c"),
            ("finish", "c", "abort"),
        ],
        [],
        [("finish", "a", "abort"), ("arrive", "b"), ("admit", "b")],
    ]


def test_a_step_that_failed_is_not_in_the_trace() -> None:
    """Its admissions neither: the request is admitted with the step that took its place."""
    scheduler, steps = watched()
    scheduler.add_request(request_of("a"))
    scheduler.schedule()
    step(scheduler)
    assert [(each.step, each.num_tokens) for each in steps] == [(0, 5)]
    assert events_of(steps) == [[("arrive", "a"), ("admit", "a")]]


@pytest.mark.parametrize("explicit", [True, False], ids=["recover()", "schedule() again"])
def test_a_recovery_in_a_trace(explicit: bool) -> None:
    """Of 4 blocks a, b and c have filled 3, and d waits for a slot. A step that would preempt c fails, and b leaves.

    Those that were in the batch before it are preempted, in the order of the queue. Nothing else of it is reported.
    """
    scheduler, steps = watched(num_blocks=4, block_size=4, max_num_seqs=3)
    for request_id, num_prompt in zip("abcd", (4, 4, 8, 4), strict=True):
        scheduler.add_request(request_of(request_id, num_prompt))
    step(scheduler)
    output = scheduler.schedule()
    assert output.preempted == ["c"]
    scheduler.abort_request("b")
    if explicit:
        scheduler.recover()
    step(scheduler)
    failed = "the step failed"
    assert events_of(steps) == [
        [*(("arrive", each) for each in "abcd"), *(("admit", each) for each in "abc")],
        [("finish", "b", "abort"), ("preempt", "a", failed), ("preempt", "c", failed), ("resume", "a")],
    ]
    assert steps[1].batch == (TraceEntry("a", 0, 5, 4, 1),)
    assert steps[1].num_swapped == 0


def test_what_a_failed_step_finished_is_told() -> None:
    """a outgrows the pool, b is admitted in the same step, which fails: a has finished, and b was never admitted."""
    scheduler, steps = watched(num_blocks=2, block_size=4)
    for request_id, num_prompt in zip("ab", (8, 4), strict=True):
        scheduler.add_request(request_of(request_id, num_prompt))
    step(scheduler)
    output = scheduler.schedule()
    assert (output.finished, output.num_scheduled_tokens) == (["a"], {"b": 4})
    step(scheduler)
    assert events_of(steps)[1:] == [[("finish", "a", "capacity"), ("admit", "b")]]


def test_a_recorder_that_comes_in_the_middle_of_a_step() -> None:
    plain, steps = create_scheduler("paged", num_blocks=10), list[TraceStep]()
    plain.add_request(request_of("a"))
    output = plain.schedule()
    scheduler = observe(plain, Recorder(steps.append))
    scheduler.update_from_output(output, {"a": TOKEN})
    step(scheduler)
    assert [each.batch for each in steps] == [(TraceEntry("a", 5, 1, 5, 1),)]


def test_a_clock() -> None:
    times = iter([10.0, 10.5, 12.0, 12.25])
    steps: list[TraceStep] = []
    scheduler = observe(create_scheduler("paged", num_blocks=10), Recorder(steps.append, lambda: next(times)))
    drive(scheduler, [request_of("a", max_tokens=2)])
    assert [(each.time, each.seconds) for each in steps] == [(10.0, 0.5), (12.0, 0.25)]
