"""One client's connection: what it may send, what it may leave unread, and for how long. No phase builds this module.

`minicache serve` and `minicache route` use it alike. What is bounded here is bounded before any route sees a request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NoReturn

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minicache.serving.http.answering import WRITE_NOW
from minicache.serving.http.listener import max_connections
from minicache.serving.http.logs import request_log

HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of a request, from when it was opened or the next head began."""

UNREAD_SECONDS = 30.0
"""How long a client may read nothing of what was sent to it. The default of `--unread-seconds`."""

MAX_HEAD_NBYTES: Final = 64 * 2**10
"""The most bytes of a request's line and headers together (431), and of the trailers behind its body."""

MAX_TARGET_NBYTES: Final = 8 * 2**10
"""The most bytes of a request's path and query (414)."""

MAX_HEADERS: Final = 256
"""The most headers of a request (431): each is looked at several times."""

IDLE_SECONDS: Final = 75
"""How long a connection may be idle. Clients and proxies close theirs after 5 to 60 s: what is sent on one that is
being closed here is lost, and the client cannot know whether it was received."""

MAX_QUEUED: Final = 32
"""So many requests of a connection may wait for the one before them. Beyond, it is not read. (A piece that was begun is
parsed to its end: of the shortest requests that there are, it has 14.)"""

CROWDED: Final = 0.75
"""From this part of `max_connections` on, a new connection takes the place of the one that is idle longest."""

_PIECE_NBYTES: Final = 256
_PIECES_PER_TURN: Final = 64
"""What is parsed of one connection before the event loop goes on to others."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with httptools, with bounds.

    What has come is parsed in pieces, and only while fewer than `MAX_QUEUED` requests wait; meanwhile the connection is
    not read. A head may be so long (`MAX_HEAD_NBYTES`) and take so long (`HEAD_SECONDS`). Trailers are dropped. A
    client that reads nothing for `unread_seconds` is disconnected. Where there are many connections, a new one ends the
    one that has waited longest for a whole head: who only connects keeps no one out. And when a client with several
    requests disconnects, all of them learn it; uvicorn tells the last.

    Args:
        *args: uvicorn's.
        idle: the server's connections without a request, the one that is idle longest first.
        unread_seconds: as above.
        **kwargs: uvicorn's.
    """

    flow: _Flow

    def __init__(
        self,
        *args: Any,
        idle: dict[BoundedProtocol, None],
        unread_seconds: float = UNREAD_SECONDS,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._unread_seconds = unread_seconds
        self._unparsed: deque[bytes] = deque()
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._is_in_head = True
        self._refusal: tuple[int, str] | None = None
        self._num_head_nbytes = 0  # since something came that is neither head nor trailer
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # `pause_writing` means: the client does not keep up
        self._start_head_timer()
        if len(self.server_state.connections) > CROWDED * max_connections() and self._idle:
            longest = next(iter(self._idle))
            del self._idle[longest]  # its end comes in the next turn, and before that other connections may begin
            longest.transport.abort()
        self._idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        super().connection_lost(exc)
        self._idle.pop(self, None)
        self._unparsed.clear()
        self._stop_head_timer()
        self._stop_unread_timer()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    # What the client sends

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        starts = range(0, len(data), _PIECE_NBYTES)
        self._unparsed.extend(data[start : start + _PIECE_NBYTES] for start in starts)
        self._parse()

    def _parse(self) -> None:
        """Parse a part of what has come; the rest later: after others, or when a request was answered."""
        for _ in range(_PIECES_PER_TURN):
            if self.transport.is_closing():
                self._unparsed.clear()
            if not self._unparsed or len(self.pipeline) >= MAX_QUEUED:
                break
            piece = self._unparsed.popleft()
            self._num_head_nbytes += len(piece)
            if self._num_head_nbytes > MAX_HEAD_NBYTES:
                self._refuse(431, f"The request's headers are longer than {MAX_HEAD_NBYTES:,} bytes.")
            else:
                super().data_received(piece)
        else:
            self.loop.call_soon(self._parse)
        self.flow.is_behind(bool(self._unparsed))
        # Empty lines behind a response are no head yet, but they stop uvicorn's timer for idle connections.
        if self._is_in_head or (self.cycle is not None and self.cycle.response_complete):
            self._start_head_timer()

    def on_response_complete(self) -> None:
        """The first of the unanswered requests was answered."""
        answered = self._unanswered.popleft()
        answered.scope.pop("extensions", None)  # they refer to it, so it would wait for a garbage collection
        super().on_response_complete()
        if not (self._unanswered or self.transport.is_closing()):
            self._idle[self] = None
        if self._unparsed:
            self._parse()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        super().on_url(url)
        if len(self.url) > MAX_TARGET_NBYTES:
            self._give_up(414, f"The request's target is longer than {MAX_TARGET_NBYTES:,} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers, or one of its trailers. httptools leaves the spaces behind a value, RFC 9110 does not."""
        if self._is_in_head:
            super().on_header(name, value.rstrip(b" \t"))
            if len(self.headers) > MAX_HEADERS:
                self._give_up(431, f"The request has more than {MAX_HEADERS} headers.")

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        self._is_in_head = False
        self._idle.pop(self, None)
        self._stop_head_timer()
        super().on_headers_complete()
        self.scope["extensions"] = {WRITE_NOW: {"write": partial(_write_now, self.cycle)}}
        self._unanswered.append(self.cycle)

    def on_chunk_header(self) -> None:
        """A chunk of its body begins, or its trailers do."""
        self._num_head_nbytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._num_head_nbytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it has come."""
        self._num_head_nbytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What has come is no HTTP, or the parser was stopped."""
        self._refuse(*(self._refusal or (400, msg)))

    def _give_up(self, status: int, message: str) -> NoReturn:
        """Stop the parser, in the middle of a head; uvicorn then calls `send_400_response`."""
        self._refusal = status, message
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, and say why; but not in the middle of an answer."""
        if not self._unanswered:
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            head += f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
            self.transport.write(f"{head}{message}".encode())
        self.transport.close()

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
        if self._unanswered:
            self._start_head_timer()
        else:
            self.transport.close()

    # What the client reads

    def pause_writing(self) -> None:
        """The system takes no more for the client: it has to read first."""
        super().pause_writing()
        self._start_unread_timer()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._stop_unread_timer()

    def _start_unread_timer(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(self._unread_seconds, self._is_unread, size)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _is_unread(self, size: int) -> None:
        """Disconnect the client, if it has read nothing since `size` bytes were left."""
        if self.transport.get_write_buffer_size() < size:
            self._start_unread_timer()
            return
        for cycle in self._unanswered:
            request_log(cycle.scope).error = "unread"  # type: ignore[arg-type]
        self.transport.abort()


class _Flow(FlowControl):
    """uvicorn's flow control, with a second reason not to read: what was read is not parsed yet."""

    _is_behind = _is_full = False

    def pause_reading(self) -> None:
        self._is_full = True
        self._update()

    def resume_reading(self) -> None:
        self._is_full = False
        self._update()

    def is_behind(self, is_behind: bool) -> None:
        """Whether something that was read is still to be parsed."""
        self._is_behind = is_behind
        self._update()

    def _update(self) -> None:
        if self._is_full or self._is_behind:
            super().pause_reading()
        else:
            super().resume_reading()


def _write_now(cycle: RequestResponseCycle, make: Callable[[], bytes]) -> bool:
    """Make and write a piece of a body whose head was sent, if the connection has room, and return whether it has.

    It is what `cycle.send` does, without a coroutine; for bodies of no given length over HTTP/1.1 only.
    """
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
        return False
    if cycle.transport.is_closing():
        return False
    body = make()
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True
