"""What the line in the log costs that a server writes for each request: processor time per request.

An application that answers every request at once is called as uvicorn calls it, without a socket: bare, behind
`RequestLogs` with a log that begins at "warning" (each request has an id, and no line), and with lines as text and as
JSON, written to /dev/null. The four take turns; recorded is the least of all rounds.

    python -m benchmarks.request_log
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path

from rich.console import Console
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks._record import record
from minicache.serving.http.logs import RequestLogs, logging_to_stderr, request_log

ROUNDS, NUM_REQUESTS = 20, 2000
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"80")]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, and notes what a route notes of an answer."""
    request_log(scope).num_prompt_tokens = 24
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def asked(app: ASGIApp) -> float:
    """Microseconds of processor time per request."""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        pass

    begun = time.thread_time()
    for _ in range(NUM_REQUESTS):
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        await app({**scope, "headers": HEADERS, "client": ("127.0.0.1", 1), "state": {}}, receive, send)
    return 1e6 * (time.thread_time() - begun) / NUM_REQUESTS


def main() -> None:
    contestants: dict[str, tuple[ASGIApp, Callable[[], AbstractContextManager[None]]]] = {
        "bare": (application, nullcontext),
        "warning": (RequestLogs(application), lambda: logging_to_stderr("warning", "text")),
        "text": (RequestLogs(application), lambda: logging_to_stderr("info", "text")),
        "json": (RequestLogs(application), lambda: logging_to_stderr("info", "json")),
    }
    least = dict.fromkeys(contestants, float("inf"))
    with Path("/dev/null").open("w", buffering=1) as nowhere, redirect_stderr(nowhere):
        for _ in range(ROUNDS):
            for name, (app, logs) in contestants.items():
                with logs():
                    least[name] = min(least[name], asyncio.run(asked(app)))
    figures = {f"{name}_us": round(least[name] - least["bare"], 1) for name in ("warning", "text", "json")}
    Console(file=sys.stdout, highlight=False).print(figures)
    record("request_log", {"bare_us": round(least["bare"], 1), **figures})


if __name__ == "__main__":
    main()
