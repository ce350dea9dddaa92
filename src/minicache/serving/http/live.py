"""The live page: the engine's current state, drawn in a browser. No phase builds this module.

`minicache.serving.replica.view.LiveView` makes the pictures, where the engine is; `live_routes` hands them to browsers.
The page itself is in `static/`: HTML, a style sheet and one module of JavaScript, from no other host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Final

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from minicache.serving.http.streaming import EventStream, sse_event
from minicache.serving.replica.view import PICTURE_SECONDS

KEEP_ALIVE_SECONDS: Final = 15.0
"""After this time without a picture, a viewer gets a comment: it keeps proxies from closing the stream as idle."""

AskPicture = Callable[[], Awaitable[bytes]]
"""Returns the last picture, in JSON; a call counts as viewing (`snapshot`)."""

STATIC: Final = Path(__file__).parent / "static"
MEDIA_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Of the page and its files: nothing is loaded from another host, and no inline script runs."""


def live_routes(
    ask: AskPicture,
    stopping: asyncio.Event,
    page: Path = STATIC / "index.html",
    files: Mapping[str, Path] = {"live.js": STATIC, "live.css": STATIC},
    seconds: float = PICTURE_SECONDS,
) -> APIRouter:
    """A page at `/`, its files under `/static/`, and `/live`, the stream of pictures that it draws.

    Args:
        ask: asks for a picture.
        stopping: set when the server shuts down; then the streams end.
        page: the page.
        files: the names of its files, and the folder of each.
        seconds: between two pictures.
    """
    router = APIRouter()

    def add(path: str, endpoint: Callable[[], Awaitable[Response]]) -> None:
        router.add_api_route(path, endpoint, include_in_schema=False, response_model=None)

    async def live() -> Response:
        return EventStream(pictures(ask, stopping, seconds))

    add("/", _sends(page))
    add("/live", live)
    for name, folder in files.items():
        add(f"/static/{name}", _sends(folder / name))
    return router


def _sends(file: Path) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(file, headers=HEADERS, media_type=MEDIA_TYPES[file.suffix])

    return send


async def pictures(ask: AskPicture, stopping: asyncio.Event, seconds: float) -> AsyncGenerator[bytes, None]:
    """Every new picture as a server-sent event, until the server stops.

    Yields:
        The last picture at once; then new ones, `seconds` apart; a comment after 15 s without any.
    """
    shown: bytes | None = None
    quiet_since = perf_counter()
    while not stopping.is_set():
        picture = await ask()
        if picture != shown:
            shown, quiet_since = picture, perf_counter()
            yield sse_event(picture.decode())
        elif perf_counter() - quiet_since >= KEEP_ALIVE_SECONDS:
            quiet_since = perf_counter()
            yield b": nothing new\n\n"
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may drop a cancellation
                await stopping.wait()
