# Phase 10, serving: your file. It stands in for minicache.serving.http.streaming.
# Write what raises NotImplementedError. `minicache grade 10` grades it, `minicache hint 10.K` helps with task K.
"""Answers streamed over HTTP: server-sent events, and the detection of a disconnect.

Phase 10 builds it, on ASGI itself: `send` writes the head of the response and then piece after piece, `receive` reports
that the client is gone. Events are split by LF alone, as the HTML standard's event streams and OpenAI's clients do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

Result = TypeVar("Result")

HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers events up to 4 KiB
}

__all__ = ["ClientLeftError", "EventStream", "sse_event", "unless_client_leaves"]


class ClientLeftError(Exception):
    """The client has disconnected before its answer was complete."""


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
    """Do some work for a client; if the client disconnects meanwhile, cancel the work.

    The request's body must have been read: after it, `receive` returns when the client is gone (`http.disconnect`);
    other messages are ignored, and an exception that it raises counts as a disconnect. If the work is done when the
    client disconnects, its result counts. Neither the work nor the listening is left running when this returns or
    raises, for whatever reason: both are cancelled, once, and awaited, however long they take to end. If the caller is
    cancelled meanwhile, they still run to their end, and then the CancelledError is raised. Until one of them is done,
    this sleeps, without polling.

    Args:
        receive: the request's ASGI channel.
        work: the work to do.

    Returns:
        The result of the work.

    Raises:
        ClientLeftError: the client disconnected first; the work was cancelled, and has ended, whatever it returned.
        Exception: raised by the work.
    """
    raise NotImplementedError(
        "phase 10, task 5: Events over HTTP; read docs/en/phase-10-serving/lab/02-the-socket.md"
    )


class EventStream(Response):
    """A response that sends pieces as they are generated. FastAPI calls it, as an ASGI application, with the channels.

    Args:
        pieces: bytes, whole events each: one or several.
        close: called once, at the end, for whatever reason: the pieces are exhausted, the client has disconnected,
            writing has failed, the server cancels. (A generator's own `finally` is not enough: it does not run in a
            generator that was closed before its first piece.)
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], close: Callable[[], object] = lambda: None) -> None:
        super().__init__(headers=HEADERS)
        self.pieces = pieces
        self.close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, the pieces and the end, as long as the client stays connected.

        The head is an `http.response.start`: status 200, and `HEADERS` as pairs of bytes. Each piece is an
        `http.response.body` with `more_body` true, sent as soon as it is there; the end is an empty one with
        `more_body` false. `send` returns when the connection has room again, and only then is the next piece taken from
        the generator: a slow client delays only its own pieces. A disconnect is no error, nor is an OSError
        that `send` raises, since the connection is broken; any other exception is raised, an OSError of the generator
        too. Whatever happens, `close` is called first, and then the generator is closed (`aclose`).
        """
        raise NotImplementedError(
            "phase 10, task 5: Events over HTTP; read docs/en/phase-10-serving/lab/02-the-socket.md"
        )
