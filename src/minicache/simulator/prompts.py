"""Requests whose prompts have token ids, and begin as others do: what a prefix cache lives on.

An `Arrival` has lengths and no tokens, and any two prompts of zeros are the same. Here prompts are made of tokens drawn
at random, so two are equal only where they should be: in a system prompt that all share, or in a chat, where each
prompt repeats the conversation before it. First used in phase 8. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import count as numbers
from random import Random
from typing import Final

from minicache.errors import require_count, require_positive
from minicache.request import Request
from minicache.simulator.workload import Arrival, LengthDistribution, Workload, poisson_arrivals, stream

VOCABULARY: Final = range(1, 50_000)
"""Token ids that prompts are drawn from. 0 is what the simulator generates."""

ANSWERED: Final = 0
"""What every generated token is in simulated time."""


def behind_system_prompt(workload: Workload, num_shared: int, count: int, seed: int) -> Iterator[Request]:
    """A workload whose prompts all begin with one system prompt.

    Args:
        workload: rates and lengths; its prompts are what comes after the system prompt.
        num_shared: tokens of the system prompt, ≥ 1, fewer than max_model_len − 1.
        count: requests, ≥ 0.
        seed: the same seed gives the same requests.

    Yields:
        Requests 0, 1, 2, … in the order of their times, each of at most max_model_len tokens, system prompt included.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of its bounds.
    """
    require_count("num_shared", num_shared)
    own = replace(workload, max_model_len=workload.max_model_len - num_shared)
    shared = _draw(Random(f"system prompt {seed}"), num_shared)
    return _behind(shared, stream(own, count, seed), Random(f"own tokens {seed}"))


def _behind(shared: list[int], arrivals: Iterator[Arrival], rng: Random) -> Iterator[Request]:
    for each in arrivals:
        prompt = shared + _draw(rng, each.num_prompt_tokens)
        yield Request(each.request_id, prompt, each.num_output_tokens, ignore_eos=True, arrival_time=each.time)


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """People who talk to a server. Each message is sent with all that was said before.

    Attributes:
        message: tokens of a message.
        answer: tokens of an answer.
        rate: chats that begin a second, on average, > 0. They begin as Poisson arrivals do.
        mean_turns: messages of a chat on average, ≥ 1: after each, the same chance that it was the last.
        pause: seconds from an answer to the next message, on average, > 0; exponential.
        seconds_per_token: how long an answer's token takes, > 0. When the next message comes is settled beforehand, as
            in a trace of another server, and does not wait for this one.
        max_model_len: the most tokens of a prompt and its answer, ≥ 2. A message that would leave no tokens for an
            answer ends its chat before it is sent; an answer is cut to the tokens that are left.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """

    message: LengthDistribution
    answer: LengthDistribution
    rate: float
    mean_turns: float
    pause: float
    seconds_per_token: float
    max_model_len: int

    def __post_init__(self) -> None:
        for name in ("rate", "mean_turns", "pause", "seconds_per_token"):
            require_positive(name, getattr(self, name))
        if self.mean_turns < 1:
            raise ValueError(f"mean_turns must be at least 1, got {self.mean_turns!r}")
        require_count("max_model_len", self.max_model_len, at_least=2)


def chats(workload: ChatWorkload, count: int, seed: int) -> Iterator[Request]:
    """The messages of the first `count` chats, as requests named (chat, turn), both from 0.

    A turn's prompt is the prompt of the turn before, its answer, and a new message. Answers are `ANSWERED`s: what a
    simulated server says. So a prefix cache may find what was generated, too.

    Args:
        workload: what to draw from.
        count: chats, ≥ 0. A chat whose first message leaves no room for an answer sends nothing.
        seed: the same seed gives the same chats; at another rate, the same chats at other times.

    Yields:
        Requests in the order of their times.

    Raises:
        TypeError: `count` is not an int.
        ValueError: `count` is negative.
    """
    require_count("count", count, at_least=0)
    starts = poisson_arrivals(workload.rate, Random(f"chats {seed}"))
    each = (_turns(workload, number, start, seed) for number, start in zip(range(count), starts, strict=False))
    return merge(*each, key=lambda request: request.arrival_time)


def _turns(workload: ChatWorkload, number: int, start: float, seed: int) -> Iterator[Request]:
    """One chat."""
    rng, said, time = Random(f"chat {number} of {seed}"), list[int](), start
    for turn in numbers():
        prompt = said + _draw(rng, workload.message.sample(rng))
        room = workload.max_model_len - len(prompt)
        if room < 1:
            return
        num_answered = min(workload.answer.sample(rng), room)
        yield Request((number, turn), prompt, num_answered, ignore_eos=True, arrival_time=time)
        said = prompt + [ANSWERED] * num_answered
        time += num_answered * workload.seconds_per_token + rng.expovariate(1 / workload.pause)
        if rng.random() * workload.mean_turns < 1:
            return


def _draw(rng: Random, count: int) -> list[int]:
    """Tokens at random."""
    return rng.choices(VOCABULARY, k=count)
