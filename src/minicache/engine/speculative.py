"""Speculative decoding: propose the next tokens cheaply, and have the model verify them in one forward pass.

Phase 9 builds its second half. A decode step reads all weights for one token. A forward pass over the newest token and
k draft tokens behind it reads them once too, and says for each draft token what the model itself picks there. Those
that the model picks too are accepted; the first that it does not is replaced by the model's own, and the KV entries
behind it are removed from the cache. So the tokens are those of decoding without draft tokens, in fewer passes
(Leviathan et al. 2023). An engine does so for a whole batch in one ragged step, with `rows_to_verify` and `verify`
(`minicache.engine.speculation`). The draft tokens come from the text itself: what followed the last few tokens at their
previous occurrence (prompt lookup; Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import Model
from minicache.engine.sampling import TokenSampler, greedy
from minicache.errors import require_count


class Drafter(Protocol):
    """Proposes draft tokens."""

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Propose what follows `token_ids`: 0 … `num_tokens` tokens."""


class NgramDrafter:
    """Proposes that what followed the last few tokens before follows them again.

    Args:
        max_ngram: the longest ending that is looked for, in tokens, ≥ 1; shorter ones are tried, down to one token.

    Raises:
        TypeError: `max_ngram` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        require_count("max_ngram", max_ngram)
        self.max_ngram = max_ngram

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens behind the latest earlier occurrence of the longest ending of `token_ids`.

        Endings of max_ngram tokens are looked for first, then shorter ones, down to the last token alone. The first
        length that occurs anywhere earlier decides, even if few tokens follow there. An earlier occurrence may overlap
        the ending, but is not the ending itself. All of the text is searched, however long. Takes time in proportion to
        its length, and changes nothing.

        Args:
            token_ids: prompt and output so far; there may be none.
            num_tokens: the most to propose, ≥ 0.

        Returns:
            The tokens that follow there, at most num_tokens, and no more than there are: [1, 2, 3, 1, 2] → [3, 1, 2].
            An empty list if not even the last token occurs earlier.
        """
        tokens = list(token_ids)
        for length in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ending = tokens[-length:]
            for end in range(len(tokens) - 1, length - 1, -1):  # where an earlier occurrence ends
                if tokens[end - length : end] == ending:
                    return tokens[end : end + num_tokens]
        return []


@dataclass(slots=True)
class SpeculationStats:
    """How many draft tokens were accepted.

    Attributes:
        num_passes: forward passes, the prompt's included.
        num_tokens: generated tokens.
        num_drafted: draft tokens that were verified.
        num_accepted: draft tokens that were accepted.
    """

    num_passes: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The part of the draft tokens that was accepted, 0 … 1; 0 if there were none."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per forward pass, 1 without speculation; 0 before the first."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


def rows_to_verify(num_new_tokens: Sequence[int], num_drafts: Sequence[int]) -> list[int]:
    """Which tokens of a ragged step the model has to give logits for: of each request the last 1 + k.

    Those are its newest token and the k draft tokens behind it. A request without draft tokens, in its prompt too, has
    one: the last.

    Args:
        num_new_tokens: how many tokens each request brings, draft tokens included: 1 + k or more.
        num_drafts: k ≥ 0 of each request.

    Returns:
        Positions among the step's Σ num_new_tokens tokens, rising: Σ (1 + k) of them, request after request.
    """
    rows: list[int] = []
    end = 0
    for count, num_its_drafts in zip(num_new_tokens, num_drafts, strict=True):
        end += count
        rows += range(end - 1 - num_its_drafts, end)
    return rows


def verify(logits: Tensor, drafts: Sequence[Sequence[int]], samplers: Sequence[TokenSampler]) -> list[list[int]]:
    """The tokens that a forward pass over draft tokens gives each request, each with its own sampler.

    The first row of a request says what comes behind its newest token, the next one what comes behind its first draft
    token, and so on. A token is picked from the first row. If it is the first draft token, that is accepted, and the
    second row says what comes next. The first token that is not the draft token of its place is the last, as is one
    behind the last draft token: the rows after it belong to a text that is not this one.

    With temperature 0 the token of a row is the likeliest (`greedy`), so the tokens are those of greedy decoding.
    Otherwise it is drawn (`TokenSampler.draw`), once for each token: the tokens are those that the sampler would draw
    without draft tokens, from the same distribution. This is rejection sampling (Leviathan et al. 2023) for a draft
    distribution q with all its mass on the draft token d: d is accepted with probability p(d) / q(d) = p(d); otherwise
    the token comes from p − q where that is positive, which is p without d.

    Nothing is picked from a row whose largest logit is NaN or infinite, nor from those after it.

    Args:
        logits: `[Σ (1 + k), vocab]`, on any device: 1 + k rows of each request, in the order of `rows_to_verify`.
        drafts: the k ≥ 0 draft tokens of each request.
        samplers: one for each request. It draws as often as its request gets tokens.

    Returns:
        For each request its tokens, 1 … 1 + k of them: the accepted draft tokens, then one more. If a row gives none,
        those before it; none at all if that is the first.

    Raises:
        ValueError: not as many rows or samplers as the draft tokens ask for. Nothing was drawn.
    """
    if len(samplers) != len(drafts) or len(logits) != sum(map(len, drafts)) + len(drafts):
        raise ValueError(f"{len(drafts)} requests, {len(samplers)} samplers, {len(logits)} rows: 1 + k rows for each")
    likeliest = greedy(logits)
    is_good = logits.gather(-1, likeliest[:, None])[:, 0].isfinite().tolist()  # argmax finds NaN before anything else
    token_ids: list[int] = likeliest.tolist()
    found, row = [], 0
    for its_drafts, sampler in zip(drafts, samplers, strict=True):
        tokens: list[int] = []
        for draft in (*its_drafts, None):
            at = row + len(tokens)
            if not is_good[at]:
                break
            tokens.append(token_ids[at] if sampler.params.is_greedy else sampler.draw(logits[at]))
            if tokens[-1] != draft:
                break
        found.append(tokens)
        row += 1 + len(its_drafts)
    return found


def num_accepted(drafts: Sequence[int], picked: Sequence[int]) -> int:
    """How many draft tokens, from the first on, are what the model picks in their places.

    Behind the first that is not, none counts: the model picked there after a token that is not in the text.

    Args:
        drafts: the draft tokens, k of them, k ≥ 0.
        picked: what the model picks in the place of each of them, and one more behind the last: k + 1 tokens.

    Returns:
        0 … k.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == picked[accepted]:
        accepted += 1
    return accepted


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
    """Generate greedily (`greedy`), as `minicache.engine.decoding.decode` does, and verify draft tokens on the way.

    The first forward pass runs on the prompt. Each later one runs on the newest token, which no pass has run on yet,
    and the draft tokens behind it. So of a pass with k draft tokens the last k + 1 rows of logits say what the model
    picks in the place of each, and behind the last one. The accepted ones (`num_accepted`) are tokens, and what the
    model picks behind them is one more: a pass yields at least one token, whatever was proposed. Tokens are proposed
    only behind a single token: a prompt of several runs without draft tokens.

    Whenever a token is yielded, the cache holds KV entries of prompt and output alone, none of a rejected draft token.
    As in `decode` the model never runs on the last token: N tokens leave P + N − 1 entries in the cache, which at no
    time holds more.

    Args:
        model: called as `model(token_ids, cache)`.
        prompt: token ids `[1, P]` int64, P ≥ 1.
        max_new_tokens: N, how many tokens to generate, ≥ 0. The caller stops earlier by leaving the loop.
        cache: an empty paged cache of batch size 1, from which rejected draft tokens are removed (`truncate`).
        drafter: its `draft` gets all of prompt and output so far, the newest token included.
        num_drafts: the most draft tokens of one pass, ≥ 0. Fewer at the end of the answer or of the cache: the drafter
            is never asked for more than both have room for.
        stats: is counted in, if given, on top of what it has already; a token counts when it is yielded.

    Yields:
        `[1]` int64, the next token; N times.

    Raises:
        TypeError: `max_new_tokens` or `num_drafts` is not an int; at the first step, like what follows.
        ValueError: `prompt` is not `[1, P]` with P ≥ 1, N or num_drafts is negative, or the cache is not empty or of
            another batch size. The model has not been called.
        CacheOverflowError: the cache is full, exactly where `decode` finds it full. The tokens yielded before are
            valid.
    """
    if prompt.ndim != 2 or prompt.shape[0] != 1 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [1, P] with at least one token; got {list(prompt.shape)}")
    require_count("max_new_tokens", max_new_tokens, at_least=0)
    require_count("num_drafts", num_drafts, at_least=0)
    if cache.num_tokens or cache.batch_size != 1:
        held = f"{cache.batch_size} of {cache.num_tokens} tokens"
        raise ValueError(f"the cache must be empty, and of one sequence; it has {held}")
    stats = SpeculationStats() if stats is None else stats
    token_ids, num_left = prompt[0].tolist(), max_new_tokens
    unseen = list(token_ids)  # what the model has not run on
    while num_left:
        # The model never runs on the last token: as many draft tokens as there are tokens left would be one too many.
        room = min(num_drafts, num_left - 1, cache.max_seq_len - cache.num_tokens - len(unseen))
        drafts = drafter.draft(token_ids, max(room, 0)) if len(unseen) == 1 else []
        with torch.inference_mode():
            logits = model(torch.tensor([[*unseen, *drafts]], device=prompt.device), cache)[0, len(unseen) - 1 :]
            picked = greedy(logits).tolist()
        accepted = num_accepted(drafts, picked)
        cache.truncate(cache.num_tokens - (len(drafts) - accepted))
        new_tokens = picked[: accepted + 1]
        stats.num_passes += 1
        stats.num_drafted += len(drafts)
        stats.num_accepted += accepted
        for token in new_tokens:
            stats.num_tokens += 1
            yield torch.tensor([token], device=prompt.device)
        token_ids += new_tokens
        unseen, num_left = new_tokens[-1:], num_left - len(new_tokens)
