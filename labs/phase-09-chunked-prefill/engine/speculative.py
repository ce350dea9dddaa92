# Phase 9, chunked-prefill: your file. It stands in for minicache.engine.speculative.
# Write what raises NotImplementedError. `minicache grade 9` grades it, `minicache hint 9.K` helps with task K.
"""Speculative decoding: propose the next tokens cheaply, and have the model verify them in one forward pass.

Phase 9 builds its second half. A decode step reads all weights for one token. A forward pass over the newest token and
k draft tokens behind it reads them once too, and says for each draft token what the model itself picks there. Those
that the model picks too are accepted; the first that it does not is replaced by the model's own. So the tokens are
those of decoding without draft tokens, in fewer passes (Leviathan et al. 2023).

An engine does so for a whole batch in one ragged step: `rows_to_verify` says which rows of logits it needs, `verify`
what each request gains. The rest, from the drafts to the blocks that rejected ones took, is
`minicache.engine.speculation`'s. The draft tokens come from the text itself: what followed the last few tokens at their
previous occurrence (prompt lookup; Saxena 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minicache.engine.picking import greedy
from minicache.engine.sampling import TokenSampler
from minicache.errors import require_count


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
        raise NotImplementedError(
            "phase 9, task 4: Draft from the text; read docs/en/phase-09-chunked-prefill/lab/02-draft-and-verify.md"
        )


def rows_to_verify(num_new_tokens: Sequence[int], num_drafts: Sequence[int]) -> list[int]:
    """Which tokens of a ragged step the model has to give logits for: of each request the last 1 + k.

    Those are its newest token and the k draft tokens behind it. A request without draft tokens, in its prompt too, has
    one: the last.

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

    The first row of a request says what comes behind its newest token, the next one what comes behind its first draft
    token, and so on. A token is picked from the first row. If it is the first draft token, that is accepted, and the
    second row says what comes next. The first token that is not the draft token of its place is the last, as is one
    behind the last draft token: the rows after it belong to a text that is not this one.

    With temperature 0 the token of a row is the likeliest (`greedy`), so the tokens are those of greedy decoding. These
    are found for all rows at once, however many requests there are: on a GPU every look at a number waits. Otherwise
    the token is drawn (`TokenSampler.draw`), once for each token: the tokens are those that the sampler would draw
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
    raise NotImplementedError(
        "phase 9, task 5: Verify a batch; read docs/en/phase-09-chunked-prefill/lab/02-draft-and-verify.md"
    )
