"""The server as a process: it listens, and at SIGTERM lets its clients finish. No phase builds this module."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minicache.server.app import WRITE_NOW, Served

_GRACE = 3  # seconds beyond the drain, for clients that do not read what they were sent
_MAX_HEAD_NBYTES = 64 * 2**10
HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of a request, from when it was opened or the next head began."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP by way of httptools, with three things mended.

    httptools keeps as many headers as a client sends: here, 64 KiB of them. uvicorn waits for ever for the rest of a
    head: here, HEAD_SECONDS. And if a client leaves that has sent a second request behind its first, uvicorn tells the
    second only: here, all that are unanswered.
    """

    _num_head_nbytes = 0
    _is_in_head = True
    _unanswered: tuple[RequestResponseCycle, ...] = ()
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come. Those of a head that came in one piece with its first byte are not counted."""
        self._num_head_nbytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_nbytes > _MAX_HEAD_NBYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
        # Empty lines behind a response are no head yet, but they stop uvicorn's timer for idle connections.
        if self._is_in_head or (self.cycle is not None and self.cycle.response_complete):
            self._start_head_timer()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head, self._num_head_nbytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope["extensions"] = {WRITE_NOW: {"write": partial(_write_now, self.cycle)}}
        cycles = dict.fromkeys((*self._unanswered, self.cycle))  # the last is not new if this was an upgrade
        self._unanswered = tuple(each for each in cycles if each is not None and not each.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        super().connection_lost(exc)
        self._stop_head_timer()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _start_head_timer(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        """Close the connection; but not while an answer is still being sent on it."""
        self._head_timer = None
        if all(cycle.response_complete for cycle in self._unanswered):
            self.transport.close()
        else:
            self._start_head_timer()


def _write_now(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a piece of a body whose head was sent, if the connection has room, and return whether it has.

    It is what `cycle.send` does, without a coroutine; for bodies of no given length over HTTP/1.1 only.
    """
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


class Server(uvicorn.Server):
    """uvicorn, and an engine that it drains.

    At the first SIGTERM or SIGINT new requests are refused (503), and new connections too; answers under way go on, for
    at most `drain_seconds`. Those that are not complete then end with an error event. At the second, it ends at once.

    Args:
        app: of `create_app`.
        host: the address to listen on.
        port: 0: any that is free.
        drain_seconds: as above.
        on_listening: is called with the port, as soon as clients can come: the server listens, and the engine is ready.
            (What comes between the two is answered by a 503.)
        log_level: of uvicorn.

    Attributes:
        start_error: why the engine could not be started, in which case `run` returns; else None.

    Raises:
        ValueError: drain_seconds is negative, or not finite.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        drain_seconds: float = 30.0,
        on_listening: Callable[[int], object] = lambda port: None,
        log_level: str = "warning",
    ) -> None:
        if not (math.isfinite(drain_seconds) and drain_seconds >= 0):
            raise ValueError(f"drain_seconds must be 0 or a positive finite number; got {drain_seconds}")
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            host=host,
            port=port,
            log_level=log_level,
            access_log=False,  # a line for each request would cost more than the request; /metrics counts them
            timeout_graceful_shutdown=int(drain_seconds) + _GRACE,
        )
        super().__init__(config)
        self._served: Served = app.state.served
        self._drain_seconds = drain_seconds
        self.start_error: Exception | None = None
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Begin to listen, and wait for the engine."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)  # type: ignore[arg-type]
        if not self.started:
            return
        try:
            await self._served.backend.ready()
        except Exception as error:
            self.start_error, self.should_exit = error, True
        else:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came, or `stop` was called."""
        if self.should_exit and sig == signal.SIGTERM:
            self.force_exit = True  # uvicorn's own rule is for SIGINT alone
        super().handle_exit(sig, frame)
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed: the server has stopped already
                self._loop.call_soon_threadsafe(self._begin_to_drain)

    def stop(self) -> None:
        """What SIGTERM does, for whoever runs the server in a thread."""
        self.handle_exit(signal.SIGTERM, None)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._served.stop()
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        await self._served.engine.drain(self._drain_seconds)
        await self._served.engine.stop()
