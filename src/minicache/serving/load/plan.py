"""Who comes when, with what prompt, for an answer of what length: settled before the first request is sent.

Arrivals do not depend on answers (an open loop), so a slow server gets no fewer requests than a quick one, and two
servers get the same. Prompts are words that MiniGPT knows, one token each there, and common English for any other
model; or token ids below a vocabulary's size. Part of phase 10's load client.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from minicache.errors import require_count
from minicache.grammar import Tokenizer
from minicache.simulator.workload import Arrival, LengthDistribution, Workload, generate, poisson_arrivals


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request as it will be sent.

    Attributes:
        arrival: when it is due, in seconds from the start, and its lengths.
        prompt_token_ids: the prompt as tokens, for the simulator. For a text prompt they are numbers of words: equal
            where words are equal, and of no model's vocabulary.
        body: of the HTTP request, JSON.
    """

    arrival: Arrival
    prompt_token_ids: tuple[int, ...]
    body: bytes


def fixed_arrivals(
    count: int, rate: float, num_prompt_tokens: int, num_output_tokens: int, seed: int = 0
) -> list[Arrival]:
    """Requests of one length that come as a Poisson process, or all at once.

    Args:
        count: requests, ≥ 1.
        rate: requests per second, > 0; infinity: all come at 0.
        num_prompt_tokens: of each, ≥ 1.
        num_output_tokens: of each, ≥ 1.
        seed: the same seed gives the same times.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """
    require_count("count", count)
    require_count("num_prompt_tokens", num_prompt_tokens)
    require_count("num_output_tokens", num_output_tokens)
    times = [0.0] * count if rate == math.inf else islice(poisson_arrivals(rate, Random(f"arrivals {seed}")), count)
    return [Arrival(number, time, num_prompt_tokens, num_output_tokens) for number, time in enumerate(times)]


def workload_arrivals(
    workload: Workload, count: int, rate: float | None = None, seed: int = 0, num_shared: int = 0
) -> list[Arrival]:
    """Requests of a published workload.

    Args:
        workload: what to draw from; what it says of bursts holds at every rate.
        count: requests, ≥ 1.
        rate: requests per second, > 0; infinity: all come at 0; None: the workload's own.
        seed: the same seed gives the same lengths at every rate.
        num_shared: tokens that every prompt has in front of those that are drawn, ≥ 0. The workload's max_model_len
            holds for all of them together.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """
    require_count("count", count)
    require_count("num_shared", num_shared, at_least=0)
    own = replace(workload, max_model_len=workload.max_model_len - num_shared)
    at_once = rate == math.inf
    drawn = generate(own if rate is None or at_once else replace(own, rate=rate), count, seed)
    return [
        replace(each, time=0.0 if at_once else each.time, num_prompt_tokens=num_shared + each.num_prompt_tokens)
        for each in drawn
    ]


def fit_workload(workload: Workload, max_model_len: int) -> Workload:
    """The workload for a model of a smaller context: all lengths scaled by one factor, which keeps its shape.

    ShareGPT for 512 tokens instead of 2,048 has a quarter of the tokens, in the mean 40 in and 84 out. A workload that
    fits is returned as it is: it is never stretched.

    Raises:
        TypeError: `max_model_len` is not an int.
        ValueError: it is below 2.
    """
    require_count("max_model_len", max_model_len, at_least=2)
    if max_model_len >= workload.max_model_len:
        return workload
    shrink = math.log(max_model_len / workload.max_model_len)
    prompt, output = (LengthDistribution(each.mu + shrink, each.sigma) for each in (workload.prompt, workload.output))
    return replace(workload, prompt=prompt, output=output, max_model_len=max_model_len)


def make_requests(
    arrivals: Sequence[Arrival], *, model: str, vocab_size: int | None = None, num_shared: int = 0, seed: int = 0
) -> list[PlannedRequest]:
    """Give every arrival a prompt, drawn at random.

    Args:
        arrivals: when and how long.
        model: the name under which the server knows its model.
        vocab_size: prompts are token ids from 1 to below it, ≥ 2. None: prompts are text, one word for each token.
        num_shared: tokens that all prompts begin with, ≥ 0, fewer than any prompt has.
        seed: the same seed gives the same prompts.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of its bounds.
    """
    require_count("num_shared", num_shared, at_least=0)
    shortest = min((arrival.num_prompt_tokens for arrival in arrivals), default=num_shared + 1)
    if num_shared >= shortest:
        raise ValueError(f"{num_shared} shared tokens do not fit into a prompt of {shortest}")
    if vocab_size is None:
        words = [word for word in Tokenizer().words[1:] if word.isalpha()]
        vocab_size = len(words)
    else:
        require_count("vocab_size", vocab_size, at_least=2)
        words = []
    shared = _draw(Random(f"shared tokens {seed}"), vocab_size, num_shared)
    rng = Random(f"prompts {seed}")
    requests = []
    for arrival in arrivals:
        token_ids = shared + _draw(rng, vocab_size, arrival.num_prompt_tokens - num_shared)
        prompt = " ".join(words[token_id] for token_id in token_ids) if words else token_ids
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": arrival.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        requests.append(PlannedRequest(arrival, tuple(token_ids), json.dumps(body).encode()))
    return requests


def _draw(rng: Random, vocab_size: int, count: int) -> list[int]:
    """Token ids at random, but not 0: in more than one vocabulary, MiniGPT's included, it ends a text."""
    return rng.choices(range(1, vocab_size), k=count)
