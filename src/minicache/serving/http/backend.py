"""The engine behind the API, in a thread or in processes of its own, as the routes see it. No phase builds this."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer
from minicache.errors import EngineDiedError, StepFailedError
from minicache.scheduler.observe import observe
from minicache.serving.http.bodies import stop_reading
from minicache.serving.http.errors import ApiError, as_api_error
from minicache.serving.http.metrics import Metrics
from minicache.serving.http.shares import Shares
from minicache.serving.http.turns import Turns
from minicache.serving.replica.client import EngineClient
from minicache.serving.replica.fleet import FleetClient
from minicache.serving.replica.llm import info_of
from minicache.serving.replica.messages import EngineInfo
from minicache.serving.replica.remote import RemoteEngine
from minicache.serving.replica.stream import ShortTexts
from minicache.serving.replica.view import LiveView


class Served(ABC):
    """An engine that was not started yet: what the routes share, and what a server drains (`running.Drained`).

    Args:
        engine: as below.
        model: as below.
        tokenizer: as below.
        decoder: as below.

    Attributes:
        engine: answers requests.
        model: the name that its model is served by.
        tokenizer: the engine's, or None.
        decoder: the same, and remembers short texts; or None.
        metrics: its metrics.
        stopping: is set when the server is to stop.
        reading: the time limits of bodies that have not come yet.
        turns: in which long work is done.
        shares: which client's request is next.
        tokenizing: the thread in which texts become token ids: neither the event loop nor the engine waits for a long
            one. One thread, since a tokenizer need not be thread-safe.
        created: when it began, in seconds since 1970.
    """

    def __init__(
        self,
        engine: AsyncEngine | RemoteEngine,
        model: str,
        tokenizer: Tokenizer | None,
        decoder: ShortTexts | None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.metrics = Metrics(model)
        self.stopping = asyncio.Event()
        self.reading: set[asyncio.Timeout] = set()
        self.turns = Turns()
        self.shares = Shares()
        self.tokenizing = ThreadPoolExecutor(1, "minicache-tokenizer")
        self.created = int(time.time())

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """The engine's properties.

        Raises:
            EngineNotReadyError: it is starting, and they are not known yet.
        """

    @abstractmethod
    async def picture(self) -> bytes:
        """The live page's last picture, in JSON."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until it takes requests for the first time; raises the error that prevents it."""

    @abstractmethod
    async def compile(self, params: SamplingParams) -> None:
        """Have a constraint compiled, if that is to be done here, before its request is added: steps go on meanwhile.

        Raises:
            ConstraintError, MissingExtraError: as `LLM.add_request`.
        """

    @property
    def num_unfinished(self) -> int:
        """Answers under way."""
        return self.engine.num_unfinished

    async def drain(self, seconds: float) -> bool:
        """Wait until all answers have ended, for so long at most; whether they have."""
        return await self.engine.drain(seconds)

    async def end(self) -> None:
        """Stop the engine."""
        await self.engine.stop()

    def as_api_error(self, error: Exception) -> ApiError:
        """Any error, as clients see it. One of the model's is counted."""
        if isinstance(error, EngineDiedError | StepFailedError):
            self.metrics.count_failed()
        return as_api_error(error)

    def stop(self) -> None:
        """Refuse new requests from now on, and end endless streams. Call it in the event loop."""
        self.engine.is_draining = True
        stop_reading(self)


class ServedThread(Served):
    """An `AsyncEngine`."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        llm = engine.llm
        super().__init__(engine, model, llm.tokenizer, None if llm.tokenizer is None else ShortTexts(llm.tokenizer))
        self._info = info_of(llm)
        self._view = LiveView(llm.scheduler)
        self._picture, self._json = self._view.snapshot(), b""
        llm.scheduler = observe(llm.scheduler, self.metrics.watch(llm.scheduler), self._view)

    @property
    def info(self) -> EngineInfo:
        """As `Served.info`."""
        return self._info

    async def ready(self) -> None:
        """It is, as soon as it was started."""

    async def compile(self, params: SamplingParams) -> None:
        """As `Served.compile`; the request then finds it compiled."""
        loop, engine = asyncio.get_running_loop(), cast(AsyncEngine, self.engine)
        await loop.run_in_executor(self.tokenizing, engine.llm.grammars.compile, params)

    async def picture(self) -> bytes:
        """As `Served.picture`."""
        picture = self._view.snapshot()
        if picture is not self._picture or not self._json:
            self._picture, self._json = picture, msgspec.json.encode(picture)
        return self._json


class ServedClient(Served):
    """Engines in other processes."""

    engine: RemoteEngine

    def __init__(self, engine: RemoteEngine, model: str) -> None:
        super().__init__(engine, model, engine.tokenizer, engine.decoder)
        engine.on_info = lambda number, info: self.metrics.add_engine(number, info.cache)
        engine.on_stats = self.metrics.apply

    @property
    def info(self) -> EngineInfo:
        """As `Served.info`."""
        return self.engine.info

    async def compile(self, params: SamplingParams) -> None:
        """The engine does, in a thread of its process."""


class ServedProcesses(ServedClient):
    """Engines that this process has started."""

    engine: EngineClient

    async def ready(self) -> None:
        """As `Served.ready`."""
        await self.engine.ready()

    async def picture(self) -> bytes:
        """As `Served.picture`."""
        return (await self.engine.picture()).json


class ServedFleet(ServedClient):
    """A fleet. The live page has a table of its replicas, and draws no blocks."""

    engine: FleetClient

    async def ready(self) -> None:
        """It is, as soon as it was started."""

    async def picture(self) -> bytes:
        """As `Served.picture`, from each replica's last message."""
        answered = self.metrics.values("vllm:request_success")
        generated = self.metrics.values("vllm:generation_tokens")
        queried = self.metrics.values("vllm:prefix_cache_queries")
        hits = self.metrics.values("vllm:prefix_cache_hits")
        deaths = self.metrics.values("minicache:engine_deaths")
        replicas = [
            {
                "name": name,
                "has_died": deaths[number] > 0,
                "num_answered": answered[number],
                "num_generated": generated[number],
                "hit_rate": hits[number] / queried[number] if queried[number] else None,
            }
            for name, number in self.engine.numbers.items()
        ]
        return msgspec.json.encode(
            {
                "num_unfinished": self.engine.num_unfinished,
                "num_failovers": self.engine.num_failovers,
                "replicas": replicas,
            }
        )


def served_engine(engine: AsyncEngine | EngineClient | FleetClient, model: str) -> Served:
    """An engine that was not started yet, as routes see it.

    Args:
        engine: in a thread of this process, in processes of its own, or a fleet.
        model: the name that its model is served by.
    """
    match engine:
        case EngineClient():
            return ServedProcesses(engine, model)
        case FleetClient():
            return ServedFleet(engine, model)
    return ServedThread(engine, model)
