"""Workloads for an audit: few requests, small blocks, prompts that share what they begin with; by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

VOCABULARY = 3
"""Different tokens: so few that prompts and answers repeat each other's blocks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler is made with.

    Attributes:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
        max_num_seqs: the most requests in a step.
        max_num_batched_tokens: the most tokens of a step; at least `max_num_seqs`.
        max_model_len: the most tokens of a request, prompt and output; they fit into the cache.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    Attributes:
        step: before which step it is added.
        prompt: its tokens, at least one.
        max_tokens: how many it generates.
        aborted_after: so many steps later it is aborted, if it is not finished by then; None: it is not aborted.
    """

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    aborted_after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in the order of arrival: each one's id is its place. Every one of them fits into the cache alone."""

    limits: Limits
    arrivals: tuple[Arrival, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, prompts and outputs."""
        return sum(len(each.prompt) + each.max_tokens for each in self.arrivals)


class Engine(Protocol):
    """What a workload must know of an engine; `minicache.foreign.adapter.Adapter` says what each means."""

    block_sizes: tuple[int, ...]
    chunked_prefill: bool
    can_abort: bool


def random_workload(seed: int, num_requests: int, engine: Engine) -> Workload:
    """A workload in which prefix hits, whole-block prompts, preemptions and chunks are frequent.

    Args:
        seed: the same seed gives the same workload.
        num_requests: how many.
        engine: what it can be made with.
    """
    random = Random(seed)
    size = random.choice(engine.block_sizes)
    num_blocks = random.randint(3, 9)
    max_model_len = random.randint(2, min(num_blocks, 6)) * size
    max_num_seqs = random.randint(1, 4)
    least = max_num_seqs if engine.chunked_prefill else max(max_num_seqs, max_model_len)
    budget = random.choice((least, least + size, least + random.randrange(4 * size), least + 64))
    phrases = [[random.randrange(VOCABULARY) for _ in range(size)] for _ in range(3)]
    arrivals = []
    step = 0
    for _ in range(num_requests):
        prompt = [token for _ in range(random.randint(0, 3)) for token in random.choice(phrases)]
        prompt += [
            random.randrange(VOCABULARY) for _ in range(random.choice((0, 1, size - 1, random.randint(0, size))))
        ]
        prompt = (prompt or [0])[: max_model_len - 1]
        room = max_model_len - len(prompt)
        max_tokens = random.randint(1, min(room, 3 * size))
        aborted_after = random.choice((None, None, None, random.randint(0, 6))) if engine.can_abort else None
        arrivals.append(Arrival(step, tuple(prompt), max_tokens, aborted_after))
        step += random.choice((0, 0, 1, 3))
    return Workload(Limits(num_blocks, size, max_num_seqs, budget, max_model_len), tuple(arrivals))


def smaller(workload: Workload) -> Iterator[Workload]:
    """Workloads with one thing less: a request, an abort, output tokens, a piece of a prompt, time to an arrival."""
    arrivals, size = workload.arrivals, workload.limits.block_size

    def with_instead(place: int, *instead: Arrival) -> Workload:
        return replace(workload, arrivals=(*arrivals[:place], *instead, *arrivals[place + 1 :]))

    for place in range(len(arrivals)):
        yield with_instead(place)
        for later in (1, 2, 4):  # what it has kept waiting comes by itself
            after = (replace(each, step=each.step + later) for each in arrivals[place + 1 :])
            yield replace(workload, arrivals=(*arrivals[:place], *after))
    for place, each in enumerate(arrivals):
        least = arrivals[place - 1].step if place else 0
        if each.aborted_after is not None:
            yield with_instead(place, replace(each, aborted_after=None))
            if each.aborted_after:
                yield with_instead(place, replace(each, aborted_after=each.aborted_after - 1))
        for fewer in sorted({1, each.max_tokens // 2, each.max_tokens - 1} - {0}):
            if fewer < each.max_tokens:
                yield with_instead(place, replace(each, max_tokens=fewer))
        for prompt in (each.prompt[size:], each.prompt[:-size], each.prompt[1:], each.prompt[:-1]):
            if prompt:
                yield with_instead(place, replace(each, prompt=prompt))
        for earlier in sorted({least, each.step - 1}):
            if least <= earlier < each.step:
                yield with_instead(place, replace(each, step=earlier))
