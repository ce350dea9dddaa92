"""What a server tells Prometheus: how many requests run and wait, how long they take, what the cache finds.

The server of phase 10 is given this. `Metrics` is an observer of the scheduler, and `render` is what /metrics answers.
Names, types and labels are those of vLLM (its v1 engine), so that a dashboard made for vLLM shows this server too; what
vLLM has no name for begins with `minicache:`. `METRICS` is the whole list.

The engine's thread writes at every step, another thread reads now and then. So the numbers are kept in plain Python
under one lock, which a step takes once, and become Prometheus' text when somebody asks. A counter of
`prometheus_client` has a lock of its own, and its histograms take one observation at a time: with 256 requests in
decode that would be 512 locks a step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer
from minicache.scheduler.output import SchedulerOutput

FINISHED_REASONS: Final = tuple(status.finish_reason for status in RequestStatus if status.finish_reason)
"""Values of the label finished_reason. vLLM has no "capacity"."""

REFUSED_REASONS: Final = ("queue_full", "stopping", "too_large")
"""Values of the label reason that are there from the start: status 429, status 503, and what can never be served."""

# vLLM's, and finer ones below: its first bucket for the time between tokens ends at 10 ms, MiniGPT can be quicker.
FIRST_TOKEN_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_SECONDS: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric that `Metrics` exports.

    Attributes:
        name: as in `# TYPE`; a counter's samples have `_total` behind it.
        kind: its type.
        meaning: its `# HELP`.
        labels: those besides model_name and engine.
        buckets: upper bounds of a histogram; None: 1, 2, 5, 10, … up to the longest request.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


METRICS: Final = (
    MetricSpec("vllm:num_requests_running", "gauge", "Requests in the batch."),
    MetricSpec("vllm:num_requests_waiting", "gauge", "Requests in the waiting line, those swapped out included."),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Part of the cache's blocks that requests hold, 0 to 1."),
    MetricSpec(
        "vllm:cache_config_info",
        "gauge",
        "Always 1; its labels say how the cache is set up.",
        labels=("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching"),
    ),
    MetricSpec("vllm:num_preemptions", "counter", "How often a request lost its place in the batch."),
    MetricSpec("vllm:prefix_cache_queries", "counter", "Tokens of prompts that were looked up in the prefix cache."),
    MetricSpec("vllm:prefix_cache_hits", "counter", "Tokens of prompts that the prefix cache had."),
    MetricSpec("vllm:prompt_tokens", "counter", "Tokens of prompts, those found in the prefix cache included."),
    MetricSpec("vllm:generation_tokens", "counter", "Tokens generated."),
    MetricSpec("vllm:request_success", "counter", "Requests that have ended, by reason.", labels=("finished_reason",)),
    MetricSpec("minicache:requests_refused", "counter", "Requests that were not taken on, by reason.", ("reason",)),
    MetricSpec("minicache:requests_failed", "counter", "Calls of the API that failed because the model did."),
    MetricSpec(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token.",
        buckets=FIRST_TOKEN_SECONDS,
    ),
    MetricSpec(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between a token and the next of the same request.",
        buckets=TOKEN_SECONDS,
    ),
    MetricSpec(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "A request's mean time per token after the first.",
        buckets=TOKEN_SECONDS,
    ),
    MetricSpec(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "From a request's arrival to its end.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec(
        "vllm:request_queue_time_seconds",
        "histogram",
        "From a request's arrival until it is scheduled first.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From a request's first schedule to its first token.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec(
        "vllm:request_decode_time_seconds",
        "histogram",
        "From a request's first token to its last.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec("vllm:request_prompt_tokens", "histogram", "Tokens of a request's prompt."),
    MetricSpec("vllm:request_generation_tokens", "histogram", "Tokens that a request generated."),
    MetricSpec("vllm:iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=STEP_TOKENS),
)
"""Everything that `Metrics` exports, besides what Prometheus' client says of the process (`process_…`)."""


@dataclass(slots=True)
class Distribution:
    """The numbers of one histogram.

    Attributes:
        bounds: upper bounds of the buckets but the last, rising.
        counts: observations in each bucket; the last is for all above.
        total: their sum.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Note an observation of `value`, or several at once. A value that is a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as Prometheus writes it, observations up to it), the last bound +Inf."""
        bounds = map(floatToGoString, (*self.bounds, float("inf")))
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass(slots=True)
class Life:
    """What is remembered of an unfinished request. Times are in seconds, on the clock of `Metrics`.

    Attributes:
        arrival: when it arrived.
        num_prompt: tokens to count as prompt tokens when its first token comes: 0 for a fork, whose parent did that.
        admitted: when it was scheduled first; None before.
        first_token: when its first token came; None before.
        last_token: when its newest came.
        num_outputs: tokens of output that it had then.
        num_given: of these, the tokens that a fork has got from its parent.
    """

    arrival: float
    num_prompt: int
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_outputs: int = 0
    num_given: int = 0


class Metrics(Observer):
    """Counts what a scheduler does, and tells it as Prometheus reads it.

    Give it to `observe` or to an `LLM` that has the same scheduler. It counts from then on; of requests that were there
    before, it counts nothing. The observer's methods are for the thread that runs the scheduler; the others may be
    called from any.

    Every request that was added or forked ends once: as many observations of end-to-end latency as requests in
    `vllm:request_success`. A prompt counts once, however often a preemption has it computed again. A step that failed
    (scheduled, never reported) gave nobody a token and counts nothing, but what its `schedule()` did stays done:
    preemptions, first admissions, ends for want of memory.

    Args:
        model_name: the label model_name of every metric.
        scheduler: whose options vllm:cache_config_info shows; observed or not.
        clock: seconds; the one that requests' arrival_time is from. A request whose arrival_time is 0 arrives when it
            is added.
    """

    content_type = CONTENT_TYPE_LATEST
    """Of what `render` returns."""

    def __init__(self, model_name: str, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._labels = {"model_name": model_name, "engine": "0"}  # vLLM's engines are numbered; here there is one
        self._prefix_caching = bool(getattr(scheduler, "prefix_caching", False))
        self._num_blocks = scheduler.pool.num_blocks
        self._lives: dict[Request, Life] = {}
        self._unadmitted: set[Request] = set()  # of these, the ones that no step has had yet
        self._lock = Lock()
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            spec.name: {} if spec.labels else {(): 0} for spec in METRICS if spec.kind != "histogram"
        }
        self._values["vllm:cache_config_info"][_cache_config(scheduler, self._prefix_caching)] = 1
        self._values["vllm:request_success"] = {(reason,): 0 for reason in FINISHED_REASONS}
        self._values["minicache:requests_refused"] = {(reason,): 0 for reason in REFUSED_REASONS}
        longest = scheduler.max_model_len or self._num_blocks * scheduler.pool.block_size
        self._histograms: dict[str, Distribution] = {}
        for spec in METRICS:
            if spec.kind == "histogram":
                bounds = _token_bounds(longest) if spec.buckets is None else spec.buckets
                self._histograms[spec.name] = Distribution(bounds, [0] * (len(bounds) + 1))
        self._note_state(scheduler)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    # What a server calls

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, as they were at one moment."""
        return generate_latest(self._registry)

    def count_refused(self, reason: str) -> None:
        """A request was not taken on, for a reason that the scheduler never saw.

        Args:
            reason: "queue_full" or "stopping". ("too_large" is counted by `on_refuse`.)
        """
        with self._lock:
            refused = self._values["minicache:requests_refused"]
            refused[reason,] = refused.get((reason,), 0) + 1

    def count_failed(self) -> None:
        """A call of the API failed because the model did. Its requests count as aborted, which they were."""
        with self._lock:
            self._add("minicache:requests_failed")

    def collect(self) -> Iterator[Metric]:
        """What a registry of `prometheus_client` asks its collectors for."""
        with self._lock:
            values = {name: dict(numbers) for name, numbers in self._values.items()}
            histograms = {
                name: Distribution(each.bounds, each.counts.copy(), each.total)
                for name, each in self._histograms.items()
            }
        names, common = tuple(self._labels), tuple(self._labels.values())
        for spec in METRICS:
            family: GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
            if spec.kind == "histogram":
                numbers = histograms[spec.name]
                family = HistogramMetricFamily(spec.name, spec.meaning, labels=names)
                family.add_metric(common, numbers.buckets(), numbers.total)
            else:
                kind = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
                family = kind(spec.name, spec.meaning, labels=(*names, *spec.labels))
                for labels, value in values[spec.name].items():
                    family.add_metric((*common, *labels), value)
            yield family

    # What the scheduler's thread tells

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """A request has arrived."""
        with self._lock:
            self._lives[request] = Life(request.arrival_time or self._clock(), request.num_prompt_tokens)
            self._unadmitted.add(request)
            self._note_state(scheduler)

    def on_refuse(self, scheduler: Scheduler, request: Request, error: RequestTooLargeError) -> None:
        """A request can never be served."""
        self.count_refused("too_large")

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """A fork has its parent's past: its arrival, its admission, and the tokens that it was given."""
        with self._lock:
            now = self._clock()
            past = self._lives.get(parent) or Life(child.arrival_time or now, 0, now, now, now)
            num_given = len(child.output_token_ids)
            life = Life(past.arrival, 0, past.admitted, num_outputs=num_given, num_given=num_given)
            if num_given:
                life.first_token, life.last_token = past.first_token, past.last_token
            self._lives[child] = life
            self._note_state(scheduler)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """A step was ordered. What was preempted, admitted or ended is so even if its tokens never come."""
        with self._lock:
            now = self._clock()
            self._add("vllm:num_preemptions", len(output.preempted))
            if self._unadmitted:
                for request in output.scheduled:
                    if request in self._unadmitted:
                        self._admit(request, now)
            if output.finished:  # seldom
                ended = set(output.finished)
                for request in [each for each in self._lives if each.request_id in ended]:
                    self._end(request, now)
            self._note_state(scheduler)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """A step's tokens were recorded: whoever has more than before has got one now."""
        with self._lock:
            now = self._clock()
            lives, num_generated, num_prompt = self._lives, 0, 0
            last_tokens: dict[float, int] = {}  # who had a token in one step has one time, so there are few of these
            for request in output.scheduled:  # this loop is what a token costs
                life = lives.get(request)
                if life is None:  # ended from outside since it was scheduled
                    continue
                num_new = len(request.output_token_ids) - life.num_outputs
                if not num_new:  # still in its prompt
                    continue
                num_generated += num_new
                life.num_outputs += num_new
                if life.first_token is None:
                    life.first_token = now
                    num_prompt += life.num_prompt
                    self._observe("vllm:time_to_first_token_seconds", now - life.arrival)
                else:
                    last_tokens[life.last_token] = last_tokens.get(life.last_token, 0) + 1
                life.last_token = now
            for last_token, times in last_tokens.items():
                self._observe("vllm:inter_token_latency_seconds", now - last_token, times)
            self._add("vllm:generation_tokens", num_generated)
            self._add("vllm:prompt_tokens", num_prompt)
            if output.scheduled:
                self._observe("vllm:iteration_tokens_total", output.total_num_scheduled_tokens)
            for request in ended:
                self._end(request, now)
            self._note_state(scheduler)

    def on_recover(self, scheduler: Scheduler) -> None:
        """A step failed, and nothing runs. Its requests do not count as preempted: that would mean lack of memory."""
        with self._lock:
            self._note_state(scheduler)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """A request was ended from outside."""
        with self._lock:
            self._end(request, self._clock())
            self._note_state(scheduler)

    # Of these, whoever calls holds the lock.

    def _admit(self, request: Request, now: float) -> None:
        """A request is scheduled for the first time."""
        self._unadmitted.remove(request)
        self._lives[request].admitted = now
        if self._prefix_caching:  # as vLLM, only now: that a victim finds its own blocks again is no merit of the cache
            self._add("vllm:prefix_cache_queries", request.num_prompt_tokens)
            self._add("vllm:prefix_cache_hits", request.num_cached_tokens)

    def _end(self, request: Request, now: float) -> None:
        """A request has ended: it is forgotten, and its times and lengths are noted. One that is unknown is not."""
        life = self._lives.pop(request, None)
        if life is None:
            return
        self._unadmitted.discard(request)
        self._add("vllm:request_success", 1, str(request.finish_reason))
        self._observe("vllm:e2e_request_latency_seconds", now - life.arrival)
        admitted = now if life.admitted is None else life.admitted
        self._observe("vllm:request_queue_time_seconds", admitted - life.arrival)
        if life.first_token is not None:
            decode = life.last_token - life.first_token
            self._observe("vllm:request_prefill_time_seconds", life.first_token - admitted)
            self._observe("vllm:request_decode_time_seconds", decode)
            if life.num_outputs > 1:
                self._observe("vllm:request_time_per_output_token_seconds", decode / (life.num_outputs - 1))
        self._observe("vllm:request_prompt_tokens", request.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", life.num_outputs - life.num_given)

    def _note_state(self, scheduler: Scheduler) -> None:
        """Set the gauges to what is so now."""
        self._values["vllm:num_requests_running"][()] = scheduler.num_running
        self._values["vllm:num_requests_waiting"][()] = scheduler.num_waiting
        self._values["vllm:kv_cache_usage_perc"][()] = scheduler.pool.num_used / self._num_blocks

    def _add(self, name: str, amount: int = 1, *labels: str) -> None:
        self._values[name][labels] += amount

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)


def _cache_config(scheduler: Scheduler, prefix_caching: bool) -> tuple[str, ...]:
    """Values of the labels of vllm:cache_config_info, in the order of its `MetricSpec`."""
    host_pool = getattr(scheduler, "host_pool", None)
    num_host_blocks = 0 if host_pool is None else host_pool.num_blocks
    return str(scheduler.pool.block_size), str(scheduler.pool.num_blocks), str(num_host_blocks), str(prefix_caching)


def _token_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `longest`: vLLM's buckets for numbers of tokens."""
    bounds = (step * 10**power for power in range(len(str(longest))) for step in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= longest)
