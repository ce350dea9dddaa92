"""The server's log: one line for each finished request, and the messages of server, engines and uvicorn.

All of it is Python's `logging`, set up in one place (`logging_to_stderr`) and written to stderr: as text, or as JSON,
one object a line. The log has no prompts, no answers and no API keys.

`RequestLogs` is the outermost layer of the application. It gives each request an id, and writes its line at the end: of
a stream, when its last event was sent. What only the routes know they write into the request's `RequestLog`, which is
in the ASGI scope: `request_log(scope).key = "lab 3"`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import uuid
from asyncio import CancelledError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from time import perf_counter
from typing import Any, Final, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOG_LEVELS

from minicache.engine.answers import Chunk
from minicache.serving.http.output import written_by_a_thread

LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]
LogFormat = Literal["text", "json"]

PROBES: Final = ("/health", "/metrics")
"""Paths that machines poll: their lines are of level debug."""

MAX_PATH: Final = 256
"""The most characters of a path that are logged."""

access_logger = logging.getLogger("minicache.access")

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_BARE = re.compile(r"[^\s\"'=\x00-\x1f\x7f]+")
"""Values that need no quotation marks in a line of text."""
_COLORS: Final = {"DEBUG": 2, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}


@dataclass(slots=True)
class RequestLog:
    """The data of one HTTP request, for its line in the log.

    Attributes:
        request_id: the client's X-Request-Id, if it is up to 128 letters, digits and ._:/+=@-; else a new one.
        key: the name of the API key that the client has shown; None: none was asked for, or it is not known.
        num_prompt_tokens: of all prompts; None: the request has not come as far as the engine.
        num_generated_tokens: of all answers.
        reasons: why the answers finished, the engine's finish_reasons, each once.
        error: what went wrong: the code of the error in OpenAI's shape, or "error"; None: nothing.
        begun: when its head had come (time.perf_counter()).
        first_token_at: likewise; None: no token has come.
        status: of the response; 0: it was not begun.
        is_complete: whether all of the response was sent.
        has_left: whether the client disconnected before that.
    """

    request_id: str
    key: str | None = None
    num_prompt_tokens: int | None = None
    num_generated_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    error: str | None = None
    begun: float = field(default_factory=perf_counter)
    first_token_at: float | None = None
    status: int = 0
    is_complete: bool = False
    has_left: bool = False

    def count(self, chunks: Sequence[Chunk]) -> None:
        """Some chunks of its answers are on their way to the client."""
        if self.first_token_at is None:
            self.first_token_at = perf_counter()
        for chunk in chunks:
            self.num_generated_tokens += chunk.token_id is not None
            if chunk.finish_reason and chunk.finish_reason not in self.reasons:
                self.reasons.append(chunk.finish_reason)

    @property
    def reason(self) -> str | None:
        """How it ended: an error's code, "client_left", or the answers' finish reasons; None if it had no answers."""
        if self.error is None and self.has_left:
            return "client_left"
        return self.error or ",".join(self.reasons) or None


def request_log(scope: Scope) -> RequestLog:
    """The log of a request; a dummy if the application runs without `RequestLogs`."""
    log: RequestLog | None = scope.get("state", {}).get("log")
    return RequestLog("") if log is None else log


class RequestLogs:
    """The outermost layer of the application: each request gets an id, and a line when it is over.

    The id is the response's X-Request-Id.

    Args:
        app: what is behind it.

    Attributes:
        num_cut: responses with answers that the end of the server has cut.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_cut = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and watch."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        log = RequestLog(_request_id(scope["headers"]))
        scope.setdefault("state", {})["log"] = log

        async def receive_watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not log.is_complete:
                log.has_left = True
            return message

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", log.request_id.encode())]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                log.is_complete = True

        try:
            await self._app(scope, receive_watched, send_watched)
        except CancelledError:  # the server ends without waiting longer
            log.error = log.error or "stopping"
            self.num_cut += log.num_prompt_tokens is not None
            raise
        except Exception:  # uvicorn logs it
            log.error = log.error or "error"
            raise
        finally:
            _write(scope, log)


def _request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return value.decode()
    return uuid.uuid4().hex


def _write(scope: Scope, log: RequestLog) -> None:
    """The line of a request that is over."""
    level = logging.DEBUG if scope["path"].removeprefix(scope.get("root_path", "")) in PROBES else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:MAX_PATH]  # as it came, without the query
    first, client = log.first_token_at, scope.get("client")
    fields = {
        "client": client[0].removeprefix("::ffff:") if client else None,
        "method": scope["method"],
        "path": path,
        "status": log.status,
        "reason": log.reason,
        "prompt_tokens": log.num_prompt_tokens,
        "generated_tokens": None if log.num_prompt_tokens is None else log.num_generated_tokens,
        "ttft_seconds": None if first is None else round(first - log.begun, 6),
        "seconds": round(perf_counter() - log.begun, 6),
        "key": log.key,
        "request_id": log.request_id,
    }
    access_logger.log(level, "request", extra={"fields": fields})


# What lines look like


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER: message field=value …`; fields that are None are left out. A traceback follows.

    Args:
        colored: whether levels have colours, for a terminal.
    """

    def __init__(self, *, colored: bool) -> None:
        super().__init__()
        self._colored = colored

    def format(self, record: logging.LogRecord) -> str:
        """A record's line, or lines."""
        level = record.levelname
        if self._colored:
            level = f"\033[{_COLORS.get(level, 2)}m{level:<8}\033[0m"
        line = f"{_time(record)} {level:<8} {_name(record)}: {_message(record)}"
        for name, value in _fields(record).items():
            if value is not None:
                text = str(value)
                line += f" {name}={text if _BARE.fullmatch(text) else json.dumps(text)}"
        if exception := _exception(self, record):
            line += f"\n{exception}"
        return line


class JSONLines(logging.Formatter):
    """One JSON object: time, level, logger, message, the record's fields, and exception if there is one. In ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """A record's line."""
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": _name(record),
            "message": _message(record),
            **_fields(record),
        }
        if exception := _exception(self, record):
            line["exception"] = exception
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    """When it was, by local time and how far that is from UTC."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _name(record: logging.LogRecord) -> str:
    """The logger's name. That of uvicorn's messages is `uvicorn.error`, whatever their level."""
    return "uvicorn" if record.name == "uvicorn.error" else record.name


def _message(record: logging.LogRecord) -> str:
    """What it says; some of uvicorn's end with an empty line."""
    return record.getMessage().rstrip()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    if record.exc_info and not record.exc_text:
        record.exc_text = formatter.formatException(record.exc_info)
    return record.exc_text


# Where they go


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is at the time, each record in one piece."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Drops uvicorn's reports of requests that the end of the server has cancelled."""
    error = record.exc_info and record.exc_info[1]
    return not isinstance(error, CancelledError) and not _message(record).endswith("CancelledError")


def _is_no_lost_client(record: logging.LogRecord) -> bool:
    """Drops asyncio's lines of what was written to clients that had left. That they left is in the requests' lines."""
    return record.msg != "socket.send() raised exception."


def _report_lost(number: int) -> None:
    """Some lines were not written, and now they could be."""
    logging.getLogger("minicache").warning(
        "lines of the log that were lost, since nothing read them or the disk was full: %d", number
    )


@contextmanager
def logging_to_stderr(level: LogLevel, form: LogFormat) -> Iterator[None]:
    """Have all logs written to stderr, until the block is left; a thread writes them, and logging never waits or fails.

    What minicache logs is written from `level` up. So is what uvicorn does; but at "info" only its warnings, since its
    lines of that level repeat the server's own. Of other libraries, warnings and errors are written, and Python's
    warnings with them.

    Args:
        level: the lowest. "trace": uvicorn's messages, without headers and bodies.
        form: "text", with colours if stderr is a terminal (and NO_COLOR is not set); or "json", one object a line.
    """
    handler = _Stderr()
    handler.addFilter(_is_no_cancellation)
    handler.addFilter(_is_no_lost_client)
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler.setFormatter(JSONLines() if form == "json" else TextLines(colored=colored))
    root, lowest = logging.getLogger(), LOG_LEVELS[level]
    levels = {
        root: max(lowest, logging.WARNING),
        logging.getLogger("minicache"): lowest,
        logging.getLogger("uvicorn.error"): logging.WARNING if lowest == logging.INFO else lowest,
        logging.getLogger("uvicorn.asgi"): lowest,
    }
    before = {logger: logger.level for logger in levels}
    root.addHandler(handler)
    logging.captureWarnings(True)
    for logger, its in levels.items():
        logger.setLevel(its)
    try:
        with written_by_a_thread("stderr", _report_lost):
            yield
    finally:
        for logger, its in before.items():
            logger.setLevel(its)
        logging.captureWarnings(False)
        root.removeHandler(handler)
