"""A whole server on 127.0.0.1, in a thread of the test's own process, and a model that tests can make fail or wait."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
import zmq
from torch import Tensor

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.grammar import Tokenizer
from minicache.model import load_minigpt
from minicache.model.minigpt import MiniGPT, MiniGPTConfig
from minicache.serving.http.app import create_app
from minicache.serving.http.backend import Served
from minicache.serving.http.running import Server
from minicache.serving.replica.client import EngineClient
from minicache.serving.replica.core import EngineCore
from minicache.serving.replica.llm import info_of
from minicache.serving.replica.messages import Ready, encode

OF_APP = ("served_model_name", "api_key", "api_keys", "metrics_key", "allow_origins", "max_body_nbytes")
"""Options of `create_app`."""

OF_SERVER = ("drain_seconds", "tls", "root_path", "unread_seconds", "allow_hosts")
"""Options of `Server`."""

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


class CoreInThread:
    """An engine's process, but for the process: a thread of the test's, so a test can break its model."""

    pid = 0

    def __init__(self, llm: LLM, address: str) -> None:
        self._context = zmq.Context()
        self._is_killed = False
        self.thread = threading.Thread(target=self._run, args=(llm, address), name="engine under test")
        self.thread.start()

    def _run(self, llm: LLM, address: str) -> None:
        with suppress(zmq.ContextTerminated), self._context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            core = EngineCore(llm, socket)
            socket.send(encode(Ready(info_of(llm))))
            core.run()

    async def wait(self) -> int:
        while self.thread.is_alive() and not self._is_killed:
            await asyncio.sleep(0.002)
        return 0

    def kill(self) -> None:
        """A thread cannot be killed: it ends when it looks for a message."""
        if not self._is_killed:
            self._is_killed = True
            threading.Thread(target=self._context.term, daemon=True).start()

    def cpu_seconds(self) -> None:
        """Not known."""


@dataclass
class Running:
    """A server that answers. Leaving the block stops it, and looks whether anything is left of its requests.

    Attributes:
        llm: the engine; without a tokenizer if it is behind a socket.
        tokenizer: of the API.
        cores: the engines of kind "process".
        cut: requests that were unfinished when the server stopped.
        of_server: options of `Server`.
        kind: "thread": an `AsyncEngine`; "process": an `EngineClient` and an `EngineCore`, which runs in a thread.
    """

    llm: LLM
    kind: str
    tokenizer: Any
    options: dict[str, Any]
    of_server: dict[str, Any]
    max_waiting: int = 256
    server: Server = field(init=False)
    port: int = field(init=False, default=0)
    cores: list[CoreInThread] = field(init=False, default_factory=list)
    cut: set[Any] = field(init=False, default_factory=set)

    def __enter__(self) -> Running:
        torch.set_num_threads(1)
        self.engine: AsyncEngine | EngineClient
        if self.kind == "thread":
            self.engine = AsyncEngine(self.llm, max_waiting=self.max_waiting)
        else:
            self.engine = EngineClient(self._start_core, self.tokenizer, max_waiting=self.max_waiting)
        app = create_app(self.engine, **self.options)
        stop_engine = self.engine.stop

        async def stop() -> None:
            self.cut |= self.engine.streams.keys()
            await stop_engine()

        self.engine.stop = stop  # type: ignore[method-assign]
        self.served: Served = app.state.served
        listening = threading.Event()

        def on_listening(port: int) -> None:
            self.port = port
            listening.set()

        self.server = Server(app, port=0, on_listening=on_listening, **{"drain_seconds": 10.0, **self.of_server})
        self.thread = threading.Thread(target=self.server.run, name="server under test")
        self.thread.start()
        assert listening.wait(SECONDS), "the server does not listen"
        return self

    async def _start_core(self, number: int, address: str) -> CoreInThread:
        self.cores.append(CoreInThread(self.llm, address))
        return self.cores[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        for core in self.cores:
            core.thread.join(SECONDS)
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
        self.wait_until(lambda: not self.engine.num_unfinished and self._has_obeyed())
        self.wait_until(lambda: not self.llm.has_unfinished and not self.llm.answers)

    def _has_obeyed(self) -> bool:
        return isinstance(self.engine, EngineClient) or self.engine.commands.empty()

    def assert_all_is_given_back(self) -> None:
        """No one has a place, a stream, an answer or a block any more; the books agree."""
        assert getattr(self.engine, "error", None) is None
        assert self.engine.num_unfinished == 0
        assert not self.engine.streams
        for request_id in self.cut:  # a process would have ended with these
            self.llm.abort_request(request_id)
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


@pytest.fixture(scope="module", params=["thread", "process"])
def engine_kind(request: pytest.FixtureRequest) -> str:
    """Where the engine is, as `Running` says it: what the API does must not depend on it."""
    return str(request.param)


@pytest.fixture
def serve(model: Breakable, engine_kind: str) -> Iterator[Serve]:
    """A function that starts a server with options of `LLM` and `create_app`, and the test's model."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(running(model, engine_kind, **options))


@pytest.fixture
def gate(serve: Serve) -> Iterator[threading.Event]:
    """For a model to wait at; opened in the end, so a test that has failed does not hold up its server's end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(scope="module")
def serve_for_module(minigpt: MiniGPT, engine_kind: str) -> Serve:
    """The same for a module's own fixture: a context manager, and a model that cannot be broken."""
    return lambda **options: running(Breakable(minigpt), engine_kind, **options)


def running(model: Breakable, kind: str, **options: Any) -> Running:
    of_server = {name: options.pop(name) for name in OF_SERVER if name in options}
    max_waiting = options.pop("max_waiting", 256)
    of_app = {name: options.pop(name) for name in OF_APP if name in options}
    tokenizer = options.pop("tokenizer", None) or Tokenizer()
    settings: dict[str, Any] = {"num_blocks": 256, "prefix_caching": True, **options}
    llm = LLM(model, tokenizer=tokenizer if kind == "thread" else None, **settings)
    llm.grammars.find_tokenizer = lambda: tokenizer
    return Running(llm, kind, tokenizer, of_app, of_server, max_waiting)
