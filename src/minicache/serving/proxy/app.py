"""The proxy's routes: OpenAI's, which are passed on, and its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from minicache import __version__
from minicache.serving.http.bodies import MAX_BODY_NBYTES, BodyLimits, parse_body, stop_reading
from minicache.serving.http.errors import ApiError, as_api_error, json_response, unavailable
from minicache.serving.http.live import STATIC as SERVERS_STATIC
from minicache.serving.http.live import live_routes
from minicache.serving.http.logs import request_log
from minicache.serving.http.turns import SLICE, Turns
from minicache.serving.proxy.prompts import routed_request
from minicache.serving.proxy.relay import Call, Relay, passed_on
from minicache.serving.proxy.workers import Workers
from minicache.serving.replica.remote import Slots

PICTURE_SECONDS: Final = 0.5
BEGINNINGS: Final = 8
"""The most requests that begin in one turn of the event loop. Together they take as long as another slice of work."""
STATIC: Final = Path(__file__).parent / "static"
FILES: Final = {"route.js": STATIC, "route.css": STATIC, "live.css": SERVERS_STATIC}


class Proxy(Slots):
    """What the routes share, and what a server drains (`minicache.serving.http.running.Drained`).

    Args:
        workers: who answers.
        policy: the router's name, for the page.
        block_size: tokens of a block of the workers' prefix caches.

    Attributes:
        num_unfinished: calls under way.
        stopping: is set when the server is to stop.
        reading: the time limits of bodies that have not come yet.
        turns: in which long work is done.
        beginnings: in which requests begin: a crowd of them is long work too.
    """

    def __init__(self, workers: Workers, policy: str, block_size: int) -> None:
        super().__init__()
        self.workers, self.policy, self.block_size = workers, policy, block_size
        self.stopping = asyncio.Event()
        self.reading: set[asyncio.Timeout] = set()
        self.turns, self.beginnings = Turns(), Turns()
        self._queues: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()
        self._names = count(1)

    async def ready(self) -> None:
        """Wait until all workers have been probed. That some are not there is no reason not to begin."""
        await self.workers.ready()

    def stop(self) -> None:
        """Refuse new requests from now on, and end the page's streams."""
        stop_reading(self)

    async def end(self) -> None:
        """Close the connections to the workers."""
        await self.workers.stop()

    async def pass_on(self, request: Request) -> Response:
        """The answer of some worker to a request."""
        await self._begin(request)
        if self.stopping.is_set():
            self.workers.metrics.refused.labels("stopping").inc()
            raise unavailable("the router is stopping", "stopping")
        body, fields = await _body(request, self.turns)
        scope = request.scope
        client = scope.get("client")
        path = scope.get("raw_path", scope["path"].encode()).decode("ascii", "replace")
        query = scope.get("query_string", b"").decode("ascii", "replace")
        if ".." in path.split("/"):  # it could name another of the worker's paths
            raise ApiError(404, "Not Found")
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

    async def _begin(self, request: Request) -> None:
        """Wait for a request's turn. A client has one request at a time in the queue, however many it sends."""
        client = request.client.host if request.client else None
        queue = self._queues.setdefault((client, request.headers.get("authorization")), asyncio.Lock())
        async with queue, self.beginnings.slice(SLICE // BEGINNINGS):
            pass

    async def picture(self) -> bytes:
        """What the page shows, in JSON."""
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
        picture = {
            "policy": self.policy,
            "num_unfinished": self.num_unfinished,
            "num_continued": metrics.value("minicache:route_streams_continued_total"),
            "hit_rate": self.workers.hit_rate(*self.workers.workers.values()),
            "num_lost": metrics.value("minicache:route_requests_lost_total"),
            "workers": workers,
        }
        return json.dumps(picture).encode()


class _Counted(Response):
    """A response that counts as unfinished while it is sent."""

    def __init__(self, proxy: Proxy, relay: Relay) -> None:
        super().__init__()
        self._proxy, self._relay = proxy, relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._proxy.take_slots(1)
        try:
            await self._relay(scope, receive, send)
        finally:
            self._proxy.free_slots(1)


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

    app = FastAPI(
        title="minicache route",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to wherever the Host header says
        lifespan=lifespan,
    )
    app.state.served = proxy

    app.add_middleware(BodyLimits, served=proxy, max_nbytes=MAX_BODY_NBYTES)

    async def refuse(request: Request, error: Exception) -> Response:
        shown = as_api_error(error)
        request_log(request.scope).error = shown.reason
        return shown.response()

    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(HTTPException, refuse)

    async def pass_on(request: Request) -> Response:
        return await proxy.pass_on(request)

    async def health() -> Response:
        if proxy.stopping.is_set():
            raise unavailable("the router is stopping", "no_worker")
        if not workers.membership.views():
            raise unavailable("no worker accepts requests", "no_worker")
        return json_response(200, {"status": "ok"})

    async def metrics() -> Response:
        return Response(workers.metrics.render(), media_type=workers.metrics.content_type)

    for path, endpoint in {"/health": health, "/metrics": metrics}.items():
        app.add_api_route(path, endpoint, include_in_schema=False, response_model=None)
    app.include_router(
        live_routes(proxy.picture, proxy.stopping, STATIC / "index.html", FILES, seconds=PICTURE_SECONDS)
    )
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.add_api_route(path, pass_on, methods=["POST"], include_in_schema=False, response_model=None)
    for path in ("/v1/models", "/v1/models/{model:path}"):
        app.add_api_route(path, pass_on, include_in_schema=False, response_model=None)
    return app


async def _body(request: Request, turns: Turns) -> tuple[bytes, dict[str, Any]]:
    """The body, and its JSON object; of a GET, nothing.

    Raises:
        ApiError: it is no JSON object.
        HTTPException: as `parse_body`.
    """
    if request.method != "POST":
        return b"", {}
    try:
        fields = await parse_body(request, turns)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict) or not fields:
        raise ApiError(400, "the body must be a JSON object")
    return await request.body(), fields
