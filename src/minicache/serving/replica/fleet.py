"""What the server's process calls when engines are a fleet: the interface of one `AsyncEngine`.

The transport to replicas (Ray Serve, in `minicache.plugins.ray_serve`) is a function, `Send`. Which replica
gets a request is decided there. Here an answer's tokens are kept as they come, and `FailoverStream` says what is asked
of another replica when one has died. No phase builds this; the decisions are phase 11's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Final

from minicache.engine.answers import TokenLogprobs
from minicache.engine.async_engine import AnswerStream
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer
from minicache.errors import (
    BrokenStreamError,
    EngineDiedError,
    EngineNotReadyError,
    EngineStoppedError,
    StepFailedError,
    require_count,
)
from minicache.fleet.failover import FailoverStream
from minicache.fleet.views import RoutedRequest, route_tokens
from minicache.serving.replica.admission import require_slots, retry_seconds
from minicache.serving.replica.messages import EngineInfo, Update
from minicache.serving.replica.stream import SingleTokens, TokenStream

__all__ = ["FleetClient", "FleetRequest", "GivenToken", "Piece", "Send"]

CHOSEN_LATER: Final = ""
"""The replica of an attempt, for `FailoverStream`: here it is not known, and one that died is not there any more."""

logger = logging.getLogger("minicache")


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One answer, or what is left of it, asked of a replica.

    Attributes:
        routed: what a router sees of it.
        token_ids: what is to be continued.
        params: with n = 1 and without stop strings, which are found where the text is.
        num_logprobs, priority, cache_salt: as `LLM.add_request`.
    """

    routed: RoutedRequest
    token_ids: tuple[int, ...]
    params: SamplingParams
    num_logprobs: int | None
    priority: int
    cache_salt: str | None


GivenToken = tuple[int | None, str | None, TokenLogprobs | None]
"""A token id, the finish_reason, and log probabilities: as in `Chunk`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a replica sends of an answer. The first of an answer comes when the engine has taken the request.

    Attributes:
        replica_id: who sends it.
        tokens: those that were generated since the last piece.
        stats: what has changed in the replica's numbers since it last sent a piece of any answer.
    """

    replica_id: str
    tokens: list[GivenToken]
    stats: list[Update]


Send = Callable[[FleetRequest], AsyncGenerator[Piece, None]]
"""Has a replica answer. To close the generator is to abort the request. It raises EngineDiedError if the replica has
died, EngineStoppedError if it is being stopped, and what the engine raises."""


class FleetClient:
    """A fleet of engines, and what the coroutines of one event loop call to get their answers.

    The interface is `AsyncEngine`'s, and so are its rules: admission slots, leaving, draining. Each of a request's n
    answers goes to a replica of its own choice, and moves to another one if that dies: clients see a pause.

    Args:
        send: carries requests.
        describe: says what the engines are like, as soon as one is ready; all are the same.
        tokenizer: turns tokens into text; its end tokens finish answers. None: answers have no text.
        max_unfinished: admission slots, ≥ 1.

    Attributes:
        tokenizer: as above.
        max_unfinished: as above.
        is_draining: whether new requests are refused because the server is to stop.
        num_failovers: how often an answer has moved to another replica.
        on_stats: is called with a replica's name and what has changed in its numbers.
        on_death: is called with the name of a replica that has died over an answer, once.

    Raises:
        TypeError, ValueError: max_unfinished is not a count.
    """

    def __init__(
        self,
        send: Send,
        describe: Callable[[], Awaitable[EngineInfo]],
        tokenizer: Tokenizer | None,
        *,
        max_unfinished: int,
    ) -> None:
        require_count("max_unfinished", max_unfinished)
        self.tokenizer = tokenizer
        self.max_unfinished = max_unfinished
        self.is_draining = False
        self.num_failovers = 0
        self.on_stats: Callable[[str, Sequence[Update]], object] = lambda replica_id, updates: None
        self.on_death: Callable[[str], object] = lambda replica_id: None
        self._send, self._describe = send, describe
        self._decoder = None if tokenizer is None else SingleTokens(tokenizer)
        self._info: EngineInfo | None = None
        self._names = count()
        self._answers: dict[TokenStream, list[asyncio.Task[None]]] = {}
        self._dead: set[str] = set()
        self._num_unfinished = 0
        self._finished_at: deque[float] = deque(maxlen=64)
        self._all_finished = asyncio.Event()
        self._all_finished.set()

    # Its life

    async def __aenter__(self) -> FleetClient:
        """Wait until a replica is ready."""
        self._info = await self._describe()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def drain(self, seconds: float) -> bool:
        """Take no new requests, and wait until those that are here are finished. As `AsyncEngine.drain`."""
        self.is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_finished.wait(), seconds)
        return self.num_unfinished == 0

    async def stop(self) -> None:
        """Abort all requests, with an EngineStoppedError. The replicas belong to the creator of `send`."""
        self.is_draining = True
        tasks = [task for tasks in self._answers.values() for task in tasks]
        for stream in list(self._answers):
            self._fail(stream, EngineStoppedError("the server stopped before this answer was complete"))
        await asyncio.gather(*tasks, return_exceptions=True)

    # What clients call

    @property
    def num_unfinished(self) -> int:
        """Admission slots that are taken."""
        return self._num_unfinished

    @property
    def info(self) -> EngineInfo:
        """What the engines are like.

        Raises:
            EngineNotReadyError: none was ready yet.
        """
        if self._info is None:
            raise EngineNotReadyError("the fleet is starting")
        return self._info

    def check_admission(self, num_answers: int) -> None:
        """Raise unless so many more answers can be taken now, as `AsyncEngine.check_admission`. Takes no slot.

        Raises:
            EngineStoppedError: the fleet is draining.
            EngineNotReadyError: no replica was ready yet.
            ValueError: there are fewer admission slots altogether.
            QueueFullError: too many slots are taken now.
        """
        if self.is_draining:
            raise EngineStoppedError("the server is stopping, and accepts no new requests")
        if self._info is None:
            raise EngineNotReadyError("the fleet is starting")
        require_slots(num_answers, self.num_unfinished, self.max_unfinished, self.retry_after())

    def retry_after(self) -> float:
        """Seconds until the next answer is finished, at the rate of the last ones; within `AsyncEngine`'s bounds."""
        return retry_seconds(self._finished_at)

    async def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        num_logprobs: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> TokenStream:
        """Have a request answered. Returns when a replica has taken it.

        Args:
            prompt: token ids.
            params: what to generate; its n answers need n admission slots.
            num_logprobs: as `LLM.add_request`.
            priority: as `LLM.add_request`.
            cache_salt: as `LLM.add_request`.

        Returns:
            The stream of its chunks. The caller closes it.

        Raises:
            ValueError: stop strings without a tokenizer.
            EngineDiedError: every replica that was asked has died.
            Exception: what `check_admission` or `LLM.add_request` raises. No slot is taken then.
        """
        self.check_admission(params.n)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer: give the engine one, or use stop_token_ids")
        stream = TokenStream(next(self._names), prompt, params, self._decoder, self._leave)
        end = () if params.ignore_eos or self._decoder is None else self._decoder.end_token_ids
        self._num_unfinished += params.n
        self._all_finished.clear()
        self._answers[stream] = tasks = []
        for index in range(params.n):
            of_answer = replace(params.of_answer(index), stop=(), stop_token_ids=(*params.stop_token_ids, *end))
            asked = FleetRequest(
                route_tokens(f"{stream.number}.{index}", ()),
                tuple(prompt),
                of_answer,
                num_logprobs,
                priority,
                cache_salt,
            )
            task = asyncio.create_task(self._have_answered(stream, index, asked))
            task.add_done_callback(lambda task: self._free_slot())  # also of one that was cancelled before it began
            tasks.append(task)
        try:
            await stream.accepted()
        except BaseException:
            stream.close()
            raise
        return stream

    # One answer

    async def _have_answered(self, stream: TokenStream, index: int, asked: FleetRequest) -> None:
        """Give an answer to its stream, or the stream what went wrong."""
        try:
            await self._answer(stream, index, asked)
        except Exception as error:
            self._fail(stream, error)
            return
        self._finished_at.append(time.monotonic())
        if not stream.num_open:
            self._answers.pop(stream, None)

    async def _answer(self, stream: TokenStream, index: int, asked: FleetRequest) -> None:
        """Ask one replica after the other, until the answer is complete or given up.

        Raises:
            EngineDiedError: given up.
            Exception: what the engine raises.
        """
        params = asked.params
        failover = FailoverStream(
            asked.routed.request_id,
            asked.token_ids,
            params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            seed=params.seed,
        )
        while not failover.is_finished:
            attempt = failover.begin(CHOSEN_LATER)
            prompt = attempt.prompt_token_ids
            name, block_size = asked.routed.request_id, self.info.cache.block_size
            routed = route_tokens(name, prompt, block_size=block_size, cache_salt=asked.cache_salt)
            left = replace(params, max_tokens=attempt.max_tokens, seed=attempt.seed)
            replica_id, num_tokens = "", 0
            try:
                async with aclosing(self._send(replace(asked, routed=routed, token_ids=prompt, params=left))) as pieces:
                    async for piece in pieces:
                        replica_id = piece.replica_id
                        self.on_stats(replica_id, piece.stats)
                        if not stream.num_prompt_tokens:
                            stream.is_accepted()
                        for token_id, reason, logprobs in piece.tokens:
                            if reason == "error":
                                raise StepFailedError("sampling failed for this request")
                            if token_id is not None:
                                failover.receive(attempt, num_tokens, [token_id])
                                num_tokens += 1
                            if reason:
                                failover.finish(attempt, reason, num_tokens)
                            if stream.push(index, token_id, reason, logprobs) and not reason:
                                failover.abort()  # a stop string: the replica does not know of it
                        stream.flush()
                        if failover.is_finished:
                            return
                raise EngineDiedError("the replica exited without finishing its answer")
            except (EngineDiedError, BrokenStreamError) as error:
                if replica_id and replica_id not in self._dead and isinstance(error, EngineDiedError):
                    self._dead.add(replica_id)
                    self.on_death(replica_id)
                if failover.fail(attempt):
                    self.num_failovers += 1
                    logger.warning("request %s moves to another replica: %s", asked.routed.request_id, error)
                elif failover.finish_reason == "error":
                    raise EngineDiedError(
                        f"{failover.num_attempts} replicas died while serving this request"
                    ) from error
        stream.push(index, None, failover.finish_reason, None)  # only the end was lost
        stream.flush()

    # Ends

    def _free_slot(self) -> None:
        """An answer is over, in any way, and its replica knows."""
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._finished_at.clear()
            self._all_finished.set()

    def _leave(self, stream: AnswerStream) -> None:
        """A stream was closed with unfinished answers."""
        assert isinstance(stream, TokenStream)
        for task in self._answers.pop(stream, []):
            task.cancel()

    def _fail(self, stream: TokenStream, error: Exception) -> None:
        """End a stream with an error, and abort its other answers."""
        current = asyncio.current_task()
        for task in self._answers.pop(stream, []):
            if task is not current:
                task.cancel()
        stream.fail(error)
