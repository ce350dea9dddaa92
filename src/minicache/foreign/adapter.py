"""What another engine's scheduler must answer to be audited.

An adapter is one class of a few dozen lines: it makes the engine's scheduler, hands it requests, has it schedule a
step, commits the step with made-up tokens, and reads its state into the values below. There is no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from minicache.foreign.workload import Limits


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes of one request.

    Attributes:
        request_id: of the request.
        start: the position of the first token that is computed: those before it are read from the cache.
        num_tokens: how many are computed, from there on.
    """

    request_id: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestState:
    """An unfinished request, as the engine has it now.

    Attributes:
        request_id: as it was given to `Adapter.add`.
        token_ids: prompt and output.
        block_ids: the request's block table; empty: it holds no blocks.
        running: whether it is in the batch; otherwise it waits.
    """

    request_id: int
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    running: bool


@dataclass(frozen=True, slots=True)
class State:
    """The scheduler's books, as they are between two calls.

    Attributes:
        requests: every unfinished request, once for each place that the engine has it in.
        free_block_ids: blocks that may be given to any request, in the engine's order.
        cached_block_ids: blocks that a prefix cache holds by itself, whether or not a request lists them too. Empty for
            an engine whose cached blocks are free until they are given away.
        references: block → the engine's count of the requests that list it, blocks with none left out; None: the engine
            keeps no such count.
    """

    requests: Sequence[RequestState]
    free_block_ids: Sequence[int]
    cached_block_ids: Sequence[int] = ()
    references: Mapping[int, int] | None = None


class Adapter(ABC):
    """One engine's scheduler. Subclass it, and `minicache audit PATH --engine your_adapter.py` does the rest.

    Args:
        checkout: the folder that has the engine's source. Import from it here, once: `minicache.foreign.load` imports
            without the packages' `__init__`, and with stand-ins for modules that the scheduler does not need.

    Attributes:
        name: what the engine is called.
        marker: a file that only a checkout of this engine has, relative to its folder.
        block_sizes: sizes of blocks that the scheduler can be made with.
        chunked_prefill: whether a prompt may be computed in several steps. False: the token budget of every workload is
            then large enough for its longest request.
        can_abort: whether there is an `abort`. True: some requests of every workload are aborted.
    """

    name: ClassVar[str]
    marker: ClassVar[str]
    block_sizes: tuple[int, ...] = (2, 3, 4)
    chunked_prefill: bool = True
    can_abort: bool = False

    @abstractmethod
    def __init__(self, checkout: Path) -> None: ...

    @abstractmethod
    def start(self, limits: Limits) -> None:
        """Make a new scheduler with these limits; the one before is forgotten."""

    @abstractmethod
    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request that is to generate exactly `max_tokens` tokens, whatever they are."""

    @abstractmethod
    def schedule(self) -> list[Work]:
        """Schedule a step, in the engine's own way. Empty: the engine computes nothing in it."""

    @abstractmethod
    def commit(self, token_ids: Sequence[int]) -> dict[int, list[int]]:
        """Tell the scheduler what the model has generated in the step that was just scheduled.

        Args:
            token_ids: one for each `Work` of the step, in its order: the token that a model generates after the last
                position computed. It is meaningless where the prompt is not yet computed to its end, as in an engine.

        Returns:
            The requests that have finished, with their output.
        """

    def abort(self, request_id: int) -> None:
        """End an unfinished request, between two steps. Only for engines that can: `can_abort`."""
        raise NotImplementedError

    @abstractmethod
    def state(self) -> State:
        """The scheduler's books now. Called after every other method; it must change nothing."""
