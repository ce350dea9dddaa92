"""Metrics count what schedulers do: compared with the trace of a recorder, and with the requests themselves."""

from __future__ import annotations

import gc
import json
import random
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from minicache.engine.llm import LLM
from minicache.engine.options import ReplicaOptions
from minicache.engine.sampling import SamplingParams
from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import SCHEDULERS, Scheduler, SchedulerOutput, create_scheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.serving.http.metrics import KEY_METRICS, METRICS, Metrics
from minicache.serving.replica.llm import info_of, make_llm
from minicache.trace import TraceStep

ROOT = Path(__file__).parents[2]
TOKEN = 7


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sample(dict[str, float]):
    """What a scrape says: samples by name, or `name{label}` for a label that the metric has besides the common two."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                if not sample.name.startswith("process_"):
                    assert (labels.pop("model_name"), labels.pop("engine")) == ("minigpt", "0")
                key = sample.name + (f"{{{','.join(labels.values())}}}" if labels else "")
                assert key not in self
                self[key] = sample.value

    def ended(self) -> dict[str, float]:
        prefix = "vllm:request_success_total{"
        return {key[len(prefix) : -1]: value for key, value in self.items() if key.startswith(prefix) and value}

    def check_histogram(self, name: str, values: Iterable[float]) -> None:
        """The histogram has these observations and no others."""
        values = list(values)
        assert self[f"vllm:{name}_count"] == len(values), name
        assert self[f"vllm:{name}_sum"] == pytest.approx(sum(values)), name
        prefix = f"vllm:{name}_bucket{{"
        for key, value in self.items():
            if key.startswith(prefix):
                bound = float(key[len(prefix) : -1])
                assert value == sum(each <= bound for each in values), f"{name} up to {bound}"


def request_of(request_id: Any, num_prompt_tokens: int = 5, max_tokens: int = 4, **more: Any) -> Request:
    return Request(request_id, [TOKEN] * num_prompt_tokens, max_tokens, **more)


def watched(stage: str = "paged", **options: Any) -> tuple[Scheduler, Metrics]:
    scheduler = create_scheduler(stage, **{"num_blocks": 10} | options)
    metrics = Metrics("minigpt")
    return observe(scheduler, metrics.watch(scheduler)), metrics


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    return output


# One life, by hand


def test_the_times_of_one_request() -> None:
    clock, scheduler = Clock(), create_scheduler("chunked", num_blocks=10, max_num_batched_tokens=16)
    metrics = Metrics("minigpt")
    scheduler = observe(scheduler, metrics.watch(scheduler, clock=clock))
    scheduler.add_request(request_of("a", 20, 3, arrival_time=999.0))
    assert (Sample(metrics)["vllm:num_requests_running"], Sample(metrics)["vllm:num_requests_waiting"]) == (0, 1)
    clock.now = 1000.5
    lost = scheduler.schedule()  # it is admitted here, though this step fails
    assert lost.num_scheduled_tokens == {"a": 16}
    assert (Sample(metrics)["vllm:num_requests_running"], Sample(metrics)["vllm:num_requests_waiting"]) == (1, 0)
    clock.now = 1001.0
    for seconds in (0.25, 0.5, 0.03, 0.02):  # 16 tokens of the prompt, 4 and the first token, the second, the third
        output = scheduler.schedule()
        clock.now += seconds
        assert scheduler.has_unfinished
        scheduler.update_from_output(output, {} if seconds == 0.25 else {"a": TOKEN})
        if seconds == 0.25:
            assert Sample(metrics)["vllm:prompt_tokens_total"] == 0
            assert Sample(metrics)["vllm:kv_cache_usage_perc"] == 0.1
    got = Sample(metrics)
    got.check_histogram("time_to_first_token_seconds", [2.75])
    got.check_histogram("inter_token_latency_seconds", [0.03, 0.02])
    got.check_histogram("request_time_per_output_token_seconds", [0.025])
    got.check_histogram("request_queue_time_seconds", [1.5])
    got.check_histogram("request_prefill_time_seconds", [1.25])
    got.check_histogram("request_decode_time_seconds", [0.05])
    got.check_histogram("e2e_request_latency_seconds", [2.8])
    got.check_histogram("iteration_tokens_total", [16, 4, 1, 1])
    got.check_histogram("request_prompt_tokens", [20])
    got.check_histogram("request_generation_tokens", [3])
    assert (got["vllm:prompt_tokens_total"], got["vllm:generation_tokens_total"]) == (20, 3)
    assert got.ended() == {"length": 1}
    assert got["vllm:num_requests_running"] == got["vllm:num_requests_waiting"] == got["vllm:kv_cache_usage_perc"] == 0


def test_a_request_without_an_arrival_time_arrives_when_it_is_added() -> None:
    clock, scheduler = Clock(), create_scheduler("paged", num_blocks=10)
    metrics = Metrics("minigpt")
    scheduler = observe(scheduler, metrics.watch(scheduler, clock=clock))
    scheduler.add_request(request_of("a"))
    clock.now += 0.5
    step(scheduler)
    Sample(metrics).check_histogram("time_to_first_token_seconds", [0.5])


def test_what_ends_before_it_began() -> None:
    clock, scheduler = Clock(), create_scheduler("paged", num_blocks=10)
    metrics = Metrics("minigpt")
    scheduler = observe(scheduler, metrics.watch(scheduler, clock=clock))
    scheduler.add_request(request_of("a"))
    clock.now += 2.0
    assert scheduler.abort_request("a")
    assert not scheduler.abort_request("a")
    got = Sample(metrics)
    assert got.ended() == {"abort": 1}
    got.check_histogram("request_queue_time_seconds", [2.0])  # it has waited all its life
    got.check_histogram("request_prefill_time_seconds", [])
    got.check_histogram("request_generation_tokens", [0])
    assert got["vllm:prompt_tokens_total"] == got["vllm:num_requests_waiting"] == 0


def test_refused_and_failed() -> None:
    scheduler, metrics = watched(num_blocks=2)
    with pytest.raises(RequestTooLargeError):
        scheduler.add_request(request_of("a", 100))
    metrics.count_refused("queue_full")
    metrics.count_refused("queue_full")
    metrics.count_failed()
    got = Sample(metrics)
    refused = [
        got[f"minicache:requests_refused_total{{{reason}}}"] for reason in ("queue_full", "stopping", "too_large")
    ]
    assert refused == [2, 0, 1]
    assert got["minicache:requests_failed_total"] == 1
    assert got.ended() == {}


def test_an_id_may_be_used_again_before_the_step_is_reported() -> None:
    scheduler, metrics = watched()
    scheduler.add_request(request_of("a"))
    output = scheduler.schedule()
    scheduler.abort_request("a")
    scheduler.add_request(request_of("a", max_tokens=1))
    scheduler.update_from_output(output, {"a": TOKEN})
    assert Sample(metrics)["vllm:generation_tokens_total"] == 0
    step(scheduler)
    assert Sample(metrics)["vllm:generation_tokens_total"] == 1
    assert Sample(metrics).ended() == {"abort": 1, "length": 1}


def test_who_outgrows_the_memory_has_ended() -> None:
    scheduler, metrics = watched(num_blocks=2)
    drive(scheduler, [request_of("a", 20, 100)])
    got = Sample(metrics)
    assert got.ended() == {"capacity": 1}
    assert got["vllm:generation_tokens_total"] == 13
    got.check_histogram("request_generation_tokens", [13])


def test_a_victim_finding_its_own_blocks_is_no_hit() -> None:
    scheduler, metrics = watched("paged", num_blocks=10, prefix_caching=True)
    requests = [Request(name, range(at, at + 80), 20) for name, at in (("a", 1), ("b", 201))]
    drive(scheduler, requests)
    got = Sample(metrics)
    assert got["vllm:num_preemptions_total"] == sum(each.num_preemptions for each in requests) == 1
    assert (got["vllm:prefix_cache_queries_total"], got["vllm:prefix_cache_hits_total"]) == (160, 0)
    drive(
        scheduler, [Request("c", range(1, 49), 1), Request("d", range(301, 349), 1), Request("e", range(301, 350), 1)]
    )
    stats: Any = scheduler
    assert stats.stats.num_queried_tokens > Sample(metrics)["vllm:prefix_cache_queries_total"] == 160 + 48 + 48 + 49
    assert Sample(metrics)["vllm:prefix_cache_hits_total"] >= 48
    assert Sample(metrics)["vllm:prompt_tokens_total"] == 160 + 48 + 48 + 49


def test_ended_requests_are_forgotten() -> None:
    scheduler, metrics = watched("chunked", max_num_seqs=2)
    for each in range(4):
        scheduler.add_request(request_of(f"forgotten {each}"))
    step(scheduler)
    for each in range(4):  # two were in the batch, two never were
        scheduler.abort_request(f"forgotten {each}")
    step(scheduler)
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is Request and "forgotten" in str(each.request_id)]
    assert not left
    assert Sample(metrics).ended() == {"abort": 4}


def test_twins() -> None:
    clock = Clock()
    scheduler: Any = create_scheduler("chunked", num_blocks=20)
    metrics = Metrics("minigpt")
    watch = metrics.watch(scheduler, clock=clock)
    scheduler = observe(observe(scheduler, Recorder(lambda _: None)), watch)
    scheduler.add_request(request_of("a", 10, 4))
    clock.now += 1.0
    step(scheduler)
    scheduler.fork_request("a", "fresh", [])
    scheduler.fork_request("a", "same")
    assert Sample(metrics)["vllm:num_requests_running"] == 3
    clock.now += 0.5
    while scheduler.has_unfinished:
        step(scheduler)
        clock.now += 0.25
    got = Sample(metrics)
    assert got["vllm:prompt_tokens_total"] == 10
    assert got["vllm:generation_tokens_total"] == 4 + 4 + 3
    assert got.ended() == {"length": 3}
    got.check_histogram("request_generation_tokens", [4, 4, 3])
    got.check_histogram("time_to_first_token_seconds", [1.0, 1.5])  # the fork that was given a token has had it
    got.check_histogram("inter_token_latency_seconds", [0.5, 0.5] + [0.25] * 7)
    got.check_histogram("request_queue_time_seconds", [1.0] * 3)
    got.check_histogram("request_prefill_time_seconds", [0.0, 0.5, 0.0])


# Many lives, against the trace


class Diary(Observer):
    """When each request was added, scheduled first, and ended; in the words of a test, not of the metrics."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.added: dict[RequestId, float] = {}
        self.scheduled: dict[RequestId, float] = {}
        self.ended: dict[RequestId, tuple[float, str]] = {}
        self.requests: dict[RequestId, Request] = {}
        self.num_lost = self.num_cut = self.num_preempted = 0

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        self.added[request.request_id] = self.clock()
        self.requests[request.request_id] = request

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        for request_id in output.num_scheduled_tokens:
            self.scheduled.setdefault(request_id, self.clock())
        self.num_preempted += len(output.preempted)
        for request_id in output.finished:
            self.ended[request_id] = self.clock(), "capacity"

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        for request in ended:
            self.on_finish(scheduler, request)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        assert request.request_id not in self.ended
        self.ended[request.request_id] = self.clock(), str(request.finish_reason)


def live_through(scheduler: Scheduler, diary: Diary, clock: Clock, rng: random.Random) -> None:
    """Requests come, leave at any time, are stopped by strings; steps fail."""
    coming = [
        Request(
            each,
            [TOKEN + rng.randint(0, 1)] * rng.randint(1, 60),
            rng.randint(1, 30),
            stop_token_ids=[1],
            priority=rng.randint(0, 1),
        )
        for each in range(60)
    ]
    while coming or scheduler.has_unfinished:
        for _ in range(min(len(coming), rng.choice((0, 0, 1, 4)))):
            scheduler.add_request(coming.pop())
            clock.now += rng.random() / 1000
        output = scheduler.schedule()
        clock.now += rng.choice((0.002, 0.02, 0.2, 2.0)) * rng.random()
        if rng.random() < 0.1:  # the model fails, and perhaps someone leaves for it
            diary.num_lost += len(output.scheduled)
            if output.scheduled and rng.random() < 0.5:
                scheduler.abort_request(rng.choice(output.scheduled).request_id)
            scheduler.recover()
            continue
        here = [*scheduler.running, *scheduler.waiting.values()]
        if here and rng.random() < 0.15:
            leaving = rng.choice(here)
            diary.num_cut += leaving in output.scheduled
            scheduler.abort_request(leaving.request_id)
        tokens = {each: rng.choice((1, *[TOKEN] * 30)) for each in output.num_scheduled_tokens}
        scheduler.update_from_output(output, tokens)
        for request in output.scheduled:
            if request.output_token_ids and rng.random() < 0.02:
                scheduler.finish_request(request.request_id, RequestStatus.FINISHED_STOPPED)
        clock.now += rng.random() / 1000


def token_times(steps: list[TraceStep]) -> dict[RequestId, list[float]]:
    """When each request had its tokens, by the trace."""
    times: dict[RequestId, list[float]] = defaultdict(list)
    for each in steps:
        aborted = {event.request_id for event in each.events if event.kind == "finish" and event.reason == "abort"}
        for entry in each.batch:
            complete = (
                entry.num_computed_tokens + entry.num_new_tokens == entry.num_prompt_tokens + entry.num_output_tokens
            )
            if complete and entry.request_id not in aborted:
                times[entry.request_id].append(each.time + each.seconds)
    return times


SETUPS: list[tuple[str, dict[str, Any]]] = [
    *((stage, {}) for stage in SCHEDULERS),
    *((stage, {"prefix_caching": True}) for stage in ("paged", "fair", "chunked")),
    ("fair", {"preemption": "swap", "num_host_blocks": 6}),
    ("chunked", {"max_num_batched_tokens": 24, "prefix_caching": True, "num_blocks": 7}),
]


@pytest.mark.parametrize(("stage", "options"), SETUPS)
def test_against_the_trace(stage: str, options: dict[str, Any]) -> None:
    clock, steps = Clock(), list[TraceStep]()
    scheduler = create_scheduler(stage, **{"num_blocks": 8, "max_num_seqs": 6} | options)
    metrics, diary = Metrics("minigpt"), Diary(clock)
    watch = metrics.watch(scheduler, clock=clock)
    scheduler = observe(observe(scheduler, Recorder(steps.append, clock), diary), watch)
    live_through(scheduler, diary, clock, random.Random(stage))
    got, tokens, requests = Sample(metrics), token_times(steps), list(diary.requests.values())
    assert min(diary.num_lost, diary.num_cut) > 0, "no step failed, or no one left in the middle of one"
    assert {id: len(times) for id, times in tokens.items()} == {
        each.request_id: len(each.output_token_ids) for each in requests if each.output_token_ids
    }
    # Counters
    assert got.ended() == Counter(reason for _, reason in diary.ended.values())
    assert sum(got.ended().values()) == len(requests) == 60
    assert got["vllm:generation_tokens_total"] == sum(map(len, tokens.values()))
    assert got["vllm:prompt_tokens_total"] == sum(each.num_prompt_tokens for each in requests if each.output_token_ids)
    assert got["vllm:num_preemptions_total"] == diary.num_preempted  # those of steps that failed do not count
    if stage not in ("static", "continuous"):
        assert got["vllm:num_preemptions_total"]
    looked_up = [each for each in requests if each.request_id in diary.scheduled and options.get("prefix_caching")]
    assert got["vllm:prefix_cache_queries_total"] == sum(each.num_prompt_tokens for each in looked_up)
    assert got["vllm:prefix_cache_hits_total"] == sum(each.num_cached_tokens for each in looked_up)
    assert bool(got["vllm:prefix_cache_hits_total"]) == bool(looked_up)
    # Gauges: no one is left
    assert got["vllm:num_requests_running"] == got["vllm:num_requests_waiting"] == got["vllm:kv_cache_usage_perc"] == 0
    # Histograms
    first = {id: times[0] for id, times in tokens.items()}
    began = {id: diary.scheduled.get(id, end) for id, (end, _) in diary.ended.items()}
    decode = {id: times[-1] - times[0] for id, times in tokens.items()}
    gaps = [after - before for times in tokens.values() for before, after in pairwise(times)]
    got.check_histogram("inter_token_latency_seconds", gaps)
    got.check_histogram("time_to_first_token_seconds", (first[id] - diary.added[id] for id in first))
    got.check_histogram("e2e_request_latency_seconds", (end - diary.added[id] for id, (end, _) in diary.ended.items()))
    got.check_histogram("request_queue_time_seconds", (began[id] - diary.added[id] for id in began))
    got.check_histogram("request_prefill_time_seconds", (first[id] - began[id] for id in first))
    got.check_histogram("request_decode_time_seconds", decode.values())
    means = (decode[id] / (len(times) - 1) for id, times in tokens.items() if len(times) > 1)
    got.check_histogram("request_time_per_output_token_seconds", means)
    got.check_histogram("request_prompt_tokens", (each.num_prompt_tokens for each in requests))
    got.check_histogram("request_generation_tokens", (len(each.output_token_ids) for each in requests))
    got.check_histogram("iteration_tokens_total", (each.num_tokens for each in steps if each.batch))


@pytest.mark.parametrize("stage", SCHEDULERS)
def test_gauges_follow_every_call(stage: str) -> None:
    scheduler, metrics = watched(stage, num_blocks=6)

    def check() -> None:
        lines = [line.split() for line in metrics.render().decode().splitlines()]
        got = {line[0].partition("{")[0]: float(line[1]) for line in lines if len(line) == 2}
        assert got["vllm:num_requests_running"] == scheduler.num_running
        assert got["vllm:num_requests_waiting"] == scheduler.num_waiting
        assert got["vllm:kv_cache_usage_perc"] == pytest.approx(scheduler.pool.num_used / 6)

    check()
    for each in range(4):
        scheduler.add_request(request_of(each, 30, 8))
        check()
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        check()
        if len(scheduler.waiting) == 2:
            scheduler.recover()
            check()
            output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
        check()
        if scheduler.abort_request(3):
            check()


# With a model


def llm_of(*, overlaps: bool, **options: Any) -> tuple[LLM, Metrics]:
    scheduler = create_scheduler(
        "async" if overlaps else "chunked", **{"num_blocks": 64, "max_model_len": 512} | options
    )
    metrics = Metrics("minigpt")
    return LLM(scheduler=scheduler, observers=[metrics.watch(scheduler)], async_scheduling=overlaps), metrics


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_llm_with_stop_strings_several_answers_and_aborts(overlaps: bool) -> None:
    llm, metrics = llm_of(prefix_caching=True, overlaps=overlaps)
    greedy, several = SamplingParams(max_tokens=12), SamplingParams(max_tokens=6, temperature=1.0, n=3, ignore_eos=True)
    [whole] = llm.generate(["Yesterday I"], greedy)
    word = whole.text.split()[2]
    completions = llm.generate(["Yesterday I"], SamplingParams(max_tokens=12, stop=(word,)))
    completions += [whole, *llm.generate(["She"], several)]
    llm.abort_request(llm.add_request("They are", greedy))
    got = Sample(metrics)
    assert got.ended() == Counter(each.finish_reason for each in completions) + Counter(["abort"])
    assert completions[0].finish_reason == "stop"
    assert got["vllm:generation_tokens_total"] == sum(len(each.token_ids) for each in completions)
    assert llm.tokenizer is not None
    prompts = [len(llm.tokenizer.encode(prompt)) for prompt in ("Yesterday I", "Yesterday I", "She")]
    assert got["vllm:prompt_tokens_total"] == sum(prompts)
    assert got["vllm:time_to_first_token_seconds_count"] == len(completions)
    assert got["vllm:num_requests_running"] == got["vllm:num_requests_waiting"] == got["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_llm_whose_model_fails(monkeypatch: pytest.MonkeyPatch, overlaps: bool) -> None:
    llm, metrics = llm_of(overlaps=overlaps)
    good, calls = llm.run_model, iter([True, False, True, True, *[False] * 100])

    def run_model(output: SchedulerOutput) -> Any:
        if next(calls):
            raise RuntimeError("out of memory")
        return good(output)

    monkeypatch.setattr(llm, "run_model", run_model)
    for prompt in ("Yesterday I", "She"):
        llm.add_request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    num_failed = 0
    while llm.has_unfinished:
        try:
            llm.step()
        except RuntimeError:
            num_failed += 1
    got = Sample(metrics)
    assert num_failed == 3
    assert got["vllm:generation_tokens_total"] == 10
    assert got["vllm:iteration_tokens_total_count"] == 5
    assert got.ended() == {"length": 2}


# Read from another thread, and cheap


class Interrupted(list[Request]):
    """A list that has a scrape made when someone reads it."""

    def __init__(self, requests: list[Request], scrape: Callable[[], object]) -> None:
        super().__init__(requests)
        self.thread = threading.Thread(target=scrape)

    def __iter__(self) -> Iterator[Request]:
        self.thread.start()
        self.thread.join()
        return super().__iter__()


def test_a_scrape_in_the_middle_of_an_update_sees_nothing_of_it() -> None:
    scheduler = create_scheduler("paged", num_blocks=10)
    metrics = Metrics("minigpt")
    watch = metrics.watch(scheduler)
    request, scrapes = request_of("a", max_tokens=1), list[Sample]()
    scheduler.add_request(request)
    watch.on_add(scheduler, request)
    output = scheduler.schedule()
    watch.on_schedule(scheduler, output)
    ended = Interrupted(scheduler.update_from_output(output, {"a": TOKEN}), lambda: scrapes.append(Sample(metrics)))
    watch.on_update(scheduler, output, ended)
    ended.thread.join()
    for got, num_done in ((scrapes[0], 0), (Sample(metrics), 1)):
        assert got["vllm:generation_tokens_total"] == sum(got.ended().values()) == num_done
        assert got["vllm:num_requests_running"] == 1 - num_done


def test_every_scrape_is_of_one_moment() -> None:
    scheduler, metrics = watched("chunked", num_blocks=40, max_num_seqs=16)
    done, faults = threading.Event(), list[str]()

    def scrape() -> None:
        while not done.is_set():
            got = Counter[str]()
            for family in metrics.collect():  # what `render` reads; a whole scrape would leave time for few
                for sample in family.samples:
                    got[sample.name] += int(sample.value)
            tokens = got["vllm:time_to_first_token_seconds_count"] + got["vllm:inter_token_latency_seconds_count"]
            if got["vllm:generation_tokens_total"] != tokens:
                faults.append(f"{got['vllm:generation_tokens_total']} tokens, {tokens} times of tokens")
            if got["vllm:e2e_request_latency_seconds_count"] != got["vllm:request_success_total"]:
                faults.append("requests that finished, and their latencies")

    thread, interval = threading.Thread(target=scrape), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or a scrape would barely ever fall into the middle of an update
    thread.start()
    try:
        for turn in range(10):
            drive(scheduler, [request_of(f"{turn} {each}", 20, 20) for each in range(30)])
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert not faults
    assert Sample(metrics)["vllm:generation_tokens_total"] == 10 * 30 * 20


# Names, the page, the dashboard


def test_names_types_and_labels_are_vllms() -> None:
    text = watched("paged", preemption="swap", num_host_blocks=3)[1].render().decode()
    for line in (
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="minigpt"} 0.0',
        "# TYPE vllm:generation_tokens_total counter",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="minigpt"} 0.0',
        "# TYPE vllm:inter_token_latency_seconds histogram",
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.025",model_name="minigpt"} 0.0',
        'vllm:request_prompt_tokens_bucket{engine="0",le="100.0",model_name="minigpt"} 0.0',
        'vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="minigpt"} 0.0',
        'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="False",engine="0",model_name="minigpt",'
        'num_cpu_blocks="3",num_gpu_blocks="10"} 1.0',
    ):
        assert line in text.splitlines()
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="200.0"' not in text  # no request is longer than the cache
    assert Metrics.content_type.startswith("text/plain; version=")


@pytest.mark.parametrize("kv_cache_dtype", [None, "int8", "fp8_e4m3"])
def test_what_the_cache_holds_is_a_label(kv_cache_dtype: str | None) -> None:
    """As an engine's process makes it from its options; without a word, vLLM's "auto"."""
    options = ReplicaOptions(kv_cache_dtype=kv_cache_dtype, num_blocks=40, num_threads=torch.get_num_threads())
    llm = make_llm(options)
    metrics = Metrics("minigpt")
    metrics.add_engine(0, info_of(llm).cache)
    assert f'cache_dtype="{kv_cache_dtype or "auto"}"' in metrics.render().decode()
    assert (llm.storage.dtype == torch.float32) == (kv_cache_dtype is None)


def test_two_servers_do_not_share_numbers() -> None:
    (one, its), (_, others) = watched(), watched()
    one.add_request(request_of("a"))
    assert Sample(its)["vllm:num_requests_waiting"] == 1
    assert Sample(others)["vllm:num_requests_waiting"] == 0


def test_the_page_lists_every_metric() -> None:
    page = (ROOT / "docs/en/reference/metrics.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    listed = {row[0].strip("`"): (row[1], row[2]) for row in rows if row[0].startswith(("`vllm:", "`minicache:"))}
    exported = {
        each.name + ("_total" if each.kind == "counter" else ""): (each.kind, each.meaning.rstrip("."))
        for each in (*METRICS, *KEY_METRICS)
    }
    assert listed == exported
    assert all(len(row) == 4 and row[3] for row in rows)


DASHBOARD = json.loads((ROOT / "dashboards/minicache.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_exported() -> None:
    exported = {key.split("{")[0] for key in Sample(watched()[1])}
    exported |= {each.name + ("_total" if each.kind == "counter" else "") for each in KEY_METRICS}
    named: Callable[[str], list[str]] = re.compile(r"\b(?:vllm|minicache):\w+").findall
    used = {name for expression in expressions() for name in named(expression)}
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    used |= set(named(variables["model_name"]["definition"]))
    assert used <= exported
    assert not {"running", "waiting"} - {name.rsplit("_", 1)[-1] for name in used}
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        assert expression.count('{model_name=~"$model_name"}') == len(named(expression))
    for quantile in (name for name in expressions() if "histogram_quantile" in name):
        assert "_bucket{" in quantile
        assert "by (le)" in quantile


def test_the_dashboard_has_grafanas_shape() -> None:
    assert {"uid", "title", "schemaVersion", "templating", "panels", "time"} <= DASHBOARD.keys()
    assert DASHBOARD["schemaVersion"] >= 36
    assert "__inputs" not in DASHBOARD
    source, model = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert model["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{one} and {other} overlap"


def test_the_scrape_example() -> None:
    import yaml

    config = yaml.safe_load((ROOT / "dashboards/prometheus.yml").read_text(encoding="utf-8"))
    [job] = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
