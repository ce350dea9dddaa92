"""The engine's loop in a process of its own: obey the messages that are there, run a step, send what it gave.

It is `AsyncEngine`'s thread with a socket in the place of its two queues. Nothing waits here but for work: a message is
handed to ZeroMQ's own thread, which writes it while the next step computes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import zmq

from minicache.engine.answers import Chunk, request_of
from minicache.engine.async_engine import LastStep
from minicache.engine.llm import LLM
from minicache.errors import InvariantError, RankDiedError, StepFailedError
from minicache.scheduler.observe import observe
from minicache.serving.replica.messages import (
    AbortRequest,
    AddRequest,
    AskPicture,
    Caught,
    FromEngine,
    Picture,
    Refused,
    Shutdown,
    StepResult,
    StopAnswer,
    ToEngine,
    Update,
    decode_to_engine,
    encode,
)
from minicache.serving.replica.stats import SchedulerStats
from minicache.serving.replica.view import LiveView

logger = logging.getLogger("minicache")

COMPILE_POLL: Final = 1
"""Milliseconds. With nothing else to do, it is looked so often whether a constraint is compiled."""

MAX_AHEAD: Final = 2
"""So many steps with log probabilities may be on their way. A step's tokens are handled in a fraction of its time, but
not 20 log probabilities of each: those of a fast engine would pile up, and all clients' next tokens behind them."""


class EngineCore:
    """Serves the requests of one socket with one `LLM`. The thread that calls `run` owns both.

    Args:
        llm: the engine, without a tokenizer.
        socket: a PAIR socket, connected.
    """

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes]) -> None:
        self._llm = llm
        self._socket = socket
        self._news = StepResult()  # to be sent with the next step, or before
        self._stats: list[Update] = []
        self._view = LiveView(llm.scheduler)
        self._last_step = LastStep()
        # Requests whose constraint is compiled in a thread, which does not hold the GIL: steps go on.
        self._compiler = ThreadPoolExecutor(1, "minicache-grammars")
        self._compiling: dict[int, tuple[AddRequest, Future[Any]]] = {}
        self._num_ahead = 0  # steps with log probabilities, on their way
        stats = SchedulerStats(llm.scheduler, self._stats.extend)
        llm.scheduler = observe(llm.scheduler, stats, self._view, self._last_step)

    def run(self) -> None:
        """Until `Shutdown`. All messages that are there, then one step; with nothing to compute, sleep until one comes.

        Raises:
            InvariantError: a step failed that had no requests.
            RankDiedError: a rank of the model has ended. Another process has to take this one's place.
        """
        llm = self._llm
        while True:
            while (message := self._receive()) is not None:
                if isinstance(message, Shutdown):
                    return
                self._obey(message)
            if self._compiling:
                self._add_compiled()
            if self._news.accepted or self._news.refused or (self._stats and not self._has_step):
                self._send_news()  # clients need not wait for the step
            if self._has_step:
                try:
                    chunks = llm.step()
                except RankDiedError:
                    raise
                except Exception as error:
                    self._fail_step(error)
                else:
                    self._send_step(chunks)

    @property
    def _has_step(self) -> bool:
        return self._llm.has_unfinished and self._num_ahead < MAX_AHEAD

    def _receive(self) -> ToEngine | None:
        """The next message. None if there is none and there is a step to run, or news to send."""
        is_idle = not (self._has_step or self._news.accepted or self._news.refused or self._stats)
        if is_idle and self._compiling:
            is_idle = bool(self._socket.poll(COMPILE_POLL))
        if is_idle or int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message: ToEngine = decode_to_engine(self._socket.recv())
            return message
        return None

    def _obey(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                if message.params.is_constrained:
                    compiling = self._compiler.submit(self._llm.grammars.compile, message.params)
                    self._compiling[message.request_id] = message, compiling
                else:
                    self._add(message)
            case AbortRequest():
                if message.request_id in self._compiling:
                    self._compiling.pop(message.request_id)[1].cancel()
                self._llm.abort_request(message.request_id)
            case StopAnswer():
                self._llm.stop_answer(message.request_id, message.index)
            case Caught():
                self._num_ahead -= message.num_steps
            case AskPicture():
                picture = self._view.snapshot()
                version = picture["version"]
                self._send(Picture(version, b"" if version == message.known else msgspec.json.encode(picture)))

    def _add_compiled(self) -> None:
        """Add the requests whose constraints are compiled. What was wrong with one, `LLM.add_request` raises too."""
        for message, compiling in list(self._compiling.values()):
            if compiling.done():
                del self._compiling[message.request_id]
                self._add(message)

    def _add(self, message: AddRequest) -> None:
        try:
            self._llm.add_request(
                message.prompt_token_ids,
                message.params,
                request_id=message.request_id,
                num_logprobs=message.num_logprobs,
                priority=message.priority,
                cache_salt=message.cache_salt,
                arrival_time=message.arrival_time,
            )
        except Exception as error:
            self._refuse([message.request_id], error)
        else:
            self._news.accepted.append(message.request_id)

    def _refuse(self, request_ids: list[int], error: Exception) -> None:
        self._news.refused.append(Refused(request_ids, type(error).__name__, str(error)))

    def _send_step(self, chunks: Sequence[Chunk]) -> None:
        """Send the chunks of a step, in one message."""
        news = self._news
        # Ids are the client's: whole numbers.
        news.tokens = [(each.request_id, each.index, each.token_id, each.finish_reason) for each in chunks]  # type: ignore[misc]
        for position, chunk in enumerate(chunks):
            if chunk.logprobs is not None:
                news.logprobs[position] = (chunk.logprobs.logprob, chunk.logprobs.packed)
        self._num_ahead += bool(news.logprobs)
        self._send_news()

    def _send_news(self) -> None:
        self._news.stats = self._stats
        self._send(self._news)
        self._stats.clear()
        self._news = StepResult()

    def _send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def _fail_step(self, error: Exception) -> None:
        """End the requests that may be to blame for a step that failed, by the rule of `AsyncEngine.fail_step`."""
        scheduled, answers = self._last_step.requests, self._llm.answers
        suspects = [request for request in scheduled if not request.output_token_ids]
        if not suspects or self._last_step.has_failed:
            suspects = scheduled
        self._last_step.forget()
        ids = [request.request_id for request in suspects] or list(answers)
        failed = list(dict.fromkeys(request_of(each) for each in ids if each in answers))
        if not failed and not scheduled:
            raise InvariantError(f"a step without suspected requests failed: {error}") from error
        for request_id in failed:
            self._llm.abort_request(request_id)
        logger.error("a step failed with %d requests", len(failed), exc_info=error)
        self._refuse(failed, StepFailedError(f"a step of the model failed: {error}"))  # type: ignore[arg-type]
