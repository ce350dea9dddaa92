"""The engine behind the API, in a thread or in processes of its own, as the routes see it. No phase builds this."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.stopping import Tokenizer
from minicache.replica.client import EngineClient
from minicache.replica.llm import info_of
from minicache.replica.messages import EngineInfo, Picture
from minicache.replica.view import LiveView
from minicache.scheduler.observe import observe
from minicache.server.metrics import Metrics


class Backend(ABC):
    """An engine, and what a server knows of it besides.

    Attributes:
        engine: answers.
        metrics: counts.
        tokenizer: the engine's, or None.
    """

    engine: AsyncEngine | EngineClient
    metrics: Metrics
    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What the engine is like.

        Raises:
            EngineNotReadyError: it is starting, and that is not known yet.
        """

    @abstractmethod
    async def ready(self) -> None:
        """Wait until it takes requests for the first time; raises what stands in its way."""

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


def backend_of(engine: AsyncEngine | EngineClient, model_name: str) -> Backend:
    """What the routes use; the engine was not started yet."""
    if isinstance(engine, EngineClient):
        return ProcessBackend(engine, model_name)
    return ThreadBackend(engine, model_name)
