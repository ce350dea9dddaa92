"""The bound: no policy serves more, neither a baseline nor the best of all schedules of a few requests."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from tests.arena.small import few, tokens

from minicache.simulator.costs import StepLoad
from minicache_course.arena.baselines import BASELINES, ORACLES, text_of
from minicache_course.arena.bound import bound
from minicache_course.arena.limits import load_policy
from minicache_course.arena.loop import Loop
from minicache_course.arena.machine import Service, the_machine
from minicache_course.arena.workloads import WORKLOADS, Session, Turn

COST = the_machine().cost


def single(service, start, num_prompt, length, number):
    return Session(service, start, (), (Turn(tokens(number, num_prompt), length),))


def best(sessions):
    """The most requests that any schedule serves within their limits: all schedules are tried.

    In each step every request that has arrived computes nothing, half of its prompt, all of it, or a token; or the
    server waits for the next arrival. Memory has no limit here.
    """
    asked = [(each.start, len(each.turns[0].prompt), each.turns[0].length, each.service) for each in sessions]

    def good(index, first, last):
        start, _, length, service = asked[index]
        tpot = (last - first) / (length - 1) if length > 1 else 0.0
        return first - start <= service.ttft and tpot <= service.tpot

    def go(now, state):
        """`state`: of each request the computed tokens, and when its first token came; None once it is finished."""
        if all(each is None for each in state):
            return 0
        choices = []
        for (start, num_prompt, _, _), each in zip(asked, state, strict=True):
            if each is None or start > now:
                choices.append((0,))
            elif each[0] < num_prompt:
                left = num_prompt - each[0]
                choices.append((0, left) if left <= num_prompt // 2 else (0, num_prompt // 2, left))
            else:
                choices.append((0, 1))
        found = 0
        later = [start for start, *_ in asked if start > now]
        if later:
            found = go(min(later), state)
        for news in product(*choices):
            if not any(news):
                continue
            load = StepLoad.of([(new, each[0]) for new, each in zip(news, state, strict=True) if new])
            end, num_good, after = now + COST.step_seconds(load), 0, list(state)
            for index, (new, each) in enumerate(zip(news, state, strict=True)):
                if not new:
                    continue
                _, num_prompt, length, _ = asked[index]
                computed, first = each[0] + new, each[1]
                if computed < num_prompt:
                    after[index] = (computed, None)
                    continue
                first = end if first is None else first
                after[index] = (computed, first)
                if computed - num_prompt + 1 == length:
                    after[index] = None
                    num_good += good(index, first, end)
            found = max(found, num_good + go(end, tuple(after)))
        return found

    return go(0.0, tuple((0, None) for _ in asked))


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_schedules_is_not_above_it(seed):
    rng = Random(seed)
    service = Service("tight", ttft=rng.choice([0.08, 0.2, 0.4]), tpot=rng.choice([0.03, 0.06, 0.2]), max_tokens=64)
    starts = sorted(rng.choice([0.0, 0.0, 0.05, 0.2]) for _ in range(3))
    sessions = [
        single(service, start, rng.choice([200, 900, 1700, 2500]), rng.randint(1, 2), number)
        for number, start in enumerate(starts)
    ]
    assert best(sessions) <= bound(sessions) <= 3


def test_it_is_below_the_number_of_requests_where_they_do_not_fit():
    """A prompt of 2,500 tokens takes 0.29 s: of three at once, in 0.4 s, one can be served, and a third of another."""
    service = Service("tight", ttft=0.4, tpot=0.2, max_tokens=64)
    sessions = [single(service, 0.0, 2500, 2, number) for number in range(3)]
    assert best(sessions) == bound(sessions) == 1


def test_a_request_that_is_too_late_alone_does_not_count():
    service = Service("tight", ttft=0.2, tpot=0.2, max_tokens=64)
    assert bound([single(service, 0.0, 2500, 2, 0)]) == 0
    assert bound([single(service, 0.0, 1000, 2, 0)]) == 1


def test_what_may_be_found_in_a_cache_is_not_charged():
    service = Service("tight", ttft=0.4, tpot=0.2, max_tokens=64)
    shared = tokens(0, 2496)
    sessions = [Session(service, 0.0, shared, (Turn(tokens(9 + number, 4), 2),)) for number in range(3)]
    assert bound(sessions) == 3


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_is_above_it(name):
    for sessions in (few(), WORKLOADS[2].sessions(2, 0)):
        run = Loop(sessions, load_policy(text_of(name)), audit=False, oracle=name in ORACLES).run()
        assert run.num_good <= bound(sessions)
