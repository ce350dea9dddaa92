"""Workloads: are the times and lengths distributed as they say, and always the same for the same seed?"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from statistics import NormalDist, fmean, median, pstdev

import pytest

from minicache.simulator.workload import (
    ALPACA,
    AZURE_CODE,
    AZURE_CONVERSATION,
    SHAREGPT,
    Arrival,
    LengthDistribution,
    Workload,
    gamma_arrivals,
    generate,
    poisson_arrivals,
)

PUBLISHED = [SHAREGPT, ALPACA, AZURE_CODE, AZURE_CONVERSATION]


def gaps(times, count):
    return [later - earlier for earlier, later in pairwise([0.0, *islice(times, count)])]


# Lengths


@pytest.mark.parametrize(("mean", "cv"), [(161.31, 1.29), (337.99, 0.5), (10.0, 3.0), (1.0, 0.1)])
def test_mean_and_cv_are_what_was_asked_for(mean, cv):
    lengths = LengthDistribution.from_mean(mean, cv)
    assert lengths.mean == pytest.approx(mean)
    assert lengths.cv == pytest.approx(cv)


def test_the_closed_forms_are_those_of_an_integral():
    """Mean and spread of e^X for a normal X, by summing over a fine grid of its quantiles."""
    lengths = LengthDistribution(5.02, 0.86)
    normal = NormalDist(5.02, 0.86)
    values = [math.exp(normal.inv_cdf((i + 0.5) / 200_000)) for i in range(200_000)]
    assert lengths.mean == pytest.approx(fmean(values), rel=1e-3)
    assert lengths.cv == pytest.approx(pstdev(values) / fmean(values), rel=5e-3)


def test_samples_have_the_mean_the_spread_and_the_median():
    lengths, rng = LengthDistribution.from_mean(337.99, 0.8), Random(1)
    drawn = [lengths.sample(rng) for _ in range(40_000)]
    assert fmean(drawn) == pytest.approx(337.99, rel=0.02)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.8, rel=0.05)
    assert median(drawn) == pytest.approx(math.exp(lengths.mu), rel=0.03)


def test_lengths_are_whole_and_at_least_one():
    lengths, rng = LengthDistribution.from_mean(0.2, 1.0), Random(1)
    drawn = {lengths.sample(rng) for _ in range(2000)}
    assert min(drawn) == 1
    assert all(type(length) is int for length in drawn)


@pytest.mark.parametrize("sigma", [0, -1.0, math.nan, math.inf])
def test_a_spread_that_is_none_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma"):
        LengthDistribution(1.0, sigma)


@pytest.mark.parametrize(("mean", "cv"), [(0, 1), (-5, 1), (5, 0), (5, -1), (math.inf, 1)])
def test_means_and_spreads_that_cannot_be_are_refused(mean, cv):
    with pytest.raises(ValueError, match="must be"):
        LengthDistribution.from_mean(mean, cv)


# Arrivals


def test_poisson_gaps_are_exponential():
    found = gaps(poisson_arrivals(2.0, Random(1)), 40_000)
    assert fmean(found) == pytest.approx(0.5, rel=0.02)
    assert pstdev(found) / fmean(found) == pytest.approx(1.0, rel=0.03)
    # The share of gaps longer than t is e^(-2 t).
    for t in (0.1, 0.5, 1.0):
        assert sum(gap > t for gap in found) / len(found) == pytest.approx(math.exp(-2 * t), abs=0.01)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_the_rate_and_the_spread(cv):
    found = gaps(gamma_arrivals(4.0, cv, Random(2)), 60_000)
    assert fmean(found) == pytest.approx(0.25, rel=0.04)
    assert pstdev(found) / fmean(found) == pytest.approx(cv, rel=0.05)


def test_a_gamma_with_a_cv_of_one_is_poisson():
    found = sorted(gaps(gamma_arrivals(2.0, 1.0, Random(3)), 40_000))
    for t in (0.1, 0.5, 1.0):
        assert sum(gap > t for gap in found) / len(found) == pytest.approx(math.exp(-2 * t), abs=0.01)


def test_violent_bursts_are_arrivals_too():
    """At Azure's CV of 13.2 most gaps are next to nothing, and times still never run backwards."""
    found = gaps(gamma_arrivals(2.6, 13.2, Random(4)), 5000)
    assert min(found) >= 0
    assert median(found) < 1e-6


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan])
def test_rates_and_spreads_that_cannot_be_are_refused_at_once(bad):
    for make in (
        lambda: poisson_arrivals(bad, Random(1)),
        lambda: gamma_arrivals(bad, 1.0, Random(1)),
        lambda: gamma_arrivals(1.0, bad, Random(1)),
        lambda: replace(SHAREGPT, rate=bad),
        lambda: replace(SHAREGPT, arrival_cv=bad),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()


# Workloads


@pytest.mark.parametrize("workload", PUBLISHED, ids=lambda workload: workload.name)
def test_every_request_fits_the_model(workload):
    arrivals = generate(workload, 3000, seed=0)
    assert [arrival.request_id for arrival in arrivals] == list(range(3000))
    assert all(earlier.time <= later.time for earlier, later in pairwise(arrivals))
    assert min(min(each.num_prompt_tokens, each.num_output_tokens) for each in arrivals) >= 1
    assert max(each.num_prompt_tokens + each.num_output_tokens for each in arrivals) <= workload.max_model_len


@pytest.mark.parametrize("workload", [SHAREGPT, ALPACA], ids=lambda workload: workload.name)
def test_the_papers_means_are_drawn_but_for_the_cut(workload):
    """The limit of 2,048 cuts a tail of a few percent off the mean, and nothing is added."""
    arrivals = generate(workload, 20_000, seed=0)
    prompt = fmean(arrival.num_prompt_tokens for arrival in arrivals)
    output = fmean(arrival.num_output_tokens for arrival in arrivals)
    assert 0.95 < prompt / workload.prompt.mean < 1.03
    assert 0.94 < output / workload.output.mean < 1.03


def test_the_published_numbers():
    assert (SHAREGPT.prompt.mean, SHAREGPT.output.mean) == pytest.approx((161.31, 337.99))
    assert (ALPACA.prompt.mean, ALPACA.output.mean) == pytest.approx((19.31, 58.45))
    assert (AZURE_CODE.prompt.mean, AZURE_CODE.output.mean) == pytest.approx((2048, 27.9))
    assert (AZURE_CODE.prompt.cv, AZURE_CODE.output.cv) == pytest.approx((0.96, 2.15))
    assert (AZURE_CODE.rate, AZURE_CODE.arrival_cv) == (2.6, 13.2)
    assert (AZURE_CONVERSATION.prompt.mean, AZURE_CONVERSATION.output.mean) == pytest.approx((1155, 211))
    for workload in (AZURE_CONVERSATION, SHAREGPT, ALPACA):
        assert (workload.prompt.cv, workload.output.cv) == pytest.approx((0.96, 0.77))
    assert (AZURE_CONVERSATION.rate, AZURE_CONVERSATION.arrival_cv) == (5.5, 1.09)


def test_a_limit_cuts_the_prompt_first_and_then_the_output():
    long = Workload("long", LengthDistribution(9.0, 0.01), LengthDistribution(9.0, 0.01), rate=1.0, max_model_len=100)
    short = replace(long, prompt=LengthDistribution(3.0, 0.001))
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in generate(long, 20, 0)} == {(99, 1)}
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in generate(short, 20, 0)} == {(20, 80)}


def test_a_seed_is_a_workload():
    assert generate(SHAREGPT, 200, seed=7) == generate(SHAREGPT, 200, seed=7)
    assert generate(SHAREGPT, 200, seed=7) != generate(SHAREGPT, 200, seed=8)
    assert generate(SHAREGPT, 300, seed=7)[:200] == generate(SHAREGPT, 200, seed=7)
    assert generate(SHAREGPT, 0, seed=7) == []


def test_a_seed_is_the_same_on_every_machine_and_python():
    """Worked out once: a change of this line is a change of every figure that was made with a seed."""
    first = generate(SHAREGPT, 1, seed=0)[0]
    assert first == Arrival(0, pytest.approx(0.9948379138458302), 58, 220)


def test_the_lengths_are_the_same_at_every_rate():
    slow, fast = generate(SHAREGPT, 500, 3), generate(replace(SHAREGPT, rate=8.0, arrival_cv=2.0), 500, 3)
    assert [each.num_output_tokens for each in slow] == [each.num_output_tokens for each in fast]
    assert [each.num_prompt_tokens for each in slow] == [each.num_prompt_tokens for each in fast]
    assert slow[-1].time > 2 * fast[-1].time


@pytest.mark.parametrize(("count", "seed", "error"), [(-1, 0, ValueError), (1.0, 0, TypeError), (1, "0", TypeError)])
def test_counts_and_seeds_that_cannot_be_are_refused(count, seed, error):
    with pytest.raises(error):
        generate(SHAREGPT, count, seed)


@pytest.mark.parametrize("limit", [1, 0])
def test_a_limit_without_room_for_prompt_and_output_is_refused(limit):
    with pytest.raises(ValueError, match="max_model_len"):
        replace(SHAREGPT, max_model_len=limit)
