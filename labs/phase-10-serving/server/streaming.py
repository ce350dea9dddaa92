# Phase 10, serving: your file. It stands in for minicache.server.streaming.
# Write what raises NotImplementedError. `minicache grade 10` grades it, `minicache hint 10.K` helps with task K.
"""Answers over HTTP while they come: server-sent events, and noticing that a client has left.

Phase 10 builds it, on ASGI itself: `send` writes the head of the response and then piece after piece, `receive` tells
when the client is gone. Events are split by LF alone, as the HTML standard's event streams and OpenAI's clients do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep events back until it has 4 KiB of them
}

__all__ = ["ClientLeftError", "EventStream", "sse_event", "unless_client_leaves"]


class ClientLeftError(Exception):
    """The client has left before its answer was complete: there is nobody to answer."""


def sse_event(data: str) -> bytes:
    r"""One server-sent event: a `data:` line for each line of `data`, then an empty line; lines end with LF.

    >>> sse_event('{"text": " saw"}')
    b'data: {"text": " saw"}\n\n'

    Args:
        data: what to send; JSON without line breaks, as a rule. A CR LF, or a CR alone, in it is a line break as well.
    """
    raise NotImplementedError(
        "phase 10, task 5: Events over HTTP; read docs/en/phase-10-serving/lab/02-the-socket.md"
    )


async def unless_client_leaves(receive: Receive, work: Awaitable[Result]) -> Result:
    """Do some work for a client; if it leaves meanwhile, cancel the work.

    The request's body must have been read: what `receive` says after it is that the client is gone
    (`http.disconnect`), whenever that is; other messages mean nothing. Work that is done when the client leaves counts.
    Neither the work nor the waiting is left running when this returns or raises, however that comes: both are
    cancelled, and waited for, however long they take to end. Until one of them is done, it sleeps: it does not look
    every so often.

    Args:
        receive: the request's.
        work: what to do.

    Returns:
        What the work gives.

    Raises:
        ClientLeftError: the client has left first, and the work was cancelled, and has ended.
        Exception: what the work raises.
    """
    raise NotImplementedError(
        "phase 10, task 5: Events over HTTP; read docs/en/phase-10-serving/lab/02-the-socket.md"
    )


class EventStream(Response):
    """A response that sends pieces as they come. An ASGI application: FastAPI calls it with the request's channels.

    Args:
        pieces: bytes, whole events each: one or several.
        close: is called once, at the end, however that comes: the pieces are over, the client has left, writing has
            failed, the server cancels. (A generator's own `finally` would not do: it does not run in a generator that
            was closed before its first piece.)
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], close: Callable[[], object] = lambda: None) -> None:
        super().__init__(headers=HEADERS)
        self.pieces = pieces
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, the pieces and the end; or as much of it as the client stays for.

        The head is status 200 and `HEADERS`. Each piece is a body with `more_body`, sent as soon as it is there; the
        end is an empty body without. `send` returns when the connection has room again, and only then is the next piece
        taken from the generator: so a slow client slows down its own pieces and nothing else. That a client leaves is
        no error. At the end, `close` is called, and the generator closed (`aclose`).
        """
        raise NotImplementedError(
            "phase 10, task 5: Events over HTTP; read docs/en/phase-10-serving/lab/02-the-socket.md"
        )
