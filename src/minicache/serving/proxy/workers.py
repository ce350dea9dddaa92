"""The servers behind the proxy: who takes requests, what each has, and one request to one of them."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Final, Literal

import httpx

from minicache.errors import BrokenStreamError, NoReplicaError
from minicache.fleet.membership import Membership
from minicache.fleet.router import Router
from minicache.fleet.views import ReplicaId, ReplicaView, RoutedRequest
from minicache.serving.events import EventSplitter
from minicache.serving.http.errors import ApiError
from minicache.serving.proxy.metrics import Metrics
from minicache.serving.proxy.pools import Pools

logger = logging.getLogger("minicache.route")

Kind = Literal["minicache", "vllm", "other"]
"""What a worker is, by the names of its metrics: whether it can tell token ids, and which."""

CONNECT_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 4.0
"""An idle connection is closed after it; uvicorn closes its end after 5 s."""

PROBE: Final = {b"Connection": b"close"}
"""A probe closes what is idle for too long in its pool; a connection that it kept would be there until the next one."""

NUM_UNFINISHED: Final = ("vllm:num_requests_running", "vllm:num_requests_waiting")
HITS, QUERIES = "vllm:prefix_cache_hits", "vllm:prefix_cache_queries"
_SAMPLE = re.compile(rf"^({'|'.join((*NUM_UNFINISHED, HITS, QUERIES))})(?:_total)?(?:{{.*}})? (\S+)", re.MULTILINE)


class WorkerError(Exception):
    """A worker does not answer, or has stopped answering half-way.

    Attributes:
        was_sent: whether the request had been sent: the worker may have computed some of it.
    """

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent


@dataclass(slots=True, eq=False)
class Worker:
    """A server behind the proxy.

    Attributes:
        url: where it is, without "/" at the end; also its name.
        kind: what it is.
        reading: the time limits of the responses that are being read from it.
        look_now: is set when it should be probed before its time.
        num_answered: requests that it has begun to answer.
        num_failed: requests that it has broken off.
    """

    url: ReplicaId
    kind: Kind = "other"
    reading: set[asyncio.Timeout] = field(default_factory=set)
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    num_answered: int = 0
    num_failed: int = 0


class Reply:
    """What a worker answers to one request, from its head on. It must be closed.

    Attributes:
        worker: who answers.
        response: status and headers.
    """

    def __init__(self, worker: Worker, response: httpx.Response) -> None:
        self.worker, self.response = worker, response

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of events."""
        kind: str = self.response.headers.get("content-type", "")
        return kind.startswith("text/event-stream")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body's bytes as they come.

        Raises:
            WorkerError: it breaks off, or the worker has been found not to answer any more.
        """
        body = self.response.aiter_raw()
        while True:
            try:
                async with _until_it_is_gone(self.worker):
                    piece = await anext(body, None)
            except (httpx.HTTPError, TimeoutError) as error:
                raise WorkerError(f"{self.worker.url} broke off: {_reason(error)}") from error
            if piece is None:
                return
            yield piece

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """The events of a stream, whole ones, those together that came together. Raises: as `pieces`.

        What is no whole event at the end is dropped.
        """
        splitter = EventSplitter()
        async for piece in self.pieces():
            try:
                events = splitter.push(piece)
            except BrokenStreamError as error:
                raise WorkerError(f"{self.worker.url} sends no event stream: {error}") from error
            if events:
                yield events

    async def read(self) -> bytes:
        """All of the body. Raises: as `pieces`."""
        return b"".join([piece async for piece in self.pieces()])

    async def close(self) -> None:
        """Done with it. If not all of it was read, the connection is closed, which tells the worker."""
        await self.response.aclose()


@asynccontextmanager
async def _until_it_is_gone(worker: Worker) -> AsyncIterator[None]:
    """Whatever is awaited inside raises TimeoutError once the worker is found not to answer."""
    async with asyncio.timeout(None) as limit:
        worker.reading.add(limit)
        try:
            yield
        finally:
            worker.reading.discard(limit)


class Workers:
    """All of them.

    Args:
        urls: where they are, each once.
        router: chooses.
        metrics: receives the counts.
        max_unfinished: the most unfinished requests of a worker.
        check_seconds: how often each is probed.
        check_timeout: how long a probe waits. A refused connection fails at once; two in a row that are not
            answered at all mean that the machine is gone, and end the streams that wait for it.
        metrics_key: what the workers' /metrics ask for; None: nothing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        router: Router,
        metrics: Metrics,
        *,
        max_unfinished: int,
        check_seconds: float = 1.0,
        check_timeout: float = 5.0,
        metrics_key: str | None = None,
    ) -> None:
        self.router, self.membership, self.metrics = router, Membership(), metrics
        self.workers = {url: Worker(url) for url in urls}
        for url in self.workers:
            self.membership.join(url, max_unfinished=max_unfinished)
        self._check_seconds = check_seconds
        self._check_timeout = httpx.Timeout(check_timeout)
        self._metrics_headers = PROBE.copy()
        if metrics_key is not None:
            self._metrics_headers[b"Authorization"] = f"Bearer {metrics_key}".encode()
        self._checks: list[asyncio.Task[None]] = []
        self._first_checks = [asyncio.Event() for _ in self.workers]
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            trust_env=False,  # a worker is asked directly, whatever proxies the environment names
            transport=Pools(
                idle_seconds=IDLE_SECONDS,
                verify=any(url.startswith("https:") for url in urls),  # else nothing is verified, and it takes 30 ms
            ),
        )

    async def start(self) -> None:
        """Probe them from now on."""
        for worker, event in zip(self.workers.values(), self._first_checks, strict=True):
            check = asyncio.create_task(self._watch(worker, event))
            check.add_done_callback(_log_failure)
            self._checks.append(check)

    async def ready(self) -> None:
        """Wait until each was probed once, healthy or not. Raises what a check raises that should not."""
        for event, check in zip(self._first_checks, self._checks, strict=True):
            probed = asyncio.create_task(event.wait())
            await asyncio.wait((probed, check), return_when=asyncio.FIRST_COMPLETED)
            probed.cancel()
        for check in self._checks:
            if check.done():
                check.result()

    async def stop(self) -> None:
        """Close all connections."""
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._client.aclose()

    # Requests

    def choose(self, request: RoutedRequest, views: Sequence[ReplicaView], without: Collection[ReplicaId]) -> Worker:
        """The router's choice among `views`, without some.

        Raises:
            NoReplicaError: there is none, or all are full. Or the router, a learner's, has chosen one that cannot be
                asked: it would be asked again and again.
        """
        views = [each for each in views if each.replica_id not in without] if without else views
        url = self.router.choose(request, views)
        if url not in {each.replica_id for each in views if not each.is_full}:
            raise NoReplicaError(f"the router has chosen {url!r}, which is full or not a candidate")
        return self.workers[url]

    @asynccontextmanager
    async def counted(self, worker: Worker, request: RoutedRequest) -> AsyncIterator[None]:
        """The time in which a worker has a request: router, membership and metrics know of it."""
        number = self.membership.on_sent(request.request_id, worker.url)
        self.router.on_sent(request, worker.url)
        self.metrics.running.labels(worker.url).inc()
        try:
            yield
        finally:
            self.metrics.running.labels(worker.url).dec()
            self.membership.on_finished(number)
            self.router.on_finished(request.request_id, worker.url)

    async def ask(
        self, worker: Worker, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], content: bytes
    ) -> Reply:
        """Send a request to a worker, and wait for the head of its answer.

        Raises:
            WorkerError: it cannot be reached, or breaks off.
            ApiError: the client's path or headers cannot be sent. No worker is to blame.
        """
        try:
            request = httpx.Request(method, f"{worker.url}{path}", headers=list(headers), content=content)
            request.extensions["timeout"] = self._client.timeout.as_dict()
            async with _until_it_is_gone(worker):
                response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._is_unreachable(worker)
            raise WorkerError(f"{worker.url} cannot be reached: {_reason(error)}", was_sent=False) from error
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
            raise ApiError(400, f"the request cannot be passed on: {_reason(error)}") from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise WorkerError(f"{worker.url} broke off: {_reason(error)}") from error
        return Reply(worker, response)

    def has_answered(self, worker: Worker, status: int) -> None:
        """A worker's answer goes to a client."""
        worker.num_answered += 1
        self.metrics.answered.labels(worker.url, str(status)).inc()

    def has_failed(self, worker: Worker) -> None:
        """A request to it was broken off: its cache is probably gone, and so may be the worker."""
        worker.num_failed += 1
        self.metrics.failed.labels(worker.url).inc()
        self.router.on_left(worker.url)
        worker.look_now.set()

    # Health

    def _is_unreachable(self, worker: Worker) -> None:
        """Connection refused: it gets no requests before it answers a probe, if the membership agrees."""
        was_healthy = self._is_healthy(worker)
        for _ in range(self.membership.unhealthy_after):
            self.membership.on_failed(self.membership.on_probed(worker.url))
        self._note_health(worker, was_healthy)

    def _is_healthy(self, worker: Worker) -> bool:
        return self.membership.members[worker.url].is_healthy

    async def _watch(self, worker: Worker, first: asyncio.Event) -> None:
        num_silent = 0
        while True:
            was_healthy = self._is_healthy(worker)
            probe = self.membership.on_probed(worker.url)
            try:
                stats = await self._look(worker)
            except httpx.HTTPError as error:
                self.membership.on_failed(probe)
                num_silent = num_silent + 1 if isinstance(error, httpx.TimeoutException) else 0
            else:
                self.membership.on_report(probe, stats)
                num_silent = 0
            self._note_health(worker, was_healthy)
            self._note_hits(worker)
            if num_silent >= 2:
                for limit in worker.reading:
                    limit.reschedule(0)
            first.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_seconds):  # Python 3.11's wait_for may ignore a cancellation
                    await worker.look_now.wait()
            worker.look_now.clear()

    async def _look(self, worker: Worker) -> Mapping[str, float]:
        """What a worker says of itself; {} if it says nothing that is known here.

        Raises:
            httpx.HTTPError: it is not healthy.
        """
        ask = functools.partial(self._client.get, timeout=self._check_timeout)
        health = await ask(f"{worker.url}/health", headers=PROBE)
        if health.status_code >= 500:
            health.raise_for_status()
        metrics = await ask(f"{worker.url}/metrics", headers=self._metrics_headers)
        if metrics.status_code != 200:
            return {}
        worker.kind = _kind(metrics.text)
        stats = _sums(metrics.text)
        if all(name in stats for name in NUM_UNFINISHED):
            stats["num_unfinished"] = sum(stats[name] for name in NUM_UNFINISHED)
        return stats

    def hit_rate(self, *workers: Worker) -> float | None:
        """What part of their prompt tokens the workers' prefix caches had, as they said last; None: they did not."""
        stats = [self.membership.members[worker.url].stats for worker in workers]
        num_queries = sum(each.get(QUERIES, 0.0) for each in stats)
        return sum(each.get(HITS, 0.0) for each in stats) / num_queries if num_queries else None

    def _note_hits(self, worker: Worker) -> None:
        if (hit_rate := self.hit_rate(worker)) is not None:
            self.metrics.hit_rate.labels(worker.url).set(hit_rate)

    def _note_health(self, worker: Worker, was_healthy: bool) -> None:
        is_healthy = self._is_healthy(worker)
        self.metrics.healthy.labels(worker.url).set(is_healthy)
        if was_healthy and not is_healthy:
            self.router.on_left(worker.url)
            logger.warning("%s is out of rotation", worker.url)
        elif is_healthy and not was_healthy:
            logger.info("%s is back in rotation", worker.url)


def _kind(metrics: str) -> Kind:
    if "minicache:" in metrics:
        return "minicache"
    return "vllm" if "vllm:" in metrics else "other"


def _sums(metrics: str) -> dict[str, float]:
    """The numbers of a worker's metrics that count here, each summed over its labels; only those that it has."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        with suppress(ValueError):
            number = float(value)
            if isfinite(number):
                sums[name] = sums.get(name, 0.0) + number
    return sums


def _log_failure(check: asyncio.Task[None]) -> None:
    """A worker is not probed any more: a mistake, of the membership or here."""
    if not check.cancelled() and (error := check.exception()) is not None:
        logger.error("a worker is no longer probed", exc_info=error)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
