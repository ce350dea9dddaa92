"""A server's metrics for Prometheus: running and waiting requests, latencies, prefix cache hits.

The server of phase 10 uses this. `Metrics` keeps the numbers, and `render` returns the text of /metrics.
`minicache.serving.replica.stats.SchedulerStats` updates them, in the engine's thread or in its process. Names, types
and labels are those of vLLM (its v1 engine), so a dashboard made for vLLM shows this server too; metrics that vLLM does
not have begin with `minicache:`. `METRICS` is the whole list.

The engine writes at every step, another thread reads occasionally. So the numbers are kept in plain Python under one
lock, which a step takes twice, and become Prometheus' text on request. Each counter of `prometheus_client` has a lock,
and its histograms take one observation at a time: with 256 requests in decode that would be 512 locks a step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from minicache.request import RequestStatus
from minicache.scheduler import Scheduler
from minicache.serving.http.keys import UNKNOWN
from minicache.serving.replica.messages import CacheInfo, Update
from minicache.serving.replica.stats import SchedulerStats, cache_info

LABELS: Final = ("model_name", "engine")
"""Of every metric. vLLM's engines are numbered from 0."""

FINISHED_REASONS: Final = tuple(status.finish_reason for status in RequestStatus if status.finish_reason)
"""Values of the label finished_reason. vLLM has no "capacity"."""

REFUSED_REASONS: Final = ("queue_full", "stopping", "not_ready", "too_large")
"""Values of the label reason that are there from the start: status 429, status 503, and what can never be served.

The limits of API keys add "concurrency_limit" and "token_limit", once they refuse a request.
"""

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
        name: as in `# TYPE`; a counter's samples have "_total" behind it.
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
    MetricSpec("vllm:num_requests_waiting", "gauge", "Requests in the waiting queue, swapped-out ones included."),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Fraction of the cache's blocks that requests hold, 0 to 1."),
    MetricSpec(
        "vllm:cache_config_info",
        "gauge",
        "Always 1; the labels have the cache's configuration.",
        labels=("block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching", "cache_dtype"),
    ),
    MetricSpec("vllm:num_preemptions", "counter", "Preemptions."),
    MetricSpec("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache."),
    MetricSpec("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache."),
    MetricSpec("vllm:prompt_tokens", "counter", "Prompt tokens, those found in the prefix cache included."),
    MetricSpec("vllm:generation_tokens", "counter", "Tokens generated."),
    MetricSpec("vllm:spec_decode_num_drafts", "counter", "Drafts: steps of requests that had draft tokens."),
    MetricSpec("vllm:spec_decode_num_draft_tokens", "counter", "Draft tokens verified."),
    MetricSpec("vllm:spec_decode_num_accepted_tokens", "counter", "Draft tokens accepted."),
    MetricSpec(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Draft tokens accepted at each position of a draft, from 0.",
        labels=("position",),
    ),
    MetricSpec("minicache:kv_tier_hits", "counter", "Blocks loaded from a tier.", ("tier",)),
    MetricSpec("minicache:kv_tier_loaded_bytes", "counter", "Bytes loaded from a tier.", ("tier",)),
    MetricSpec("minicache:kv_tier_stored_bytes", "counter", "Bytes stored in a tier.", ("tier",)),
    MetricSpec("minicache:kv_tier_errors", "counter", "A tier's failed calls, late loads, corrupt blocks.", ("tier",)),
    MetricSpec("minicache:kv_tier_dropped", "counter", "Blocks that a tier was too slow to store.", ("tier",)),
    MetricSpec("vllm:request_success", "counter", "Finished requests, by reason.", labels=("finished_reason",)),
    MetricSpec("minicache:requests_refused", "counter", "Refused requests, by reason.", ("reason",)),
    MetricSpec("minicache:requests_failed", "counter", "API calls that failed because a model step failed."),
    MetricSpec("minicache:engine_deaths", "counter", "Unexpected exits of the engine process."),
    MetricSpec(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "From a request's arrival to its first token.",
        buckets=FIRST_TOKEN_SECONDS,
    ),
    MetricSpec(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between consecutive tokens of a request.",
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
        "From a request's arrival until it is first scheduled.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "From when a request is first scheduled to its first token.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec(
        "vllm:request_decode_time_seconds",
        "histogram",
        "From a request's first token to its last.",
        buckets=REQUEST_SECONDS,
    ),
    MetricSpec("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request."),
    MetricSpec("vllm:request_generation_tokens", "histogram", "Tokens generated for a request."),
    MetricSpec("vllm:iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=STEP_TOKENS),
)
"""Everything that `Metrics` exports, besides what Prometheus' client says of the process (`process_…`)."""


KEY_METRICS: Final = (
    MetricSpec("minicache:key_requests", "counter", "Accepted requests, by the API key's name.", ("key",)),
    MetricSpec("minicache:key_requests_refused", "counter", "Refused requests, by key and reason.", ("key", "reason")),
    MetricSpec("minicache:key_answers_running", "gauge", "Answers in progress, by key.", ("key",)),
    MetricSpec("minicache:key_prompt_tokens", "counter", "Prompt tokens, by key.", ("key",)),
    MetricSpec("minicache:key_generation_tokens", "counter", "Tokens generated, by key.", ("key",)),
)
"""What `Metrics` exports too, if the server asks for API keys. Without the label `engine`: the server counts these."""


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


class EngineNumbers:
    """The numbers of one engine.

    Args:
        cache: the engine's.
    """

    def __init__(self, cache: CacheInfo) -> None:
        self.values: dict[str, dict[str, float]] = {
            spec.name: {} if spec.labels else {"": 0} for spec in METRICS if spec.kind != "histogram"
        }
        self.values["vllm:request_success"] = dict.fromkeys(FINISHED_REASONS, 0)
        self.values["minicache:requests_refused"] = dict.fromkeys(REFUSED_REASONS, 0)
        labels = (cache.block_size, cache.num_blocks, cache.num_host_blocks, cache.prefix_caching, cache.cache_dtype)
        self.cache_config = tuple(map(str, labels))
        self.histograms: dict[str, Distribution] = {}
        for spec in METRICS:
            if spec.kind == "histogram":
                bounds = _token_bounds(cache.max_model_len) if spec.buckets is None else spec.buckets
                self.histograms[spec.name] = Distribution(bounds, [0] * (len(bounds) + 1))

    def apply(self, updates: Sequence[Update]) -> None:
        """Apply some changes (`minicache.serving.replica.stats`). The caller holds the lock."""
        for name, value, detail in updates:
            if isinstance(detail, str):
                numbers = self.values[name]
                numbers[detail] = numbers.get(detail, 0) + value
            elif (histogram := self.histograms.get(name)) is not None:
                histogram.observe(value, detail)
            else:
                self.values[name][""] = value

    def copy(self) -> EngineNumbers:
        """The same, for a reader."""
        numbers = copy(self)
        numbers.values = {name: dict(each) for name, each in self.values.items()}
        numbers.histograms = {
            name: Distribution(each.bounds, each.counts.copy(), each.total) for name, each in self.histograms.items()
        }
        return numbers


class Metrics:
    """The numbers of a server's engines, as Prometheus reads them. Its methods may be called from any thread.

    Args:
        model_name: the label model_name of every metric.
    """

    content_type = CONTENT_TYPE_LATEST
    """Of what `render` returns."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._lock = Lock()
        self._engines: dict[int, EngineNumbers] = {}
        self._refused: Counter[str] = Counter()  # by the server, before an engine heard of it
        self._num_failed = 0
        self._by_key: dict[str, dict[tuple[str, ...], int]] = {each.name: {} for each in KEY_METRICS}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def add_engine(self, number: int, cache: CacheInfo) -> None:
        """An engine is there: its label is `engine="number"`. If there was one of that number, it counts on."""
        with self._lock:
            self._engines.setdefault(number, EngineNumbers(cache))

    def watch(self, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic) -> SchedulerStats:
        """An observer of the only engine's scheduler, for `observe`: from now on its numbers are counted here.

        Args:
            scheduler: of this process.
            clock: as `SchedulerStats`.
        """
        self.add_engine(0, cache_info(scheduler))
        return SchedulerStats(scheduler, partial(self.apply, 0), clock=clock)

    def apply(self, number: int, updates: Sequence[Update]) -> None:
        """What has changed in an engine."""
        with self._lock:
            self._engines[number].apply(updates)

    def count_refused(self, reason: str) -> None:
        """A request was not taken on, for a reason that no scheduler ever saw.

        Args:
            reason: "queue_full", "stopping", "not_ready", "concurrency_limit" or "token_limit". (The scheduler counts
                "too_large".)
        """
        with self._lock:
            self._refused[reason] += 1

    def set_keys(self, keys: Collection[str]) -> None:
        """These are the names of all API keys: their numbers are exported, new ones from 0, and those of no others."""
        known = {*keys, UNKNOWN}
        with self._lock:
            for spec in KEY_METRICS:
                kept = {labels: value for labels, value in self._by_key[spec.name].items() if labels[0] in known}
                new = {(key,): 0 for key in keys} if spec.labels == ("key",) else {}
                self._by_key[spec.name] = new | kept

    def count_key(self, name: str, value: int, key: str, *reason: str) -> None:
        """Add to a number of an API key.

        Args:
            name: of `KEY_METRICS`.
            value: what to add.
            key: its name; that of a key that the server knows, or "unknown".
            reason: why a request was refused.
        """
        with self._lock:
            numbers = self._by_key[name]
            numbers[key, *reason] = numbers.get((key, *reason), 0) + value

    def count_failed(self) -> None:
        """A call of the API failed because the model did. Its requests count as aborted, which they were."""
        with self._lock:
            self._num_failed += 1

    def values(self, name: str) -> dict[int, float]:
        """A number of every engine, by the engine's: of `METRICS`, and no histogram. Summed over its labels."""
        with self._lock:
            return {number: sum(each.values[name].values()) for number, each in self._engines.items()}

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, as they were at one moment."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What a registry of `prometheus_client` asks its collectors for."""
        with self._lock:
            engines = {number: each.copy() for number, each in self._engines.items()}
            refused, num_failed = self._refused.copy(), self._num_failed
            by_key = {name: dict(numbers) for name, numbers in self._by_key.items()}
        if engines:  # what the server counts itself stands with its first engine
            first = engines[min(engines)]
            first.apply([("minicache:requests_refused", count, reason) for reason, count in refused.items()])
            first.apply([("minicache:requests_failed", num_failed, "")])
        for spec in METRICS:
            family: GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
            if spec.kind == "histogram":
                family = HistogramMetricFamily(spec.name, spec.meaning, labels=LABELS)
            else:
                kind = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
                family = kind(spec.name, spec.meaning, labels=(*LABELS, *spec.labels))
            for number, numbers in engines.items():
                common = (self._model_name, str(number))
                if isinstance(family, HistogramMetricFamily):
                    histogram = numbers.histograms[spec.name]
                    family.add_metric(common, histogram.buckets(), histogram.total)
                elif spec.name == "vllm:cache_config_info":
                    family.add_metric((*common, *numbers.cache_config), 1)
                else:
                    for label, value in numbers.values[spec.name].items():
                        family.add_metric((*common, *([label] if spec.labels else ())), value)
            yield family
        for spec in KEY_METRICS:
            if by_key[spec.name]:
                kind = GaugeMetricFamily if spec.kind == "gauge" else CounterMetricFamily
                family = kind(spec.name, spec.meaning, labels=("model_name", *spec.labels))
                for labels, value in by_key[spec.name].items():
                    family.add_metric((self._model_name, *labels), value)
                yield family


def _token_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `longest`: vLLM's buckets for numbers of tokens."""
    bounds = (step * 10**power for power in range(len(str(longest))) for step in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= longest)
