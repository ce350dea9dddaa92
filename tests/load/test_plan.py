"""Who comes when, with which prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import fmean

import pytest

from minicache.grammar import Tokenizer
from minicache.serving.load import fit_workload, fixed_arrivals, make_requests, workload_arrivals
from minicache.simulator.workload import ALPACA, AZURE_CODE, SHAREGPT, generate


def prompts(requests):
    return [json.loads(request.body)["prompt"] for request in requests]


def test_arrivals_of_one_length_are_poisson():
    arrivals = fixed_arrivals(4000, 8.0, 24, 64, seed=3)
    times = [arrival.time for arrival in arrivals]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = fmean(gaps)
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert fmean((gap - mean) ** 2 for gap in gaps) ** 0.5 == pytest.approx(mean, rel=0.1)  # exponential
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in arrivals} == {(24, 64)}
    assert [each.request_id for each in arrivals] == list(range(4000))
    assert arrivals == fixed_arrivals(4000, 8.0, 24, 64, seed=3)
    assert arrivals != fixed_arrivals(4000, 8.0, 24, 64, seed=4)


def test_all_at_once():
    assert {arrival.time for arrival in fixed_arrivals(9, float("inf"), 1, 1)} == {0.0}
    at_once = workload_arrivals(ALPACA, 9, rate=float("inf"))
    assert [replace(arrival, time=0.0) for arrival in workload_arrivals(ALPACA, 9)] == at_once


def test_a_workload_is_the_simulators():
    assert workload_arrivals(SHAREGPT, 50, rate=4.0, seed=5) == generate(replace(SHAREGPT, rate=4.0), 50, 5)
    assert workload_arrivals(AZURE_CODE, 50) == generate(AZURE_CODE, 50, 0)


def test_shared_tokens_come_in_front_and_within_the_context():
    own, behind = (workload_arrivals(fit_workload(SHAREGPT, 512), 300, num_shared=shared) for shared in (0, 100))
    for one, other in zip(own, behind, strict=True):
        assert other.num_prompt_tokens + other.num_output_tokens <= 512
        assert other.num_prompt_tokens == min(one.num_prompt_tokens, 411) + 100


def test_a_workload_is_scaled_to_a_smaller_context_and_never_stretched():
    fitted = fit_workload(SHAREGPT, 512)
    assert fitted.max_model_len == 512
    assert fitted.prompt.mean == pytest.approx(SHAREGPT.prompt.mean / 4)
    assert fitted.output.mean == pytest.approx(SHAREGPT.output.mean / 4)
    assert fitted.prompt.cv == pytest.approx(SHAREGPT.prompt.cv)
    assert fit_workload(SHAREGPT, 2048) is SHAREGPT
    assert fit_workload(SHAREGPT, 100_000) is SHAREGPT


def test_text_prompts_have_one_token_a_word_for_minigpt():
    tokenizer = Tokenizer()
    requests = make_requests(workload_arrivals(fit_workload(SHAREGPT, 512), 40), model="m")
    for request, prompt in zip(requests, prompts(requests), strict=True):
        assert len(tokenizer.encode(prompt)) == request.arrival.num_prompt_tokens == len(request.prompt_token_ids)
        assert json.loads(request.body)["max_tokens"] == request.arrival.num_output_tokens
    assert len(set(prompts(requests))) == 40
    assert requests == make_requests(workload_arrivals(fit_workload(SHAREGPT, 512), 40), model="m")
    assert prompts(requests) != prompts(make_requests([each.arrival for each in requests], model="m", seed=1))


def test_token_ids_stay_below_the_vocabulary_and_leave_0_out():
    requests = make_requests(fixed_arrivals(20, 1.0, 50, 4), model="m", vocab_size=7)
    assert {token for prompt in prompts(requests) for token in prompt} == set(range(1, 7))
    assert [tuple(prompt) for prompt in prompts(requests)] == [request.prompt_token_ids for request in requests]


@pytest.mark.parametrize("vocab_size", [None, 1000])
def test_prompts_begin_alike_as_far_as_they_share_and_no_further(vocab_size):
    arrivals = fixed_arrivals(30, 1.0, 40, 4)
    requests = make_requests(arrivals, model="m", vocab_size=vocab_size, num_shared=16)
    split = [prompt.split() if vocab_size is None else prompt for prompt in prompts(requests)]
    assert len({tuple(prompt[:16]) for prompt in split}) == 1
    assert len({tuple(prompt[16:20]) for prompt in split}) == 30
    assert len({request.prompt_token_ids[:16] for request in requests}) == 1


def test_numbers_out_of_bounds():
    for arguments in ((0, 1.0, 1, 1), (1, 0.0, 1, 1), (1, -1.0, 1, 1), (1, 1.0, 0, 1), (1, 1.0, 1, 0)):
        with pytest.raises(ValueError, match="must be"):
            fixed_arrivals(*arguments)
    arrivals = fixed_arrivals(2, 1.0, 8, 1)
    with pytest.raises(ValueError, match="do not fit into a prompt of 8"):
        make_requests(arrivals, model="m", num_shared=8)
    with pytest.raises(ValueError, match="vocab_size"):
        make_requests(arrivals, model="m", vocab_size=1)
    with pytest.raises(ValueError, match="max_model_len"):
        fit_workload(SHAREGPT, 1)
