"""One request: from its client to a worker, to another if that one dies, and back."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minicache.errors import BrokenStreamError, NoReplicaError
from minicache.fleet.failover import Attempt
from minicache.fleet.views import ReplicaId, RoutedRequest
from minicache.serving.events import DONE
from minicache.serving.http.errors import ApiError, rate_limited, unavailable
from minicache.serving.http.logs import request_log
from minicache.serving.http.streaming import ClientLeftError, sse_event, unless_client_leaves
from minicache.serving.proxy.streams import ClientStream, EventError
from minicache.serving.proxy.workers import Reply, Worker, WorkerError, Workers

logger = logging.getLogger("minicache.route")

Headers = Sequence[tuple[bytes, bytes]]

BUSY: Final = (429, 502, 503, 504)
"""A worker that says one of these has not begun: it is full, stopping or starting, or is a proxy before such a one."""

HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
"""Headers that are meant for the next machine only (RFC 9110, section 7.6.1)."""

NOT_PASSED_ON: Final = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"x-request-id", b"expect"}
NOT_PASSED_BACK: Final = HOP_BY_HOP | {b"date", b"server", b"content-length", b"x-request-id"}
"""The server in front writes its own."""

MAX_HEADERS_NBYTES: Final = 32 * 2**10
"""The most bytes of a request's headers. Workers have bounds of their own: one that hangs up on long headers would seem
to be broken, and the next one after it."""


@dataclass(slots=True)
class Call:
    """What a client has asked.

    Attributes:
        method: of HTTP.
        path: with its query, as it came.
        headers: those that a worker gets.
        body: as it came.
        fields: the body's JSON object; {} if there is none.
        routed: what the router sees of it.
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    fields: Mapping[str, Any]
    routed: RoutedRequest


class Relay(Response):
    """The answer to one call: an ASGI application, as responses are.

    **Before the first byte** another worker is asked if one refuses (429, 503), cannot be reached or breaks off.
    **After it** a stream continues on another worker, if the client's tokens are known (`ClientStream`); else it ends
    with an error event. A non-streamed answer is read to its end before its first byte is sent, so it can be retried.

    Args:
        workers: who is asked.
        call: what for.
    """

    def __init__(self, workers: Workers, call: Call) -> None:
        super().__init__()
        self._workers, self._call = workers, call
        is_chat = call.path.partition("?")[0].endswith("/chat/completions")
        self._stream = ClientStream(str(call.routed.request_id), call.fields, is_chat=is_chat)
        self._begun = perf_counter()
        self._open = AsyncExitStack()  # the reply under way, and its place in the counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. If the client disconnects, the connection to its worker is closed."""
        try:
            await unless_client_leaves(receive, self._answer(scope, receive, send))
        except (ClientLeftError, OSError):  # OSError: the connection broke while we wrote
            self._stream.failover.abort()
        finally:
            await self._open.aclose()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply, body = await self._reply()
        except ApiError as error:
            request_log(scope).error = error.reason
            await error.response()(scope, receive, send)
            return
        headers = [each for each in reply.response.headers.raw if each[0].lower() not in NOT_PASSED_BACK]
        if body is not None:
            headers.append((b"content-length", b"%d" % len(body)))
        self._workers.has_answered(reply.worker, reply.response.status_code)
        await send({"type": "http.response.start", "status": reply.response.status_code, "headers": headers})
        self._workers.metrics.first_byte.observe(perf_counter() - self._begun)
        if body is None:
            pieces = self._pieces(reply)
            try:
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            finally:
                await pieces.aclose()
        await send({"type": "http.response.body", "body": body or b"", "more_body": False})

    async def _reply(self) -> tuple[Reply, bytes | None]:
        """A reply, and its body if it is no stream.

        Raises:
            ApiError: there is none.
        """
        failover = self._stream.failover
        while True:
            reply, attempt = await self._ask_next()
            if reply.is_stream:
                return reply, None
            try:
                body = await reply.read()
            except WorkerError as error:
                await self._has_failed(reply.worker, attempt, error)
                if failover.is_finished:
                    raise self._lost(error) from error
            else:
                failover.finish(attempt, "stop", 0)
                await self._open.aclose()
                return reply, body

    async def _pieces(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """The events of a stream, from one worker or several."""
        stream, failover = self._stream, self._stream.failover
        while True:
            attempt, last = failover.attempt, b""
            assert attempt is not None, "a reply under way has an attempt"
            error: Exception | None = None
            try:
                async for events in reply.events():
                    pieces = []
                    for event in events:
                        try:
                            pieces += stream.take(attempt, event)
                        except (EventError, BrokenStreamError) as failed:
                            error = failed
                            break
                    if pieces:
                        yield b"".join(pieces)
                    if error is not None:
                        raise error
                if stream.is_done:
                    return
                error = WorkerError(f"{reply.worker.url} ended its stream without [DONE]")
            except EventError as failed:
                error, last = failed, failed.event
            except (WorkerError, BrokenStreamError) as failed:
                error = failed
            can_continue = stream.can_continue
            await self._has_failed(reply.worker, attempt, error)
            if failover.is_finished and failover.finish_reason != "error":
                for piece in stream.closing_events():
                    yield piece
                return
            if can_continue and not failover.is_finished:
                try:
                    reply, attempt = await self._ask_next()
                except ApiError as refusal:
                    error, last = refusal, sse_event(json.dumps(refusal.body))
                else:
                    if reply.is_stream:
                        logger.info("a stream continues on %s after %d tokens", reply.worker.url, attempt.num_received)
                        self._workers.metrics.continued.inc(attempt.num_received > 0)
                        continue
                    error = WorkerError(
                        f"{reply.worker.url} answers {reply.response.status_code} instead of continuing"
                    )
            lost = self._lost(error)
            yield last or sse_event(json.dumps(lost.body))
            yield DONE
            return

    async def _ask_next(self) -> tuple[Reply, Attempt]:
        """The head of a worker's answer to what is to be asked now, one worker after the other.

        Raises:
            ApiError: no worker takes it.
        """
        workers, failover = self._workers, self._stream.failover
        refused_by: set[ReplicaId] = set()
        refusal: ApiError | None = None
        while True:
            views = failover.candidates(workers.membership.views())
            try:
                worker = workers.choose(self._call.routed, views, refused_by)
            except NoReplicaError as error:
                if refusal is None:
                    refusal = _no_worker(str(error), is_full=any(each.is_full for each in views))
                workers.metrics.refused.labels("full" if refusal.status == 429 else "no_worker").inc()
                raise refusal from error
            attempt = failover.begin(worker.url)
            await self._open.enter_async_context(workers.counted(worker, self._call.routed))
            try:
                reply = await self._send(worker, attempt)
            except WorkerError as error:
                if error.was_sent:
                    await self._has_failed(worker, attempt, error)
                    if failover.is_finished:
                        raise self._lost(error) from error
                else:
                    refused_by.add(worker.url)
                    failover.refuse(attempt)
                    await self._open.aclose()
                continue
            self._open.push_async_callback(reply.close)
            if reply.response.status_code not in BUSY:
                return reply, attempt
            try:
                await _check_has_not_begun(reply)
            except WorkerError as error:
                await self._has_failed(worker, attempt, error)
                if failover.is_finished:
                    raise self._lost(error) from error
                continue
            refusal = await _refusal(reply)
            refused_by.add(worker.url)
            failover.refuse(attempt)
            await self._open.aclose()

    async def _send(self, worker: Worker, attempt: Attempt) -> Reply:
        call = self._call
        path, content = call.path, call.body
        if call.fields:
            fields = self._stream.ask(attempt, worker.kind)
            if call.fields.get("stream") and fields != call.fields:
                content = json.dumps(fields).encode()
            if attempt.num_received:
                path = path.replace("/chat/completions", "/completions")
        return await self._workers.ask(worker, call.method, path, call.headers, content)

    async def _has_failed(self, worker: Worker, attempt: Attempt, error: Exception) -> None:
        """The worker has broken off. (If all tokens have come, only the end is lost, and nothing of this matters.)"""
        await self._open.aclose()
        self._stream.failover.fail(attempt)
        self._workers.has_failed(worker)
        logger.warning("a request was aborted: %s", error)

    def _lost(self, error: Exception) -> ApiError:
        self._workers.metrics.lost.inc()
        return ApiError(502, f"the answer was aborted: {error}", kind="server_error", code="worker_died")


async def _check_has_not_begun(reply: Reply) -> None:
    """Raise a WorkerError if an engine has died with the request, or its answer breaks off: that counts as an attempt.

    A request that kills every engine would else be sent to all workers.
    """
    if reply.response.status_code == 503 and b'"engine_died"' in await reply.read():
        raise WorkerError(f"the engine of {reply.worker.url} has died")


async def _refusal(reply: Reply) -> ApiError:
    """What a worker says that does not take a request, for the client, if all of them say so."""
    is_full = reply.response.status_code == 429
    message = "all workers are full" if is_full else "no worker accepts requests at the moment"
    refusal = _no_worker(message, is_full=is_full)
    refusal.headers["Retry-After"] = reply.response.headers.get("retry-after", "1")
    return refusal


def _no_worker(message: str, *, is_full: bool) -> ApiError:
    return rate_limited(message, "queue_full", 1) if is_full else unavailable(message, "no_worker")


def passed_on(headers: Headers, request_id: str, client: str | None) -> Headers:
    """A request's headers as a worker gets them: without those for this machine, with the request's id and origin.

    Spaces and tabs around a value are none of it (RFC 9110, section 5.5), and may not be sent.

    Raises:
        ApiError: they are longer than MAX_HEADERS_NBYTES.
    """
    if sum(len(key) + len(value) for key, value in headers) > MAX_HEADERS_NBYTES:
        message = f"the request's headers have more than {MAX_HEADERS_NBYTES} bytes: send fewer, or shorter ones"
        raise ApiError(431, message, code="headers_too_large")
    headers = [(key, value.strip(b" \t")) for key, value in headers]
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    left_out = NOT_PASSED_ON | named
    passed = [(key, value) for key, value in headers if key not in left_out and key != b"x-forwarded-for"]
    came_through = [value for key, value in headers if key == b"x-forwarded-for"]
    origin = [*came_through, *([client.encode()] if client else [])]
    passed += [(b"x-request-id", request_id.encode()), (b"accept-encoding", b"identity")]
    return [*passed, (b"x-forwarded-for", b", ".join(origin))] if origin else passed
