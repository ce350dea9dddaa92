"""Prompts with tokens: are two alike exactly where they are meant to be, and is a chat all that was said before?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from minicache.scheduler import create_scheduler
from minicache.simulator.costs import FixedCost
from minicache.simulator.prompts import ANSWERED, ChatWorkload, behind_system_prompt, chats
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import ALPACA, LengthDistribution, generate

CHATS = ChatWorkload(
    message=LengthDistribution.from_mean(30, 0.5),
    answer=LengthDistribution.from_mean(40, 0.5),
    rate=1.0,
    mean_turns=4.0,
    pause=20.0,
    seconds_per_token=0.05,
    max_model_len=512,
)


def by_chat(requests):
    found = defaultdict(list)
    for request in requests:
        found[request.request_id[0]].append(request)
    return found


def test_all_prompts_begin_with_the_system_prompt_and_go_on_each_on_its_own():
    requests = list(behind_system_prompt(ALPACA, 80, 50, seed=1))
    [shared] = {tuple(request.prompt_token_ids[:80]) for request in requests}
    assert ANSWERED not in shared
    rest = [tuple(request.prompt_token_ids[80:]) for request in requests]
    assert all(rest)
    assert len({tokens for tokens in rest if len(tokens) > 3}) == sum(len(tokens) > 3 for tokens in rest)


def test_times_and_lengths_are_the_workloads():
    requests = list(behind_system_prompt(ALPACA, 80, 50, seed=1))
    arrivals = generate(ALPACA, 50, seed=1)
    assert [request.arrival_time for request in requests] == [arrival.time for arrival in arrivals]
    assert [request.num_prompt_tokens - 80 for request in requests] == [each.num_prompt_tokens for each in arrivals]
    assert [request.max_tokens for request in requests] == [arrival.num_output_tokens for arrival in arrivals]


def test_the_system_prompt_counts_among_the_models_tokens():
    short = replace(ALPACA, max_model_len=100)
    assert max(each.num_prompt_tokens + each.max_tokens for each in behind_system_prompt(short, 80, 200, 0)) == 100
    with pytest.raises(ValueError, match="max_model_len"):
        behind_system_prompt(short, 99, 1, 0)
    with pytest.raises(ValueError, match="num_shared"):
        behind_system_prompt(short, 0, 1, 0)


def test_a_turn_repeats_all_that_was_said():
    found = by_chat(chats(CHATS, 60, seed=2))
    assert max(map(len, found.values())) > 3
    for turns in found.values():
        assert [request.request_id[1] for request in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            said = before.prompt_token_ids + [ANSWERED] * before.max_tokens
            assert after.prompt_token_ids[: len(said)] == said
            assert after.num_prompt_tokens > len(said)
            assert after.arrival_time > before.arrival_time + before.max_tokens * CHATS.seconds_per_token


def test_chats_come_in_the_order_of_time_and_within_the_models_length():
    requests = list(chats(CHATS, 60, seed=2))
    times = [request.arrival_time for request in requests]
    assert times == sorted(times)
    assert max(request.num_prompt_tokens + request.max_tokens for request in requests) <= CHATS.max_model_len


def test_means_are_what_was_asked_for():
    long = replace(CHATS, max_model_len=10**6)
    found = by_chat(chats(long, 2000, seed=0))
    assert fmean(map(len, found.values())) == pytest.approx(4.0, rel=0.05)
    assert fmean(turns[0].num_prompt_tokens for turns in found.values()) == pytest.approx(30, rel=0.05)
    pauses = [
        after.arrival_time - before.arrival_time - before.max_tokens * long.seconds_per_token
        for turns in found.values()
        for before, after in pairwise(turns)
    ]
    assert fmean(pauses) == pytest.approx(20.0, rel=0.05)


def test_one_turn_each_if_the_mean_is_one():
    assert [request.request_id for request in chats(replace(CHATS, mean_turns=1), 3, 0)] == [(0, 0), (1, 0), (2, 0)]


def test_the_same_seed_gives_the_same_chats_at_every_rate():
    def told(rate, seed=5):
        return [each.prompt_token_ids for each in sorted(chats(replace(CHATS, rate=rate), 9, seed), key=name)]

    def name(request):
        return request.request_id

    assert told(1.0) == told(50.0)
    assert told(1.0) != told(1.0, seed=6)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"mean_turns": 0.5}, {"pause": -1}, {"max_model_len": 1}])
def test_bad_chats_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CHATS, **wrong)


def test_a_prefix_cache_finds_what_was_said_and_what_was_answered():
    """With memory for all: the full blocks of what the turn before has computed, which is all but its last token."""
    requests = list(chats(CHATS, 20, seed=3))
    scheduler = create_scheduler("paged", num_blocks=5000, prefix_caching=True)
    ServingSimulation(scheduler, FixedCost(0.001), requests).run()
    for turns in by_chat(requests).values():
        assert turns[0].num_cached_tokens == 0
        for before, after in pairwise(turns):
            assert after.num_cached_tokens == (before.num_prompt_tokens + before.max_tokens - 1) // 16 * 16
