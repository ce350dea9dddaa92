"""What the server's process calls: engines in processes of their own, which it starts, and starts again.

A request goes to the engine with the fewest unfinished answers, as token ids. Its tokens come back, one message a step;
here they become texts, stop strings are found, and each client's stream gets its chunks. An engine that dies fails its
own requests only, and is started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import zmq
import zmq.asyncio

from minicache.engine.answers import TokenLogprobs
from minicache.engine.async_engine import AnswerStream
from minicache.engine.stopping import Tokenizer
from minicache.errors import (
    EngineDiedError,
    EngineNotReadyError,
    EngineStoppedError,
    StepFailedError,
    require_count,
)
from minicache.serving.replica.messages import (
    AbortRequest,
    AddRequest,
    AskPicture,
    Caught,
    EngineInfo,
    FromEngine,
    Picture,
    Progress,
    Ready,
    Shutdown,
    StartFailed,
    StepResult,
    StopAnswer,
    ToEngine,
    decode_from_engine,
    encode,
    error_of,
)
from minicache.serving.replica.process import EngineProcess, Start
from minicache.serving.replica.remote import RemoteEngine
from minicache.serving.replica.stats import DEATH
from minicache.serving.replica.stream import TokenStream

__all__ = ["EngineClient"]

MAX_STEP_SECONDS: Final = 600.0
"""An engine with requests that has said nothing for so long is taken for hung, and killed, though it computes."""
MAX_IDLE_SECONDS: Final = 30.0
"""The same for one that has neither said anything nor used the processor. A long prompt, or a kernel that is compiled,
uses it: an honest step may take longer than this."""
REFUSE_SECONDS: Final = 5.0
"""Idle for so long, it gets no new requests, and /health says so."""
MIN_CPU_SHARE: Final = 0.01
"""An engine that has used a smaller part of a core is idle."""
RESTART_SECONDS: Final = 0.5
"""How long to wait before an engine is started again that has died before it was ready; twice as long each time."""
MAX_RESTART_SECONDS: Final = 30.0
WATCH_SECONDS: Final = 1.0
"""How often to look whether an engine is hung."""
STOP_SECONDS: Final = 5.0
"""How long an engine may take to end before it is killed."""
PICTURE_SECONDS: Final = 1.0
"""How long a picture is waited for: during a long step, the last one is as good."""

MIN_PAUSE: Final = 0.001
MAX_PAUSE: Final = 0.005
"""Writing a step's tokens to many clients takes a while. For as long, at most 5 ms, nothing is written then: half of
the event loop's time is left for requests, and under load a write carries the tokens of several steps."""

logger = logging.getLogger("minicache")


class Replica:
    """One engine, and the process that it runs in now.

    Attributes:
        number: 0, 1, 2, …
        info: what it is like; None before it was ready for the first time.
        is_ready: whether it takes requests.
        status: in words, while it is not ready.
        start_error: why its process could not be started last; None once it is ready.
        streams: request id → stream, of its requests with unfinished answers.
        num_unfinished: these answers.
        num_caught: steps with log probabilities that were handled, and not confirmed yet.
        num_starts: how often a process was started.
        heard_at: when it said something last, or got a request after it had none (time.monotonic()).
        num_idle: so many times in a row it was looked at, every WATCH_SECONDS, and had done nothing for its requests.
        process: the last one.
        picture: the last one that it has sent.
        asked: a picture is on its way; else None.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.info: EngineInfo | None = None
        self.is_ready = False
        self.status = "the engine is starting"
        self.start_error: Exception | None = None
        self.streams: dict[int, TokenStream] = {}
        self.num_unfinished = 0
        self.num_caught = 0
        self.num_starts = 0
        self.heard_at = 0.0
        self.num_idle = 0
        self._seen: tuple[float, float | None] = 0.0, None
        self.process: EngineProcess | None = None
        self.picture = Picture(0, b"")
        self.asked: asyncio.Future[None] | None = None
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def idle_seconds(self) -> float:
        """How long it has done nothing for its requests."""
        return self.num_idle * WATCH_SECONDS

    @property
    def why_not(self) -> str | None:
        """Why it takes no requests; None: it does."""
        if not self.is_ready:
            return self.status
        if self.idle_seconds < REFUSE_SECONDS:
            return None
        return (
            f"engine {self.number} has done nothing for {self.idle_seconds:.0f} s, with {self.num_unfinished} answers "
            f"in progress; after {MAX_IDLE_SECONDS:.0f} s it is restarted"
        )

    def look(self) -> None:
        """Note whether it has got on since the last look.

        Looks are counted, not seconds: while the whole machine is asleep, there are none.
        """
        (heard_at, before), now = self._seen, None
        if self.num_unfinished and self.process is not None:
            now = self.process.cpu_seconds()
        self._seen = self.heard_at, now
        has_used = before is None or now is None or not 0 <= now - before < MIN_CPU_SHARE * WATCH_SECONDS
        self.num_idle = self.num_idle + 1 if heard_at == self.heard_at and not has_used else 0

    def open(self, context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
        """A socket for the next process."""
        self._socket = context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)  # no bound: `send` never waits
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        return self._socket

    def close(self) -> None:
        """Its process has ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.has_drawn()

    def send(self, message: bytes) -> None:
        """Send a message; without a process, drop it."""
        if self._socket is not None:
            self._socket.send(message)

    def tell(self, message: ToEngine) -> None:
        """Encode a message, and send it."""
        self.send(encode(message))

    def confirm(self) -> None:
        """Let it go on, if it waits for log probabilities to be handled."""
        if self.num_caught:
            self.tell(Caught(self.num_caught))
            self.num_caught = 0

    def has_drawn(self) -> None:
        """A picture has come, or none will."""
        if self.asked is not None:
            self.asked.set_result(None)
            self.asked = None

    def kill(self) -> None:
        """End its process at once, if there is one."""
        if self.process is not None:
            self.process.kill()


class EngineClient(RemoteEngine):
    """Engines in processes of their own, which it starts.

    Admission slots are max_num_seqs of all ready engines, and max_waiting.

    **When an engine dies**, its requests end with an EngineDiedError, and it is started again: at once if it had been
    ready; else after RESTART_SECONDS, and twice as long each time. Requests go to the others meanwhile; if there is no
    other, they are refused with an EngineNotReadyError.

    Args:
        start: starts an engine's process (`minicache.serving.replica.process.starter`).
        tokenizer: as `RemoteEngine`.
        num_replicas: how many engines, ≥ 1.
        max_waiting: answers that may wait, beyond those that the engines have batch slots for.

    Attributes:
        replicas: all of them.
        on_progress: is called with what the engines are at while they start.

    Raises:
        TypeError, ValueError: num_replicas or max_waiting is not a count.
    """

    def __init__(
        self, start: Start, tokenizer: Tokenizer | None, *, num_replicas: int = 1, max_waiting: int = 256
    ) -> None:
        require_count("num_replicas", num_replicas)
        require_count("max_waiting", max_waiting, at_least=0)
        super().__init__(tokenizer)
        self.replicas = [Replica(number) for number in range(num_replicas)]
        self.on_progress: Callable[[str], object] = lambda doing: None
        self._start_process = start
        self._max_waiting = max_waiting
        self._fresh: dict[TokenStream, None] = {}  # streams that have got tokens since the last `_flush`
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # an engine has become ready, or could not be started

    # Its life

    def start(self) -> None:
        """Start the processes. Called once, in the event loop whose coroutines will use it. Does not wait for them."""
        if self._tasks:
            raise RuntimeError("the engines have already been started: create a new client")
        self._folder = _new_folder()
        self._context = zmq.asyncio.Context()
        self._tasks = [asyncio.ensure_future(self._keep(replica)) for replica in self.replicas]
        self._tasks.append(asyncio.ensure_future(self._watch()))

    async def ready(self) -> None:
        """Wait until all engines have been ready once.

        Raises:
            EngineDiedError: one has died before.
            EngineStoppedError: `stop` was called before.
            Exception: one could not be made; as `LLM`.
        """
        while not all(replica.info for replica in self.replicas):
            for replica in self.replicas:
                if replica.start_error is not None:
                    raise replica.start_error
            if self._stopping is not None:
                raise EngineStoppedError("the server stopped before the engine was ready")
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """End the processes. Unfinished requests get an EngineStoppedError. A second call waits for the first."""
        self.is_draining = True
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._changed.set()
        for replica in self.replicas:
            self._fail(replica, EngineStoppedError("the server stopped before this answer was complete"))
            if replica.is_ready:
                replica.tell(Shutdown())
            else:
                replica.kill()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
            if late:
                for replica in self.replicas:
                    replica.kill()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._context.term()
            self._folder.cleanup()

    async def __aenter__(self) -> EngineClient:
        self.start()
        return self

    # What clients call

    @property
    def streams(self) -> dict[int, TokenStream]:
        """Request id → stream, of all requests with unfinished answers."""
        return {name: stream for replica in self.replicas for name, stream in replica.streams.items()}

    @property
    def info(self) -> EngineInfo:
        """As `RemoteEngine.info`."""
        for replica in self.replicas:
            if replica.info is not None:
                return replica.info
        raise EngineNotReadyError(self.replicas[0].status)

    @property
    def max_num_seqs(self) -> int:
        """As `RemoteEngine.max_num_seqs`."""
        return sum(replica.info.max_num_seqs for replica in self.replicas if replica.is_ready and replica.info)

    @property
    def max_unfinished(self) -> int:
        """As `RemoteEngine.max_unfinished`."""
        return self.max_num_seqs + self._max_waiting

    def check_ready(self) -> None:
        """As `RemoteEngine.check_ready`."""
        reasons = [replica.why_not for replica in self.replicas]
        if all(reasons):
            raise EngineNotReadyError(reasons[0])

    def send(self, stream: TokenStream, request: AddRequest) -> None:
        """As `RemoteEngine.send`, to the engine with the fewest unfinished answers."""
        message = encode(request)
        replica = min((each for each in self.replicas if not each.why_not), key=lambda each: each.num_unfinished)
        if not replica.num_unfinished:
            replica.heard_at = time.monotonic()
        replica.streams[request.request_id] = stream
        replica.num_unfinished += stream.num_open
        self.take_slots(stream.num_open)
        replica.send(message)

    async def picture(self) -> Picture:
        """The live page's picture of the first engine that is ready: asked for, and the last one if it takes long."""
        replica = next((each for each in self.replicas if each.is_ready), self.replicas[0])
        if replica.is_ready:
            if replica.asked is None:
                replica.asked = asyncio.get_running_loop().create_future()
                replica.tell(AskPicture(replica.picture.version))
            await asyncio.wait((replica.asked,), timeout=PICTURE_SECONDS)
        return replica.picture

    # What the engines say

    def _handle(self, replica: Replica, message: FromEngine) -> None:
        match message:
            case StepResult():
                self._dispatch(replica, message)
            case Picture():
                if message.json:
                    replica.picture = message
                replica.has_drawn()
            case Progress():
                replica.status = f"the engine is starting: {message.doing}"
                logger.info("engine %d: %s", replica.number, message.doing)
                self.on_progress(message.doing)
            case Ready():
                replica.info, replica.is_ready, replica.start_error = message.info, True, None
                replica.picture = Picture(0, b"")  # the new process counts from 1 again
                logger.info(
                    "engine %d is ready, process %d", replica.number, replica.process.pid if replica.process else 0
                )
                self.on_info(replica.number, message.info)
                self._changed.set()
            case StartFailed():
                replica.start_error = error_of(message.kind, message.message)
                if replica.info is not None:  # else `ready` raises it
                    logger.error("engine %d cannot be restarted: %s", replica.number, message.message)

    def _dispatch(self, replica: Replica, step: StepResult) -> None:
        """Give what a step gave to the streams, as `AsyncEngine.dispatch`; `_flush` gives it to the clients."""
        streams = replica.streams
        replica.num_caught += bool(step.logprobs)
        self.on_stats(replica.number, step.stats)
        for request_id in step.accepted:
            if (stream := streams.get(request_id)) is not None:
                stream.is_accepted()
        for refused in step.refused:
            self._fail(replica, error_of(refused.kind, refused.message), refused.request_ids)
        for position, (request_id, index, token_id, finish_reason) in enumerate(step.tokens):
            stream = streams.get(request_id)
            if stream is None:
                continue
            logprobs = None
            if step.logprobs and position in step.logprobs:
                assert token_id is not None
                logprobs = TokenLogprobs(token_id, *step.logprobs[position])
            try:
                if finish_reason == "error":
                    raise StepFailedError("sampling failed")
                reason = stream.push(index, token_id, finish_reason, logprobs)
            except Exception as error:
                if not isinstance(error, StepFailedError):
                    logger.error("the tokens of request %r cannot be decoded", request_id, exc_info=error)
                failure = StepFailedError("sampling or decoding failed for this request")
                self._fail(replica, failure, [request_id])
                replica.tell(AbortRequest(request_id))
                continue
            self._fresh[stream] = None
            if reason:
                self.finished_at.append(time.monotonic())
                self._free(replica, 1)
                if not finish_reason:
                    replica.tell(StopAnswer(request_id, index))
                if not stream.num_open:
                    del streams[request_id]

    def _flush(self) -> None:
        """Give the clients what has come for them."""
        for stream in self._fresh:
            stream.flush()
        self._fresh.clear()

    def leave(self, stream: AnswerStream) -> None:
        """As `RemoteEngine.leave`."""
        assert isinstance(stream, TokenStream)
        for replica in self.replicas:
            if replica.streams.get(stream.request_id) is stream:
                del replica.streams[stream.request_id]
                self._free(replica, stream.num_open)
                replica.tell(AbortRequest(stream.request_id))

    def _free(self, replica: Replica, num_answers: int) -> None:
        """That many answers of an engine are no longer unfinished."""
        replica.num_unfinished -= num_answers
        self.free_slots(num_answers)

    def _fail(self, replica: Replica, error: Exception, request_ids: Sequence[int] | None = None) -> None:
        """End the streams of some requests of an engine with an error, as `AsyncEngine.fail`; None: of all."""
        for request_id in list(replica.streams) if request_ids is None else request_ids:
            stream = replica.streams.pop(request_id, None)
            if stream is not None:
                self._free(replica, stream.num_open)
                stream.fail(error)

    # Processes

    async def _keep(self, replica: Replica) -> None:
        """Keep an engine's process alive until `stop`."""
        num_failures = 0
        while True:
            how = await self._live(replica)
            was_ready, replica.is_ready = replica.is_ready, False
            if self._stopping is not None:
                return
            self._bury(replica, how)
            num_failures = 0 if was_ready else num_failures + 1
            if num_failures:
                if replica.info is None:  # for callers waiting in `ready`
                    replica.start_error = replica.start_error or EngineDiedError(replica.status)
                self._changed.set()
                await self._pause(min(RESTART_SECONDS * 2 ** (num_failures - 1), MAX_RESTART_SECONDS))
            if self.is_draining:
                return

    async def _live(self, replica: Replica) -> str:
        """One life of a process, from its start to its end; how that came."""
        try:
            if not os.path.isdir(self._folder.name):  # something has cleaned up /tmp
                self._folder.cleanup()
                self._folder = _new_folder()
            address = f"ipc://{self._folder.name}/{replica.number}-{replica.num_starts}"
            replica.num_starts += 1
            socket = replica.open(self._context, address)
            replica.process = await self._start_process(replica.number, address)
            if self._stopping is not None:
                replica.kill()
            listening = asyncio.ensure_future(self._listen(replica, socket))
            status = await replica.process.wait()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            while await socket.poll(0):  # what it had said before
                self._handle(replica, decode_from_engine(await socket.recv()))
            self._flush()
        except (OSError, zmq.ZMQError) as error:
            return f"the engine's process could not be started: {error}"
        finally:
            replica.kill()  # if this task was cancelled: the event loop ends
            replica.close()
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
        return f"the engine's process {how}"

    async def _listen(self, replica: Replica, socket: zmq.asyncio.Socket) -> None:
        """Handle what a process says, as it comes. Of several steps that have come, a client gets all in one piece.

        But after MAX_PAUSE clients get what there is: an engine may be faster than its tokens are decoded here.
        """
        while True:
            message = await socket.recv()
            replica.heard_at = time.monotonic()
            begun = time.perf_counter()
            try:
                self._handle(replica, decode_from_engine(message))
                while time.perf_counter() - begun < MAX_PAUSE and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    self._handle(replica, decode_from_engine(await socket.recv(zmq.NOBLOCK)))
                self._flush()
                replica.confirm()
            except Exception as error:
                logger.critical("a message of engine %d cannot be handled", replica.number, exc_info=error)
                replica.kill()
            if (spent := time.perf_counter() - begun) > MIN_PAUSE:
                await asyncio.sleep(min(spent, MAX_PAUSE))

    async def _watch(self) -> None:
        """Kill an engine that hangs: it has requests, and its step never ends."""
        while self._stopping is None:
            await self._pause(WATCH_SECONDS)
            for replica in self.replicas:
                replica.look()
                is_late = replica.num_unfinished and time.monotonic() - replica.heard_at > MAX_STEP_SECONDS
                if is_late or replica.idle_seconds > MAX_IDLE_SECONDS:
                    seconds = MAX_STEP_SECONDS if is_late else replica.idle_seconds
                    logger.error("engine %d hangs: no step has finished for %.0f seconds", replica.number, seconds)
                    replica.kill()

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past `stop`."""
        end = time.monotonic() + seconds
        while self._stopping is None and (left := end - time.monotonic()) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):  # wait_for of Python 3.11 may drop a cancellation
                    await self._changed.wait()

    def _bury(self, replica: Replica, how: str) -> None:
        """A process has ended by itself: end its requests, and account for them."""
        replica.status = f"{how}; it is being restarted"
        lost = replica.streams.values()
        logger.error("engine %d: %s; requests lost: %d", replica.number, how, len(lost))
        if replica.info is not None:
            self.on_stats(replica.number, [*(update for stream in lost for update in stream.lost_stats()), *DEATH])
        self._fail(replica, EngineDiedError(f"{how}: send the request again"))


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    """For the sockets, and for this user alone (mode 0700)."""
    return tempfile.TemporaryDirectory(prefix="minicache-")


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
