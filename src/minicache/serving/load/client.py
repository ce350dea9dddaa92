"""Sends a plan's requests when they are due, whatever has come of the earlier ones, and notes when each token came.

Every request has a connection of its own, as clients have that do not know of each other. Bytes are read where the
event loop gets them, without a task that has to wake up first: so a token's time is taken within microseconds of its
arrival, and one core reads tens of thousands of events a second. Part of phase 10's load client.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from minicache.errors import BrokenStreamError, LoadClientError, require_count, require_positive
from minicache.serving.events import EventSplitter, event_data
from minicache.serving.load.plan import PlannedRequest
from minicache.serving.load.wire import ResponseReader, WireError
from minicache.simulator.workload import Arrival

Status = Literal["ok", "refused", "failed", "timed out", "unfinished"]

MOST_QUOTED = 300
"""Characters of what a server said that are kept."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server speaks OpenAI's API.

    Attributes:
        host: its name or address.
        port: as it says.
        base: what the paths begin with, "/v1" at the end.
        is_tls: https.
        api_key: is sent as a bearer token, if there is one.
        address: what to connect to; None: `host`, whose address is then looked up for every request.
    """

    host: str
    port: int
    base: str = "/v1"
    is_tls: bool = False
    api_key: str | None = None
    address: str | None = None

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """The endpoint of a URL such as `http://127.0.0.1:8000`, with or without `/v1` at its end.

        Raises:
            ValueError: this is no URL of HTTP, or the key cannot stand in a header.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server URL such as http://127.0.0.1:8000")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the API key has characters that are invalid in a header")
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(parts.hostname, port, base, is_tls, api_key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """An HTTP/1.1 request, after which the connection is to be closed."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are in seconds from the start of the run.

    Attributes:
        arrival: what was planned.
        sent: when it was sent: connecting is part of what the sender waits for.
        status: "ok": the whole answer came. "refused": 429, the server has no place. "failed": anything else that is
            no answer. "timed out": it took longer than this client waits. "unfinished": the run was stopped before.
        ended: when the answer had ended, in whatever way.
        token_times: of each event that brought tokens, when it came. A server may put several tokens into one.
        num_prompt_tokens, num_output_tokens: as the server counts them; None if it did not say.
        http_status: of the answer, 0 if there was none.
        retry_after: seconds that a refusal asked to wait, if it did.
        detail: what went wrong, in the server's words if it had any.
    """

    arrival: Arrival
    sent: float
    status: Status = "unfinished"
    ended: float = 0.0
    token_times: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    http_status: int = 0
    retry_after: float | None = None
    detail: str = ""

    @property
    def lag(self) -> float:
        """Seconds by which it was sent later than planned."""
        return self.sent - self.arrival.time

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: as the server counts them, else one for each event."""
        return len(self.token_times) if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token; for an answer that has one."""
        return self.token_times[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token; for an answer that has one."""
        return self.token_times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds between tokens after the first; None if there is no second one."""
        return (self.latency - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that brought tokens, one after the other: the inter-token latencies."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


class _Exchange(asyncio.Protocol):
    """One request and its answer on one connection; `done` is resolved when the answer, or the connection, has ended.

    The body is kept, unless a subclass reads it as it comes.
    """

    def __init__(self, request: bytes) -> None:
        self.response = ResponseReader()
        self.body = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            self.take(self.response.feed(data))
        except WireError as error:
            self._end(error)
        else:
            if self.response.is_complete:
                self._end()

    def take(self, piece: bytes) -> None:
        """More of the body has come."""
        self.body += piece

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done.done():
            return
        try:
            self.response.feed_eof()
        except WireError as error:
            self._end(error)
        else:
            self._end()

    def _end(self, error: WireError | None = None) -> None:
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class _Completion(_Exchange):
    """A streamed completion: notes into its `Outcome` when tokens come."""

    def __init__(self, request: bytes, outcome: Outcome, start: float) -> None:
        super().__init__(request)
        self.is_over = False  # "[DONE]" was said
        self._outcome = outcome
        self._start = start
        self._events = EventSplitter()

    def take(self, piece: bytes) -> None:
        """As above; what is no stream of events is kept, to be read as an error when it is whole."""
        now = time.perf_counter() - self._start
        if self.response.status != 200 or not self.is_stream:
            self.body += piece
            return
        try:
            events = self._events.push(piece)
        except BrokenStreamError as error:
            raise WireError(str(error)) from error
        for event in events:
            data = event_data(event)
            if data == "[DONE]":
                self.is_over = True
            elif data:
                self._note(data, now)

    @property
    def is_stream(self) -> bool:
        """Whether the answer says that it is a stream of events."""
        return self.response.headers.get("content-type", "").lower().startswith("text/event-stream")

    def _note(self, data: str, now: float) -> None:
        """One event: a piece of the text, the usage at the end, or an error.

        Raises:
            WireError: it is none of these.
        """
        try:
            parsed = json.loads(data)
        except ValueError:
            raise WireError(f"an event is not valid JSON: {data[:MOST_QUOTED]!r}") from None
        if not isinstance(parsed, dict):
            raise WireError(f"an event is not a completion: {data[:MOST_QUOTED]!r}")
        if parsed.get("choices"):
            self._outcome.token_times.append(now)
        elif "error" in parsed:
            raise WireError(f"an error in the stream: {_error_message(parsed, data)}")
        usage = parsed.get("usage")
        if isinstance(usage, dict):
            self._outcome.num_prompt_tokens = _count(usage.get("prompt_tokens"))
            self._outcome.num_output_tokens = _count(usage.get("completion_tokens"))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


class LoadRun:
    """One run: every request of a plan, each when it is due.

    Args:
        endpoint: where to.
        requests: the plan, in the order of its times.
        timeout: seconds after which a request is given up, > 0.
        max_in_flight: the most requests at once, ≥ 1. A request that is due waits for a place, and is late: no open
            loop any more. None: no limit.

    Attributes:
        outcomes: of the requests that were sent, in their order; those in flight are "unfinished".
        num_in_flight: requests that were sent and have not ended.
        seconds: how long the run took, once it is over.
        cpu_share: the processor time of this process meanwhile, as a part of one core's.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[PlannedRequest],
        *,
        timeout: float = 600.0,
        max_in_flight: int | None = None,
    ) -> None:
        require_positive("timeout", timeout)
        if max_in_flight is not None:
            require_count("max_in_flight", max_in_flight)
        self.outcomes: list[Outcome] = []
        self.num_in_flight = 0
        self.seconds = 0.0
        self.cpu_share = 0.0
        self._endpoint = endpoint
        self._tls = ssl.create_default_context() if endpoint.is_tls else None
        self._requests = requests
        self._timeout = timeout
        self._max_in_flight = max_in_flight
        self._start = 0.0

    async def run(self) -> None:
        """Send everything and wait for every answer. If it is cancelled, `outcomes` has what came until then."""
        most = len(self._requests) if self._max_in_flight is None else self._max_in_flight
        places = asyncio.Semaphore(most)
        payloads = [self._endpoint.request("POST", "/completions", each.body) for each in self._requests]
        cpu_before, self._start = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for planned, payload in zip(self._requests, payloads, strict=True):
                    await self._until(planned.arrival.time)
                    await places.acquire()
                    task = tasks.create_task(self._send(planned.arrival, payload))
                    task.add_done_callback(lambda _: places.release())
        finally:
            self.seconds = self.now
            self.cpu_share = (time.process_time() - cpu_before) / self.seconds

    @property
    def now(self) -> float:
        """Seconds since the run has begun."""
        return time.perf_counter() - self._start

    async def _until(self, due: float) -> None:
        if (left := due - self.now) > 0:
            await asyncio.sleep(left)

    async def _send(self, arrival: Arrival, payload: bytes) -> None:
        """Send one request and note what comes of it."""
        outcome = Outcome(arrival, self.now)
        self.outcomes.append(outcome)
        self.num_in_flight += 1
        exchange = _Completion(payload, outcome, self._start)
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                await _exchange(self._endpoint, exchange, self._tls)
            _judge(outcome, exchange)
        except (OSError, WireError) as error:  # a TimeoutError is an OSError
            outcome.status, outcome.detail = "failed", str(error) or type(error).__name__
            if deadline.expired():
                outcome.status, outcome.detail = "timed out", f"no end after {self._timeout:g} s"
        finally:
            outcome.ended = self.now
            outcome.http_status = exchange.response.status
            self.num_in_flight -= 1


async def _exchange(endpoint: Endpoint, exchange: _Exchange, tls: ssl.SSLContext | None) -> None:
    """Connect, send, and wait until the answer is there. The connection is closed in any case.

    Raises:
        OSError: there is no connection.
        WireError: there is no answer, or no whole one.
    """
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(
        lambda: exchange,
        endpoint.address or endpoint.host,
        endpoint.port,
        ssl=tls,
        server_hostname=None if tls is None else endpoint.host,
    )
    try:
        await exchange.done
    finally:
        transport.abort()


def _judge(outcome: Outcome, exchange: _Completion) -> None:
    """Say what the answer, now that it has ended, amounts to."""
    status = exchange.response.status
    if status == 200 and exchange.is_stream:
        if not outcome.token_times:
            outcome.status, outcome.detail = "failed", "the stream ended without a token"
        elif not exchange.is_over:
            outcome.status, outcome.detail = "failed", "the stream ended without [DONE]"
        else:
            outcome.status = "ok"
        return
    outcome.status = "refused" if status == 429 else "failed"
    if status == 200:
        kind = exchange.response.headers.get("content-type", "without a type")
        outcome.detail = f"expected an event stream, got {kind}"
        return
    with suppress(KeyError, ValueError):  # there is none, or it is a date
        outcome.retry_after = float(exchange.response.headers["retry-after"])
    text = exchange.body.decode(errors="replace")
    try:
        message = _error_message(json.loads(text), text)
    except ValueError:
        message = text[:MOST_QUOTED].strip()
    outcome.detail = f"HTTP {status}: {message}"


def _error_message(parsed: Any, otherwise: str) -> str:
    """What an error in OpenAI's form says, `{"error": {"message": …}}`; another's is quoted."""
    error = parsed.get("error") if isinstance(parsed, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or otherwise)[:MOST_QUOTED]


async def reach(endpoint: Endpoint) -> Endpoint:
    """Check that a server answers.

    Returns:
        The endpoint with the address that answers.

    Raises:
        LoadClientError: no server answers.
    """
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except (OSError, UnicodeError) as error:  # a name may be none that could be looked up
        raise LoadClientError(f"no server at {endpoint.host}:{endpoint.port}: {error}") from error
    address: str = writer.get_extra_info("peername")[0]
    writer.close()
    return replace(endpoint, address=address)


class ServedModel(NamedTuple):
    """What a server says of its first model.

    Attributes:
        name: for requests.
        max_model_len: the most tokens that it takes; None if the server does not say that, as vLLM's does.
        version: of minicache, if that is the server; else "".
        lab_files: a learner's files that compute it, module → SHA-256.
    """

    name: str
    max_model_len: int | None = None
    version: str = ""
    lab_files: Mapping[str, str] = {}


async def fetch_model(endpoint: Endpoint, timeout: float = 30.0) -> ServedModel:
    """Ask the server which model it has.

    Raises:
        LoadClientError: it does not say.
    """
    exchange = _Exchange(endpoint.request("GET", "/models"))
    tls = ssl.create_default_context() if endpoint.is_tls else None
    try:
        async with asyncio.timeout(timeout):
            await _exchange(endpoint, exchange, tls)
        parsed = json.loads(exchange.body)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError, WireError and JSON's a ValueError
        raise LoadClientError(f"{endpoint.base}/models: {str(error) or 'no answer'}") from error
    if exchange.response.status != 200:
        message = _error_message(parsed, exchange.body.decode(errors="replace"))
        raise LoadClientError(f"{endpoint.base}/models: HTTP {exchange.response.status}: {message}")
    try:
        model = parsed["data"][0]
        name, longest = model["id"], model.get("max_model_len")
        version, files = model.get("version"), model.get("lab_files")
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise LoadClientError(f"{endpoint.base}/models lists no model; set --model") from error
    longest = longest if isinstance(longest, int) else None
    files = files if isinstance(files, dict) else {}
    return ServedModel(str(name), longest, version if isinstance(version, str) else "", files)
