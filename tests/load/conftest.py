"""A server under a test's control: it answers when, and with which bytes, a test says, and notes when it did."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


def event(text: str = " word", end: str = "\n") -> bytes:
    """A piece of a completion, as a server-sent event."""
    told = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return f"data: {json.dumps(told)}{end}{end}".encode()


def usage(num_prompt: int, num_output: int) -> bytes:
    told = {"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_output}}
    return f"data: {json.dumps(told)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def plain(status: str, body: bytes, *headers: str) -> bytes:
    """A whole answer that is no stream."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclass
class Call:
    """A request that has come.

    Attributes:
        number: 0, 1, 2, … of those to /v1/completions, in the order in which they came.
        headers: by name in lower case.
        body: of the completion that is asked for.
        written: when each piece of the answer was written, by `time.perf_counter`.
    """

    number: int
    headers: dict[str, str]
    body: dict[str, object]
    written: list[float] = field(default_factory=list)


Answer = Callable[[Call], AsyncIterator[bytes]]


async def answer_at_once(call: Call) -> AsyncIterator[bytes]:
    """What a good server says, without any delay."""
    num_output = int(str(call.body["max_tokens"]))
    yield STREAM_HEAD
    for _ in range(num_output):
        yield chunk(event())
    prompt = call.body["prompt"]
    num_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)  # type: ignore[arg-type]
    yield chunk(usage(num_prompt, num_output)) + chunk(DONE) + b"0\r\n\r\n"


@dataclass
class FakeServer:
    """Answers on 127.0.0.1, in a thread of its own.

    Attributes:
        port: where.
        calls: the completions that were asked for.
    """

    answer: Answer
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    models: bytes = json.dumps({"data": [{"id": "fake", "max_model_len": 512}]}).encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, is_up: Callable[[], object], stop: Awaitable[object]) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        is_up()
        await stop
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):  # the client may leave whenever it likes
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request_line, *lines = head.split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if request_line == "GET /v1/models HTTP/1.1":
                writer.write(plain("200 OK", self.models))
            elif request_line == "POST /v1/completions HTTP/1.1":
                call = Call(len(self.calls), headers, json.loads(body))
                self.calls.append(call)
                async for piece in self.answer(call):
                    writer.write(piece)
                    call.written.append(time.perf_counter())
            else:
                writer.write(plain("404 Not Found", b"what?"))
            await writer.drain()
        writer.close()


@contextmanager
def running(answer: Answer = answer_at_once) -> Iterator[FakeServer]:
    """A server that answers completions so, for as long as the block lasts."""
    server, is_up = FakeServer(answer), threading.Event()
    loop = asyncio.new_event_loop()
    stop = loop.create_future()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(is_up.set, stop)))
    thread.start()
    assert is_up.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set_result, None)
        thread.join()
        for task in asyncio.all_tasks(loop):  # answers that no one waits for any more
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture
def fake():
    """Everything that a test needs to have a server answer as it likes."""

    class Fake:
        run = staticmethod(running)
        head, done = STREAM_HEAD, DONE
        chunk, event, usage, plain = staticmethod(chunk), staticmethod(event), staticmethod(usage), staticmethod(plain)

    return Fake
