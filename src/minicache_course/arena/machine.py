"""What every policy is given: a machine, a clock, and the limits of each request. Pure standard library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from minicache.arithmetic.specs import H100, QWEN3_32B
from minicache.request import Request
from minicache.simulator.costs import RooflineCost
from minicache.simulator.machine import published_machine

BLOCK_SIZE: Final = 16
"""Tokens of a block."""

MAX_MODEL_LEN: Final = 8192
"""The most tokens of a prompt and its answer together, as every request may have."""

MAX_NUM_SEQS: Final = 256
"""The most requests of a batch: vLLM's default for such a machine."""

MAX_NUM_BATCHED_TOKENS: Final = 8192
"""The most tokens of a step: a longest prompt fits into one."""

MAX_REPLICAS: Final = 8
"""The most replicas of a fleet, those that are starting included."""

START_SECONDS: Final = 20.0
"""From the decision until a new replica takes requests."""

PRICE: Final = 0.5
"""Good requests that a second of a replica must bring to be worth it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a class of requests is promised.

    Attributes:
        name: of the class.
        ttft: seconds within which the first token must come.
        tpot: seconds that a token after the first may take, on average over the answer.
        max_tokens: the most tokens of an answer.
    """

    name: str
    ttft: float
    tpot: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Arena:
    """What a policy is given. The same functions are good at any time during the run.

    Attributes:
        options: the keyword arguments of a `minicache.scheduler.base.Scheduler` for this machine. A policy may lower
            max_num_seqs and max_num_batched_tokens, and add the options of its stage.
        now: the time at which the step being scheduled begins, in seconds of the run.
        service: the class of a request.
        step_seconds: how long a step takes that computes, for each request, (new tokens, tokens in the cache).
        length: how many tokens the answer to a request will have. None, except for the baselines that are oracles.
    """

    options: dict[str, Any]
    now: Callable[[], float]
    service: Callable[[Request], Service]
    step_seconds: Callable[[Iterable[tuple[int, int]]], float]
    length: Callable[[Request], int] | None = None


@dataclass(frozen=True, slots=True)
class FleetArena:
    """What a fleet's policy is given.

    Attributes:
        now: the time, in seconds of the run.
        max_replicas: `MAX_REPLICAS`.
        start_seconds: `START_SECONDS`.
        price: `PRICE`.
        block_size: tokens of a block, as the router sees prompts.
    """

    now: Callable[[], float]
    max_replicas: int = MAX_REPLICAS
    start_seconds: float = START_SECONDS
    price: float = PRICE
    block_size: int = BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves.

    Attributes:
        cost: how long a step takes.
        num_blocks: blocks of its cache.
    """

    cost: RooflineCost
    num_blocks: int

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a scheduler for it."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
        }


@cache
def the_machine() -> Machine:
    """Qwen3-32B in 16 bits on one H100: the weights take 65 of 86 GB, and leave 43,700 tokens of cache.

    So memory is short, as it is on most servers, and a step takes 26 ms or more, which keeps the runs short.
    """
    num_blocks = published_machine("qwen3-32b", "h100", block_size=BLOCK_SIZE).num_blocks
    return Machine(RooflineCost(QWEN3_32B, H100), num_blocks)
