# Phase 10, serving: your file. It stands in for minicache.engine.async_engine.
# Write what raises NotImplementedError. `minicache grade 10` grades it, `minicache hint 10.K` helps with task K.
#
# Predict, before you write task 10.2. `minicache grade` checks it, without points.
# Nothing is unfinished. Three commands are in the queue when the thread wakes up; each adds a request for 2 tokens. A
# fourth command like them arrives in the middle of the first step. There are batch slots for all. How many steps does
# the thread make?
# 10.2a =
# How many times does the thread have the event loop call something in these steps, to hand over the chunks?
# 10.2b =
# A command that arrives in the middle of a step aborts the only request, which has 5 tokens still to come. How many
# further steps begin?
# 10.2c =
"""Many clients, one engine: one thread owns the `LLM`, and the coroutines of an event loop get its tokens.

Phase 10 builds it. A client's call becomes a command, which the thread runs between two steps. The chunks of a step go
to the event loop in one call, and there to the stream of each client. So only the thread uses the `LLM`, no step waits
for a slow reader, and a request whose client disconnects is aborted before the next step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from minicache.engine.answers import Chunk, Prompt, request_of
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import EngineStoppedError, InvariantError, QueueFullError, StepFailedError, require_count
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.observe import Observer, observe

__all__ = ["AnswerStream", "AsyncEngine"]

MAX_YIELD = 0.02
"""The most seconds that the thread waits for the event loop to write the chunks of a step."""

logger = logging.getLogger("minicache")

MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1.0, 60.0
"""Bounds of `retry_after`, in seconds."""


class AnswerStream:
    """The chunks of one request, as they are generated. Made by `AsyncEngine.add_request`; read by one task at a time.

        with await engine.add_request(prompt, params) as stream:
            async for chunk in stream:
                ...

    Leaving the block early aborts the request. Chunks wait here until they are fetched: at most n · max_tokens of them,
    however slow the reader is.

    Args:
        request_id: the request's id.
        num_answers: the request's n, and the number of chunks that will have a finish_reason.
        leave: called once, with this stream, if it is closed before all answers are finished.

    Attributes:
        request_id: as above.
        num_unfinished: answers that are not finished.
        num_prompt_tokens: the length of the prompt; 0 until the engine has taken the request.
    """

    def __init__(self, request_id: RequestId, num_answers: int, leave: Callable[[AnswerStream], None]) -> None:
        self.request_id = request_id
        self.num_unfinished = num_answers
        self.num_prompt_tokens = 0
        self._leave = leave
        self._chunks: deque[Chunk] = deque()  # not fetched yet
        self._error: Exception | None = None  # that of `fail`
        self._is_closed = False
        self._news = asyncio.Event()  # set whenever a reader may have something to do

    # What the engine calls, in the event loop

    def accept(self, num_prompt_tokens: int) -> None:
        """The thread has taken the request."""
        self.num_prompt_tokens = num_prompt_tokens
        self._news.set()

    async def accepted(self) -> None:
        """Wait for `accept`. If the stream fails first, raise its error."""
        while not self.num_prompt_tokens:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    def put(self, chunk: Chunk) -> None:
        """Add the next chunk, and wake the reader. One with a finish_reason finishes one of the answers.

        The reasons are "stop", "length" and "capacity" (the cache is too small for the answer). See `dispatch` for
        "error".
        """
        raise NotImplementedError(
            "phase 10, task 1: A stream for each client; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def fail(self, error: Exception) -> None:
        """No more chunks will come: the reader gets those that are here, then `error` is raised. Wakes the reader.

        The engine has ended the request, so `close` has nothing left to abort.
        """
        raise NotImplementedError(
            "phase 10, task 1: A stream for each client; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    # What a client calls

    async def take(self) -> list[Chunk]:
        """Wait until there is a chunk, and fetch all that are there: a slow reader catches up.

        The first that applies: a closed stream has none; chunks that are there are fetched; a failed stream raises its
        error; one whose answers are all finished has none; any other waits, and does not poll.

        Returns:
            One or more chunks, in their order; none if all answers are finished, or the stream is closed.

        Raises:
            StepFailedError, EngineStoppedError: the engine has ended the request (`fail`).
        """
        raise NotImplementedError(
            "phase 10, task 1: A stream for each client; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk. Waits for it. Raises what `take` raises, and StopAsyncIteration where that returns none."""
        raise NotImplementedError(
            "phase 10, task 1: A stream for each client; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def close(self) -> None:
        """The client is done: drop the chunks that were not fetched, and wake the reader, which gets none.

        If answers are unfinished and the stream was not failed, `leave` is called, which aborts them. A second call
        does nothing. This is not a coroutine, since a task that is being cancelled must be able to complete it.
        """
        raise NotImplementedError(
            "phase 10, task 1: A stream for each client; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncEngine:
    """One thread that owns an `LLM`, and the calls by which coroutines of one event loop get its answers.

    **Admission slots.** At most max_num_seqs + max_waiting answers are unfinished at any time; a request that finds too
    few slots is refused at once. A waiting answer costs only its prompt, so the queue could be longer; but a request
    that would wait longer than its client is willing to is better refused.

    **When a step fails**, see `fail_step`. If anything else fails in the thread, the thread ends: every stream is
    failed, and `error` is what was raised.

    Args:
        llm: the engine. From `start` on, only the thread may use it.
        max_waiting: answers that may wait, beyond the max_num_seqs that the scheduler has batch slots for; ≥ 0.

    Attributes:
        llm: as above. It belongs to the thread.
        max_unfinished: the admission slots, max_num_seqs + max_waiting.
        num_unfinished: the slots taken: unfinished answers, of all streams. It belongs to the event loop, as do the
            next five.
        streams: request id → stream, of all requests with unfinished answers.
        is_draining: whether new requests are refused because the engine is to stop.
        error: the exception that ended the thread; None if there was none.
        all_finished: an `asyncio.Event`, set while num_unfinished is 0; what `drain` waits for.
        finished_at: when the last answers finished (time.monotonic()), the newest last; empty when none is unfinished.
        commands: functions for the thread to call, in this order, between two steps; None ends it. The only way from
            the event loop to the thread.
        last_step: an observer that remembers the step under way.

    Raises:
        TypeError, ValueError: max_waiting is not a count.
    """

    def __init__(self, llm: LLM, *, max_waiting: int = 256) -> None:
        require_count("max_waiting", max_waiting, at_least=0)
        self.llm = llm
        self.max_unfinished = llm.scheduler.max_num_seqs + max_waiting
        self.num_unfinished = 0
        self.streams: dict[RequestId, AnswerStream] = {}
        self.is_draining = False
        self.error: BaseException | None = None
        self.finished_at: deque[float] = deque(maxlen=64)
        self.commands: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.last_step = LastStep()
        llm.scheduler = observe(llm.scheduler, self.last_step)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._names = count()
        self._loop_is_done = threading.Event()
        self.all_finished = asyncio.Event()
        self.all_finished.set()

    # Its life

    def start(self) -> None:
        """Start the thread. Called once, in the event loop whose coroutines will use it."""
        if self._thread is not None:
            raise RuntimeError("the engine was started already: make a new one")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="minicache-engine", daemon=True)
        self._thread.start()

    async def drain(self, seconds: float) -> bool:
        """Take no new requests, and wait until all requests are finished (num_unfinished is 0).

        It sleeps until `all_finished` is set, without polling, and ends no request. If its task is cancelled, the
        CancelledError is raised.

        Args:
            seconds: the longest wait.

        Returns:
            Whether all are finished.
        """
        raise NotImplementedError(
            "phase 10, task 4: A step that fails, and the end; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    async def stop(self) -> None:
        """End the thread after its current step. Unfinished requests get an EngineStoppedError, and are aborted."""
        self.is_draining = True
        self.fail(list(self.streams), EngineStoppedError("the server has stopped before this answer was complete"))
        if self._thread is not None:
            self.commands.put(self._abort_all)
            self.commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    # What clients call, in the event loop

    def check_admission(self, num_answers: int) -> None:
        """Raise unless that many more answers can be admitted now. Takes no slot.

        Args:
            num_answers: n of a request, or of several together.

        Raises:
            EngineStoppedError: the engine is draining, or has ended (`error`).
            ValueError: otherwise, if there are fewer admission slots altogether: a later attempt would fail as well.
            QueueFullError: otherwise, if too many slots are taken now. Its retry_after is `retry_after()`.
        """
        raise NotImplementedError(
            "phase 10, task 3: A bounded queue, and leaving it; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    async def add_request(self, prompt: Prompt, params: SamplingParams, **options: Any) -> AnswerStream:
        """Submit a request. Returns when the thread has taken it.

        If `check_admission` allows it, n admission slots are taken and the stream is put into `streams` before the
        thread is asked: requests that come at the same time cannot take the same slots. The thread calls
        `llm.add_request` between two steps, as a command. Then it has the event loop call the stream's `accept`, with
        the length of the prompt (`llm.answers[request_id].request.num_prompt_tokens`); or `fail`, with the error that
        was raised. `accepted` waits for either. If the client disconnects meanwhile (this task is cancelled), the
        stream is closed: its slots are free again, and the request is aborted.

        Args:
            prompt: token ids, or a text. A text is tokenised in the thread, and a long one delays the next step: a
                server tokenises before it calls this.
            params: what to generate; its n answers need n admission slots.
            options: further arguments of `llm.add_request` (priority, cache_salt). A caller's request_id and
                arrival_time are ignored: the id is a number that was never used (`_names`), the time is the one of this
                call (time.monotonic()), not of the command's.

        Returns:
            The stream of its chunks. The caller closes it.

        Raises:
            Exception: raised by `check_admission` or `llm.add_request`. Nothing was added, and no slot is taken.
        """
        raise NotImplementedError(
            "phase 10, task 3: A bounded queue, and leaving it; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    def retry_after(self) -> float:
        """Seconds until the answers that wait now will be finished, at the current rate.

        With t seconds between two of `finished_at` on average, and k unfinished answers beyond the scheduler's
        max_num_seqs, but at least one, that is k · t; no less than MIN_RETRY_AFTER and no more than MAX_RETRY_AFTER. If
        `finished_at` has fewer than two: MIN_RETRY_AFTER.
        """
        raise NotImplementedError(
            "phase 10, task 3: A bounded queue, and leaving it; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    def leave(self, stream: AnswerStream) -> None:
        """A stream was closed with unfinished answers: free their slots, and have the thread abort its request.

        The stream leaves `streams`. If it was not there, nothing is done. Slots of finished answers are free already.
        """
        raise NotImplementedError(
            "phase 10, task 3: A bounded queue, and leaving it; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    # The thread

    def run(self) -> None:
        """The thread's loop, until the command None, which ends it at once.

        An iteration: run all commands that are there, in their order; then one step, if anything is unfinished
        (`llm.has_unfinished`). The step's chunks go to `deliver`, an `Exception` that it raises to `fail_step`; any
        other error ends the thread. If nothing is unfinished, the thread sleeps until the next command, without
        polling.
        """
        raise NotImplementedError(
            "phase 10, task 2: One thread owns the engine; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Have the event loop give a step's chunks to their streams (`call_in_loop`, `dispatch`), if there are any.

        One call for all of them: waking the event loop costs more than giving a chunk to a stream. Then wait for the
        event loop (`yield_to_loop`). A step without chunks needs neither.
        """
        raise NotImplementedError(
            "phase 10, task 2: One thread owns the engine; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def fail_step(self, error: Exception) -> None:
        """A step has failed: end the requests that may be to blame, so the next steps can succeed.

        All requests are in the waiting queue again (`LLM.recover`), and the others go on from there. Requests of the
        step that have no token yet are suspected first: the others have been through steps like this one. In a step
        with both kinds, only the suspects are ended. All requests of the step are ended if there is only one kind, or
        if the step before failed too (`has_failed`): suspecting again might end one newcomer after another because of
        an old request. If no step was in progress (`schedule` itself raised), all requests are ended.

        `last_step` has the requests of the step, and is then reset (`forget`). Their ids are those of answers, as in
        `llm.answers`; `request_of` gives the id of the client's request. An answer that is no longer in `llm.answers`
        is left out. A request is ended with all its answers: it is aborted, here in the thread, and its stream is
        failed in the event loop, with a StepFailedError whose message contains that of `error`, and whose `__cause__`
        is `error`. One call of `fail` names all of them, each once. `error` is logged, with its traceback (`logger`,
        exc_info).

        Args:
            error: the exception that the step raised.

        Raises:
            InvariantError: there was no step and there are no requests, so the next one would fail as well. Its
                `__cause__` is `error`.
        """
        raise NotImplementedError(
            "phase 10, task 4: A step that fails, and the end; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    def call_in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the event loop call a function soon: the only way from the thread to the event loop."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def yield_to_loop(self) -> None:
        """Wait until the event loop has made the calls and run the tasks that these wake; at most MAX_YIELD seconds.

        Thread and event loop share the GIL. If the thread went on at once, every write to a socket would hand the GIL
        to the model, and every operation of the model would hand it back: with 64 clients that costs more than doing
        all their writes at once.
        """
        assert self._loop is not None
        self._loop_is_done.clear()
        with suppress(RuntimeError):
            # Twice, to run after the tasks that the earlier call wakes.
            self._loop.call_soon_threadsafe(self._loop.call_soon, self._loop_is_done.set)
            self._loop_is_done.wait(MAX_YIELD)

    # What the thread calls, in the event loop

    def dispatch(self, chunks: Sequence[Chunk]) -> None:
        """Put each chunk into the stream of its request; drop it if there is none any more.

        If the chunk finishes an answer (it has a finish_reason), the time is appended to `finished_at`, and a slot is
        free again (`free_slots`). The stream leaves `streams` when all its answers are finished. But a chunk with the
        finish_reason "error" is not put, and ends the whole request: its stream is failed with a StepFailedError
        (`fail`), and a command has the thread abort its other answers.
        """
        raise NotImplementedError(
            "phase 10, task 2: One thread owns the engine; read docs/en/phase-10-serving/lab/00-the-async-engine.md"
        )

    def fail(self, request_ids: Sequence[RequestId], error: Exception) -> None:
        """End the streams of some requests with an error. The thread aborts these requests, or has not taken them.

        The streams leave `streams`, and the slots of their unfinished answers are free (`free_slots`). Ids without a
        stream are skipped.
        """
        raise NotImplementedError(
            "phase 10, task 3: A bounded queue, and leaving it; read docs/en/phase-10-serving/lab/01-admission-and-failure.md"
        )

    def _abort_all(self) -> None:
        """In the thread."""
        for request_id in list(self.llm.answers):
            self.llm.abort_request(request_id)

    def free_slots(self, num_answers: int) -> None:
        """That many answers are no longer unfinished. When none is left, `drain` returns, and `finished_at` is cleared.

        (Otherwise a pause without requests would look like slow service to `retry_after`.)
        """
        self.num_unfinished -= num_answers
        if not self.num_unfinished:
            self.finished_at.clear()
            self.all_finished.set()

    def _main(self) -> None:
        """The thread."""
        try:
            self.run()
        except BaseException as error:
            logger.critical("the engine's thread has ended", exc_info=error)
            self.call_in_loop(self._end, error)

    def _end(self, error: BaseException) -> None:
        """An error has ended the thread: fail every stream."""
        self.error = error
        stopped = EngineStoppedError(f"the engine has ended: {error}")
        stopped.__cause__ = error
        self.fail(list(self.streams), stopped)


class LastStep(Observer):
    """Remembers the step in progress, whose requests are suspected if it fails.

    With asynchronous scheduling there may be two. The older one is waited for, so it is the one that fails.

    Attributes:
        requests: of the oldest output whose tokens are not recorded, in batch order; none if there is none, or it
            was forgotten.
        has_failed: whether a step has failed since tokens were last recorded.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.has_failed = False
        self._ahead: list[Request] = []  # of the step behind it

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """A step begins."""
        if scheduler.outstanding is output:
            self.requests, self._ahead = output.scheduled, []
        else:
            self._ahead = output.scheduled

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Its tokens are recorded."""
        self.requests, self._ahead, self.has_failed = self._ahead, [], False

    def forget(self) -> None:
        """It has failed, and its requests were handled."""
        self.requests, self._ahead, self.has_failed = [], [], True
