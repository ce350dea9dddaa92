"""What the proxy tells Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

FIRST_BYTE_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Metrics:
    """The proxy's own numbers. What a worker says of itself is in the worker's /metrics.

    Args:
        urls: the workers.
    """

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, urls: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self.running = Gauge(
            "minicache:route_requests_running", "The router's requests at a worker.", ["worker"], registry=self.registry
        )
        self.healthy = Gauge(
            "minicache:route_worker_healthy", "1 if the worker accepts requests.", ["worker"], registry=self.registry
        )
        self.answered = Counter(
            "minicache:route_responses", "Workers' responses, by status.", ["worker", "status"], registry=self.registry
        )
        self.failed = Counter(
            "minicache:route_attempts_failed",
            "Requests broken off by a worker.",
            ["worker"],
            registry=self.registry,
        )
        self.continued = Counter(
            "minicache:route_streams_continued",
            "Streams continued on another worker after their first token.",
            registry=self.registry,
        )
        self.lost = Counter(
            "minicache:route_requests_lost", "Requests lost with an error of the router.", registry=self.registry
        )
        self.refused = Counter(
            "minicache:route_requests_refused",
            "Requests that no worker accepted, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.hit_rate = Gauge(
            "minicache:route_worker_prefix_cache_hit_rate",
            "Fraction of prompt tokens found in the worker's prefix cache, by its own metrics.",
            ["worker"],
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "minicache:route_time_to_first_byte_seconds",
            "From a request to the first byte of its answer's body.",
            buckets=FIRST_BYTE_SECONDS,
            registry=self.registry,
        )
        for url in urls:
            self.running.labels(url)
            self.healthy.labels(url)
            self.failed.labels(url)
        for reason in ("full", "no_worker", "stopping"):
            self.refused.labels(reason)

    def value(self, name: str) -> float:
        """Of a metric without labels, now."""
        return self.registry.get_sample_value(name) or 0.0

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
