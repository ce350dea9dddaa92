"""The HTTP API: routes, errors, and access. No phase builds this module.

`create_app` puts an engine behind OpenAI's routes. A request is checked (`bodies`, `protocol`), becomes one or more
streams of the engine (`answering`), and is answered in OpenAI's shape (`shapes`), as one body or as events
(`streaming`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minicache import __version__
from minicache.engine.async_engine import AsyncEngine
from minicache.errors import MinicacheError
from minicache.serving.http.answering import ApiCall, check_model
from minicache.serving.http.backend import Served, served_engine
from minicache.serving.http.bodies import MAX_BODY_NBYTES, BodyLimits, BoundedRoute, route_path
from minicache.serving.http.errors import ApiError
from minicache.serving.http.keys import UNKNOWN, ApiKeys
from minicache.serving.http.live import live_routes
from minicache.serving.http.logs import request_log
from minicache.serving.http.metrics import Metrics
from minicache.serving.http.protocol import ChatRequest, CompletionRequest, ErrorBody, ModelCard, ModelList
from minicache.serving.http.shapes import ChatShape, CompletionShape
from minicache.serving.http.turns import Together
from minicache.serving.replica.client import EngineClient
from minicache.serving.replica.fleet import FleetClient

logger = logging.getLogger("minicache")

EXPOSED = (
    "Retry-After",
    "X-Request-Id",
    "X-RateLimit-Limit-Tokens",
    "X-RateLimit-Remaining-Tokens",
    "X-RateLimit-Reset-Tokens",
)
"""Headers of a response that scripts of other origins may read."""

LIVE_PATHS = ("/", "/live", "/static/live.js", "/static/live.css")
"""The page and its data: with an API key they are behind it. /health and /openapi.json are not."""

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is invalid."},
    401: {"model": ErrorBody, "description": "The API key is missing or wrong."},
    404: {"model": ErrorBody, "description": "No such model."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not application/json in UTF-8."},
    429: {
        "model": ErrorBody,
        "description": "All admission slots are taken, or the key has reached a limit. Retry-After says when to retry.",
    },
    500: {"model": ErrorBody, "description": "The model failed on this request."},
    503: {"model": ErrorBody, "description": "The server is stopping, or its engine is starting or has died."},
}


def create_app(
    engine: AsyncEngine | EngineClient | FleetClient,
    *,
    served_model_name: str = "minigpt",
    api_key: str | None = None,
    api_keys: ApiKeys | None = None,
    metrics_key: str | None = None,
    allow_origins: Sequence[str] = (),
    max_body_nbytes: int = MAX_BODY_NBYTES,
    lab_files: Mapping[str, str] | None = None,
) -> FastAPI:
    """The API as an ASGI application. Its lifespan starts the engine and stops it.

    Args:
        engine: in a thread of this process, or in processes of its own, or a fleet.
        served_model_name: what clients call the model.
        api_key: what clients of `/v1/…` and of the live page have to show; None: nothing.
        api_keys: several, with names and limits, instead. SIGHUP has their file read again.
        metrics_key: what `/metrics` asks for; None: nothing.
        allow_origins: of web pages that may ask from a browser, such as "https://lab.example"; "*": of all.
        max_body_nbytes: a larger body is refused.
        lab_files: a learner's files that compute here, module → SHA-256, which `/v1/models` says.

    Returns:
        The application; `app.state.served` is its `Served`.

    Raises:
        ValueError: a key is empty; there are both; an origin is none.
    """
    if api_key is not None:
        if api_keys is not None:
            raise ValueError("pass either api_key or api_keys, not both")
        api_keys = ApiKeys.of_single(api_key)
    for origin in allow_origins:
        check_origin(origin)
    served = served_engine(engine, served_model_name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with served.engine:
            with _reading_again(api_keys, served.metrics):
                yield
        served.tokenizing.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="minicache",
        version=__version__,
        summary="An OpenAI-compatible API in front of the engine that this course builds.",
        docs_url=None,  # these pages load their scripts from another host
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to wherever the Host header says
        lifespan=lifespan,
    )
    app.state.served = served
    app.include_router(_openai_routes(served, lab_files or {}))
    app.include_router(_server_routes(served))
    app.include_router(live_routes(served.picture, served.stopping))
    for kind in (ApiError, MinicacheError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _error_response)
    served.metrics.set_keys([usage.key.name for usage in api_keys or ()])
    app.add_middleware(BodyLimits, served=served, max_nbytes=max_body_nbytes)
    metrics_keys = None if metrics_key is None else ApiKeys.of_single(metrics_key)
    app.add_middleware(Gate, served=served, api_keys=api_keys, metrics_keys=metrics_keys)
    if allow_origins:  # before the gate: its refusals are for the page's eyes too, and a preflight has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED,
        )
    return app


def check_origin(origin: str) -> None:
    """Raise ValueError for what browsers never send as an origin."""
    if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
        raise ValueError(
            f'expected an origin such as "https://lab.example" or "http://localhost:5173", without a path, or "*"; '
            f"got {origin!r}"
        )


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z*]+")
"""As browsers send it: in small letters."""


@contextmanager
def _reading_again(api_keys: ApiKeys | None, metrics: Metrics) -> Iterator[None]:
    """Have SIGHUP read the file of keys again. Only a process's main thread can receive signals."""
    if api_keys is None or api_keys.path is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def read_again() -> None:
        try:
            api_keys.reload()
        except ValueError as error:
            logger.error("the API keys were not reloaded: %s", error)
            return
        names = [usage.key.name for usage in api_keys]
        metrics.set_keys(names)
        logger.info("the API keys were reloaded: %d", len(names))

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, read_again)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)  # the default would end a server that is about to end well
        signal.signal(signal.SIGHUP, before)


async def _error_response(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's shape."""
    served: Served = request.app.state.served
    shown = served.as_api_error(error)
    request_log(request.scope).error = shown.reason
    return shown.response()


# Routes


def _server_routes(served: Served) -> APIRouter:
    router, rendering = APIRouter(), Together(served.metrics.render)

    @router.get("/health", responses={503: {"model": ErrorBody, "description": "It is stopping or has failed."}})
    async def health() -> dict[str, str]:
        """Whether the server takes requests."""
        served.engine.check_admission(0)
        return {"status": "ok"}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(await rendering.result(), media_type=Metrics.content_type)

    return router


def _openai_routes(served: Served, lab_files: Mapping[str, str]) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=ERRORS, route_class=BoundedRoute)

    def card() -> ModelCard:
        return ModelCard(
            id=served.model,
            created=served.created,
            max_model_len=served.info.max_model_len,
            has_chat_template=getattr(served.tokenizer, "has_chat_template", False),
            lab_files=lab_files,
        )

    @router.get("/models")
    async def list_models() -> ModelList:
        """The served models: one."""
        return ModelList(data=[card()])

    @router.get("/models/{model:path}")
    async def retrieve_model(model: str) -> ModelCard:
        """One model."""
        check_model(served, model)
        return card()

    @router.post("/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        return await ApiCall(served, body, request, CompletionShape).answer()

    @router.post("/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await ApiCall(served, body, request, ChatShape).answer()

    return router


# Access


class Gate:
    """In front of all routes: checks the API key.

    Args:
        app: what is behind it.
        served: has the metrics.
        api_keys: None: none is asked for.
        metrics_keys: those of `/metrics`, likewise.
    """

    def __init__(self, app: ASGIApp, served: Served, api_keys: ApiKeys | None, metrics_keys: ApiKeys | None) -> None:
        self._app = app
        self._served = served
        self._api_keys, self._metrics_keys = api_keys, metrics_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            try:
                send = self._with_key(scope, send)
            except ApiError as refusal:
                request_log(scope).error = refusal.reason
                await refusal.response()(scope, receive, send)
                return
            if scope["method"] == "HEAD" and route_path(scope) != "/live":  # uvicorn leaves out the body
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def _with_key(self, scope: Scope, send: Send) -> Send:
        """Find the request's key, and return a `send` that adds its remaining tokens to the headers.

        Raises:
            ApiError: the key is unknown.
        """
        path = route_path(scope)
        is_api, is_page = path.startswith("/v1/"), path in LIVE_PATHS
        keys = self._metrics_keys if path == "/metrics" else self._api_keys if is_api or is_page else None
        if keys is None:
            return send
        usage = keys.find(dict(scope["headers"]).get(b"authorization", b""))
        if usage is None:
            self._served.metrics.count_key("minicache:key_requests_refused", 1, UNKNOWN, "invalid_api_key")
            message, scheme = "send it as `Authorization: Bearer KEY`", "Bearer"
            if is_page:
                message = "give it as the password, with any user name"
                scheme = 'Basic realm="minicache", charset="UTF-8"'
            message = f"wrong or missing API key: {message}"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})
        if keys is self._metrics_keys:
            return send
        request_log(scope).key = usage.key.name
        scope.setdefault("state", {})["usage"] = usage
        if usage.key.tokens_per_minute is None or not is_api:
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *usage.headers()]
            await send(message)

        return send_with_limits
