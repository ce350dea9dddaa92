"""The server as a process: it listens, and at SIGTERM lets its clients finish. No phase builds this module."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from minicache.serving.http.connections import IDLE_SECONDS, UNREAD_SECONDS, BoundedProtocol
from minicache.serving.http.hosts import HostCheck
from minicache.serving.http.listener import Listener, raise_descriptor_limit
from minicache.serving.http.logs import RequestLogs

logger = logging.getLogger("minicache.server")

_GRACE = 3  # seconds beyond the drain, for clients that do not read what they were sent
_GOODBYE_SECONDS = 2.0
"""How long a client may take to agree to the end of its TLS connection, once the server stops. (asyncio has 30.)"""
HANDSHAKE_SECONDS = 10.0
"""How long a client may take to begin a TLS connection. (asyncio has 60.)"""
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


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


class _Loop(asyncio.SelectorEventLoop):
    """asyncio's event loop, which waits less long for a client that begins a TLS connection."""

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        if kwargs.get("ssl"):
            kwargs["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
        return await super().create_server(*args, **kwargs)


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
        unread_seconds: a client that reads nothing of its answer for so long is disconnected.
        allow_hosts: names in a request's Host header that are answered besides addresses and localhost (`HostCheck`);
            None: all are.

    Attributes:
        start_error: why the engine could not be started, in which case `run` returns; else None.
        num_given_up: answers that were not complete when it ended.

    Raises:
        ValueError: drain_seconds is negative, or not finite; unread_seconds is not positive, or not finite; or
            root_path is no path.
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
        unread_seconds: float = UNREAD_SECONDS,
        allow_hosts: Sequence[str] | None = None,
    ) -> None:
        if not (math.isfinite(drain_seconds) and drain_seconds >= 0):
            raise ValueError(f"drain_seconds must be 0 or a positive finite number; got {drain_seconds}")
        if not (math.isfinite(unread_seconds) and unread_seconds > 0):
            raise ValueError(f"unread_seconds must be a positive finite number; got {unread_seconds}")
        if root_path and not _PATH.fullmatch(root_path):
            raise ValueError(
                f'root_path must be a path such as "/minicache", without "/" at its end; got {root_path!r}'
            )
        answered: ASGIApp = app if allow_hosts is None else HostCheck(app, allow_hosts)
        self._logs = RequestLogs(answered)
        config = uvicorn.Config(
            self._logs,
            http=partial(BoundedProtocol, idle={}, unread_seconds=unread_seconds),  # type: ignore[arg-type]
            ws="none",
            timeout_keep_alive=IDLE_SECONDS,
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

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until it is stopped.

        Args:
            sockets: a `Listener`; None: one for the server's host and port.
        """
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self.serve(sockets or [Listener(self.config.host, self.config.port)]))

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Begin to listen, and wait for the engine."""
        raise_descriptor_limit()
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
