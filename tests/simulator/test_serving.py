"""A server in simulated time: right where a hand or a theorem can follow it, and no one and no token lost."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from tests.grid import grid

from minicache.arithmetic.specs import A100_40GB, OPT_13B
from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler import PagedScheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.audit import Auditor
from minicache.simulator.costs import FixedCost, RooflineCost, StepLoad
from minicache.simulator.orca import OrcaScheduler
from minicache.simulator.report import NUM_SAMPLES
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import SHAREGPT, Arrival, LengthDistribution, generate, stream

COST = RooflineCost(OPT_13B, A100_40GB)
NAMES = ["static", "continuous", "paged", "fair", "swap", "max", "pow2", "oracle"]


def scheduler(name, num_blocks=40, block_size=4, **options):
    if name in ("max", "pow2", "oracle"):
        return OrcaScheduler(name, num_slots=num_blocks * block_size, max_model_len=100, **options)
    options |= {"num_blocks": num_blocks, "block_size": block_size}
    if name == "swap":
        return create_scheduler("paged", preemption="swap", num_host_blocks=num_blocks, **options)
    return create_scheduler(name, **options)


def small_workload(rate=20.0):
    """Short requests, so many that a small memory runs out."""
    lengths = LengthDistribution.from_mean(20, 1.0)
    return replace(SHAREGPT, prompt=lengths, output=lengths, rate=rate, max_model_len=100)


def serve(name, arrivals, cost=COST, observers=(), **options):
    """The report, and the trace."""
    steps = []
    simulation = ServingSimulation(scheduler(name, **options), cost, arrivals, observers=observers, trace=steps.append)
    return simulation.run(), steps


def burst(*lengths, time=0.0):
    return [Arrival(number, time, prompt, output) for number, (prompt, output) in enumerate(lengths)]


# By hand


def test_three_requests_with_a_clock_that_counts_steps():
    """A comes at 0 for two tokens, B at 0.5 for one, C at 10 for one: steps from 0, 1 and 10."""
    arrivals = [Arrival(0, 0.0, 3, 2), Arrival(1, 0.5, 1, 1), Arrival(2, 10.0, 5, 1)]
    report, steps = serve("paged", arrivals, FixedCost(1.0))
    assert list(report.times.first_token) == [1.0, 1.5, 1.0]
    assert list(report.times.latency) == [2.0, 1.5, 1.0]
    assert list(report.times.arrival) == [0.0, 0.5, 10.0]
    assert list(report.times.normalized()) == [1.0, 1.5, 1.0]
    assert list(report.times.per_output_token()) == [1.0]
    assert (report.makespan, report.busy_seconds, report.num_steps) == (11.0, 3.0, 3)
    assert (report.mean_batch_size, report.max_batch_size) == (pytest.approx(4 / 3), 2)
    assert report.max_memory == 2 / 40  # blocks of 4: 3 + 1 tokens and 1 token; then 5
    assert report.mean_memory == pytest.approx((1 + 2 + 2) / 3 / 40)
    assert report.requests_per_second == pytest.approx(3 / 11)
    assert report.tokens_per_second == pytest.approx(4 / 11)
    assert (report.ttft.mean, report.ttft.p50, report.ttft.max) == (pytest.approx(3.5 / 3), 1.0, 1.5)
    assert [(step.time, step.seconds) for step in steps] == [(0.0, 1.0), (1.0, 1.0), (10.0, 1.0)]


def two_prompts(**options):
    """Two prompts of 80 tokens for 20 more each, in 10 blocks of 16: the second loses its place after one token."""
    return serve("paged", burst((80, 20), (80, 20)), num_blocks=10, block_size=16, **options)


def test_a_recompute_is_counted():
    report, steps = two_prompts(cost=FixedCost(1.0))
    assert report.num_preemptions == 1
    assert report.num_recomputed_tokens == 80  # its prompt; the token that it had got was never computed
    assert report.num_output_tokens == 40
    assert report.num_steps == 20 + 19  # the first request alone, then the second without its first token
    assert [entry.num_new_tokens for entry in steps[20].batch] == [81]


class SwapsAtATenth(FixedCost):
    def swap_seconds(self, num_tokens):
        return 0.1 * num_tokens


def test_a_swap_costs_time_and_no_tokens():
    """5 blocks of 16 tokens go out in step 1, and come back in step 20."""
    arrivals = burst((80, 20), (80, 20))
    report, steps = serve("swap", arrivals, SwapsAtATenth(1.0), num_blocks=10, block_size=16)
    assert (report.num_swapped_blocks, report.num_recomputed_tokens, report.num_preemptions) == (10, 0, 1)
    assert report.makespan == pytest.approx(39 + 2 * 8.0)
    assert [step.seconds for step in steps if step.seconds > 1] == pytest.approx([9.0, 9.0])


def test_a_first_token_waits_for_what_is_swapped_in_beside_it():
    """As above, and a third request comes while the second is in the queue: both join at 28 s, in one step."""
    arrivals = [*burst((80, 20), (80, 20)), Arrival(2, 27.0, 16, 1)]
    report, steps = serve("swap", arrivals, SwapsAtATenth(1.0), num_blocks=10, block_size=16)
    joint = next(step for step in steps if len(step.batch) == 2 and step.time > 20)
    assert [event.kind for event in joint.events if event.kind in ("admit", "resume", "swap_in")].count("swap_in") == 1
    assert report.times.first_token[report.times.num_output_tokens.index(1)] == joint.time + 9.0 - 27.0


def test_who_outgrows_the_memory_and_who_never_fits():
    """2 blocks of 4: a prompt of 4 has room for 4 more tokens, and gets a fifth. A prompt of 9 is refused."""
    report, _ = serve("paged", burst((4, 20), (9, 1), (2, 2)), FixedCost(1.0), num_blocks=2, max_num_seqs=1)
    assert (report.num_finished, report.num_outgrown, report.num_refused) == (1, 1, 1)
    assert report.num_requests == 3
    assert report.num_output_tokens == 5 + 2
    assert report.num_prompt_tokens == 4 + 2
    assert report.num_recomputed_tokens == 0
    assert "request 1 needs 3 blocks" in report.refusal


def test_nobody_at_all():
    report, steps = serve("paged", [])
    assert (report.num_requests, report.makespan, report.mean_batch_size, steps) == (0, 0.0, 0.0, [])
    assert report.ttft.mean == report.requests_per_second == report.tokens_per_second == 0.0


def test_what_the_cost_is_told():
    """A prompt of 3 and one of 2; then both in decode; then the second alone."""
    told = []

    class Notes(FixedCost):
        def step_seconds(self, load):
            told.append(load)
            return 1.0

    serve("paged", burst((3, 2), (2, 3)), Notes(1.0))
    assert told == [
        StepLoad(num_sequences=2, num_new_tokens=5, num_cached_tokens=0, num_pairs=6 + 3, num_prefills=2),
        StepLoad(num_sequences=2, num_new_tokens=2, num_cached_tokens=5, num_pairs=7, num_prefills=0),
        StepLoad(num_sequences=1, num_new_tokens=1, num_cached_tokens=3, num_pairs=4, num_prefills=0),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_cost_is_told_is_what_is_in_the_trace(name):
    """The sums are kept from step to step; here they are made anew from every batch."""
    told = []

    class Notes(FixedCost):
        def step_seconds(self, load):
            told.append(load)
            return 0.03

    _, steps = serve(name, generate(small_workload(), 80, seed=4), Notes(1.0))
    batches = [[(entry.num_new_tokens, entry.num_computed_tokens) for entry in step.batch] for step in steps]
    assert told == [StepLoad.of(batch) for batch in batches if batch]


# Theorems


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_slot_and_one_step_each_is_an_m_d_1_queue(load):
    """Poisson arrivals, one server, a fixed service: the mean wait is ρ / (2 (1 − ρ)) (Pollaczek, Khinchine)."""
    arrivals = stream(
        replace(small_workload(rate=load), output=LengthDistribution.from_mean(1e-9, 0.1)), 12_000, seed=1
    )
    report = ServingSimulation(scheduler("continuous", max_num_seqs=1), FixedCost(1.0), arrivals).run()
    assert report.max_batch_size == 1
    assert report.ttft.mean - 1.0 == pytest.approx(load / (2 * (1 - load)), rel=0.12)
    assert report.busy_seconds / report.makespan == pytest.approx(load, rel=0.03)


def test_littles_law():
    """Requests in the server, on average over time = requests per second × the time that each is there."""
    report, steps = serve("paged", generate(small_workload(4.0), 300, seed=1))
    arrivals, ends = report.times.arrival, map(sum, zip(report.times.arrival, report.times.latency, strict=True))
    events = sorted([(time, 1) for time in arrivals] + [(time, -1) for time in ends])
    area = inside = 0.0
    for (time, change), (later, _) in pairwise(events):
        inside += change
        area += inside * (later - time)
    assert area == pytest.approx(report.num_finished * report.latency.mean)
    in_batch = sum(step.seconds * len(step.batch) for step in steps)
    assert report.mean_batch_size * report.busy_seconds == pytest.approx(in_batch)
    assert in_batch < area


# Conservation


@grid({"name": NAMES, "rate": [20.0, 0.5]})
def test_no_request_and_no_token_is_lost(name, rate):
    arrivals = generate(small_workload(rate), 120, seed=1)
    report, steps = serve(name, arrivals, observers=[Auditor()])
    assert report.num_requests == report.num_finished == len(report.times) == 120
    assert report.num_output_tokens == sum(arrival.num_output_tokens for arrival in arrivals)
    assert report.num_prompt_tokens == sum(arrival.num_prompt_tokens for arrival in arrivals)
    computed = sum(step.num_tokens for step in steps)
    assert computed == report.num_prompt_tokens + report.num_output_tokens - 120 + report.num_recomputed_tokens
    assert sorted(report.times.arrival) == pytest.approx([arrival.time for arrival in arrivals])
    assert all(0 < first <= last for first, last in zip(report.times.first_token, report.times.latency, strict=True))
    assert report.busy_seconds == pytest.approx(sum(step.seconds for step in steps))
    assert report.makespan == pytest.approx(steps[-1].time + steps[-1].seconds)
    assert all(earlier.time + earlier.seconds <= later.time + 1e-9 for earlier, later in pairwise(steps))


def test_a_run_repeats_itself():
    reports = [serve("fair", generate(small_workload(), 100, seed=3))[0].to_json() for _ in range(2)]
    assert reports[0] == reports[1]
    assert serve("fair", generate(small_workload(), 100, seed=4))[0].to_json() != reports[0]


# How it runs


def test_arrivals_are_asked_for_one_at_a_time():
    asked = []

    def coming():
        for number in range(100):
            asked.append(number)
            yield Arrival(number, float(number), 2, 1)

    simulation = ServingSimulation(scheduler("paged"), FixedCost(0.5), coming())
    for served in range(1, 20):
        assert simulation.step()
        assert len(asked) == served + 1


def test_requests_are_taken_as_they_are():
    """A request brings its own priority and stop tokens. Every token is a 0: one that stops there ends at once."""
    requests = [
        Request("ends", [1], 9, stop_token_ids=[0]),
        Request("goes on", [1], 9, stop_token_ids=[0], ignore_eos=True),
    ]
    report, steps = serve("fair", requests, FixedCost(1.0))
    assert list(report.times.num_output_tokens) == [1, 9]
    assert [event.reason for event in steps[0].events if event.kind == "finish"] == ["stop"]


def test_arrivals_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"arrives at 1\.0"):
        serve("paged", [Arrival(0, 2.0, 1, 1), Arrival(1, 1.0, 1, 1)])


def test_progress_is_told_and_ends_with_all():
    told = []
    ServingSimulation(scheduler("paged"), FixedCost(0.01), stream(small_workload(), 1000, seed=0)).run(told.append)
    assert told[-1] == 1000
    assert told == sorted(told)
    assert len(told) > 2


def test_a_scheduler_that_schedules_nothing_is_an_error_and_no_endless_loop():
    class Asleep(PagedScheduler):
        def schedule(self):
            self.outstanding = SchedulerOutput()
            return self.outstanding

    with pytest.raises(InvariantError, match="nothing was scheduled"):
        ServingSimulation(Asleep(num_blocks=4), FixedCost(), burst((3, 3))).run()


def test_memory_does_not_grow_with_the_number_of_requests():
    """Requests that have finished are gone: four numbers of each stay, and a few hundred samples of the server."""
    peaks = {}
    for count in (500, 4000):
        arrivals = stream(replace(small_workload(rate=5.0), output=LengthDistribution.from_mean(2, 0.5)), count, seed=0)
        simulation = ServingSimulation(scheduler("paged", num_blocks=400), FixedCost(0.05), arrivals)
        tracemalloc.start()
        while simulation.step():
            pass
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(simulation.report().series.time) <= NUM_SAMPLES
    assert peaks[4000] - peaks[500] < 3500 * 28 * 1.25 + 100_000


def test_the_series_covers_the_whole_run():
    report, _ = serve("paged", generate(small_workload(2.0), 600, seed=0))
    series = report.series
    assert NUM_SAMPLES / 4 < len(series.time) <= NUM_SAMPLES
    assert series.time[0] < 0.02 * report.makespan
    assert series.time[-1] > 0.98 * report.makespan
    assert series.time == sorted(series.time)
    assert max(series.num_running) <= report.max_batch_size
    assert all(0 <= share <= 1 for share in series.memory)


# Quiet stretches


@grid(
    {
        "name": ["static", "continuous", "paged", "swap", "fair"],
        "rate": [0.5, 5.0, 50.0],
        "options": [{}, {"num_blocks": 30, "max_num_seqs": 3}, {"max_model_len": 60}],
    }
)
def test_skipping_quiet_steps_changes_nothing(name, rate, options):
    """The same report to the last bit, asked at every step or only where there is something to decide."""
    reports, num_asked = [], []
    for skip_quiet in (False, True):
        asked = scheduler(name, **options)
        schedule, calls = asked.schedule, []
        asked.schedule = lambda schedule=schedule, calls=calls: calls.append(1) or schedule()
        arrivals = stream(small_workload(rate), 80, seed=1)
        reports.append(ServingSimulation(asked, COST, arrivals, skip_quiet=skip_quiet).run())
        num_asked.append(len(calls))
        asked.check()
        assert not asked.pool.num_used
    assert reports[0].to_json() == reports[1].to_json()
    assert [list(column) for column in (reports[0].times.latency, reports[0].times.first_token)] == [
        list(column) for column in (reports[1].times.latency, reports[1].times.first_token)
    ]
    assert num_asked[0] == reports[0].num_steps
    if rate < 1 or name == "static":  # where arrivals are far apart, or wait for a batch to drain
        assert num_asked[1] < 0.7 * num_asked[0]


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 5, 6])
def test_skipping_quiet_steps_changes_nothing_where_prompts_come_in_chunks(seed):
    """Small memories and small budgets: a request that is computed again, in chunks, is in no quiet step."""
    rng, reports = Random(seed), []
    options = {
        "num_blocks": rng.choice((26, 30)),
        "max_num_batched_tokens": rng.choice((3, 5, 17)),
        "long_prefill_threshold": rng.choice((0, 3)),
        "max_num_seqs": rng.choice((2, 5, 64)),
        "max_model_len": 100,
    }
    rate = rng.choice((0.5, 5.0, 20.0))
    for skip_quiet in (False, True):
        asked = scheduler("chunked", **options)
        arrivals = stream(small_workload(rate), 60, seed=seed)
        reports.append(ServingSimulation(asked, COST, arrivals, skip_quiet=skip_quiet).run())
        asked.check()
    assert reports[0].num_preemptions
    assert reports[0].to_json() == reports[1].to_json()


def test_quiet_steps_are_skipped_as_soon_as_a_request_has_left_or_has_its_prompt():
    steps = scheduler("chunked")
    schedule, calls = steps.schedule, []
    steps.schedule = lambda: calls.append(1) or schedule()
    report = ServingSimulation(steps, COST, burst((4, 20), (4, 40)), skip_quiet=True).run()
    assert report.num_steps == 40
    assert len(calls) == 3  # both prompts; the last token of the one; the last token of the other


def test_the_load_counts_a_request_that_had_no_budget_left():
    """A long prompt of higher priority takes the whole budget of three steps: another request is in none of them."""
    loads = []

    class Cost(FixedCost):
        def step_seconds(self, load):
            loads.append(load)
            return 1.0

    first = Request("first", [1] * 4, 12, ignore_eos=True, priority=1)
    long = Request("long", [1] * 31, 3, ignore_eos=True, arrival_time=0.5)  # 7 tokens next to a decode, and 3 × 8
    steps = scheduler("chunked", max_num_batched_tokens=8)
    ServingSimulation(steps, Cost(), [first, long]).run()
    assert [(load.num_sequences, load.num_new_tokens, load.num_cached_tokens) for load in loads[:7]] == [
        (1, 4, 0),
        (2, 8, 4),
        (1, 8, 7),
        (1, 8, 15),
        (1, 8, 23),
        (2, 2, 5 + 31),
        (2, 2, 6 + 32),
    ]


def test_whoever_decides_otherwise_is_asked_at_every_step():
    """A scheduler that is not one of the four, and one that is watched, are never skipped over."""

    class Mine(PagedScheduler):
        pass

    for kind, observers in ((Mine, []), (PagedScheduler, [Auditor()])):
        steps = kind(num_blocks=40)
        schedule, calls = steps.schedule, []
        steps.schedule = lambda schedule=schedule, calls=calls: calls.append(1) or schedule()
        report = ServingSimulation(steps, COST, burst((4, 40)), observers=observers, skip_quiet=True).run()
        assert len(calls) == report.num_steps == 40
