# Phase 9, chunked-prefill: your file. It stands in for minicache.engine.speculative.
# Write what raises NotImplementedError. `minicache grade 9` grades it, `minicache hint 9.K` helps with task K.
"""Speculative decoding: guess the next tokens cheaply, and have the model check all guesses in one pass.

Phase 9 builds its second half. A decode step reads all weights for one token. A step that is given the newest token and
k guesses behind it reads them once too, and says for each guess what the model itself would have picked there. Guesses
that agree are tokens; the first that does not is replaced by the model's own, and the rows behind it are cut off the
cache again. So the tokens are those of greedy decoding, only sooner (Leviathan et al. 2023). The guesses come from the
text itself: what followed the last few tokens when they stood there before (prompt lookup; Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import Model
from minicache.engine.sampling import greedy
from minicache.errors import require_count


class Drafter(Protocol):
    """Who guesses."""

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Guess what follows `token_ids`: at most `num_tokens` tokens, none if there is no idea."""


class NgramDrafter:
    """Guesses that what followed the last few tokens before follows them again.

    Args:
        max_ngram: how many tokens must have stood there before at best, ≥ 1; fewer are tried, down to one.

    Raises:
        TypeError: `max_ngram` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        require_count("max_ngram", max_ngram)
        self.max_ngram = max_ngram

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens behind the latest earlier place where the longest ending of `token_ids` stands.

        Endings of max_ngram tokens are looked for first, then shorter ones, down to the last token alone. The first
        length that stands anywhere before decides, even if few tokens follow there. An earlier place may overlap the
        ending, but is not the ending itself. Takes time in proportion to the tokens, and changes nothing.

        Args:
            token_ids: prompt and answer so far; there may be none.
            num_tokens: the most to guess, ≥ 0.

        Returns:
            The tokens that follow there, at most num_tokens, and no more than there are: [1, 2, 3, 1, 2] → [3, 1, 2].
            None if not even the last token stands elsewhere.
        """
        raise NotImplementedError(
            "phase 9, task 4: Guess from the text; read docs/en/phase-09-chunked-prefill/lab/01-guess-and-check.md"
        )


@dataclass(slots=True)
class SpeculationStats:
    """How well the guesses did.

    Attributes:
        num_passes: of the model, the prompt's included.
        num_tokens: that were generated.
        num_drafted: tokens that were guessed and checked.
        num_accepted: of these, the ones that the model agreed with.
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The part of the guesses that the model agreed with, 0 … 1; 0 if there were none."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a pass gave, 1 without speculation; 0 before the first."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


def num_agreed(drafts: Sequence[int], picked: Sequence[int]) -> int:
    """How many guesses, from the first on, are what the model picked in their places.

    Behind the first that is not, nothing counts: the model picked there after a token that is not in the text.

    Args:
        drafts: the guesses, k of them, k ≥ 0.
        picked: what the model picked in the place of each of them, and one more behind the last: k + 1 tokens.

    Returns:
        0 … k.
    """
    raise NotImplementedError(
        "phase 9, task 5: Check the guesses; read docs/en/phase-09-chunked-prefill/lab/01-guess-and-check.md"
    )


def speculative_decode(
    model: Model,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    cache: PagedKVCache,
    drafter: Drafter,
    num_drafts: int = 4,
    stats: SpeculationStats | None = None,
) -> Iterator[Tensor]:
    """Generate greedily (`greedy`), as `minicache.engine.decoding.decode` does, and check guesses on the way.

    The first pass is shown the prompt. Each later one is shown the newest token, which no pass has seen yet, and the
    guesses behind it. So of a pass with k guesses the last k + 1 rows of logits say what the model picks in the place
    of each guess, and behind the last one. Those that agree (`num_agreed`) are tokens, and what the model picked behind
    them is one more: a pass gives at least one token, whatever was guessed. Only behind a single token is anything
    guessed: a prompt of several tokens is shown without guesses.

    Whenever a token is yielded, the cache holds rows of prompt and answer alone, none of a wrong guess. As in `decode`
    the last token is never shown: N tokens leave P + N − 1 in the cache, which at no time holds more.

    Args:
        model: called as `model(token_ids, cache)`.
        prompt: token ids `[1, P]` int64, P ≥ 1.
        max_new_tokens: N, how many tokens to generate, ≥ 0. The caller stops earlier by leaving the loop.
        cache: an empty paged cache of batch size 1: rows of guesses that were wrong are cut off again (`truncate`).
        drafter: who guesses: `draft` gets prompt and answer so far, the newest token included.
        num_drafts: the most guesses of one pass, ≥ 0. Fewer where N ends or the cache is full: no more are asked for
            than the answer and the cache have room for.
        stats: is counted in, if given, on top of what it says already; a token counts when it is yielded.

    Yields:
        `[1]` int64, the next token; N times.

    Raises:
        TypeError: `max_new_tokens` or `num_drafts` is not an int; at the first step, like what follows.
        ValueError: `prompt` is not `[1, P]` with P ≥ 1, N or num_drafts is negative, or the cache is not empty or of
            another batch size. The model has not been called.
        CacheOverflowError: the cache is full, which is so exactly where `decode` finds it full. The tokens yielded
            before stay good.
    """
    raise NotImplementedError(
        "phase 9, task 5: Check the guesses; read docs/en/phase-09-chunked-prefill/lab/01-guess-and-check.md"
    )
