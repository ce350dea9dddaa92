"""The proxy's routes: OpenAI's, which are passed on, and its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from minicache import __version__
from minicache.errors import NoReplicaError
from minicache.serving.http.live import HEADERS
from minicache.serving.http.live import STATIC as SERVERS_STATIC
from minicache.serving.http.logs import request_log
from minicache.serving.http.protocol import ApiError
from minicache.serving.http.streaming import EventStream, sse_event
from minicache.serving.proxy.prompts import routed_request
from minicache.serving.proxy.relay import Call, Relay, passed_on
from minicache.serving.proxy.workers import Workers

MAX_BODY_NBYTES: Final = 16 * 2**20
BODY_SECONDS: Final = 30.0
PICTURE_SECONDS: Final = 0.5
STATIC: Final = Path(__file__).parent / "static"


class Proxy:
    """What the routes share, and what a server drains (`minicache.serving.http.running.Drained`).

    Args:
        workers: who answers.
        policy: the router's name, for the page.
        block_size: tokens of a block of the workers' prefix caches.

    Attributes:
        num_unfinished: calls under way.
        stopping: is set when the server is to stop.
    """

    def __init__(self, workers: Workers, policy: str, block_size: int) -> None:
        self.workers, self.policy, self.block_size = workers, policy, block_size
        self.num_unfinished = 0
        self.stopping = asyncio.Event()
        self._all_finished = asyncio.Event()
        self._names = count(1)

    async def ready(self) -> None:
        """Wait until all workers have been probed. That some are not there is no reason not to begin."""
        await self.workers.ready()

    def stop(self) -> None:
        """Refuse new requests from now on, and end the page's streams."""
        self.stopping.set()

    async def drain(self, seconds: float) -> bool:
        """Wait until all calls have ended, for so long at most; whether they have."""
        deadline = time.monotonic() + seconds
        while self.num_unfinished and (left := deadline - time.monotonic()) > 0:
            self._all_finished.clear()
            try:
                await asyncio.wait_for(self._all_finished.wait(), left)
            except TimeoutError:
                break
        return not self.num_unfinished

    async def end(self) -> None:
        """Close the connections to the workers."""
        await self.workers.stop()

    async def pass_on(self, request: Request) -> Response:
        """The answer of some worker to a request."""
        if self.stopping.is_set():
            self.workers.metrics.refused.labels("stopping").inc()
            headers = {"Retry-After": "1"}
            return _refused(
                ApiError(503, "the router is stopping", kind="server_error", code="stopping", headers=headers)
            )
        try:
            body, fields = await _body(request)
        except ApiError as error:
            request_log(request.scope).error = error.reason
            return _refused(error)
        scope = request.scope
        client = scope.get("client")
        path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "replace")
        query = scope.get("query_string", b"").decode("ascii", "replace")
        if ".." in path.split("/"):  # it could name another of the worker's paths
            return _refused(ApiError(404, "Not Found"))
        log_id = request_log(scope).request_id or f"route-{next(self._names)}"
        call = Call(
            method=request.method,
            path=f"{path}?{query}" if query else path,
            headers=passed_on(scope["headers"], log_id, client[0] if client else None),
            body=body,
            fields=fields,
            routed=routed_request(f"{next(self._names)}", fields, self.block_size),
        )
        return _Counted(self, Relay(self.workers, call))

    def picture(self) -> dict[str, Any]:
        """What the page shows."""
        metrics = self.workers.metrics
        workers = []
        for url, worker in self.workers.workers.items():
            member = self.workers.membership.members[url]
            workers.append(
                {
                    "url": url,
                    "kind": worker.kind,
                    "is_healthy": member.is_healthy,
                    "num_unfinished": member.num_unfinished,
                    "num_answered": worker.num_answered,
                    "num_failed": worker.num_failed,
                    "hit_rate": self.workers.hit_rate(worker),
                }
            )
        return {
            "policy": self.policy,
            "num_unfinished": self.num_unfinished,
            "num_continued": metrics.value("minicache:route_streams_continued_total"),
            "hit_rate": self.workers.hit_rate(*self.workers.workers.values()),
            "num_lost": metrics.value("minicache:route_requests_lost_total"),
            "workers": workers,
        }

    def finished_one(self) -> None:
        """A call has ended."""
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self._all_finished.set()


class _Counted(Response):
    """A response that counts as unfinished while it is sent."""

    def __init__(self, proxy: Proxy, relay: Relay) -> None:
        super().__init__()
        self._proxy, self._relay = proxy, relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy.num_unfinished += 1
        try:
            await self._relay(scope, receive, send)
        finally:
            self._proxy.finished_one()


def create_app(workers: Workers, *, policy: str, block_size: int = 16) -> FastAPI:
    """The proxy as an ASGI application. Its lifespan probes the workers.

    Args:
        workers: who answers.
        policy: the router's name, for the page.
        block_size: tokens of a block of the workers' prefix caches, ≥ 1.

    Returns:
        The application; `app.state.served` is its `Proxy`.
    """
    proxy = Proxy(workers, policy, block_size)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await workers.start()
        yield
        await workers.stop()

    app = FastAPI(title="minicache route", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.served = proxy

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused(ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})))

    app.add_exception_handler(HTTPException, refuse)

    async def pass_on(request: Request) -> Response:
        return await proxy.pass_on(request)

    async def health() -> Response:
        try:
            if proxy.stopping.is_set():
                raise NoReplicaError("the router is stopping")
            if not workers.membership.views():
                raise NoReplicaError("no worker accepts requests")
        except NoReplicaError as error:
            return _refused(ApiError(503, str(error), kind="server_error", code="no_worker"))
        return _json(200, {"status": "ok"})

    async def metrics() -> Response:
        return Response(workers.metrics.render(), media_type=workers.metrics.content_type)

    async def live() -> Response:
        return EventStream(_pictures(proxy))

    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    async def script() -> Response:
        return FileResponse(STATIC / "route.js", headers=HEADERS, media_type="text/javascript")

    async def servers_style() -> Response:
        return FileResponse(SERVERS_STATIC / "live.css", headers=HEADERS, media_type="text/css")

    async def style() -> Response:
        return FileResponse(STATIC / "route.css", headers=HEADERS, media_type="text/css")

    own = {
        "/health": health,
        "/metrics": metrics,
        "/live": live,
        "/": page,
        "/static/route.js": script,
        "/static/live.css": servers_style,
        "/static/route.css": style,
    }
    for path, endpoint in own.items():
        app.add_api_route(path, endpoint, include_in_schema=False, response_model=None)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, pass_on, methods=["POST"], include_in_schema=False, response_model=None)
    for path in ("/v1/models", "/v1/models/{model:path}"):
        app.add_api_route(path, pass_on, include_in_schema=False, response_model=None)
    return app


async def _body(request: Request) -> tuple[bytes, dict[str, Any]]:
    """The body, and its JSON object; of a GET, nothing.

    Raises:
        ApiError: it is too large, too slow, or no JSON object.
    """
    if request.method != "POST":
        return b"", {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a web page can have a browser send without asking is of another type
        raise ApiError(415, "send the body as application/json", code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_NBYTES:
                    raise ApiError(413, f"the body may have at most {MAX_BODY_NBYTES} bytes", code="body_too_large")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not fields:
        raise ApiError(400, "the body must be a JSON object")
    return bytes(body), fields


async def _pictures(proxy: Proxy) -> AsyncGenerator[bytes, None]:
    """A picture now, and whenever something has changed, until the server stops."""
    shown = None
    while not proxy.stopping.is_set():
        picture = json.dumps(proxy.picture())
        yield b": nothing new\n\n" if picture == shown else sse_event(picture)
        shown = picture
        try:
            await asyncio.wait_for(proxy.stopping.wait(), PICTURE_SECONDS)
        except TimeoutError:
            continue


def _json(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


def _refused(error: ApiError) -> Response:
    return _json(error.status, error.body, error.headers)
