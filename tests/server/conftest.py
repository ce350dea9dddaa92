"""A whole server on 127.0.0.1, in a thread of the test's own process, and a model that tests can make fail or wait."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.logprobs import ServedLLM
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.model.minigpt import MiniGPT, MiniGPTConfig
from minicache.server.app import Served, create_app
from minicache.server.running import Server

OF_APP = ("served_model_name", "max_waiting", "api_key", "max_body_nbytes")
"""Options of `create_app`."""

SECONDS = 60
"""So long a test waits for what has to happen; then it has failed. Nothing that goes well takes this long."""


class Breakable:
    """MiniGPT, with a hook before each pass and one after it: what they raise, the model raises.

    Attributes:
        before: is called with a step's token ids, [1, N].
        after: is called with them and the logits, and gives the logits.
    """

    def __init__(self, model: MiniGPT) -> None:
        self.model = model
        self.config = model.config
        self.reset()

    def reset(self) -> None:
        self.before: Callable[[Tensor], object] = lambda token_ids: None
        self.after: Callable[[Tensor, Tensor], Tensor] = lambda token_ids, logits: logits

    def parameters(self) -> Any:
        return self.model.parameters()

    def hidden_states(self, token_ids: Tensor, cache: Any = None) -> Tensor:
        self.before(token_ids)
        self._token_ids = token_ids
        return self.model.hidden_states(token_ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.after(self._token_ids, self.model.logits(hidden))

    def __call__(self, token_ids: Tensor, cache: Any = None) -> Tensor:
        return self.logits(self.hidden_states(token_ids, cache))


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each event, as JSON; "[DONE]" as it is."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """A second reading of the event stream format, by LF alone: what does not end with LF LF is no event."""
    assert b"\r" not in body
    blocks = body.split(b"\n\n")
    assert blocks.pop() == b"", "the stream ends in the middle of an event"
    events = []
    for block in blocks:
        lines = block.split(b"\n")
        assert all(line.startswith(b"data: ") for line in lines)
        data = b"\n".join(line.removeprefix(b"data: ") for line in lines).decode()
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


@dataclass
class Running:
    """A server that answers. Leaving the block stops it, and looks whether anything is left of its requests."""

    llm: ServedLLM
    options: dict[str, Any]
    drain_seconds: float = 10.0
    server: Server = field(init=False)
    port: int = field(init=False, default=0)

    def __enter__(self) -> Running:
        torch.set_num_threads(1)
        app = create_app(self.llm, **self.options)
        self.served: Served = app.state.served
        self.engine: AsyncEngine = self.served.engine
        listening = threading.Event()

        def on_listening(port: int) -> None:
            self.port = port
            listening.set()

        self.server = Server(app, port=0, drain_seconds=self.drain_seconds, on_listening=on_listening)
        self.thread = threading.Thread(target=self.server.run, name="server under test")
        self.thread.start()
        assert listening.wait(SECONDS), "the server does not listen"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self.assert_all_is_given_back()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the server does not stop"

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def open(self) -> http.client.HTTPConnection:
        """A connection that speaks HTTP."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)

    exchange = staticmethod(lambda *arguments: exchange(*arguments))

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own. A body that is no bytes is sent as JSON."""
        connection = self.open()
        try:
            return exchange(connection, method, path, body, headers)
        finally:
            connection.close()

    def complete(self, prompt: Any = "Yesterday I", **fields: Any) -> Answer:
        return self.ask("POST", "/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def wait_until(self, what: Callable[[], object]) -> None:
        """Ask in the event loop, again and again, until it is so."""
        loop = self.server._loop
        assert loop is not None
        done, asked = threading.Event(), threading.Event()

        def look() -> None:
            if done.is_set():
                return
            if what():
                asked.set()
            else:
                loop.call_later(0.002, look)

        loop.call_soon_threadsafe(look)
        try:
            assert asked.wait(SECONDS), "it has not come to that"
        finally:
            done.set()

    def wait_until_idle(self) -> None:
        """Until all answers have ended, and the thread has nothing left to do."""
        self.wait_until(lambda: not self.engine.num_unfinished and self.engine.commands.empty())
        self.wait_until(lambda: not self.llm.has_unfinished and not self.llm.answers)

    def assert_all_is_given_back(self) -> None:
        """Nobody has a place, a stream, an answer or a block any more; the books agree."""
        assert self.engine.error is None
        assert self.engine.num_unfinished == 0
        assert not self.engine.streams
        assert not self.llm.answers
        assert not self.llm.has_unfinished
        scheduler = self.llm.scheduler
        scheduler.check()
        assert scheduler.pool.num_free == scheduler.pool.num_blocks


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """A request and its response on a connection that may have had others."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@pytest.fixture(scope="session")
def minigpt() -> MiniGPT:
    return load_minigpt()


@pytest.fixture
def model(minigpt: MiniGPT) -> Breakable:
    return Breakable(minigpt)


@pytest.fixture
def tiny() -> Breakable:
    """A random model of one layer and 64 tokens, for tests that count steps and need no words."""
    torch.manual_seed(0)
    return Breakable(MiniGPT(MiniGPTConfig(64, 32, 1, 2, 1, 16, 32, 512, 10_000.0, 1e-6)))


Serve = Callable[..., Running]


@pytest.fixture
def serve(model: Breakable) -> Iterator[Serve]:
    """A function that starts a server with options of `ServedLLM` and `create_app`, and the test's model."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(model, **options))


@pytest.fixture
def gate(serve: Serve) -> Iterator[threading.Event]:
    """For a model to wait at; opened in the end, so that a test that has failed does not hold up its server's end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(scope="module")
def serve_for_module(minigpt: MiniGPT) -> Serve:
    """The same for a module's own fixture: a context manager, and a model that cannot be broken."""
    return lambda **options: running(Breakable(minigpt), **options)


def running(model: Breakable, *, drain_seconds: float = 10.0, **options: Any) -> Running:
    of_app = {name: options.pop(name) for name in OF_APP if name in options}
    settings: dict[str, Any] = {"num_blocks": 256, "prefix_caching": True, "tokenizer": Tokenizer(), **options}
    return Running(ServedLLM(model, **settings), of_app, drain_seconds)
