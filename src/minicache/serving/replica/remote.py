"""Engines elsewhere, with the interface of one `AsyncEngine` and by its rules: what `client` and `fleet` share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import TracebackType

from minicache.engine.async_engine import MAX_RETRY_AFTER, MIN_RETRY_AFTER, AnswerStream
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer
from minicache.errors import EngineStoppedError, QueueFullError
from minicache.serving.replica.messages import AddRequest, EngineInfo, Update
from minicache.serving.replica.stream import ShortTexts, TokenStream


class Slots:
    """Counts what is in progress, and waits until nothing is. Used in one event loop.

    Attributes:
        num_unfinished: slots that are taken.
    """

    def __init__(self) -> None:
        self.num_unfinished = 0
        self._all_finished = asyncio.Event()
        self._all_finished.set()

    def take_slots(self, number: int) -> None:
        """So many more are in progress."""
        self.num_unfinished += number
        self._all_finished.clear()

    def free_slots(self, number: int) -> None:
        """So many have ended."""
        self.num_unfinished -= number
        if not self.num_unfinished:
            self._all_finished.set()

    async def drain(self, seconds: float) -> bool:
        """Wait until nothing is in progress, for so long at most; whether that has come."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may drop a cancellation
                await self._all_finished.wait()
        return self.num_unfinished == 0


class RemoteEngine(Slots, ABC):
    """Engines in other processes, and what the coroutines of one event loop call to get their answers.

    Requests go there as token ids, and tokens come back. Texts are made here, and stop strings found.

    Args:
        tokenizer: turns tokens into text; its end tokens finish answers. None: answers have no text.

    Attributes:
        tokenizer: as above.
        decoder: the same, and remembers short texts; or None.
        num_unfinished: admission slots that are taken.
        is_draining: whether new requests are refused because the server is to stop.
        finished_at: when the last answers finished, the newest last; empty when none is unfinished.
        on_info: is called with an engine's number and what it is like, whenever it has become ready.
        on_stats: is called with an engine's number and what has changed in its numbers.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.is_draining = False
        self.finished_at: deque[float] = deque(maxlen=64)
        self.on_info: Callable[[int, EngineInfo], object] = lambda number, info: None
        self.on_stats: Callable[[int, Sequence[Update]], object] = lambda number, updates: None
        self.decoder = None if tokenizer is None else ShortTexts(tokenizer)
        self._names = count()

    # What differs

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What the engines are like; all are the same.

        Raises:
            EngineNotReadyError: none was ready yet.
        """

    @property
    @abstractmethod
    def max_num_seqs(self) -> int:
        """Batch slots of all ready engines."""

    @property
    @abstractmethod
    def max_unfinished(self) -> int:
        """Admission slots."""

    @abstractmethod
    def check_ready(self) -> None:
        """Raise EngineNotReadyError, with the reason, unless an engine takes requests."""

    @abstractmethod
    def send(self, stream: TokenStream, request: AddRequest) -> None:
        """Have a request answered into its stream, and take a slot for each of its answers.

        Raises:
            ValueError: it cannot be sent. No slot was taken.
        """

    @abstractmethod
    def leave(self, stream: AnswerStream) -> None:
        """A stream was closed with unfinished answers: as `AsyncEngine.leave`."""

    @abstractmethod
    async def __aenter__(self) -> RemoteEngine:
        """Begin."""

    @abstractmethod
    async def stop(self) -> None:
        """End all unfinished requests with an EngineStoppedError."""

    # What is the same

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def drain(self, seconds: float) -> bool:
        """Take no new requests, and wait until those that are here are finished. As `AsyncEngine.drain`."""
        self.is_draining = True
        return await super().drain(seconds)

    def check_admission(self, num_answers: int) -> None:
        """Raise unless so many more answers can be taken now, as `AsyncEngine.check_admission`. Takes no slot.

        Raises:
            EngineStoppedError: the engines are draining.
            EngineNotReadyError: no engine is ready. The message says why.
            ValueError: there are fewer admission slots altogether.
            QueueFullError: too many slots are taken now.
        """
        if self.is_draining:
            raise EngineStoppedError("the server is stopping, and accepts no new requests")
        self.check_ready()
        if num_answers > self.max_unfinished:
            raise ValueError(f"{num_answers} answers requested: at most {self.max_unfinished} can be in progress")
        if self.num_unfinished + num_answers > self.max_unfinished:
            raise QueueFullError(
                f"{self.num_unfinished} of {self.max_unfinished} admission slots are taken, and {num_answers} needed",
                self.retry_after(),
            )

    def retry_after(self) -> float:
        """Seconds until the answers that wait now will be finished. As `AsyncEngine.retry_after`."""
        if len(self.finished_at) < 2:
            return MIN_RETRY_AFTER
        between = (self.finished_at[-1] - self.finished_at[0]) / (len(self.finished_at) - 1)
        num_waiting = max(self.num_unfinished - self.max_num_seqs, 1)
        return min(max(num_waiting * between, MIN_RETRY_AFTER), MAX_RETRY_AFTER)

    def free_slots(self, number: int) -> None:
        """As `AsyncEngine.free_slots`."""
        super().free_slots(number)
        if not self.num_unfinished:
            self.finished_at.clear()

    async def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        num_logprobs: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Have a request answered. Returns when an engine has taken it.

        Args:
            prompt: token ids.
            params: what to generate; its n answers need n admission slots.
            num_logprobs: as `LLM.add_request`.
            priority: as `LLM.add_request`.
            cache_salt: as `LLM.add_request`.

        Returns:
            The stream of its chunks. The caller closes it.

        Raises:
            ValueError: stop strings without a tokenizer, or a cache_salt that is no Unicode.
            EngineDiedError: the engine has died before it answered.
            Exception: what `check_admission` or `LLM.add_request` raises. No slot is taken then.
        """
        self.check_admission(params.n)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the engine one, or use stop_token_ids")
        stream = TokenStream(next(self._names), prompt, params, self.decoder, self.leave)
        ends = self.decoder is not None and (not params.ignore_eos or params.is_constrained)
        end = self.decoder.end_token_ids if self.decoder is not None and ends else ()
        for_engine = replace(params, stop=(), stop_token_ids=(*params.stop_token_ids, *end))
        name, arrival = stream.request_id, stream.arrival_time
        self.send(stream, AddRequest(name, list(prompt), for_engine, num_logprobs, priority, cache_salt, arrival))
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream
