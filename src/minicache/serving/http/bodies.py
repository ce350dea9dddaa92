"""What a request's body may be, before any route reads it: its type, its size, its time of arrival.

No phase builds this module.
"""

from __future__ import annotations

import asyncio
import email.message
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minicache.serving.http.errors import ApiError
from minicache.serving.http.logs import request_log
from minicache.serving.http.turns import Turns

MAX_BODY_NBYTES: Final = 2**20
"""131,072 token ids of seven digits with their commas; as text, more tokens than that."""

MAX_CONTAINERS: Final = 2**14
"""The most arrays and objects of a body: 4,096 messages of one part each have three quarters of that."""

SMALL_NBYTES: Final = 2**14
"""A body up to this size is parsed at once, in less than a millisecond or two."""

BODY_SECONDS = 30.0
"""The longest that a body may take to arrive. Half a body would otherwise hold its connection, and the shutdown."""

CHARSETS: Final = ("utf-8", "utf8", "us-ascii", "ascii")

JSON_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class Stoppable(Protocol):
    """A server that is to stop at some time.

    Attributes:
        stopping: is set then.
        reading: the time limits of bodies that have not come yet.
        turns: in which long work is done.
    """

    stopping: asyncio.Event
    reading: set[asyncio.Timeout]
    turns: Turns


def stop_reading(served: Stoppable) -> None:
    """It is to stop: no body is waited for any longer. Call it in the event loop."""
    served.stopping.set()
    for limit in served.reading:
        limit.reschedule(0)


def route_path(scope: Scope) -> str:
    """The path that routes see: without what a proxy has put before it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class BodyLimits:
    """In front of all routes: checks the type, size and time of arrival of a body.

    Args:
        app: what is behind it.
        served: has the time limits of bodies that are being read: a server that stops does not wait for them.
        max_nbytes: as said beforehand (Content-Length), and as it comes.
    """

    def __init__(self, app: ASGIApp, served: Stoppable, max_nbytes: int) -> None:
        self._app = app
        self._served = served
        self._max_nbytes = max_nbytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as refusal:
                request_log(scope).error = refusal.reason
                await refusal.response()(scope, receive, send)
                return
            receive = self._limited(receive)
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:  # before its body was complete
            await Response(status_code=499)(scope, receive, send)  # only for the log: the client is gone

    def _check(self, scope: Scope) -> None:
        """Refuse a body by what its headers say.

        A body that does not say that it is JSON is not read as such: without asking, a browser sends what a web page
        wants to any server, 127.0.0.1 too, unless it is of a type that forms cannot have.
        """
        headers = dict(scope["headers"])
        if self._says_too_large(headers.get(b"content-length", b"0")):
            raise self._too_large()
        if scope["method"] != "POST" or route_path(scope) not in JSON_PATHS:
            return
        sent_type = email.message.Message()
        sent_type["Content-Type"] = sent = headers.get(b"content-type", b"").decode("latin-1")
        charset = sent_type.get_param("charset", "utf-8")
        is_json = sent != "" and sent_type.get_content_type() == "application/json"
        if not is_json or str(charset).lower() not in CHARSETS:
            what = f"it is {sent!r}" if sent else "it is missing"
            message = f"the body must be JSON in UTF-8, sent with the header Content-Type: application/json; {what}"
            raise ApiError(415, message, code="unsupported_media_type")

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, as long as the body is neither too large nor too late."""
        num_left, is_read = self._max_nbytes, False
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
        return digits.isdigit() and (len(digits) > 18 or int(digits) > self._max_nbytes)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_nbytes:,} bytes", code="body_too_large")


# What it holds


async def parse_body(request: Request, turns: Turns) -> Any:
    """The JSON of a request's body. A large one is parsed in a turn of its own.

    Raises:
        json.JSONDecodeError: it is no JSON.
        HTTPException: 400: it is no UTF-8, is nested too deeply, or holds too much or too long a number.
    """
    body = await request.body()
    if len(body) <= SMALL_NBYTES:
        return _parse(body)
    async with turns.slice():
        return _parse(body)


def _parse(body: bytes) -> Any:
    # Brackets first: counting them is cheap, and those in strings are left out only if they are too many.
    if _num_brackets(body) > MAX_CONTAINERS and _num_brackets(_STRING.sub(b"", body)) > MAX_CONTAINERS:
        raise HTTPException(400, f"the body has more than {MAX_CONTAINERS:,} arrays and objects: send fewer at a time")
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None


def _num_brackets(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""Also one without an end. Possessive: each byte is looked at once."""


class _BoundedRequest(Request):
    async def json(self) -> Any:
        served: Stoppable = self.app.state.served
        return await parse_body(self, served.turns)


class BoundedRoute(APIRoute):
    """A route whose body is parsed by `parse_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As FastAPI's."""
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return handle_bounded
