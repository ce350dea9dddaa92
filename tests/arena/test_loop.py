"""The loop: what a policy sees of a request, when turns arrive, and what a client saw."""

from __future__ import annotations

import pytest
from tests.arena.small import SERVICE, few, tokens

from minicache.request import RequestStatus
from minicache.scheduler import ChunkedPrefillScheduler
from minicache.simulator.costs import StepLoad
from minicache_course.arena.loop import Loop, Outcome
from minicache_course.arena.machine import MAX_MODEL_LEN, Service, the_machine
from minicache_course.arena.workloads import STOP, WINDOW, WORKLOADS, Session, Turn, answer

COST = the_machine().cost


class Noting(ChunkedPrefillScheduler):
    """Notes what it is given, and when."""

    def __init__(self, arena):
        super().__init__(**arena.options, prefix_caching=True)
        self.arena, self.noted = arena, []

    def add_request(self, request):
        self.noted.append((self.arena.now(), request))
        super().add_request(request)


def serve(sessions):
    made = []

    def policy(arena):
        made.append(Noting(arena))
        return made[0]

    return Loop(sessions, policy).run(), made[0]


def test_a_request_asks_for_as_many_tokens_as_its_class_may_have_and_ends_with_a_stop_token():
    run, policy = serve([Session(SERVICE, 0.5, (), (Turn(tokens(0, 100), 3),))])
    [(now, request)] = policy.noted
    assert now == 0.5
    assert (request.max_tokens, request.stop_token_ids) == (SERVICE.max_tokens, frozenset({STOP}))
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.output_token_ids == [0, 0, STOP]
    steps = [COST.step_seconds(StepLoad.of([each])) for each in ((100, 0), (1, 100), (1, 101))]
    assert run.outcomes == [Outcome(SERVICE, pytest.approx(steps[0]), pytest.approx((steps[1] + steps[2]) / 2))]


def test_an_answer_of_max_tokens_is_cut():
    _, policy = serve([Session(SERVICE, 0.0, (), (Turn(tokens(0, 100), SERVICE.max_tokens),))])
    assert policy.noted[0][1].status is RequestStatus.FINISHED_LENGTH
    assert STOP not in answer(SERVICE.max_tokens, SERVICE)


def test_the_next_turn_comes_after_the_answer_and_a_pause_and_repeats_what_was_said():
    first, second = Turn(tokens(0, 100), 3), Turn(tokens(1, 20), 2, 1.5)
    run, policy = serve([Session(SERVICE, 0.0, tokens(2, 64), (first, second))])
    (_, one), (now, two) = policy.noted
    assert two.prompt_token_ids == [*tokens(2, 64), *first.prompt, 0, 0, STOP, *second.prompt]
    ends = run.outcomes[0].ttft + 2 * run.outcomes[0].tpot
    assert now == pytest.approx(ends + 1.5)
    assert two.num_cached_tokens > one.num_prompt_tokens - 16


@pytest.mark.parametrize(("pause", "num_new"), [(WINDOW, 10), (0.1, MAX_MODEL_LEN)])
def test_a_turn_that_is_too_late_or_too_long_is_not_sent(pause, num_new):
    turns = Turn(tokens(0, 100), 3), Turn(tokens(1, num_new), 2, pause)
    assert len(serve([Session(SERVICE, 0.0, (), turns)])[0].outcomes) == 1


def test_limits_are_met_together():
    service = Service("x", ttft=1.0, tpot=0.1, max_tokens=64)
    met = [Outcome(service, *felt).is_good for felt in ((1.0, 0.1), (1.1, 0.1), (1.0, 0.2), (0.5, 0.0))]
    assert met == [True, False, False, True]


def test_a_run_may_stop_and_go_on():
    whole, parts = Loop(few(), Noting), Loop(few(), Noting, audit=False)
    digests = whole.run().digests
    assert parts.run(20).digests == digests[:20]
    assert parts.unfinished()
    assert parts.run().digests == digests
    assert not parts.unfinished()


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workloads_are_the_same_each_time_and_fit_into_the_machine(workload):
    sessions = workload.sessions(1, 3)
    assert sessions == workload.sessions(1, 3)
    assert sessions != workload.sessions(1, 4)
    assert sessions != workload.sessions(0, 3)
    assert [each.start for each in sessions] == sorted(each.start for each in sessions)
    for each in sessions:
        assert 0 <= each.start < WINDOW
        assert each.start * 1e6 == pytest.approx(round(each.start * 1e6), abs=1e-6)
        assert len(each.prefix) + len(each.turns[0].prompt) + each.service.max_tokens <= MAX_MODEL_LEN
        assert all(1 <= turn.length <= each.service.max_tokens for turn in each.turns)
