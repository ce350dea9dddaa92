"""Every stage, as a server meets it: its options, a busy run, and steps that fail or are misused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler import SCHEDULERS, Scheduler, SharingScheduler, create_scheduler
from minicache.scheduler.drive import drive

TOKEN, STOP = 7, 9

each_stage = pytest.mark.parametrize("stage", SCHEDULERS)
each_without_overlap = pytest.mark.parametrize("stage", [name for name in SCHEDULERS if name != "async"])


def request_of(request_id: Any, num_prompt_tokens: int = 5, max_tokens: int = 4, **more: Any) -> Request:
    return Request(request_id, [TOKEN] * num_prompt_tokens, max_tokens, **more)


def step(scheduler: Scheduler) -> dict[Any, int]:
    """One step, a token for everyone: what it ordered."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    return output.num_scheduled_tokens


def state(scheduler: Scheduler, *requests: Request) -> Any:
    """All that can be seen of a scheduler and its requests."""
    requests_seen = {id(each): each for each in (*scheduler.waiting.values(), *scheduler.running, *requests)}
    seen = [{name: repr(getattr(each, name)) for name in Request.__slots__} for each in requests_seen.values()]
    places = list(scheduler.waiting), [each.request_id for each in scheduler.running]
    return places, scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished, scheduler.pool.num_free, seen


# Limits


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_blocks": 0}, ValueError),
        ({"num_blocks": 4.0}, TypeError),
        ({"block_size": 0}, ValueError),
        ({"max_num_seqs": 0}, ValueError),
        ({"max_num_seqs": True}, TypeError),
        ({"max_num_batched_tokens": 0}, ValueError),
        ({"max_num_batched_tokens": None}, TypeError),
        ({"max_model_len": 1}, ValueError),
        ({"max_model_len": "10"}, TypeError),
        ({"preemption": "drop"}, ValueError),
        ({"preemption": None}, ValueError),
        ({"preemption": "swap"}, ValueError),
        ({"num_host_blocks": -1}, ValueError),
        ({"num_host_blocks": "5"}, TypeError),
        ({"num_host_blocks": 2.0}, TypeError),
        ({"num_host_blocks": True}, TypeError),
        ({"watermark": -0.1}, ValueError),
        ({"watermark": 1}, ValueError),
        ({"watermark": float("nan")}, ValueError),
        ({"watermark": "0"}, TypeError),
        ({"watermark": False}, TypeError),
        ({"prefix_caching": None}, TypeError),
        ({"prefix_caching": 1}, TypeError),
        ({"long_prefill_threshold": -1}, ValueError),
        ({"long_prefill_threshold": 0.0}, TypeError),
    ],
    ids=str,
)
@each_stage
def test_options_that_are_refused(stage: str, options: dict[str, Any], error: type[Exception]) -> None:
    """By every stage, those that a stage makes no use of too; the message names the option."""
    with pytest.raises(error, match="host_blocks" if options == {"preemption": "swap"} else min(options)):
        create_scheduler(stage, **{"num_blocks": 8} | options)


def test_no_such_stage() -> None:
    with pytest.raises(ValueError, match="static, continuous, paged, fair, chunked, async"):
        create_scheduler("chunky", num_blocks=8)


# A run


@pytest.mark.parametrize("stage", ["static", "continuous", "paged", "fair", "chunked", "async"])
def test_the_queue_keeps_its_order(stage: str) -> None:
    """Of equal requests, none has its first token before one that arrived earlier."""
    rng = random.Random(3)
    arrivals = [(rng.randrange(60), request_of(number, rng.randint(1, 40), rng.randint(1, 30))) for number in range(80)]
    arrivals.sort(key=lambda arrival: arrival[0])
    scheduler = create_scheduler(stage, num_blocks=12, max_num_seqs=6, max_num_batched_tokens=64)
    tally = drive(scheduler, arrivals=arrivals)
    assert len(tally.finished) == 80
    came = [request.request_id for _, request in arrivals]
    assert [tally.first_token[request_id] for request_id in came] == sorted(tally.first_token.values())


@each_without_overlap
@pytest.mark.parametrize("seed", range(5))
def test_a_busy_server_keeps_its_books(stage: str, seed: int) -> None:
    """Requests arrive, finish, are aborted, and steps fail at random: limits hold, and the books always agree."""
    rng = random.Random(seed)
    scheduler = create_scheduler(stage, num_blocks=14, block_size=4, max_num_seqs=5, max_num_batched_tokens=60)
    unfinished: dict[int, Request] = {}
    for moment in range(300):
        if moment < 200 and rng.random() < 0.5:
            request = request_of(moment, rng.randint(1, 20), rng.randint(1, 20), stop_token_ids=[STOP])
            scheduler.add_request(request)
            unfinished[moment] = request
        output = scheduler.schedule()
        scheduler.check()
        if rng.random() < 0.1:
            output = scheduler.schedule()
        if unfinished and rng.random() < 0.1:
            gone = rng.choice(list(unfinished))
            assert scheduler.abort_request(gone)
            del unfinished[gone]
        tokens = {request.request_id: rng.randint(5, 9) for request in output.scheduled}
        ended = scheduler.update_from_output(output, tokens)
        for request_id in (*output.finished, *(request.request_id for request in ended)):
            del unfinished[request_id]
        scheduler.check()
        assert output.total_num_scheduled_tokens <= 60
        assert scheduler.num_running <= 5
        assert scheduler.num_running + scheduler.num_waiting == len(unfinished)
        assert scheduler.has_unfinished == bool(unfinished)
    for _ in range(2000):
        if not scheduler.has_unfinished:
            break
        step(scheduler)
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_used == 0


# Misuse


@each_without_overlap
def test_schedule_twice(stage: str) -> None:
    """The model failed: the batch waits again, and the second step computes everything anew."""
    scheduler = create_scheduler(stage, num_blocks=8, max_num_seqs=2)
    requests = [request_of(request_id) for request_id in range(3)]
    for request in requests:
        scheduler.add_request(request)
    for num_generated in range(2):
        first = scheduler.schedule()
        second = scheduler.schedule()
        scheduler.check()
        assert second.num_scheduled_tokens == dict.fromkeys((0, 1), requests[0].num_prompt_tokens + num_generated)
        assert [each.num_preemptions for each in requests] == [num_generated + 1] * 2 + [0]
        before = state(scheduler)
        with pytest.raises(ValueError, match="a later schedule"):
            scheduler.update_from_output(first, dict.fromkeys(first.num_scheduled_tokens, TOKEN))
        assert state(scheduler) == before
        assert scheduler.update_from_output(second, dict.fromkeys(second.num_scheduled_tokens, TOKEN)) == []
    assert [len(each.output_token_ids) for each in requests] == [2, 2, 0]


@each_stage
def test_recover(stage: str) -> None:
    """Every request waits, without a block, with nothing computed, and with all that it has generated."""
    scheduler = create_scheduler(stage, num_blocks=8, max_num_seqs=2)
    requests = [request_of(request_id) for request_id in range(3)]
    for request in requests:
        scheduler.add_request(request)
    step(scheduler)
    output = scheduler.schedule()
    scheduler.recover()
    scheduler.check()
    assert (list(scheduler.waiting), scheduler.running, scheduler.pool.num_used) == ([0, 1, 2], [], 0)
    assert {each.status for each in requests} == {RequestStatus.WAITING}
    assert [each.num_computed_tokens for each in requests] == [0, 0, 0]
    assert [each.output_token_ids for each in requests] == [[TOKEN], [TOKEN], []]
    with pytest.raises(ValueError, match="given up"):
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    assert scheduler.schedule().num_scheduled_tokens == {each: requests[each].num_tokens for each in (0, 1)}


def test_a_step_that_only_swapped_out_may_fail_too() -> None:
    """It computes nothing, but its copies may not have been made: a second schedule() trusts none of them."""
    scheduler = SharingScheduler(num_blocks=4, block_size=4, preemption="swap", num_host_blocks=4)
    scheduler.add_request(request_of("parent", 16, 9))
    step(scheduler)
    scheduler.fork_request("parent", "child", [])
    output = scheduler.schedule()  # to preempt the child frees nothing: it shares all its blocks
    assert (output.finished, list(output.swapped_out), output.scheduled) == (["parent"], ["child"], [])
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.swapped_in) == ({"child": 16}, {})
    scheduler.check()


@each_stage
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ({0: TOKEN}, ValueError, "no token for request 1"),
        ({}, ValueError, "no token for request 0"),
        ({0: TOKEN, 1: TOKEN, 2: TOKEN}, ValueError, "did not have: .*2"),
        ({0: TOKEN, 1: 7.0}, TypeError, "must be an int; got float"),
        ({0: True, 1: TOKEN}, TypeError, "must be an int; got bool"),
    ],
)
def test_a_bad_commit_changes_nothing(stage: str, tokens: dict[int, Any], error: type[Exception], message: str) -> None:
    scheduler = create_scheduler(stage, num_blocks=8)
    requests = [request_of(0, max_tokens=1), request_of(1, max_tokens=1)]
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    before = state(scheduler, *requests)
    with pytest.raises(error, match=message):
        scheduler.update_from_output(output, tokens)
    assert state(scheduler, *requests) == before
    assert scheduler.update_from_output(output, {1: TOKEN, 0: TOKEN}) == requests


@each_stage
def test_a_client_leaves_while_the_model_runs(stage: str) -> None:
    """Its blocks are free at once, its token is dropped, and a new request of that id starts anew."""
    scheduler = create_scheduler(stage, num_blocks=8)
    old, other = request_of("a"), request_of("b")
    scheduler.add_request(old)
    scheduler.add_request(other)
    output = scheduler.schedule()
    assert scheduler.abort_request("a")
    assert (old.block_ids, old.finish_reason) == ([], "abort")
    scheduler.check()
    new = request_of("a")
    scheduler.add_request(new)
    assert scheduler.update_from_output(output, {"a": TOKEN, "b": TOKEN}) == []
    assert (old.output_token_ids, new.output_token_ids, other.output_token_ids) == ([], [], [TOKEN])
    assert (new.status, new.num_computed_tokens) == (RequestStatus.WAITING, 0)
    scheduler.check()
