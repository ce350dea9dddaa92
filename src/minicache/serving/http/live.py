"""The live page: the engine's current state, drawn in a browser. No phase builds this module.

`minicache.serving.replica.view.LiveView` makes the pictures, where the engine is; `live_routes` hands them to browsers.
The page itself is in `static/`: HTML, a style sheet and one module of JavaScript, from no other host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from minicache.serving.http.streaming import EventStream, sse_event
from minicache.serving.replica.messages import Picture
from minicache.serving.replica.view import PICTURE_SECONDS

KEEP_ALIVE_SECONDS: Final = 15.0
"""After this time without a picture, a viewer gets a comment: it keeps proxies from closing the stream as idle."""

AskPicture = Callable[[], Awaitable[Picture]]
"""Returns the last picture, the same object until there is a new one; a call counts as viewing (`snapshot`)."""

STATIC: Final = Path(__file__).parent / "static"
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of the page and its files: nothing is loaded from another host, and no inline script runs."""


def live_routes(ask: AskPicture, stopping: asyncio.Event) -> APIRouter:
    """The page at `/`, its files, and `/live`, the stream of pictures that it draws.

    Args:
        ask: asks the engine for a picture.
        stopping: set when the server shuts down; then the streams end.
    """

    async def page() -> Response:
        return FileResponse(STATIC / "index.html", headers=HEADERS)

    async def script() -> Response:
        return FileResponse(STATIC / "live.js", headers=HEADERS, media_type="text/javascript")

    async def style() -> Response:
        return FileResponse(STATIC / "live.css", headers=HEADERS, media_type="text/css")

    async def live() -> EventStream:
        return EventStream(pictures(ask, stopping), close=lambda: None)

    router = APIRouter()
    endpoints = {"/": page, "/static/live.js": script, "/static/live.css": style, "/live": live}
    for path, endpoint in endpoints.items():
        router.add_api_route(path, endpoint, include_in_schema=False, response_model=None)
    return router


async def pictures(ask: AskPicture, stopping: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Every new picture as a server-sent event, until the server stops.

    Yields:
        The last picture at once; then new ones, at most ten a second; a comment after 15 s without any.
    """
    shown: Picture | None = None
    quiet_since = perf_counter()
    while not stopping.is_set():
        picture = await ask()
        if picture is not shown:
            shown, quiet_since = picture, perf_counter()
            yield sse_event(picture.json.decode())
        elif perf_counter() - quiet_since >= KEEP_ALIVE_SECONDS:
            quiet_since = perf_counter()
            yield b": nothing new\n\n"
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), PICTURE_SECONDS)
