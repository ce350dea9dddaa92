"""What the server's process calls when engines are a fleet: the interface of one `AsyncEngine`.

The transport to replicas (Ray Serve, in `minicache.plugins.ray_serve`) is a function, `Send`. Which replica
gets a request is decided there. Here an answer's tokens are kept as they come, and `FailoverStream` says what is asked
of another replica when one has died. No phase builds this; the decisions are phase 11's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
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
from minicache.serving.replica.messages import AddRequest, EngineInfo, Update
from minicache.serving.replica.remote import RemoteEngine
from minicache.serving.replica.stats import DEATH
from minicache.serving.replica.stream import TokenStream

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
        num_logprobs, priority, cache_salt, num_answer_tokens: as `LLM.add_request`.
    """

    routed: RoutedRequest
    token_ids: tuple[int, ...]
    params: SamplingParams
    num_logprobs: int | None
    priority: int
    cache_salt: str | None
    num_answer_tokens: int = 0


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


class FleetClient(RemoteEngine):
    """A fleet of engines, which others start and choose among.

    Each of a request's n answers goes to a replica of its own choice, and moves to another one if that dies: clients
    see a pause.

    Args:
        send_to_replica: carries requests.
        describe: says what the engines are like, as soon as one is ready; all are the same.
        tokenizer: as `RemoteEngine`.
        max_unfinished: admission slots, ≥ 1.

    Attributes:
        numbers: of the replicas, by their names, in order of their first message.
        num_failovers: how often an answer has moved to another replica.

    Raises:
        TypeError, ValueError: max_unfinished is not a count.
    """

    def __init__(
        self,
        send_to_replica: Send,
        describe: Callable[[], Awaitable[EngineInfo]],
        tokenizer: Tokenizer | None,
        *,
        max_unfinished: int,
    ) -> None:
        require_count("max_unfinished", max_unfinished)
        super().__init__(tokenizer)
        self.numbers: dict[str, int] = {}
        self.num_failovers = 0
        self._max_unfinished = max_unfinished
        self._send_to_replica, self._describe = send_to_replica, describe
        self._info: EngineInfo | None = None
        self._answers: dict[TokenStream, list[asyncio.Task[None]]] = {}
        self._dead: set[int] = set()

    # Its life

    async def __aenter__(self) -> FleetClient:
        """Wait until a replica is ready."""
        self._info = await self._describe()
        return self

    async def stop(self) -> None:
        """As `RemoteEngine.stop`. The replicas belong to the creator of `send_to_replica`."""
        self.is_draining = True
        tasks = [task for tasks in self._answers.values() for task in tasks]
        for stream in list(self._answers):
            self._fail(stream, EngineStoppedError("the server stopped before this answer was complete"))
        await asyncio.gather(*tasks, return_exceptions=True)

    # What clients call

    @property
    def info(self) -> EngineInfo:
        """As `RemoteEngine.info`."""
        if self._info is None:
            raise EngineNotReadyError("the fleet is starting")
        return self._info

    @property
    def max_unfinished(self) -> int:
        """As `RemoteEngine.max_unfinished`."""
        return self._max_unfinished

    @property
    def max_num_seqs(self) -> int:
        """As many: how many replicas there are now is not known here, so `retry_after` is that of the next answer."""
        return self._max_unfinished

    def check_ready(self) -> None:
        """As `RemoteEngine.check_ready`."""
        _ = self.info

    def send(self, stream: TokenStream, request: AddRequest) -> None:
        """As `RemoteEngine.send`, each answer on its own."""
        num_answers = request.params.n
        self.take_slots(num_answers)
        self._answers[stream] = tasks = []
        for index in range(num_answers):
            asked = FleetRequest(
                route_tokens(f"{stream.request_id}.{index}", ()),
                tuple(request.prompt_token_ids),
                request.params.of_answer(index),
                request.num_logprobs,
                request.priority,
                request.cache_salt,
            )
            task = asyncio.create_task(self._have_answered(stream, index, asked))
            task.add_done_callback(lambda task: self.free_slots(1))  # also of one that was cancelled before it began
            tasks.append(task)

    # One answer

    async def _have_answered(self, stream: TokenStream, index: int, asked: FleetRequest) -> None:
        """Give an answer to its stream, or the stream what went wrong."""
        try:
            await self._answer(stream, index, asked)
        except Exception as error:
            self._fail(stream, error)
            return
        self.finished_at.append(time.monotonic())
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
            num_given = len(prompt) - len(asked.token_ids)
            rest = replace(asked, routed=routed, token_ids=prompt, params=left, num_answer_tokens=num_given)
            replica: int | None = None
            num_tokens = 0
            try:
                async with aclosing(self._send_to_replica(rest)) as pieces:
                    async for piece in pieces:
                        replica = self._number(piece.replica_id)
                        self.on_stats(replica, piece.stats)
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
                if replica is not None and replica not in self._dead and isinstance(error, EngineDiedError):
                    self._dead.add(replica)
                    self.on_stats(replica, DEATH)
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

    def leave(self, stream: AnswerStream) -> None:
        """As `RemoteEngine.leave`."""
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

    def _number(self, replica_id: str) -> int:
        """A replica's number. One that is new counts as ready."""
        if replica_id not in self.numbers:
            self.numbers[replica_id] = len(self.numbers)
            self.on_info(self.numbers[replica_id], self.info)
        return self.numbers[replica_id]
