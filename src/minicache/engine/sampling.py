"""Sampling: one token from a row of logits, with the parameters of its request.

Phase 5 builds it: temperature, top-k and top-p, with a generator for each request, so a request's draws do not depend
on the batch composition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minicache.engine.picking import check_number, check_temperature, greedy, new_generator
from minicache.errors import require_count


@dataclass(frozen=True)
class SamplingParams:
    """How much to generate for a request, and how to pick each token.

    Attributes:
        max_tokens: the most tokens to generate, ≥ 1.
        temperature: 0 takes the likeliest token; 1 draws from the model's distribution; higher is more random.
        top_k: draw from the k likeliest tokens only; 0: from all.
        top_p: 0 < top_p ≤ 1: draw from the smallest set of likeliest tokens whose probabilities add up to top_p or
            more (nucleus sampling, Holtzman et al. 2020). 1: from all.
        seed: makes the request's tokens reproducible in any batch; None takes a random one.
        stop: strings that end the text. The text is cut before the first of them; the tokens stay. A single string
            is accepted too; the attribute is a tuple.
        stop_token_ids: tokens that end the request. They stay in the output. The attribute is a tuple.
        ignore_eos: the tokenizer's end token does not end the request, for benchmarks with answers of a given length.
            stop_token_ids and stop strings still do. A constrained answer goes on as long as its constraint lets it,
            and ends where nothing more can follow.
        n: answers for each prompt, ≥ 1. They share the prompt's blocks, if the scheduler forks (phase 8). With a seed,
            the j-th answer, from 0, equals that of a request with seed + j.
        json_schema: the answer is JSON that this schema allows (`minicache.engine.constraints`); {"type": "object"}:
            any JSON object. The attribute is the schema as a text.
        regex: the whole answer matches this regular expression, in the syntax of Rust's `regex`.
        choice: the answer is one of these texts. The attribute is a tuple.

    Of json_schema, regex and choice, at most one.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of its bounds, a stop string is empty, there is nothing to choose from, or more than
            one constraint.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        require_count("max_tokens", self.max_tokens)
        require_count("top_k", self.top_k, at_least=0)
        require_count("n", self.n)
        check_temperature(self.temperature)
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1; got {self.top_p!r}")
        if self.seed is not None:
            require_count("seed", self.seed, at_least=0)
            if self.seed >= 2**64:
                raise ValueError(f"seed must be below 2 ** 64; got {self.seed}")
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False; got {self.ignore_eos!r}")
        # Frozen, to let many requests share one object; these two are converted to tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for text in self.stop:
            if not isinstance(text, str):
                raise TypeError(f"a stop string must be a str; got {text!r}")
            if not text:
                raise ValueError("a stop string is empty: it would end every text before its first letter")
        for token_id in self.stop_token_ids:
            require_count("a stop token's id", token_id, at_least=0)
        self._check_constraint()

    def _check_constraint(self) -> None:
        schema, regex, choice = self.json_schema, self.regex, self.choice
        if sum(each is not None for each in (schema, regex, choice)) > 1:
            raise ValueError("an answer has one constraint: give json_schema, regex or choice")
        if not isinstance(schema, str | Mapping | None):
            raise TypeError(f"json_schema must be a dict, or JSON; got {schema!r}")
        if isinstance(schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(schema))
        if not isinstance(regex, str | None):
            raise TypeError(f"regex must be a str; got {regex!r}")
        if choice is not None:
            if isinstance(choice, str) or not all(isinstance(each, str) for each in choice):
                raise TypeError(f"choice must be a list of texts; got {choice!r}")
            if not choice:
                raise ValueError("choice is empty: give at least one text")
            object.__setattr__(self, "choice", tuple(choice))

    @property
    def is_constrained(self) -> bool:
        """Whether json_schema, regex or choice says which tokens are allowed."""
        return self.json_schema is not None or self.regex is not None or self.choice is not None

    def of_answer(self, turn: int) -> SamplingParams:
        """The parameters of the answer with index `turn`, 0 … n − 1: the same, with n = 1 and a different seed."""
        return replace(self, n=1, seed=None if self.seed is None else (self.seed + turn) % 2**64)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken: temperature 0."""
        return self.temperature == 0


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the k likeliest tokens of each row, and mask the others.

    Args:
        logits: `[…, vocab]`. Not changed.
        top_k: k. 0, or at least the vocabulary: all of them.

    Returns:
        `[…, vocab]`: the logits of the kept tokens, −inf for the others. Tokens with the same logit as the k-th are
        kept too.

    Raises:
        TypeError: `top_k` is not an int.
        ValueError: it is negative.
    """
    require_count("top_k", top_k, at_least=0)
    if not 0 < top_k < logits.shape[-1]:
        return logits
    lowest = logits.topk(top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < lowest, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the nucleus of each row: the smallest set of likeliest tokens whose probabilities add up to p or more.

    The probabilities are softmax(logits). Going from the likeliest token down, a token is kept while those before it
    add up to less than p. So the one that crosses p is the last that is kept, and the likeliest always is.

    Args:
        logits: `[…, vocab]`; −inf for tokens that are already masked. Not changed.
        top_p: p, 0 < p ≤ 1. 1: all of them.

    Returns:
        `[…, vocab]`: the logits of the kept tokens, −inf for the others. Among equals the lower ids are kept.

    Raises:
        ValueError: p is out of its bounds.
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be more than 0 and at most 1; got {top_p!r}")
    if top_p == 1:  # sums in floats may reach 1 before the last token
        return logits
    probabilities, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    before[..., 0] = 0  # exactly, whatever the rounding
    masked = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return logits.masked_fill(masked, -torch.inf)


class TokenSampler:
    """Picks the tokens of one request, with a separate random generator on the CPU.

    So the n-th draw of a request with a seed is always the same, in any batch and on any device. Drawing leaves
    torch's global generator alone.

    Args:
        params: of the request.

    Attributes:
        params: as given.
        generator: the random generator; None if the temperature is 0.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = None if params.is_greedy else new_generator(params.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution of the next token: temperature first, then top-k, then top-p.

        In float64, the largest logit is subtracted before the division by the temperature: a temperature near 0 then
        gives the likeliest token, and no infinity arises.

        Args:
            logits: `[vocab]`, of a request with temperature > 0.

        Returns:
            `[vocab]` float64 on the CPU; they sum to 1, and are 0 for tokens that top-k or top-p masks.
        """
        params, row = self.params, logits.double().cpu()
        row = (row - row.max()) / params.temperature
        return torch.softmax(keep_top_p(keep_top_k(row, params.top_k), params.top_p), dim=-1)

    def draw(self, logits: Tensor) -> int:
        """Draw one token from `probabilities(logits)`; the likeliest one if the temperature is 0.

        Args:
            logits: `[vocab]`.
        """
        if self.generator is None:
            return int(logits.argmax())
        return int(torch.multinomial(self.probabilities(logits), num_samples=1, generator=self.generator))


def pick_tokens(logits: Tensor, samplers: Sequence[TokenSampler]) -> list[int | None]:
    """Pick one token from each row of a batch, with the sampler of its request.

    The rows of requests with temperature 0 are picked all at once, by `greedy`; only the others are processed one by
    one, and only they are copied to the CPU. A row whose largest logit is NaN or infinite gives no token, and its
    sampler draws nothing.

    Args:
        logits: `[B, vocab]`, on any device.
        samplers: B of them; the b-th picks from row b.

    Returns:
        B token ids; None for a row that gives none.

    Raises:
        ValueError: the number of samplers is not the number of rows. Nothing was drawn.
    """
    if len(samplers) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits but {len(samplers)} samplers: pass one for each row")
    likeliest = greedy(logits)
    is_good = logits.gather(-1, likeliest[:, None])[:, 0].isfinite().tolist()  # argmax treats NaN as the largest
    token_ids = [token_id if good else None for token_id, good in zip(likeliest.tolist(), is_good, strict=True)]
    drawn = [row for row, sampler in enumerate(samplers) if is_good[row] and not sampler.params.is_greedy]
    if drawn:
        for row, its_logits in zip(drawn, logits[drawn].cpu(), strict=True):
            token_ids[row] = samplers[row].draw(its_logits)
    return token_ids
