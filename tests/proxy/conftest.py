"""What the proxy's tests share: workers that behave as asked, over real sockets, and a proxy in front of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from minicache.fleet import create_router
from minicache.serving.http.logs import RequestLogs
from minicache.serving.proxy.app import Proxy, create_app
from minicache.serving.proxy.metrics import Metrics
from minicache.serving.proxy.workers import Workers

MINICACHE = "minicache:requests_refused_total 0\n"
"""Metrics of a worker that tells token ids when nothing is held back."""


def next_token(token_ids: Sequence[int]) -> int:
    """A model with greedy sampling, over small letters: the next depends on all before it."""
    return 97 + hashlib.sha256(repr(list(token_ids)).encode()).digest()[0] % 26


def generated(prompt: Sequence[int], max_tokens: int) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        token_ids.append(next_token([*prompt, *token_ids]))
    return token_ids


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def ids_of(prompt: Any) -> list[int]:
    return list(map(ord, prompt)) if isinstance(prompt, str) else list(prompt)


@dataclass
class Asked:
    """What a worker was asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    has_left: asyncio.Event = field(default_factory=asyncio.Event)


Answer = Callable[["FakeWorker", Asked, asyncio.StreamWriter], Awaitable[None]]


class FakeWorker:
    """An HTTP server that answers as `answer` says. A token is a letter; its text is the letter."""

    def __init__(self, answer: Answer | None = None, *, metrics: str = MINICACHE) -> None:
        self.answer: Answer = answer or stream()
        self.metrics, self.health, self.is_silent = metrics, 200, False
        self.metrics_key: str | None = None
        self.asked: list[Asked] = []
        self.sent = b""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._answer_one(reader, writer)
        writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split(" ")
        if self.is_silent:
            await asyncio.sleep(60)
        if path == "/health":
            await respond(writer, self.health, b"{}")
        elif path == "/metrics":
            is_refused = self.metrics_key and headers.get("authorization") != f"Bearer {self.metrics_key}"
            await respond(writer, 401 if is_refused else 200, b"" if is_refused else self.metrics.encode())
        else:
            asked = Asked(method, path, headers, json.loads(content) if content else None)
            self.asked.append(asked)
            watching = asyncio.ensure_future(self._watch(reader, asked))
            try:
                await self.answer(self, asked, writer)
            finally:
                watching.cancel()

    async def _watch(self, reader: asyncio.StreamReader, asked: Asked) -> None:
        with suppress(ConnectionError):
            await reader.read()
        asked.has_left.set()


async def respond(writer: asyncio.StreamWriter, status: int, body: bytes, *headers: str) -> None:
    head = [f"HTTP/1.1 {status} So", f"Content-Length: {len(body)}", "Connection: close", *headers]
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await writer.drain()


async def begin_events(writer: asyncio.StreamWriter, *headers: str) -> None:
    head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream", "Transfer-Encoding: chunked", *headers]
    writer.write("\r\n".join([*head, "", ""]).encode())
    await writer.drain()


async def write(worker: FakeWorker, writer: asyncio.StreamWriter, data: bytes, size: int = 10**6) -> None:
    """Some bytes of a body, in HTTP chunks of `size`, each in a packet of its own."""
    worker.sent += data
    for begin in range(0, len(data), size):
        piece = data[begin : begin + size]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0)


def events_for(asked: Asked, *, name: str = "w", tells_ids: bool = True) -> list[bytes]:
    """The events of an answer in minicache's shape: one a token, and the end."""
    body, is_chat = asked.body, asked.path.startswith("/v1/chat")
    prompt = ids_of("".join(each["content"] for each in body["messages"]) if is_chat else body["prompt"])
    head = {"id": name, "object": "chat" if is_chat else "text", "created": 1, "model": "m"}
    has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    tokens = generated(prompt, body.get("max_completion_tokens") or body.get("max_tokens", 16))
    found: list[dict[str, Any]] = []
    if is_chat:
        found.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        found[0] |= {"prompt_token_ids": prompt} if tells_ids else {}
    for number, token in enumerate(tokens):
        text: dict[str, Any] = {"delta": {"content": chr(token)}} if is_chat else {"text": chr(token)}
        choice = {"index": 0, **text, "finish_reason": "length" if number == len(tokens) - 1 else None}
        if tells_ids and body.get("return_token_ids"):
            choice |= {"token_ids": [token]}
            choice |= {"prompt_token_ids": prompt} if number == 0 and not is_chat else {}
        if body.get("logprobs") is not None and not is_chat:
            choice["logprobs"] = {"tokens": [chr(token)], "token_logprobs": [-1.0], "text_offset": [number]}
        found.append({"choices": [choice]})
    if has_usage:
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        found.append({"choices": [], "usage": usage | {"total_tokens": len(prompt) + len(tokens)}})
    return [*(b"data: " + json.dumps(head | each).encode() + b"\n\n" for each in found), b"data: [DONE]\n\n"]


def stream(*, dies_after: float | None = None, size: int = 10**6, tells_ids: bool = True, name: str = "w") -> Answer:
    """Answer with a stream; die after so many events (2.5: in the middle of the third) by breaking the connection."""

    async def answer(worker: FakeWorker, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if not asked.body.get("stream"):
            events = events_for(asked, tells_ids=tells_ids)
            text = "".join(json.loads(each[6:])["choices"][0].get("text", "") for each in events[:-1])
            body = json.dumps({"choices": [{"text": text}]}).encode()
            if dies_after is not None:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n" + body
                )
                await writer.drain()
                return
            await respond(writer, 200, body, "Content-Type: application/json")
            return
        events = events_for(asked, name=name, tells_ids=tells_ids)
        await begin_events(writer)
        if dies_after is not None:
            whole = int(dies_after)
            part = events[whole][: len(events[whole]) // 2] if dies_after > whole else b""
            await write(worker, writer, b"".join(events[:whole]) + part, size)
            await asyncio.sleep(0.005)  # what was written is read before the connection breaks
            writer.transport.abort()
            return
        await write(worker, writer, b"".join(events), size)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    return answer


class Opened:
    """A request to the proxy that is read piece by piece, as a server would: `read` makes room for the next."""

    def __init__(self, app: ASGIApp, method: str, path: str, body: Any) -> None:
        self._left = asyncio.Event()
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        content = b"" if body is None else json.dumps(body).encode()
        scope = {
            **{"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""},
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
        }
        has_read = False

        async def receive() -> Any:
            nonlocal has_read
            if not has_read:
                has_read = True
                return {"type": "http.request", "body": content}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                await self._pieces.put(message["body"])

        self.task = asyncio.ensure_future(app(scope, receive, send))

    async def read(self) -> bytes:
        return await self._pieces.get()

    async def read_all(self) -> bytes:
        found = b""
        while not (self.task.done() and self._pieces.empty()):
            reading = asyncio.ensure_future(self._pieces.get())
            await asyncio.wait({reading, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                found += reading.result()
            reading.cancel()
        return found

    async def leave(self) -> None:
        self._left.set()
        await self.task


class Proxied:
    """A proxy, and a client of it."""

    def __init__(self, app: ASGIApp, proxy: Proxy, client: httpx.AsyncClient) -> None:
        self.app, self.proxy, self.workers, self.client = app, proxy, proxy.workers, client

    async def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    def open(self, body: Any, path: str = "/v1/completions") -> Opened:
        return Opened(self.app, "GET" if body is None else "POST", path, body)

    async def until(self, is_so: Callable[[], object], what: str) -> None:
        for _ in range(1000):
            if is_so():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{what}: it has not happened")


@asynccontextmanager
async def proxied(
    *workers: FakeWorker, policy: str = "round_robin", max_unfinished: int = 64, check_timeout: float = 5.0, **more: Any
) -> AsyncIterator[Proxied]:
    """A proxy in front of workers, which round robin asks in the order in which they are given."""
    for worker in workers:
        if not worker.url:
            await worker.start()
    if (in_order := sorted(each.url for each in workers)) != [each.url for each in workers]:
        for worker in workers:
            await worker.stop()
        for worker, url in zip(workers, in_order, strict=True):
            await worker.start(int(url.rpartition(":")[2]))
    urls = [each.url for each in workers]
    fleet = Workers(
        urls,
        create_router(policy),
        Metrics(urls),
        max_unfinished=max_unfinished,
        check_seconds=0.03,
        check_timeout=check_timeout,
        **more,
    )
    api = create_app(fleet, policy=policy, block_size=4)
    app = RequestLogs(api)
    await fleet.start()
    await fleet.ready()
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            yield Proxied(app, api.state.served, client)
    finally:
        await fleet.stop()
        for worker in workers:
            await worker.stop()


def contents(body: bytes) -> list[Any]:
    """The JSON of a stream's events; the last must be [DONE]."""
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(each.removeprefix(b"data: ")) for each in events]


def text_in(events: Sequence[Any]) -> str:
    choices = [each["choices"][0] for each in events if each.get("choices")]
    return "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in choices)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings of workers that die are what is tested."""
    import logging

    logger = logging.getLogger("minicache.route")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
