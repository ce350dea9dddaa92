"""Driving a scheduler without a model: the tallies of runs that were counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from minicache.errors import RequestTooLargeError
from minicache.request import Request
from minicache.scheduler import SCHEDULERS, ContinuousBatchScheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.drive import Tally, drive


def request_of(request_id: Any, num_prompt_tokens: int = 5, max_tokens: int = 4, **more: Any) -> Request:
    return Request(request_id, [1] * num_prompt_tokens, max_tokens, **more)


def test_nothing_to_serve() -> None:
    tally = drive(create_scheduler("paged", num_blocks=4))
    assert tally == Tally()
    assert tally.mean_batch_size == 0


def test_a_static_run() -> None:
    """2 batch slots: a and b run until b has its 3 tokens, then c has its one."""
    scheduler = create_scheduler("static", num_blocks=10, max_num_seqs=2)
    tally = drive(scheduler, [request_of("a", 4, 1), request_of("b", 5, 3), request_of("c", 6, 1)])
    assert tally == Tally(
        num_steps=4,
        num_prefill_tokens=15,
        batch_sizes=[2, 1, 1, 1],
        first_token={"a": 0, "b": 0, "c": 3},
        finished={"a": 0, "b": 2, "c": 3},
        order=[["a", "b"], ["b"], ["b"], ["c"]],
    )
    assert tally.mean_batch_size == 5 / 4


def test_a_continuous_run() -> None:
    """The same requests: c has a's batch slot in step 1."""
    scheduler = create_scheduler("continuous", num_blocks=10, max_num_seqs=2)
    tally = drive(scheduler, [request_of("a", 4, 1), request_of("b", 5, 3), request_of("c", 6, 1)])
    assert tally == Tally(
        num_steps=3,
        num_prefill_tokens=15,
        batch_sizes=[2, 2, 1],
        first_token={"a": 0, "b": 0, "c": 1},
        finished={"a": 0, "c": 1, "b": 2},
        order=[["a", "b"], ["b", "c"], ["b"]],
    )
    assert list(tally.finished) == ["a", "c", "b"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("stage", ["paged", "fair"])
def test_what_a_preemption_costs(stage: str, preemption: Any) -> None:
    """10 blocks, two prompts of 80, 20 new tokens each: 81 more, 80 of them computed before; or 5 blocks both ways."""
    scheduler = create_scheduler(stage, num_blocks=10, preemption=preemption, num_host_blocks=5)
    tally = drive(scheduler, [request_of(0, 80, 20), request_of(1, 80, 20)])
    swaps = preemption == "swap"
    assert tally.num_steps == 20 + 19
    assert tally.num_preemptions == 1
    assert tally.num_prefill_tokens == (160 if swaps else 160 + 81)
    assert tally.num_recomputed_tokens == (0 if swaps else 80)
    assert tally.num_swapped_blocks == (10 if swaps else 0)
    assert tally.batch_sizes == [2] + 38 * [1]
    assert tally.finished == {0: 19, 1: 38}
    assert tally.first_token == {0: 0, 1: 0}


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_two_lengths_run_together(stage: str) -> None:
    """Prompts of 120 and 50, 100 new tokens each, memory for both: 100 steps, 170 prefill tokens, no preemption."""
    tally = drive(create_scheduler(stage, num_blocks=100), [request_of(0, 120, 100), request_of(1, 50, 100)])
    assert (tally.num_steps, tally.num_prefill_tokens, tally.num_preemptions) == (100, 170, 0)
    assert tally.mean_batch_size == 2


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_arrivals(stage: str) -> None:
    """Anyone who comes before step k is in it; steps in which no one is there count no work, and time goes on."""
    arrivals = [
        (7, request_of("c", max_tokens=1)),
        (2, request_of("a", max_tokens=2)),
        (2, request_of("b", max_tokens=1)),
    ]
    tally = drive(create_scheduler(stage, num_blocks=10), arrivals=arrivals)
    assert tally.finished == {"b": 2, "a": 3, "c": 7}
    assert tally.order == [["a", "b"], ["a"], ["c"]]
    assert tally.num_steps == 3


def test_tokens_are_made_up() -> None:
    request = request_of("a", max_tokens=4, stop_token_ids=[2])
    drive(create_scheduler("paged", num_blocks=4), [request], token=lambda request: len(request.output_token_ids))
    assert (request.output_token_ids, request.finish_reason) == ([0, 1, 2], "stop")


def test_capacity() -> None:
    """2 blocks of 16, a prompt of 30: steps of 30, 1 and 1 tokens, and one that only ends it."""
    tally = drive(create_scheduler("paged", num_blocks=2), [request_of("a", 30, 50)])
    assert (tally.num_steps, tally.batch_sizes, tally.finished) == (4, [1, 1, 1, 0], {"a": 3})


def test_who_is_refused_is_the_callers_to_handle() -> None:
    with pytest.raises(RequestTooLargeError):
        drive(create_scheduler("paged", num_blocks=2), [request_of("a", 100)])


def test_a_scheduler_that_never_ends() -> None:
    """A broken one is stopped: its steps did nothing, and no one has finished."""

    class Idle(ContinuousBatchScheduler):
        def schedule_waiting(self, output: SchedulerOutput) -> None:
            pass

    tally = drive(Idle(num_blocks=4), [request_of("a")], max_steps=30)
    assert (tally.num_steps, tally.batch_sizes, tally.finished) == (0, [0] * 30, {})
