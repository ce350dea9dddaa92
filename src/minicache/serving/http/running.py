"""The server as a process: it listens, and at SIGTERM lets its clients finish. No phase builds this module."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minicache.serving.http.answering import WRITE_NOW
from minicache.serving.http.logs import RequestLogs

logger = logging.getLogger("minicache.server")

_GRACE = 3  # seconds beyond the drain, for clients that do not read what they were sent
_GOODBYE_SECONDS = 2.0
"""How long a client may take to agree to the end of its TLS connection, once the server stops. (asyncio has 30.)"""
_MAX_HEAD_NBYTES = 64 * 2**10
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of a request, from when it was opened or the next head began."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP with httptools, with three fixes.

    httptools keeps all headers that a client sends: here, at most 64 KiB. uvicorn waits forever for the rest of a head:
    here, HEAD_SECONDS. And when a client with pipelined requests disconnects, uvicorn notifies only the last one: here,
    all that are unanswered.
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
            self.send_400_response("The request's headers are too long.")
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


def _write_now(cycle: RequestResponseCycle, make: Callable[[], bytes]) -> bool:
    """Make and write a piece of a body whose head was sent, if the connection has room, and return whether it has.

    It is what `cycle.send` does, without a coroutine; for bodies of no given length over HTTP/1.1 only.
    """
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding or cycle.response_complete:
        return False
    body = make()
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TLS:
    """What HTTPS needs.

    Attributes:
        certfile: the server's certificate, in PEM, and those that lead from it to one that clients know.
        keyfile: its private key; None: certfile has it too.
        password: of an encrypted key.
        ca_certs: clients have to show a certificate that one of these has signed; None: they need none.
    """

    certfile: Path
    keyfile: Path | None = None
    password: str | None = None
    ca_certs: Path | None = None

    def check(self) -> None:
        """Read the files.

        Raises:
            ValueError: one cannot be read, or is not what it should be. The message says which.
        """
        key = self.keyfile or self.certfile
        is_encrypted = False

        def password() -> str:
            nonlocal is_encrypted
            is_encrypted = True
            return self.password or ""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, key, password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(
                    f"the private key in {key} does not match the certificate in {self.certfile}"
                ) from None
            if is_encrypted:
                what = "its password is wrong" if self.password else "set --ssl-keyfile-password"
                raise ValueError(f"the private key in {key} is encrypted; {what}") from None
            if self.keyfile is None:
                what = f"{key} must have a certificate and its private key, in PEM; or give --ssl-keyfile"
            else:
                what = f"{self.certfile} must have a certificate, and {key} its private key, in PEM"
            raise ValueError(what) from None
        except OSError as error:
            raise ValueError(f"{error.filename or self.certfile} cannot be read: {error.strerror}") from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError:
                raise ValueError(f"{self.ca_certs} must have certificates in PEM") from None
            except OSError as error:
                raise ValueError(f"{self.ca_certs} cannot be read: {error.strerror}") from None

    def options(self) -> dict[str, Any]:
        """The same for `uvicorn.Config`."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.password,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_REQUIRED if self.ca_certs else ssl.CERT_NONE,
        }


class Drained(Protocol):
    """What a server lets finish before it ends: an engine, or a proxy's requests. It is the application's `served`."""

    @property
    def num_unfinished(self) -> int:
        """Answers under way."""

    async def ready(self) -> None:
        """Wait until requests can be served; raises if they never will."""

    def stop(self) -> None:
        """Refuse new requests from now on, and end endless streams. Called in the event loop."""

    async def drain(self, seconds: float) -> bool:
        """Wait until all answers have ended, for so long at most; whether they have."""

    async def end(self) -> None:
        """End what is left."""


class Server(uvicorn.Server):
    """uvicorn, and an engine that it drains. It logs its requests (`RequestLogs`), and that it stops.

    At the first SIGTERM or SIGINT new requests are refused (503), and new connections too; answers under way go on, for
    at most `drain_seconds`. Those that are not complete then end with an error event. At the second, it ends at once.
    After either, `run` returns: what the process does then is its own affair.

    Args:
        app: of `create_app`, or another with a `Drained` in `app.state.served`.
        host: the address to listen on.
        port: 0: any that is free.
        drain_seconds: as above.
        on_listening: is called with the port, as soon as clients can come: the server listens, and the engine is ready.
            (What comes between the two is answered by a 503.)
        tls: None: HTTP without encryption.
        root_path: a prefix of all paths that a proxy takes away before it asks here, such as "/minicache".
        forwarded_allow_ips: whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses or networks with commas
            between them, or "*"; None: this machine's.

    Attributes:
        start_error: why the engine could not be started, in which case `run` returns; else None.
        num_given_up: answers that were not complete when it ended.

    Raises:
        ValueError: drain_seconds is negative, or not finite; or root_path is no path.
    """

    def __init__(
        self,
        app: FastAPI,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        drain_seconds: float = 30.0,
        on_listening: Callable[[int], object] = lambda port: None,
        tls: TLS | None = None,
        root_path: str = "",
        forwarded_allow_ips: str | None = None,
    ) -> None:
        if not (math.isfinite(drain_seconds) and drain_seconds >= 0):
            raise ValueError(f"drain_seconds must be 0 or a positive finite number; got {drain_seconds}")
        if root_path and not _PATH.fullmatch(root_path):
            raise ValueError(
                f'root_path must be a path such as "/minicache", without "/" at its end; got {root_path!r}'
            )
        self._logs = RequestLogs(app)
        config = uvicorn.Config(
            self._logs,
            loop="asyncio",  # not uvloop where that happens to be installed: one server, one way to run
            http=BoundedProtocol,
            host=host,
            port=port,
            log_config=None,
            access_log=False,  # `RequestLogs` writes these
            timeout_graceful_shutdown=int(drain_seconds) + _GRACE,
            root_path=root_path,
            forwarded_allow_ips=forwarded_allow_ips,
            **({} if tls is None else tls.options()),
        )
        super().__init__(config)
        self._served: Drained = app.state.served
        self._drain_seconds = drain_seconds
        self.start_error: Exception | None = None
        self.num_given_up = 0
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
            await self._served.ready()
        except Exception as error:
            if not self.should_exit:  # told to stop, it need not say that it has not begun
                self.start_error, self.should_exit = error, True
        else:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Wait until the clients have received all written data, and end."""
        hanging_up = asyncio.ensure_future(self._hang_up())
        await super().shutdown(sockets)  # type: ignore[arg-type]
        hanging_up.cancel()
        if num_unfinished := self._served.num_unfinished:
            self._give_up(num_unfinished, "because of a second signal")
        elif self._logs.num_cut and not self.num_given_up:
            self._give_up(self._logs.num_cut, "that their clients did not read")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came, or `stop` was called. (uvicorn's own would raise the signal again after the end.)"""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed: the server has stopped already
                self._loop.call_soon_threadsafe(self._begin_to_drain)

    def stop(self) -> None:
        """The effect of SIGTERM, for a server that runs in a thread."""
        self.handle_exit(signal.SIGTERM, None)

    def _begin_to_drain(self) -> None:
        if self._draining is None:
            self._served.stop()
            self._draining = asyncio.ensure_future(self._drain())

    async def _hang_up(self) -> None:
        """End TLS connections that were closed here, and whose clients do not close them: they may sit in a pool."""
        while True:
            transports = [each.transport for each in self.server_state.connections]
            closing = [each for each in transports if each.is_closing() and each.get_extra_info("ssl_object")]
            await asyncio.sleep(_GOODBYE_SECONDS)
            for each in closing:
                each.abort()

    async def _drain(self) -> None:
        served = self._served
        logger.info("draining: %s, up to %g s", _answers(served.num_unfinished), self._drain_seconds)
        if await served.drain(self._drain_seconds):
            logger.info("drained")
        else:
            self._give_up(served.num_unfinished, f"after {self._drain_seconds:g} s")
        await served.end()

    def _give_up(self, num_answers: int, why: str) -> None:
        self.num_given_up += num_answers
        logger.warning("abandoned %s %s", _answers(num_answers), why)


def _answers(number: int) -> str:
    return "1 answer" if number == 1 else f"{number} answers"
