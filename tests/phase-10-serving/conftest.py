"""What the tests of phase 10 share: scenarios in an event loop, an LLM whose steps can be held, a client over sockets.

Nothing here sleeps for a fixed time. Waiting polls every few milliseconds (`BEAT`), long enough to fail only if the
event never happens; it fails at once when the engine's thread, or a callback of the loop, has raised.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from contextlib import suppress
from functools import cache, partial, wraps
from queue import SimpleQueue

import pytest
import torch

from minicache.engine.answers import Chunk, request_of
from minicache.engine.async_engine import AnswerStream, AsyncEngine
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import StepFailedError
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT
from minicache.model.config import MiniGPTConfig
from minicache_course.checks import CheckFailed, Outcome, is_not_written, that, told, unwrapped
from minicache_course.seeds import fresh

BEAT, NUM_BEATS = 0.01, 150  # seconds; so many looks without a step of the engine. A slow machine is slow in both
POISON = 13  # a step that has a prompt with this token fails
MAX_STEPS = 1000  # of one LLM: no test needs half of it
MAX_SET_WAITS = 1000  # in one iteration of the event loop
NUM_TURNS = 20  # of the event loop: in so many, all that can happen without a clock and another thread has happened


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def looks(*llms):
    """Counts looks, until there were NUM_BEATS in a row in which no step has begun; but an end there is."""
    num_steps, left = 0, NUM_BEATS
    for number in range(5 * NUM_BEATS):
        if (now := sum(len(llm.steps) for llm in llms)) != num_steps:
            num_steps, left = now, NUM_BEATS
        if not left:
            return
        left -= 1
        yield number


# Scenarios


def _sleep_elsewhere(sleep, loops_thread, seconds):
    """`time.sleep`, in any thread but the event loop's."""
    __tracebackhide__ = True
    if threading.get_ident() == loops_thread:
        raise CheckFailed(
            f"time.sleep({seconds}) in the event loop",
            "no client gets anything meanwhile: the loop stands still",
            "`await` of what wakes the task",
        )
    sleep(seconds)


def _in_the_loop(method, loops_thread, errors):
    """A method of `AnswerStream` that another thread must not call."""

    @wraps(method)
    def checked(stream, *arguments):
        __tracebackhide__ = True
        if threading.get_ident() != loops_thread:
            called = f"stream.{method.__name__}() in the engine's thread"
            got = "nothing wakes the event loop, and the reader may sleep on"
            errors.append(error := CheckFailed(called, got, "`call_in_loop`: streams belong to the event loop"))
            raise error
        return method(stream, *arguments)

    return checked


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts the calls that are scheduled in it, now or later, and waits that do not wait.

    Attributes:
        seconds_ahead: of its clock; a test that sets it lets a time limit pass without waiting.
    """

    num_asked, num_set_waits, seconds_ahead = 0, 0, 0.0

    def time(self):
        return super().time() + self.seconds_ahead

    def _run_once(self):
        self.num_set_waits = 0
        super()._run_once()

    def wait_for_event(self, wait, event):
        """`asyncio.Event.wait`. With a set event it returns at once, and a loop around it stops the event loop."""
        __tracebackhide__ = True
        self.num_set_waits += event.is_set()
        if self.num_set_waits > MAX_SET_WAITS:
            raise CheckFailed(
                "waiting for an asyncio.Event that is set",
                f"it returns at once, more than {MAX_SET_WAITS} times in one iteration of the event loop",
                "an event that was cleared: a set one is no wait, and every other client waits for this loop",
            )
        return wait(event)

    def call_soon(self, *arguments, **options):
        self.num_asked += 1
        return super().call_soon(*arguments, **options)

    def call_at(self, *arguments, **options):
        self.num_asked += 1
        return super().call_at(*arguments, **options)


class Scenario:
    """What a test does in an event loop of its own: `scenario.run(main)`, where main is an `async def` of no argument.

    Errors that no task awaits are recorded: those of callbacks and forgotten tasks, and of an engine's thread. The
    loop is in asyncio's debug mode, where its own calls refuse to be made by another thread. `time.sleep` in it, which
    would stop every client, raises.
    """

    def __init__(self):
        self.errors, self.engines = [], []

    def run(self, main):
        __tracebackhide__ = True

        async def play():
            __tracebackhide__ = True
            try:
                await main()
            finally:
                await self._end_engines()
            self.check()

        loop = self.loop = CountingLoop()
        loop.set_debug(True)
        loop.slow_callback_duration = math.inf
        loop.set_exception_handler(self._note)
        here, wait = threading.get_ident(), asyncio.Event.wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "sleep", partial(_sleep_elsewhere, time.sleep, here))
            patch.setattr(asyncio.Event, "wait", lambda event: loop.wait_for_event(wait, event))
            for name in ("accept", "put", "fail"):
                patch.setattr(AnswerStream, name, _in_the_loop(getattr(AnswerStream, name), here, self.errors))
            try:
                loop.run_until_complete(play())
            finally:
                self._close(loop)

    def engine(self, llm, **options):
        """An engine that was started, on `llm`; it is ended with the scenario."""
        engine = self.new_engine(llm, **options)
        engine.start()
        return engine

    def new_engine(self, llm, **options):
        """The same, not started yet."""
        self.engines.append(engine := WatchedEngine(self, llm, **options))
        return engine

    async def open_together(self, engine, *requests):
        """Start an engine whose first turn finds some requests, each a prompt and its params. Their streams."""
        __tracebackhide__ = True
        tasks = [asyncio.ensure_future(engine.add_request(prompt, its)) for prompt, its in requests]
        await asyncio.sleep(0)
        engine.start()
        return [await self.result(f"add_request, the first of {len(tasks)}", task) for task in tasks]

    def check(self, called="what the engine does meanwhile", wanted="no error"):
        """Raise the recorded errors that no task awaited."""
        __tracebackhide__ = True
        for error in self.errors:
            if is_not_written(error) or isinstance(error, CheckFailed):
                raise error
            raise CheckFailed(called, told(unwrapped(error)), wanted) from error

    async def until(self, what, is_so, wanted="that it happens", *, task=None):
        """Wait until `is_so()`, while a task has not raised."""
        __tracebackhide__ = True
        for _ in self._looks():
            if is_so():
                return
            self.check(f"waiting until {what}", wanted)
            if task is not None and task.done() and (error := self.outcome(what, task).error):
                raise CheckFailed(f"waiting until {what}", told(error), wanted) from error
            await asyncio.sleep(BEAT)
        raise CheckFailed(f"waiting until {what}", "it does not happen", wanted)

    async def ask(self, called, awaitable, wanted="a result, or an error"):
        """What came of a coroutine: an `Outcome`. One that never returns fails the test."""
        __tracebackhide__ = True
        task = asyncio.ensure_future(awaitable)
        for _ in self._looks():
            await asyncio.wait({task}, timeout=BEAT)
            if task.done():
                return self.outcome(called, task)
            self.check(called, wanted)
        task.cancel()
        await asyncio.wait({task}, timeout=BEAT)
        raise CheckFailed(called, "nothing: it waits forever", wanted)

    async def result(self, called, awaitable):
        """What a coroutine returns."""
        __tracebackhide__ = True
        return (await self.ask(called, awaitable, "a result")).value

    def outcome(self, called, task):
        """What came of a task that is done."""
        __tracebackhide__ = True
        if task.cancelled():
            return Outcome(called, error=asyncio.CancelledError())
        error = task.exception()
        if error is not None and (is_not_written(error) or isinstance(error, CheckFailed)):
            raise error
        return Outcome(called, error=error) if error is not None else Outcome(called, returned=task.result())

    async def waits(self, called, task, why):
        """Check that a task has not ended, now that everything that could happen in the event loop has happened.

        And that it sleeps: it does not ask the loop for one turn after the other, to look whether it may go on.
        """
        __tracebackhide__ = True
        for _ in range(20):
            await asyncio.sleep(0)
        before = self.loop.num_asked
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        num_asked = self.loop.num_asked - before - NUM_TURNS  # `sleep(0)` is one
        if task.done():
            outcome = self.outcome(called, task)
            got = told(outcome.error) if outcome.error else repr(outcome.returned)
            raise CheckFailed(called, got, f"that it waits: {why}")
        if num_asked >= NUM_TURNS // 2:
            got = f"it runs in {num_asked} of {NUM_TURNS} iterations of the event loop, and polls each time"
            raise CheckFailed(called, got, f"that it sleeps until it is woken: {why}")

    async def wakes(self, called, task):
        """The outcome of a task whose event has happened: it must wake at once, without polling."""
        __tracebackhide__ = True
        for _ in range(NUM_TURNS):
            await asyncio.sleep(0)
        if not task.done():
            raise CheckFailed(called, "it sleeps on", "that it wakes at once, without polling")
        return self.outcome(called, task)

    def check_no_task_is_left(self):
        """No task may be left running but the test."""
        __tracebackhide__ = True
        left = [str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        that("tasks that are left running", left).gives([])

    async def what_ends(self, engine):
        """What has ended the engine's thread: the type of each error; [] if nothing has."""
        __tracebackhide__ = True
        for _ in self._looks():
            if engine.has_ended.is_set():
                break
            await asyncio.sleep(BEAT)
        for error in self.errors:
            if is_not_written(error):
                raise error
        ended, self.errors = self.errors, []
        return [type(error) for error in ended]

    def _looks(self):
        return looks(*(engine.llm for engine in self.engines))

    def _note(self, loop, context):
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))

    def _close(self, loop):
        """End what runs still. Unlike `asyncio.run`, do not wait forever for a task that another thread has broken."""
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=BEAT))
        loop.close()

    async def _end_engines(self):
        """End the threads, those in endless loops too, as long as they ask the LLM anything."""
        for engine in self.engines:
            engine.llm.is_over = True
            engine.llm.let_all()
            engine.commands.put(None)
        for engine in self.engines:
            for _ in range(NUM_BEATS):
                if engine.has_ended.is_set() or not engine.has_begun:
                    break
                await asyncio.sleep(BEAT)


@pytest.fixture
def scenario():
    """See `Scenario`."""
    return Scenario()


class WatchedEngine(AsyncEngine):
    """An `AsyncEngine` that tells when its loop has ended, and the scenario of what."""

    def __init__(self, scenario, llm, **options):
        super().__init__(llm, **options)
        self.scenario, self.has_begun, self.has_ended = scenario, False, threading.Event()

    def start(self):
        self.has_begun = True
        super().start()

    def run(self):
        try:
            super().run()
        except SystemExit:
            pass  # of TinyLLM, at the end of the test
        except BaseException as error:
            if not self.llm.is_over:
                self.scenario.errors.append(error)
        finally:
            self.has_ended.set()


# The engine


class RoundInCirclesError(BaseException):
    """Of an engine that takes step after step and gets nowhere. No Exception, since `run` makes these failed steps."""


class TinyLLM(LLM):
    """An `LLM` over a tiny random model, whose steps can be held. It speaks MiniGPT's words, though not its grammar.

    Attributes:
        steps: the requests in each step, begun ones too.
        threads: which threads have run a step.
        num_empty_steps: how often `step` was called with nothing unfinished.
        num_asks: how often `has_unfinished` was asked.
        is_over: the test has ended: who asks or steps now is ended.
    """

    def __init__(self, **options):
        given = {"num_blocks": 128, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        self.steps, self.threads, self.num_asks, self.is_over = [], set(), 0, False
        self.num_empty_steps = 0
        self._is_held, self._is_broken, self._permits = False, False, threading.Semaphore(0)
        super().__init__(tiny_model(), tokenizer=Tokenizer(), **given | options)

    def hold(self):
        """From now on every step waits, when it is about to run the model, until it is let."""
        self._is_held, self._permits = True, threading.Semaphore(0)

    def let(self, num_steps=1):
        """Let so many steps go on; those after them are held."""
        for _ in range(num_steps):
            self._permits.release()

    def break_step(self):
        """The step that is held now, or the next one, fails: its model raises a MemoryError."""
        self._is_broken = True

    def let_all(self):
        """Hold no more."""
        self._is_held = False
        self._permits.release(1000)  # only the held step waits for them

    @property
    def has_unfinished(self):
        if threading.current_thread() is not threading.main_thread():
            self.num_asks += 1
            if self.is_over:
                raise SystemExit
        return super().has_unfinished

    @property
    def is_clean(self):
        """Whether no request is left, and no block used."""
        return not self.answers and self.scheduler.pool.num_used == 0

    def step(self):
        self.num_empty_steps += not super().has_unfinished
        return super().step()

    def run_model(self, output):
        self.steps.append([request_of(each.request_id) for each in output.scheduled])
        self.threads.add(threading.get_ident())
        if len(self.steps) > MAX_STEPS:
            raise RoundInCirclesError(f"{MAX_STEPS} steps, and no end")
        if self._is_held:
            self._permits.acquire()
        if self.is_over:
            raise SystemExit
        if self._is_broken:
            self._is_broken = False
            raise MemoryError("no room")
        if any(POISON in each.prompt_token_ids for each in output.scheduled):
            raise ArithmeticError("the model cannot bear token 13")
        return super().run_model(output)


@cache
def tiny_model():
    """One layer, one head; the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(fresh(4))
        config = MiniGPTConfig(Tokenizer().vocab_size, 16, 1, 2, 1, 8, 16)
        return MiniGPT(config).requires_grad_(False)


def sampled(max_tokens=6, seed=1, **more):
    """The parameters of the tests: sampled, so no two answers are alike by chance."""
    return SamplingParams(max_tokens=max_tokens, temperature=50.0, seed=seed, ignore_eos=True, **more)


@pytest.fixture(scope="session")
def tiny_llm():
    """`tiny_llm(**options)`: a `TinyLLM`; by default 4 batch slots, 128 blocks of 4, 64 tokens a step."""
    return TinyLLM


@pytest.fixture(scope="session")
def params():
    """`params(max_tokens=6, seed=1, n=1)`: what to generate."""
    return sampled


@pytest.fixture(scope="session")
def right_answers():
    """`right_answers(prompt, params)`: token ids of each of the n answers, by `LLM.generate`, alone."""

    def answers(prompt, its):
        one_by_one = [sampled(its.max_tokens, its.seed + turn) for turn in range(its.n)]
        llm = LLM(tiny_model(), num_blocks=256, block_size=4)
        return [each.token_ids for each in llm.generate([prompt] * its.n, one_by_one)]

    return answers


@pytest.fixture(scope="session")
def a_chunk():
    """`a_chunk(text, finish_reason=None, …)`: a chunk of request "a"; its token is its text's length."""

    def chunk(text, finish_reason=None, *, request_id="a", index=0):
        return Chunk(index, len(text), text, finish_reason, request_id)

    return chunk


@pytest.fixture(scope="session")
def add_by_hand():
    """`add_by_hand(engine, id, prompt, params)`: its stream; the request is a command, as `add_request` would have it.

    For the tasks that come before `add_request`.
    """

    def add(engine, request_id, prompt, its):
        stream = AnswerStream(request_id, its.n, lambda stream: None)
        engine.streams[request_id] = stream
        engine.num_unfinished += its.n
        engine.commands.put(lambda: engine.llm.add_request(prompt, its, request_id=request_id))
        return stream

    return add


@pytest.fixture(scope="session")
def all_tokens():
    """`await all_tokens(stream)`: the token ids of each of its answers, by `take`, until all have ended."""

    async def read(stream):
        found = {}
        while chunks := await stream.take():
            for chunk in chunks:
                found.setdefault(chunk.index, []).append(chunk.token_id)
        return [found[index] for index in sorted(found)]

    return read


class CountingQueue(SimpleQueue):
    """A queue that counts how often it is looked at."""

    def __init__(self):
        super().__init__()
        self.num_looks = 0

    def get(self, *arguments, **options):
        self.num_looks += 1
        return super().get(*arguments, **options)

    def get_nowait(self):
        self.num_looks += 1
        return super().get_nowait()

    def empty(self):
        self.num_looks += 1
        return super().empty()

    def qsize(self):
        self.num_looks += 1
        return super().qsize()


@pytest.fixture(scope="session")
def counting_queue():
    """`counting_queue()`: for `engine.commands`, a queue that counts how often it is looked at."""
    return CountingQueue


# Over HTTP


class Events:
    """A parser of server-sent events that splits lines at LF and at nothing else, whatever pieces they come in."""

    def __init__(self):
        self.found, self._rest, self._lines = [], b"", []

    def feed(self, piece):
        __tracebackhide__ = True
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.endswith(b"\r"):
                raise CheckFailed("a line of the stream", repr(line + b"\n"), "an end by LF alone, without CR")
            if line:
                field, _, value = line.decode().partition(":")
                that("the field of a line of the stream", field).gives("data")
                self._lines.append(value.removeprefix(" "))
            elif self._lines:
                self.found.append("\n".join(self._lines))
                self._lines = []

    def check_is_over(self):
        """Nothing may be left of an event that was not complete."""
        __tracebackhide__ = True
        that("what the stream has after its last event", (self._lines, self._rest)).gives(([], b""))


@pytest.fixture(scope="session")
def events_of():
    """`events_of(data, step)`: the events in some bytes, fed to the parser `step` bytes at a time."""

    def parse(data, step=1):
        __tracebackhide__ = True
        events = Events()
        for start in range(0, len(data), step):
            events.feed(data[start : start + step])
        events.check_is_over()
        return events.found

    return parse


class Client:
    """One POST over a socket of its own. It reads nothing that was not asked for.

    Attributes:
        status: of HTTP; headers: with their names in small letters.
    """

    def __init__(self, port, path, body):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=5 * BEAT * NUM_BEATS)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        self._socket.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
        self._file = self._socket.makefile("rb")
        self.status, self.headers = 0, {}

    def read_head(self):
        """Status and headers."""
        __tracebackhide__ = True
        first = self._line("the response's first line")
        self.status = int(first.split()[1])
        while line := self._line("a header of the response"):
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        return self

    def pieces(self):
        """The chunks of a chunked body as they come, or a body of known length in one."""
        __tracebackhide__ = True
        if "content-length" in self.headers:
            yield self._file.read(int(self.headers["content-length"]))
            return
        while size := int(self._line("the size of a chunk"), 16):
            yield self._file.read(size)
            self._file.readline()
        self._file.readline()

    def json(self):
        return json.loads(b"".join(self.pieces()))

    def events(self):
        """The data of all events, to the end of the stream; the bytes that come are fed to the parser one by one."""
        __tracebackhide__ = True
        events = Events()
        for piece in self.pieces():
            for place in range(len(piece)):
                events.feed(piece[place : place + 1])
        events.check_is_over()
        return events.found

    def leave(self):
        """Close the connection, at once."""
        self._file.close()
        self._socket.close()

    def _line(self, what):
        __tracebackhide__ = True
        try:
            line = self._file.readline()
        except TimeoutError:
            raise CheckFailed(f"waiting for {what}", "nothing comes", "that it comes") from None
        if not line:
            raise CheckFailed(f"waiting for {what}", "the server has closed the connection", "that it comes")
        return line.decode().rstrip("\r\n")


class Served:
    """A server on a free port of 127.0.0.1, in a thread of its own: 2 batch slots and max_waiting 1, and a `TinyLLM`.

    Attributes:
        llm: a `TinyLLM`.
        engine: the `AsyncEngine` in front of it.
        port: where it listens.
    """

    def __init__(self):
        from minicache.serving.http.app import create_app
        from minicache.serving.http.running import Server

        self.llm, self.port = TinyLLM(max_num_seqs=2), None
        app = create_app(AsyncEngine(self.llm, max_waiting=1), served_model_name="tiny")
        self.engine = app.state.served.engine
        self._server = Server(app, port=0, drain_seconds=0.2, on_listening=self._listening)
        self._clients = []
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        self.until("the server listens", lambda: self.port)

    def _listening(self, port):
        self.port = port

    def post(self, prompt, **fields):
        """A client that has asked for a completion, of 6 tokens unless told otherwise."""
        given = {"model": "tiny", "max_tokens": 6, "temperature": 50.0, "seed": 1, "ignore_eos": True}
        self._clients.append(client := Client(self.port, "/v1/completions", given | fields | {"prompt": prompt}))
        return client

    def right_text(self, prompt, max_tokens=6):
        """What that client has to get, by `LLM.generate`."""
        llm = LLM(tiny_model(), tokenizer=self.llm.tokenizer, num_blocks=256, block_size=4)
        return llm.generate([prompt], sampled(max_tokens))[0].text

    def until(self, what, is_so, wanted="that it happens"):
        """Wait until `is_so()`."""
        __tracebackhide__ = True
        for _ in looks(self.llm):
            if is_so():
                return
            if self.port and self.engine.error:
                raise CheckFailed(f"waiting until {what}", f"the thread has ended: {told(self.engine.error)}", wanted)
            time.sleep(BEAT)
        raise CheckFailed(f"waiting until {what}", "it does not happen", wanted)

    def until_idle(self):
        """Wait until all have ended, and all memory is free."""
        __tracebackhide__ = True
        self.until("no request is left", lambda: not self.engine.num_unfinished, "engine.num_unfinished of 0")
        self.until("the engine is idle", lambda: self.llm.is_clean, "no request is left, and all blocks are free")

    def clear(self):
        """End what a test has left."""
        for client in self._clients:
            client.leave()
        self._clients.clear()
        self.llm.let_all()

    def stop(self):
        self.clear()
        self._server.stop()
        self._thread.join(BEAT * NUM_BEATS)
        self.llm.is_over = True
        self.engine.commands.put(None)


async def _use_everything():
    """Call each function of the phase, whatever comes of it: what is not written says so."""
    from minicache.serving.http.streaming import EventStream, sse_event

    async def pieces():
        yield sse_event("x")

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        pass

    engine = AsyncEngine(TinyLLM())
    engine.start()
    try:
        for prompt in ([1], [POISON]):
            stream = await engine.add_request(prompt, sampled(2))
            await stream.take()
            stream.close()
    except StepFailedError:
        pass
    finally:
        engine.llm.is_over = True
        engine.commands.put(None)
    await engine.drain(0.0)
    await EventStream(pieces())({}, receive, send)


@pytest.fixture(scope="module")
def one_server():
    """One for all tests of a file, since it takes longer to start than most of them. `served` is what they use."""
    scenario = Scenario()
    scenario.run(lambda: scenario.ask("all functions of this phase, called once", _use_everything()))
    server = Served()
    yield server
    server.stop()


@pytest.fixture
def served(one_server):
    """A `Served` without clients."""
    yield one_server
    one_server.clear()
    with suppress(CheckFailed):  # the test has said enough
        one_server.until_idle()
