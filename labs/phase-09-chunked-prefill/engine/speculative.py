# Phase 9, chunked-prefill: your file. It stands in for minicache.engine.speculative.
# Write what raises NotImplementedError. `minicache grade 9` grades it, `minicache hint 9.K` helps with task K.
"""Speculative decoding: propose the next tokens cheaply, and have the model verify them in one forward pass.

Phase 9 builds it. A decode step reads all weights for one token. A forward pass over the newest token and
k draft tokens after it also reads them once, and gives the model's own token at each position. Draft tokens
that equal it are accepted; the first that differs is replaced by the model's own. So the tokens are
those of decoding without draft tokens, in fewer forward passes (Leviathan et al. 2023).

An engine does this for a whole batch in one ragged step: `rows_to_verify` returns the rows of logits that it needs,
`verify` the tokens that each request gains. The rest, from the drafts to the blocks of rejected ones, is in
`minicache.engine.drafting`. The draft tokens come from the text itself: those that followed the last few tokens at
their previous occurrence (prompt lookup; Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minicache.engine.picking import greedy
from minicache.engine.sampling import TokenSampler
from minicache.errors import require_count


class NgramDrafter:
    """Proposes the tokens that followed the last few tokens at an earlier occurrence.

    Args:
        max_ngram: the longest ending to search for, in tokens, ≥ 1; shorter ones are tried, down to one token.

    Raises:
        TypeError: `max_ngram` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, max_ngram: int = 3) -> None:
        require_count("max_ngram", max_ngram)
        self.max_ngram = max_ngram

    def draft(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The tokens after the latest earlier occurrence of the longest ending of `token_ids`.

        An ending of max_ngram tokens is searched for first, then shorter ones, down to the last token alone. The first
        length that occurs earlier decides, even if few tokens follow there. An earlier occurrence may overlap
        the ending, but is not the ending itself. All of the text is searched, in time proportional to its length.
        Changes nothing.

        Args:
            token_ids: prompt and output so far; may be empty.
            num_tokens: the most to propose, ≥ 0.

        Returns:
            The tokens that follow there, at most num_tokens, and no more than there are: [1, 2, 3, 1, 2] → [3, 1, 2].
            An empty list if not even the last token occurs earlier.
        """
        raise NotImplementedError(
            "phase 9, task 4: Draft from the text; read docs/en/phase-09-chunked-prefill/lab/02-draft-and-verify.md"
        )


def rows_to_verify(num_new_tokens: Sequence[int], num_drafts: Sequence[int]) -> list[int]:
    """The tokens of a ragged step whose logits are needed: the last 1 + k of each request.

    Those are its newest token and the k draft tokens after it. A request without draft tokens, in decode or in its
    prompt, has one: its last token.

    Args:
        num_new_tokens: how many tokens each request brings, draft tokens included: 1 + k or more.
        num_drafts: k ≥ 0 of each request.

    Returns:
        Positions among the step's Σ num_new_tokens tokens, rising: Σ (1 + k) of them, request after request.

    Raises:
        ValueError: the two are not equally long.
    """
    raise NotImplementedError(
        "phase 9, task 5: Verify a batch; read docs/en/phase-09-chunked-prefill/lab/02-draft-and-verify.md"
    )


def verify(logits: Tensor, drafts: Sequence[Sequence[int]], samplers: Sequence[TokenSampler]) -> list[list[int]]:
    """The tokens that a forward pass over draft tokens gives each request, each with its own sampler.

    The first row of a request predicts the token after its newest token, the next row the token after its first draft
    token, and so on. A token is picked from the first row. If it is the first draft token, that is accepted, and the
    next token is picked from the second row. The first token that differs from the draft token at its position is the
    last, as is the one after the last draft token: later rows belong to a different text.

    With temperature 0 the token of a row is the likeliest (`greedy`), so the tokens are those of greedy decoding. They
    are computed for all rows at once, however many requests there are, because on a GPU each value read back waits for
    the device. Otherwise the token is drawn (`TokenSampler.draw`), once for each token: the tokens are those that the
    sampler would draw without draft tokens, from the same distribution. This is rejection sampling (Leviathan et al.
    2023) for a draft distribution q with all its mass on the draft token d: d is accepted with probability
    p(d) / q(d) = p(d); otherwise the token comes from p − q where that is positive, which is p without d.

    Nothing is picked from a row whose largest logit is NaN or infinite, nor from those after it.

    Args:
        logits: `[Σ (1 + k), vocab]`, on any device: 1 + k rows of each request, in the order of `rows_to_verify`.
        drafts: the k ≥ 0 draft tokens of each request.
        samplers: one for each request. It draws as often as its request gets tokens.

    Returns:
        For each request its tokens, 1 … 1 + k of them: the accepted draft tokens, then one more. If a row gives none,
        those before it; none at all if that is the first.

    Raises:
        ValueError: the number of rows or samplers does not match the draft tokens. Nothing was drawn.
    """
    raise NotImplementedError(
        "phase 9, task 5: Verify a batch; read docs/en/phase-09-chunked-prefill/lab/02-draft-and-verify.md"
    )
