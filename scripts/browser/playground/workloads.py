"""The workloads of the playground, each with the settings that show what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final, cast

from minicache.arithmetic.specs import A100_80GB, LLAMA_3_8B
from minicache.request import Request
from minicache.simulator.costs import FixedCost, RooflineCost, StepCost
from minicache.simulator.prompts import VOCABULARY, ChatWorkload, behind_system_prompt, chats
from minicache.simulator.workload import ALPACA, LengthDistribution, generate

SIX: Final = {"A": (4, 3), "B": (3, 8), "C": (2, 5), "D": (5, 2), "E": (3, 4), "F": (2, 6)}
"""The six requests of phase 5: prompt tokens, and tokens that they will generate."""

REPLAY: Final = "replay"
"""The workload whose requests, aborts and failures the link says: `minicache.verifier.link`."""

EXAMPLE: Final = "a00.3.0,a000.2.0,s,c,s,c,s,r,s,x0,c,s,c"
"""What happens where the link does not say it."""

IN_STEPS: Final = FixedCost(1.0)
"""The clock of phases 5 to 7: every step takes 1."""

ON_A_GPU: Final = RooflineCost(LLAMA_3_8B, A100_80GB)
"""A step takes as long as Llama 3 8B on an A100 would, by phase 7's cost model."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the sliders say.

    Attributes:
        blocks: blocks of the pool.
        block_size: tokens of a block.
        slots: batch slots, `max_num_seqs`.
        budget: tokens of one step, `max_num_batched_tokens`.
    """

    blocks: int
    block_size: int
    slots: int
    budget: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, the clock that they are served on, and where the sliders stand at first.

    Attributes:
        title: for people.
        requests: makes new requests, in the order of their arrival times.
        cost: how long a step takes: `IN_STEPS` or `ON_A_GPU`.
        settings: where the sliders stand.
        schedulers: the two that are compared at first, by their names in `schedulers.SCHEDULERS`.
    """

    title: str
    requests: Callable[[], Iterable[Request]]
    cost: StepCost
    settings: Settings
    schedulers: tuple[str, str]


def six() -> list[Request]:
    """The six requests of phase 5's grids, all there from the start."""
    return [_request(name, prompt, output) for name, (prompt, output) in SIX.items()]


def burst() -> list[Request]:
    """Forty requests of mixed lengths, all there from the start."""
    lengths = LengthDistribution.from_mean(40, 0.8)
    drawn = generate(replace(ALPACA, prompt=lengths, output=lengths, max_model_len=192), 40, seed=5)
    return [_request(str(each.request_id), each.num_prompt_tokens, each.num_output_tokens) for each in drawn]


def poisson_chats() -> Iterator[Request]:
    """Chats that begin as Poisson arrivals do; every message is sent with all that was said before it.

    Chat 3's turn 1 is "3.1": an id that fits into a cell.
    """
    talk = ChatWorkload(
        message=LengthDistribution.from_mean(60, 1.0),
        answer=LengthDistribution.from_mean(60, 0.6),
        rate=4.0,
        mean_turns=3.0,
        pause=1.0,
        seconds_per_token=0.015,
        max_model_len=512,
    )
    for each in chats(talk, 24, seed=1):
        name = ".".join(map(str, cast(tuple[int, int], each.request_id)))
        prompt, time = each.prompt_token_ids, each.arrival_time
        yield Request(name, prompt, each.max_tokens, ignore_eos=True, arrival_time=time)


def shared_prefix() -> Iterator[Request]:
    """Poisson arrivals whose prompts all begin with one system prompt of 128 tokens."""
    own = replace(
        ALPACA,
        prompt=LengthDistribution.from_mean(24, 0.8),
        output=LengthDistribution.from_mean(40, 0.6),
        rate=16.0,
        max_model_len=384,
    )
    return behind_system_prompt(own, 128, 80, seed=2)


def thrash() -> list[Request]:
    """Incident 3 of phase 7: prompts of 120 and 50 tokens, 100 new tokens each, memory for both."""
    return [_request("A", 120, 100), _request("B", 50, 100)]


def _request(name: str, num_prompt: int, num_output: int) -> Request:
    """A request whose prompt no other begins with: a prefix cache must find nothing in it."""
    prompt = Random(f"prompt of {name}").choices(VOCABULARY, k=num_prompt)
    return Request(name, prompt, num_output, ignore_eos=True)


WORKLOADS: Final = {
    "six": Workload("the six requests of phase 5", six, IN_STEPS, Settings(12, 4, 3, 64), ("static", "continuous")),
    "burst": Workload("a burst of 40 requests", burst, ON_A_GPU, Settings(48, 16, 16, 512), ("continuous", "paged")),
    "chats": Workload(
        "Poisson chats", poisson_chats, ON_A_GPU, Settings(64, 16, 8, 512), ("continuous", "chunked+prefix")
    ),
    "prefix": Workload("a shared prefix", shared_prefix, ON_A_GPU, Settings(96, 16, 12, 512), ("fair", "fair+prefix")),
    "thrash": Workload("the thrash of phase 7", thrash, IN_STEPS, Settings(64, 16, 8, 8192), ("thrash", "fair")),
    REPLAY: Workload("a story of minicache verify", list, IN_STEPS, Settings(4, 2, 3, 8), ("paged", "paged+swap")),
}
"""Name in a link → workload."""
