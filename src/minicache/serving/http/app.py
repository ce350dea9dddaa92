"""The HTTP API: routes, errors, and access. No phase builds this module.

`create_app` puts an engine behind OpenAI's routes. A request is read and checked (`protocol`), becomes one or
more streams of the engine, and is answered in OpenAI's shape (`shapes`), as one body or as events (`streaming`).
"""

from __future__ import annotations

import asyncio
import email.message
import json
import logging
import math
import re
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minicache import __version__
from minicache.engine.answers import Chunk, Prompt, check_prompt_length, prompt_token_ids
from minicache.engine.async_engine import AnswerStream, AsyncEngine
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer
from minicache.errors import (
    EngineDiedError,
    EngineNotReadyError,
    EngineStoppedError,
    MinicacheError,
    QueueFullError,
    RequestTooLargeError,
    StepFailedError,
)
from minicache.serving.http.backend import Backend, backend_of
from minicache.serving.http.keys import UNKNOWN, Admission, ApiKeys, Usage, usage_of
from minicache.serving.http.live import live_routes
from minicache.serving.http.logs import RequestLog, request_log
from minicache.serving.http.metrics import Metrics
from minicache.serving.http.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    ModelCard,
    ModelList,
)
from minicache.serving.http.shapes import DONE, ChatShape, CompletionShape, Shape
from minicache.serving.http.streaming import ClientLeftError, EventStream, sse_event, unless_client_leaves
from minicache.serving.replica.client import EngineClient
from minicache.serving.replica.fleet import FleetClient
from minicache.serving.replica.stream import TokenStream

logger = logging.getLogger("minicache")

Conversation = list[dict[str, str]]
"""The messages of a chat, each with "role" and "content": a prompt, for a tokenizer with a chat template."""

MAX_BODY_NBYTES = 4 * 2**20
BODY_SECONDS = 30.0
"""The longest that a body may take to arrive. Half a body would otherwise hold its connection, and the shutdown."""

WRITE_NOW = "minicache.write_now"
"""An extension in a request's ASGI scope. Its "write" is given a call that makes some bytes of the body; if the
connection has room for more, it makes and writes them at once. It returns whether it has."""

EXPOSED = (
    "Retry-After",
    "X-Request-Id",
    "X-RateLimit-Limit-Tokens",
    "X-RateLimit-Remaining-Tokens",
    "X-RateLimit-Reset-Tokens",
)
"""Headers of a response that scripts of other origins may read."""

LIVE_PATHS = ("/", "/live", "/static/live.js", "/static/live.css")
"""The page and its data: with an API key they are behind it. /health, /metrics and /openapi.json are not."""

CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")

JSON_PATHS = ("/v1/completions", "/v1/chat/completions")

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


@dataclass(slots=True)
class Served:
    """What the routes share.

    Attributes:
        backend: the engine, and what is known of it.
        model: the name that it is served by.
        stopping: is set when the server is to stop.
        reading: the time limits of bodies that have not come yet.
        tokenizing: the thread in which texts become token ids: neither the event loop nor the engine waits for a long
            one. One thread, since a tokenizer need not bear several.
        created: when it began, in seconds since 1970.
    """

    backend: Backend
    model: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    reading: set[asyncio.Timeout] = field(default_factory=set)
    tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "minicache-tokenizer"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine(self) -> AsyncEngine | EngineClient | FleetClient:
        """Answers."""
        return self.backend.engine

    @property
    def metrics(self) -> Metrics:
        """Counts."""
        return self.backend.metrics

    @property
    def num_unfinished(self) -> int:
        """Answers under way."""
        return self.engine.num_unfinished

    async def ready(self) -> None:
        """Wait until the engine is ready."""
        await self.backend.ready()

    async def drain(self, seconds: float) -> bool:
        """Wait until all answers have ended, for so long at most; whether they have."""
        return await self.engine.drain(seconds)

    async def end(self) -> None:
        """Stop the engine."""
        await self.engine.stop()

    def stop(self) -> None:
        """Refuse new requests from now on, and end endless streams. Call it in the event loop."""
        self.engine.is_draining = True
        self.stopping.set()
        for limit in self.reading:
            limit.reschedule(0)


def create_app(
    engine: AsyncEngine | EngineClient | FleetClient,
    *,
    served_model_name: str = "minigpt",
    api_key: str | None = None,
    api_keys: ApiKeys | None = None,
    allow_origins: Sequence[str] = (),
    max_body_nbytes: int = MAX_BODY_NBYTES,
) -> FastAPI:
    """The API as an ASGI application. Its lifespan starts the engine and stops it.

    Args:
        engine: in a thread of this process, or in processes of its own, or a fleet.
        served_model_name: what clients call the model.
        api_key: what clients of `/v1/…` and of the live page have to show; None: nothing.
        api_keys: several, with names and limits, instead. SIGHUP has their file read again.
        allow_origins: of web pages that may ask from a browser, such as "https://lab.example"; "*": of all.
        max_body_nbytes: a larger body is refused.

    Returns:
        The application; `app.state.served` is its `Served`.

    Raises:
        ValueError: the API key is empty; there are both; an origin is none.
    """
    if api_key is not None:
        if api_keys is not None:
            raise ValueError("pass either api_key or api_keys, not both")
        api_keys = ApiKeys.of_single(api_key)
    for origin in allow_origins:
        check_origin(origin)
    served = Served(backend_of(engine, served_model_name), served_model_name)

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
        lifespan=lifespan,
    )
    app.state.served = served
    app.include_router(_openai_routes(served))
    app.include_router(_server_routes(served))
    app.include_router(live_routes(served.backend.picture, served.stopping))
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(MinicacheError, _told)
    app.add_exception_handler(RequestValidationError, _told)
    app.add_exception_handler(HTTPException, _told)
    app.add_exception_handler(Exception, _told)
    for usage in api_keys or ():
        served.metrics.add_key(usage.key.name)
    app.add_middleware(Gate, served=served, api_keys=api_keys, max_body_nbytes=max_body_nbytes)
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
        for name in names:
            metrics.add_key(name)
        logger.info("the API keys were reloaded: %d", len(names))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, read_again)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


# Routes


def _server_routes(served: Served) -> APIRouter:
    router = APIRouter()

    @router.get("/health", responses={503: {"model": ErrorBody, "description": "It is stopping or has failed."}})
    async def health() -> dict[str, str]:
        """Whether the server takes requests."""
        served.engine.check_admission(0)
        return {"status": "ok"}

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(await asyncio.to_thread(served.metrics.render), media_type=Metrics.content_type)

    return router


def _openai_routes(served: Served) -> APIRouter:
    router = APIRouter(prefix="/v1", responses=ERRORS)

    def card() -> ModelCard:
        return ModelCard(id=served.model, created=served.created, max_model_len=served.backend.info.max_model_len)

    @router.get("/models")
    async def list_models() -> ModelList:
        """The served models: one."""
        return ModelList(data=[card()])

    @router.get("/models/{model:path}")
    async def retrieve_model(model: str) -> ModelCard:
        """One model."""
        _check_model(served, model)
        return card()

    @router.post("/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        _check_model(served, body.model)
        body.refuse_unsupported()
        shape = CompletionShape(
            served.model,
            served.backend.tokenizer,
            usage=body.wants_usage_chunk(),
            token_ids=bool(body.return_token_ids),
        )
        params = body.sampling_params(16 if body.max_tokens is None else body.max_tokens)
        return await _answer(served, body, request, shape, body.prompts(), "prompt", params, body.logprobs)

    @router.post("/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        _check_model(served, body.model)
        body.refuse_unsupported()
        shape = ChatShape(
            served.model,
            served.backend.tokenizer,
            usage=body.wants_usage_chunk(),
            token_ids=bool(body.return_token_ids),
        )
        limit = body.token_limit()
        params = body.sampling_params(served.backend.info.max_model_len if limit is None else limit)
        prompt = _chat_prompt(served.backend.tokenizer, body.messages)
        return await _answer(served, body, request, shape, [prompt], "messages", params, body.num_logprobs())

    return router


def _check_model(served: Served, model: str | None) -> None:
    if model is not None and model != served.model:
        message = f"there is no model {model!r} here: this server has {served.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _chat_prompt(tokenizer: Tokenizer | None, messages: Sequence[ChatMessage]) -> str | Conversation:
    """A conversation as a prompt: for the model's chat template; without one, the messages' texts one after another.

    MiniGPT has no template: it knows no roles, and goes on from where the texts end.
    """
    conversation = [{"role": message.role, "content": message.text()} for message in messages]
    if hasattr(tokenizer, "apply_chat_template"):
        return conversation
    return " ".join(message["content"] for message in conversation)


async def _tokenize(served: Served, prompts: Sequence[Prompt | Conversation]) -> list[list[int]]:
    """Prompts as token ids. What cannot fit is refused before it is tokenised, the rest tokenised in a thread.

    Raises:
        Exception: as `new_answers` of the prompts; ValueError: a chat template refuses its messages.
    """
    info, tokenizer = served.backend.info, served.backend.tokenizer
    for prompt in prompts:
        text = "".join(each["content"] for each in prompt) if _is_conversation(prompt) else prompt
        check_prompt_length(cast(Prompt, text), info.max_model_len, tokenizer)

    def token_ids(prompt: Prompt | Conversation) -> list[int]:
        if _is_conversation(prompt):
            prompt = cast(Any, tokenizer).apply_chat_template(prompt)
        return prompt_token_ids(cast(Prompt, prompt), info.vocab_size, info.max_model_len, tokenizer)

    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(served.tokenizing, lambda: [token_ids(prompt) for prompt in prompts])


def _is_conversation(prompt: Prompt | Conversation) -> TypeGuard[Conversation]:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


async def _answer(
    served: Served,
    body: CompletionRequest | ChatRequest,
    request: Request,
    shape: Shape,
    prompts: Sequence[Prompt | Conversation],
    param: str,
    params: SamplingParams,
    num_logprobs: int | None,
) -> Response:
    """Begin a request, and answer it in one body or in events. If the client disconnects, it is aborted.

    `param` is the field that the prompts came in.
    """
    log, usage = request_log(request.scope), usage_of(request.scope)
    options: dict[str, Any] = {"priority": body.priority or 0, "cache_salt": body.cache_salt}
    if num_logprobs is not None:
        options["num_logprobs"] = num_logprobs
    with ExitStack() as stack:  # if one of several prompts is refused, the others are aborted
        streams = await _begin(served, usage, shape, prompts, param, params, options, log, stack)
        log.num_prompt_tokens = _num_prompt_tokens(streams)
        if body.stream:
            _write_directly(request.scope, shape, streams, params.n, log)
            close = stack.pop_all().close
            pieces = _pieces(served, shape, streams, params.n, body.wants_usage_chunk(), log, close)
            return EventStream(pieces, close)
        try:
            choices = await unless_client_leaves(request.receive, _collect(streams, params.n, log))
        except ClientLeftError:
            return Response(status_code=499)  # only for the log: the client is gone
    return _json_response(200, shape.whole(choices, _num_prompt_tokens(streams)))


def _write_directly(
    scope: Scope, shape: Shape, streams: Sequence[AnswerStream], num_answers: int, log: RequestLog
) -> None:
    """Have chunks written to the connection where they are made, if stream and connection can do that.

    `_pieces` gets what is left: a chunk that the connection has no room for now, errors, the end. At 64 streams, waking
    a task for each token would cost more than all else that a token costs here.
    """
    extension: Any = scope.get("extensions", {}).get(WRITE_NOW)
    if extension is None:
        return
    write: Callable[[Callable[[], bytes]], bool] = extension["write"]

    def write_chunks(first_index: int, chunks: Sequence[Chunk]) -> bool:
        def events() -> bytes:
            log.count(chunks)
            return shape.events(first_index, chunks)

        try:
            return write(events)
        except Exception:  # `_pieces` meets it too, and tells the client
            return False

    for index, stream in enumerate(streams):
        if isinstance(stream, TokenStream):
            stream.write = partial(write_chunks, index * num_answers)


async def _begin(
    served: Served,
    usage: Usage,
    shape: Shape,
    prompts: Sequence[Prompt | Conversation],
    param: str,
    params: SamplingParams,
    options: dict[str, Any],
    log: RequestLog,
    stack: ExitStack,
) -> list[AnswerStream]:
    """Submit all prompts at the same time: one after the other, each would wait a step to be taken.

    A request that finds no admission slots, or whose key has too many answers under way, is refused before its prompts
    are tokenized; one that its key has no tokens for, after.
    """
    streams: list[AnswerStream] = []
    num_answers = len(prompts) * params.n
    with _refusals(served, usage, "n"):
        admission = usage.begin(num_answers)
        stack.callback(_end, served, usage, admission, num_answers, streams, log)
        _count(served, usage, "minicache:key_answers_running", num_answers)
        served.engine.check_admission(num_answers)

    async def begin(token_ids: list[int]) -> AnswerStream:
        return stack.enter_context(await served.engine.add_request(token_ids, params, **options))

    with _refusals(served, usage, param):
        tokenized = await _tokenize(served, prompts)
        admission.reserve(sum(map(partial(_most_tokens, served, params), tokenized)))
        begun = await asyncio.gather(*map(begin, tokenized), return_exceptions=True)
        if refused := [each for each in begun if isinstance(each, BaseException)]:
            raise refused[0]
    streams += [each for each in begun if isinstance(each, AnswerStream)]
    shape.continue_prompts([token_ids for token_ids in tokenized for _ in range(params.n)])
    _count(served, usage, "minicache:key_requests", 1)
    _count(served, usage, "minicache:key_prompt_tokens", _num_prompt_tokens(streams))
    return streams


def _most_tokens(served: Served, params: SamplingParams, token_ids: Sequence[int]) -> int:
    """What a prompt and its answers may come to."""
    room = served.backend.info.max_model_len - len(token_ids)
    return len(token_ids) + params.n * min(params.max_tokens, room)


def _end(
    served: Served,
    usage: Usage,
    admission: Admission,
    num_answers: int,
    streams: Sequence[AnswerStream],
    log: RequestLog,
) -> None:
    """A request is over, or was refused, in which case it has no streams: charge its key for what it was given.

    What was generated and not read counts: a client that leaves has had it computed. (The streams of an engine in this
    process do not know: there what was read counts.)
    """
    per_stream = [sum(each.num_tokens) for each in streams if isinstance(each, TokenStream)]
    num_generated = sum(per_stream) if per_stream else log.num_generated_tokens
    admission.end(_num_prompt_tokens(streams) + num_generated)
    _count(served, usage, "minicache:key_generation_tokens", num_generated)
    _count(served, usage, "minicache:key_answers_running", -num_answers)


def _count(served: Served, usage: Usage, name: str, value: int, *reason: str) -> None:
    """Count something of a key, if keys are asked for."""
    if usage.key.name:
        served.metrics.count_key(name, value, usage.key.name, *reason)


@contextmanager
def _refusals(served: Served, usage: Usage, param: str) -> Iterator[None]:
    """What is raised of a request, counted, or with the field of the request that is to blame."""

    def count(reason: str) -> None:
        served.metrics.count_refused(reason)
        _count(served, usage, "minicache:key_requests_refused", 1, reason)

    try:
        yield
    except ApiError as error:  # of the key
        count(error.reason)
        raise
    except QueueFullError:
        count("queue_full")
        raise
    except EngineStoppedError:
        count("stopping")
        raise
    except EngineNotReadyError:
        count("not_ready")
        raise
    except (EngineDiedError, StepFailedError):
        raise
    except RequestTooLargeError as error:
        raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
    except (MinicacheError, ValueError, TypeError, IndexError) as error:
        raise ApiError(400, str(error), param=param) from error


async def _pieces(
    served: Served,
    shape: Shape,
    streams: Sequence[AnswerStream],
    num_answers: int,
    usage: bool,
    log: RequestLog,
    close: Callable[[], object],
) -> AsyncGenerator[bytes, None]:
    """The events of a stream. An error on the way is an event too, since the status was sent long ago.

    `close` is called before the last event: a client that has it may send its next request, and be at its limit.
    """
    if opening := shape.opening(len(streams) * num_answers):
        yield opening
    try:
        async for index, chunks in _merge(streams):
            log.count(chunks)
            yield shape.events(index * num_answers, chunks)
        if usage:
            yield shape.usage_event(_num_prompt_tokens(streams))
    except Exception as error:
        if not isinstance(error, MinicacheError):
            logger.error("a stream has failed", exc_info=error)
        told = _as_api_error(error, served)
        log.error = told.reason
        yield sse_event(json.dumps(told.body))
    close()
    yield DONE


async def _collect(streams: Sequence[AnswerStream], num_answers: int, log: RequestLog) -> list[list[Chunk]]:
    """All chunks of each choice."""
    choices: list[list[Chunk]] = [[] for _ in range(len(streams) * num_answers)]
    for index, stream in enumerate(streams):
        async for chunk in stream:
            log.count((chunk,))
            choices[index * num_answers + chunk.index].append(chunk)
    return choices


async def _merge(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """The chunks of several streams in order of arrival, with the index of their stream."""
    if len(streams) == 1:
        while chunks := await streams[0].take():
            yield 0, chunks
        return
    waiting = {asyncio.ensure_future(stream.take()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if chunks := task.result():
                    waiting[asyncio.ensure_future(streams[index].take())] = index
                    yield index, chunks
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _num_prompt_tokens(streams: Sequence[AnswerStream]) -> int:
    return sum(stream.num_prompt_tokens for stream in streams)


# Errors


async def _told(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's shape."""
    told = _as_api_error(error, request.app.state.served)
    request_log(request.scope).error = told.reason
    return _json_response(told.status, told.body, told.headers)


def _as_api_error(error: Exception, served: Served) -> ApiError:
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _what_is_invalid(error)
        case HTTPException():
            code = "body_too_large" if error.status_code == 413 else None
            return ApiError(error.status_code, str(error.detail), code=code, headers=dict(error.headers or {}))
        case QueueFullError():
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case EngineStoppedError():
            return ApiError(503, str(error), kind="server_error", code="stopping", headers={"Retry-After": "1"})
        case EngineNotReadyError():
            return ApiError(503, str(error), kind="server_error", code="not_ready", headers={"Retry-After": "1"})
        case EngineDiedError():
            served.metrics.count_failed()
            return ApiError(503, str(error), kind="server_error", code="engine_died", headers={"Retry-After": "1"})
        case StepFailedError():
            served.metrics.count_failed()
            return ApiError(500, str(error), kind="server_error", code="step_failed")
        case _:
            return ApiError(500, "the server has failed; see its log", kind="server_error")


def _what_is_invalid(error: RequestValidationError) -> ApiError:
    """What is wrong first, with the field's name.

    Of a field that may be of several types, each says why it is none. Whichever came furthest is what was meant.
    """
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", errors[0]["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}")
    told = max((each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]), key=lambda each: len(each["loc"]))
    place = [str(part) for part in told["loc"] if part != "body" and not _TYPE.search(str(part))]
    param = place[0] if place else None
    where = f"{'.'.join(place)}: " if place else ""
    if not place and told["type"] != "value_error":  # the models' own checks name the field
        where = "the body must be a JSON object, sent as application/json: "
    return ApiError(400, where + told["msg"].removeprefix("Value error, "), param=param)


_TYPE = re.compile(r"^str$|[^\w]")
"""In the place of an error: the type that was tried, and no field."""


def _json_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII: half a letter, which Python's strings can hold and UTF-8 cannot, is written as it came."""
    return Response(json.dumps(body), status_code=status, headers=headers, media_type="application/json")


# Access


def _path(scope: Scope) -> str:
    """The path that routes see: without what a proxy has put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Gate:
    """In front of all routes: checks the API key, and the type, size and time of arrival of a body.

    Args:
        app: what is behind it.
        served: has the deadlines of bodies that are being read: a server that stops does not wait for them.
        api_keys: None: none is asked for.
        max_body_nbytes: as said beforehand (Content-Length), and as it comes.
    """

    def __init__(self, app: ASGIApp, served: Served, api_keys: ApiKeys | None, max_body_nbytes: int) -> None:
        self._app = app
        self._served = served
        self._api_keys = api_keys
        self._max_body_nbytes = max_body_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            send = self._with_key(scope, headers, send)
            self._check_body(scope, headers)
        except ApiError as refusal:
            request_log(scope).error = refusal.reason
            await _json_response(refusal.status, refusal.body, refusal.headers)(scope, receive, send)
        else:
            if scope["method"] == "HEAD" and _path(scope) != "/live":  # uvicorn leaves out the body
                scope = {**scope, "method": "GET"}
            await self._app(scope, self._limited(receive), send)

    def _with_key(self, scope: Scope, headers: dict[bytes, bytes], send: Send) -> Send:
        """Find the request's key, and return a `send` that adds its remaining tokens to the headers.

        Raises:
            ApiError: the key is unknown.
        """
        path = _path(scope)
        is_api = path.startswith("/v1/")
        if self._api_keys is None or not (is_api or path in LIVE_PATHS):
            return send
        usage = self._api_keys.find(headers.get(b"authorization", b""))
        if usage is None:
            self._served.metrics.count_key("minicache:key_requests_refused", 1, UNKNOWN, "invalid_api_key")
            if is_api:
                message, scheme = "send it as `Authorization: Bearer KEY`", "Bearer"
            else:
                message = "give it as the password, with any user name"
                scheme = 'Basic realm="minicache", charset="UTF-8"'
            message = f"wrong or missing API key: {message}"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})
        request_log(scope).key = usage.key.name
        scope.setdefault("state", {})["usage"] = usage
        if usage.key.tokens_per_minute is None or not is_api:
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *usage.headers()]
            await send(message)

        return send_with_limits

    def _check_body(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a body by what its headers say.

        A body that does not say that it is JSON is not read as such: without asking, a browser sends what a web page
        wants to any server, 127.0.0.1 too, unless it is of a type that forms cannot have.
        """
        if self._says_too_large(headers.get(b"content-length", b"0")):
            raise self._too_large()
        if scope["method"] != "POST" or _path(scope) not in JSON_PATHS:
            return
        told = email.message.Message()
        told["Content-Type"] = sent = headers.get(b"content-type", b"").decode("latin-1")
        charset = told.get_param("charset", "utf-8")
        is_json = sent != "" and told.get_content_type() == "application/json"
        if not is_json or str(charset).lower() not in CHARSETS:
            what = f"it is {sent!r}" if sent else "it is missing"
            message = f"the body must be JSON in UTF-8, sent with the header Content-Type: application/json; {what}"
            raise ApiError(415, message, code="unsupported_media_type")

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, as long as the body is neither too large nor too late."""
        num_left, is_read = self._max_body_nbytes, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def receive_so_much() -> Message:
            nonlocal num_left, is_read
            if is_read:  # from here on it tells that the client has left, whenever that is
                return await receive()
            message = await self._in_time(receive, deadline)
            num_left -= len(message.get("body", b""))
            if num_left < 0:
                raise HTTPException(413, str(self._too_large()))
            is_read = not message.get("more_body", False)
            return message

        return receive_so_much

    async def _in_time(self, receive: Receive, deadline: float) -> Message:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                self._served.reading.add(limit)
                return await receive()
        except TimeoutError:
            if self._served.stopping.is_set():
                raise HTTPException(503, "the server is stopping and accepts no new requests") from None
            raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None
        finally:
            self._served.reading.discard(limit)

    def _says_too_large(self, content_length: bytes) -> bool:
        """Of a length that is no number nothing is known: it counts as it comes. (The HTTP parser refuses such.)"""
        digits = content_length.lstrip(b"0")
        return digits.isdigit() and (len(digits) > 18 or int(digits) > self._max_body_nbytes)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_nbytes:,} bytes", code="body_too_large")
