"""The five workloads, in sessions: a turn arrives when the one before has been answered. Pure standard library.

Lengths and arrivals come from the published traces (`minicache.simulator.workload`, and Mooncake's); what these do not
say, such as the pause before a next message, is assumed, and said so here. All times are whole microseconds, so a last
bit of a machine's logarithm changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from random import Random
from typing import Final

from minicache.simulator.prompts import VOCABULARY
from minicache.simulator.workload import (
    AZURE_CODE,
    AZURE_CONVERSATION,
    SHAREGPT,
    LengthDistribution,
    gamma_arrivals,
    poisson_arrivals,
)
from minicache_course.arena.machine import MAX_MODEL_LEN, Service

STOP: Final = VOCABULARY.stop
"""The token with which the model ends an answer."""

ANSWERED: Final = 0
"""Every other token that it generates."""

WINDOW: Final = 30.0
"""Seconds in which requests arrive. What arrives later is not sent."""

CHAT: Final = Service("chat", ttft=1.5, tpot=0.08, max_tokens=1024)
AGENT: Final = Service("agent", ttft=1.0, tpot=0.08, max_tokens=512)
CODE: Final = Service("code", ttft=1.0, tpot=0.1, max_tokens=256)
BATCH: Final = Service("batch", ttft=15.0, tpot=0.25, max_tokens=1024)

MOONCAKE_OUTPUT: Final = LengthDistribution.from_mean(182, AZURE_CONVERSATION.output.cv)
"""Answers of Mooncake's trace: 182 tokens on average (Qin et al. 2024, §4). The spread is that of Azure's chats."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        prompt: its own tokens, which come after all that was said before.
        length: tokens of the answer, stop token included.
        pause: seconds from the end of the turn before until this one arrives.
    """

    prompt: tuple[int, ...]
    length: int
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A chat, an agent's work, or a single request.

    Attributes:
        service: the class of its requests.
        start: when its first turn arrives.
        prefix: tokens before the first turn, which other sessions may share.
        turns: in their order.
    """

    service: Service
    start: float
    prefix: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of load.

    Attributes:
        name: for people, and in score files.
        rates: sessions per second, one for each load.
        draw: makes the sessions that begin in the window, for a rate and a seed, in the order of their starts.
    """

    name: str
    rates: tuple[float, ...]
    draw: Callable[[float, str], Iterator[Session]]

    def sessions(self, load: int, seed: int) -> list[Session]:
        """Those of a load, by its number. Another load has other requests: no run tells a policy of the next.

        Raises:
            IndexError: there is no such load.
        """
        return list(self.draw(self.rates[load], f"{self.name} {load} {seed}"))


def answer(length: int, service: Service) -> list[int]:
    """What the model generates: a stop token at the end, unless the answer is cut by max_tokens."""
    if length >= service.max_tokens:
        return [ANSWERED] * service.max_tokens
    return [ANSWERED] * (length - 1) + [STOP]


def microseconds(seconds: float) -> float:
    """The time, rounded."""
    return round(seconds * 1e6) / 1e6


def chats(rate: float, seed: str) -> Iterator[Session]:
    """Chats, as `chat` makes them."""
    for number, start in _starts(poisson_arrivals(rate, Random(f"starts {seed}"))):
        yield replace(chat(Random(f"{number} {seed}"), seed), start=start)


def chat(rng: Random, seed: str) -> Session:
    """A chat with ShareGPT's messages and answers; three turns on average, and eight seconds between them, assumed."""
    return Session(CHAT, 0.0, (), tuple(_turns(rng, CHAT, SHAREGPT.prompt, SHAREGPT.output, 3.0, 8.0)))


def agents(rate: float, seed: str) -> Iterator[Session]:
    """Agents, as `agent` makes them."""
    for number, start in _starts(poisson_arrivals(rate, Random(f"starts {seed}"))):
        yield replace(agent(Random(f"{number} {seed}"), seed), start=start)


def agent(rng: Random, seed: str) -> Session:
    """An agent with one of three tool prompts of 2,000 tokens: six turns on average, and a second of tool between them.

    The prompts are shared as in Mooncake's trace, in which half of all tokens are found in a cache, and the answers are
    as long as there; what a tool returns is 250 tokens on average, assumed.
    """
    tools = _tokens(Random(f"tools {rng.randrange(3)} {seed}"), 2000)
    result = LengthDistribution.from_mean(250, 1.0)
    return Session(AGENT, 0.0, tools, tuple(_turns(rng, AGENT, result, MOONCAKE_OUTPUT, 6.0, 1.0)))


def code(rate: float, seed: str) -> Iterator[Session]:
    """Code completion: Azure's lengths, and arrivals in bursts, less extreme than there (a cv of 1.5, not 13)."""
    for number, start in _starts(gamma_arrivals(rate, 1.5, Random(f"starts {seed}"))):
        rng = Random(f"{number} {seed}")
        yield Session(CODE, start, (), tuple(_turns(rng, CODE, AZURE_CODE.prompt, AZURE_CODE.output, 1.0, 1.0)))


def batch(rate: float, seed: str) -> Iterator[Session]:
    """Jobs that may wait: the lengths of Azure's conversations, sent in four heaps."""
    count, rng = round(rate * WINDOW), Random(f"jobs {seed}")
    for number in range(count):
        start = (4 * number // count) * WINDOW / 8
        yield Session(
            BATCH,
            start,
            (),
            tuple(_turns(rng, BATCH, AZURE_CONVERSATION.prompt, AZURE_CONVERSATION.output, 1.0, 1.0)),
        )


def mix(rate: float, seed: str) -> Iterator[Session]:
    """Chats, completions and jobs together; half-way through the window a burst of completions."""
    burst = (
        session
        for session in code(2 * rate, f"burst {seed}")
        if WINDOW / 2 <= session.start < WINDOW * 2 / 3  # five seconds
    )
    parts = (chats(0.5 * rate, seed), code(0.7 * rate, seed), batch(0.5 * rate, seed), burst)
    return iter(sorted((session for part in parts for session in part), key=lambda session: session.start))


WORKLOADS: Final = (
    Workload("chats", (2.5, 3.75, 5.0), chats),
    Workload("agents", (1.0, 1.5, 2.0), agents),
    Workload("code", (2.0, 3.0, 4.0), code),
    Workload("batch", (3.0, 4.5, 6.0), batch),
    Workload("mix", (1.5, 2.5, 3.5), mix),
)
"""All of them, each at three loads."""


def _starts(times: Iterable[float]) -> Iterator[tuple[int, float]]:
    return enumerate(takewhile(lambda time: time < WINDOW, map(microseconds, times)))


def _turns(
    rng: Random, service: Service, new: LengthDistribution, output: LengthDistribution, mean_turns: float, pause: float
) -> Iterator[Turn]:
    """A session's turns: after each, the same chance that it was the last. Those that do not fit are not sent.

    The tokens of prompts come from another generator than the lengths: the state of the one, which a policy could work
    out from a long prompt, says nothing of the other.
    """
    tokens, longest = Random(f"tokens {rng.random()}"), MAX_MODEL_LEN - service.max_tokens
    while True:
        prompt = _tokens(tokens, min(new.sample(rng), longest))
        length = min(output.sample(rng), service.max_tokens)
        yield Turn(prompt, length, microseconds(rng.expovariate(1 / pause)))
        if rng.random() * mean_turns < 1:
            return


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(VOCABULARY, k=count))
