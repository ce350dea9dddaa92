"""The engine behind the API, in a thread or in processes of its own, as the routes see it. No phase builds this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.stopping import Tokenizer
from minicache.scheduler.observe import observe
from minicache.serving.http.metrics import Metrics
from minicache.serving.replica.client import DEATH, EngineClient
from minicache.serving.replica.fleet import FleetClient
from minicache.serving.replica.llm import info_of
from minicache.serving.replica.messages import EngineInfo, Picture
from minicache.serving.replica.view import LiveView


class Backend(ABC):
    """An engine, with its metrics and its tokenizer.

    Attributes:
        engine: answers requests.
        metrics: its metrics.
        tokenizer: the engine's, or None.
    """

    engine: AsyncEngine | EngineClient | FleetClient
    metrics: Metrics
    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """The engine's properties.

        Raises:
            EngineNotReadyError: it is starting, and they are not known yet.
        """

    @abstractmethod
    async def ready(self) -> None:
        """Wait until it takes requests for the first time; raises the error that prevents it."""

    @abstractmethod
    async def picture(self) -> Picture:
        """The live page's last picture, the same object until there is a new one."""


class ThreadBackend(Backend):
    """An `AsyncEngine` that was not started yet."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        llm = engine.llm
        self.engine = engine
        self.metrics = Metrics(model_name)
        self.tokenizer = llm.tokenizer
        self._info = info_of(llm)
        self.metrics.add_engine(0, self._info.cache)
        self._view = LiveView(llm.scheduler)
        self._picture = Picture(0, b"")
        llm.scheduler = observe(llm.scheduler, self.metrics.watch(llm.scheduler), self._view)

    @property
    def info(self) -> EngineInfo:
        """As `Backend.info`."""
        return self._info

    async def ready(self) -> None:
        """It is, as soon as it was started."""

    async def picture(self) -> Picture:
        """As `Backend.picture`."""
        picture = self._view.snapshot()
        if picture["version"] != self._picture.version:
            self._picture = Picture(picture["version"], msgspec.json.encode(picture))
        return self._picture


class ProcessBackend(Backend):
    """An `EngineClient` that was not started yet."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self.engine = self._client = engine
        self.metrics = Metrics(model_name)
        self.tokenizer = engine.tokenizer
        engine.on_info = lambda number, info: self.metrics.add_engine(number, info.cache)
        engine.on_stats = self.metrics.apply

    @property
    def info(self) -> EngineInfo:
        """As `Backend.info`."""
        return self._client.info

    async def ready(self) -> None:
        """As `Backend.ready`."""
        await self._client.ready()

    async def picture(self) -> Picture:
        """As `Backend.picture`."""
        return await self._client.picture()


class FleetBackend(Backend):
    """A `FleetClient` that was not started yet. The live page has a table of its replicas, and draws no blocks."""

    def __init__(self, engine: FleetClient, model_name: str) -> None:
        self.engine = self._client = engine
        self.metrics = Metrics(model_name)
        self.tokenizer = engine.tokenizer
        self._numbers: dict[str, int] = {}
        self._picture = Picture(0, b"")
        engine.on_stats = lambda replica_id, updates: self.metrics.apply(self._number(replica_id), updates)
        engine.on_death = lambda replica_id: self.metrics.apply(self._number(replica_id), DEATH)

    def _number(self, replica_id: str) -> int:
        """The value of the label `engine`: replicas are numbered from 0 in order of their first message."""
        if replica_id not in self._numbers:
            self._numbers[replica_id] = len(self._numbers)
            self.metrics.add_engine(self._numbers[replica_id], self._client.info.cache)
        return self._numbers[replica_id]

    @property
    def info(self) -> EngineInfo:
        """As `Backend.info`."""
        return self._client.info

    async def ready(self) -> None:
        """It is, as soon as it was started."""

    async def picture(self) -> Picture:
        """As `Backend.picture`, from each replica's last message."""
        told = msgspec.json.encode(self._told())
        if told != self._picture.json:
            self._picture = Picture(self._picture.version + 1, told)
        return self._picture

    def _told(self) -> dict[str, Any]:
        answered = self.metrics.values("vllm:request_success")
        generated = self.metrics.values("vllm:generation_tokens")
        queried = self.metrics.values("vllm:prefix_cache_queries")
        hits = self.metrics.values("vllm:prefix_cache_hits")
        deaths = self.metrics.values("minicache:engine_deaths")
        return {
            "num_unfinished": self._client.num_unfinished,
            "num_failovers": self._client.num_failovers,
            "replicas": [
                {
                    "name": name,
                    "has_died": deaths[number] > 0,
                    "num_answered": answered[number],
                    "num_generated": generated[number],
                    "hit_rate": hits[number] / queried[number] if queried[number] else None,
                }
                for name, number in self._numbers.items()
            ],
        }


def backend_of(engine: AsyncEngine | EngineClient | FleetClient, model_name: str) -> Backend:
    """The backend of an engine that was not started yet."""
    match engine:
        case EngineClient():
            return ProcessBackend(engine, model_name)
        case FleetClient():
            return FleetBackend(engine, model_name)
    return ThreadBackend(engine, model_name)
