"""The numbers that are made of a run, and the prediction next to them, against what one reckons by hand."""

from __future__ import annotations

import json
from array import array

import pytest

from minicache.scheduler import create_scheduler
from minicache.serving.load import (
    Endpoint,
    LoadReport,
    LoadRun,
    Outcome,
    compare,
    fixed_arrivals,
    make_requests,
    predict,
)
from minicache.simulator.costs import FixedCost
from minicache.simulator.workload import Arrival


def report(*outcomes, seconds=10.0, cpu_share=0.1, num_requests=None):
    run = LoadRun(Endpoint("a", 1), [])
    run.outcomes.extend(outcomes)
    run.seconds, run.cpu_share = seconds, cpu_share
    return LoadReport.of(run, len(outcomes) if num_requests is None else num_requests)


def answered(sent, *times, planned=None, counted=None, asked=None):
    """An answer with an event at each of the times."""
    number = len(times) if counted is None else counted
    arrival = Arrival(0, sent if planned is None else planned, 4, number if asked is None else asked)
    return Outcome(arrival, sent, "ok", times[-1], array("d", times), 4, counted if counted else number, 200)


def test_latencies():
    told = report(answered(1.0, 1.5, 1.75, 2.0), answered(2.0, 2.25))
    assert (told.ttft.mean, told.ttft.p50, told.ttft.max) == (0.375, 0.375, 0.5)
    assert (told.tpot.mean, told.tpot.max) == (0.25, 0.25)  # a single token has no time between tokens
    assert (told.itl.mean, told.itl.p50) == (0.25, 0.25)
    assert told.latency.mean == pytest.approx((1.0 + 0.25) / 2)
    assert told.lag.max == 0
    assert told.notes == []
    assert (told.num_output_tokens, told.num_prompt_tokens, told.num_events) == (4, 8, 4)
    assert told.tokens_per_second == pytest.approx(0.4)
    assert told.requests_per_second == pytest.approx(0.2)


def test_an_event_may_bring_several_tokens():
    told = report(answered(0.0, 1.0, 3.0, counted=5))
    assert told.tpot.mean == 0.5  # 2 s for the four tokens after the first
    assert told.itl.mean == 2.0  # but one gap
    assert (told.num_output_tokens, told.num_events) == (5, 2)


def test_only_whole_answers_count():
    cut = answered(0.0, 5.0, 9.0)
    cut.status, cut.detail = "failed", "closed"
    refused = Outcome(
        Arrival(1, 0.0, 4, 2), 0.0, "refused", 0.1, http_status=429, retry_after=3.0, detail="HTTP 429: no"
    )
    late = Outcome(Arrival(2, 0.0, 4, 2), 0.0, "timed out", 9.0, detail="no end")
    rest = Outcome(Arrival(3, 0.0, 4, 2), 0.0, "unfinished", 9.0)
    told = report(answered(0.0, 1.0, 2.0), cut, refused, refused, late, rest, num_requests=8)
    assert (told.num_requests, told.num_sent, told.num_ok, told.num_refused) == (8, 6, 1, 2)
    assert (told.num_failed, told.num_timed_out, told.num_unfinished) == (1, 1, 1)
    assert told.latency.max == 2.0
    assert told.num_output_tokens == 2
    assert told.retry_after.p50 == 3.0
    assert told.errors == {"HTTP 429: no": 2, "closed": 1, "no end": 1}


def test_what_one_must_know_is_said():
    on_time = answered(1.0, 1.5)
    assert report(on_time).notes == []
    [said] = report(*[answered(1.0, 1.5, planned=0.75)] * 4).notes
    assert "250 ms" in said
    [said] = report(on_time, cpu_share=0.95).notes
    assert "95%" in said
    [said] = report(on_time, answered(1.0, 1.5, 1.6, asked=9)).notes
    assert said.startswith("1 answers are shorter")
    uncounted = answered(1.0, 1.5)
    uncounted.num_output_tokens = None
    [said] = report(uncounted, on_time).notes
    assert said.startswith("In 1 answers the server reported no token count")
    other = answered(1.0, 1.5)
    other.num_prompt_tokens = 5
    [said] = report(other).notes
    assert said.startswith("1 prompts have a different token count")


def test_json_has_everything_but_the_gaps():
    told = json.loads(json.dumps(report(answered(1.0, 1.5, 2.0), Outcome(Arrival(1, 0.0, 4, 2), 0.0)).to_json()))
    assert told["ttft"]["p99"] == 0.5
    assert told["tokens_per_second"] == pytest.approx(0.2)
    assert told["requests"][0]["latency"] == 1.0
    assert told["requests"][1]["ttft"] is None
    assert "outcomes" not in told


def test_nothing_was_answered():
    told = report()
    assert (told.ttft.mean, told.tokens_per_second, told.num_ok) == (0.0, 0.0, 0)
    assert told.errors == {}


def test_a_prediction_by_hand():
    """Two requests, a step a second, one place: the second waits until the first has its three tokens."""
    requests = make_requests([Arrival(0, 0.0, 4, 3), Arrival(1, 0.5, 4, 3)], model="m")
    scheduler = create_scheduler("fair", num_blocks=10, max_num_seqs=1)
    foretold = predict(requests, scheduler, FixedCost(1.0))
    assert sorted(foretold.times.first_token) == [1.0, 3.5]
    assert sorted(foretold.times.latency) == [3.0, 5.5]
    measured = report(answered(0.0, 1.0, 2.0, 3.0), answered(0.5, 3.5, 4.5, 5.5), seconds=5.0)
    numbers = {(each.metric, each.statistic): each for each in compare(measured, foretold)}
    assert len(numbers) == 14
    ttft = numbers["ttft", "mean"]
    assert (ttft.measured, ttft.predicted, ttft.error) == (2.0, 2.25, 0.125)
    assert numbers["tpot", "p50"].error == 0
    assert numbers["latency", "mean"].predicted == 4.25
    rate = numbers["tokens_per_second", ""]
    assert (rate.measured, rate.predicted, rate.error) == (1.2, 1.0, pytest.approx(-1 / 6))


def test_a_prediction_knows_what_the_prompts_share():
    requests = make_requests(fixed_arrivals(2, float("inf"), 64, 1), model="m", num_shared=32)
    for caching, num_computed in ((False, 128), (True, 96)):
        seen = []

        class Counting(FixedCost):
            def step_seconds(self, load, seen=seen):
                seen.append(load.num_new_tokens)
                return 1.0

        scheduler = create_scheduler("fair", num_blocks=20, max_num_seqs=1, prefix_caching=caching)
        predict(requests, scheduler, Counting())
        assert sum(seen) == num_computed
