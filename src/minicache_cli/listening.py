"""What the commands that listen on a port have in common: an address, a log, and why they do not serve."""

from __future__ import annotations

import errno
import gc
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from minicache.errors import MinicacheError, MissingExtraError
from minicache_cli.options import asked

if TYPE_CHECKING:
    from minicache.serving.http.listener import Listener
    from minicache.serving.http.running import Server

GAVE_UP = 4
"""The exit status if answers were not complete when the server ended. (0: all were. uvicorn has 3.)"""

LOGS = "Logs"

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all interfaces.")]
Port = Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any free port.")]


@dataclass(frozen=True)
class Logs:
    """What is logged, and how."""

    log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = asked(
        "info", "Lowest level: critical, error, warning, info, debug or trace.", "LEVEL", panel=LOGS
    )
    log_format: Literal["text", "json"] = asked("text", "text, or json: one object per line.", "FORMAT", panel=LOGS)

    @property
    def has_json(self) -> bool:
        """Whether programs read them."""
        return self.log_format == "json"


@contextmanager
def needing_extra(doing: str) -> Iterator[None]:
    """A package that cannot be imported is one that the extra serve brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{doing} needs {error.name}: pip install 'minicache-course[serve]'") from error


@contextmanager
def logged(logs: Logs, logger: logging.Logger) -> Iterator[None]:
    """Logs go to stderr. Why it does not serve is an error of the command, or a line of a log for programs."""
    from minicache.serving.http.logs import logging_to_stderr
    from minicache.serving.http.output import written_by_a_thread

    with written_by_a_thread("stdout"), logging_to_stderr(logs.log_level, logs.log_format):
        try:
            yield
        except (MinicacheError, ValueError) as error:
            if logs.has_json:
                logger.critical("%s", error)
                raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error
            if isinstance(error, ValueError):
                raise typer.BadParameter(str(error)) from error
            raise


def bind(host: str, port: int) -> Listener:
    """Take the port before the model is loaded, so a port in use is reported at once."""
    from minicache.serving.http.listener import Listener

    host = host.removeprefix("[").removesuffix("]")
    try:
        return Listener(host, port)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}. Try another {option}") from error


def url_of(listener: socket.socket, port: int, scheme: str = "http") -> str:
    """Where the server is, for a browser: an IPv6 address stands in brackets."""
    host = listener.getsockname()[0]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def collect_rarely() -> None:
    """Have the garbage collector stop the streams rarely, and for a short time, from now on.

    A full collection looks at all objects that there are: for 0.14 s at those of the libraries, which live as long as
    the process and so are left out, and for 0.2 s at 100,000 unread tokens. What it finds is little, some objects of
    each client that has broken off, so one in 1,000 partial collections is full. (Python has one in 10.)
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1000)


def run(server: Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    try:
        server.run(sockets=[listener])
    finally:
        gc.unfreeze()  # at exit, libraries look for objects that were not freed
    if server.start_error is not None:
        raise server.start_error
    if server.num_given_up:
        raise typer.Exit(GAVE_UP)
