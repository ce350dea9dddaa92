"""Beam search: several hypotheses for an answer are continued together, and the likeliest are kept.

Phase 8 builds it. `BeamSearch` decides which beams continue, for one prompt and without an engine;
`minicache.engine.beam_requests` runs them on an engine, as forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minicache.errors import require_count


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search.

    Attributes:
        beam_width: k, the number of beams and of answers, ≥ 1.
        max_tokens: the most tokens of an answer, ≥ 1.
        length_penalty: an answer's score is the sum of its tokens' log-probabilities divided by its number of tokens to
            this power. 0 favours short answers, 1 compares means, higher values favour long ones.
        stop_token_ids: tokens that end an answer. They stay in it, and count.
        ignore_eos: the tokenizer's end token does not end an answer; stop_token_ids do.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of its bounds.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require_count("beam_width", self.beam_width)
        require_count("max_tokens", self.max_tokens)
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise TypeError(f"length_penalty must be a number; got {self.length_penalty!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            require_count("a stop token's id", token_id, at_least=0)


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer that a search has found.

    Attributes:
        token_ids: its tokens, the one that ended it included.
        score: log-probability over length to the power of the penalty. Higher is better.
        finish_reason: "stop", "length", "capacity", or "error": the model's logits were not finite.
        text: its text; "" without a tokenizer.
    """

    token_ids: list[int]
    score: float
    finish_reason: str
    text: str = ""


class Hypothesis(NamedTuple):
    """An unfinished answer: its tokens so far, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    log_prob: float


class Step(NamedTuple):
    """Where a beam comes from: the index of its parent among the previous beams, and its newest token."""

    parent: int
    token_id: int


class BeamSearch:
    """Decides which beams of one prompt continue. Every decision needs the candidates of all of them.

    The rules are those of `transformers`' `generate(num_beams=k)` with early_stopping=False, so both find the same
    answers. At each step the k likeliest hypotheses that do not end become the next beams, and the likeliest that end
    become answers; `advance` returns the next beams and ends the search.

    Args:
        params: how to search.
        stop_token_ids: all tokens that end an answer.
        max_tokens: the most tokens of an answer: that of the params, or fewer if the model's length allows no more.

    Attributes:
        beams: the hypotheses that continue, the best first. Initially one, without tokens. Empty when the search is
            over.
        answers: the answers found so far, the best first, at most k.
        is_over: whether the search is over.
    """

    def __init__(self, params: BeamSearchParams, stop_token_ids: Iterable[int], max_tokens: int) -> None:
        self.params = params
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_tokens = max_tokens
        self.beams = [Hypothesis((), 0.0)]
        self.answers: list[Beam] = []
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest next tokens `advance` needs: (1 + stop tokens) · k, at least 2 k.

        It is also the number of hypotheses ranked, over all beams: even if all of them that can end do, k are left.
        """
        return max(2, 1 + len(self.stop_token_ids)) * self.params.beam_width

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Step]:
        """Continue the beams by one token each.

        Each beam with each of its candidates is a hypothesis; its log-probability is the sum of the beam's and the
        token's. The `num_candidates` likeliest of all beams are ranked, the likeliest first. A hypothesis ends with a
        stop token ("stop"), or else because it has max_tokens ("length"). If it ends and is among the first k,
        it is an answer (`keep`), with its last token and its `score`; if it ends and is not, it is dropped. The first k
        that do not end are the next `beams`.

        The search is over if there are none, or if there are k answers and no beam is better than the worst of them:
        the best beam's `score`, at its current length, is not greater. Then `beams` is empty.

        Args:
            candidates: for each of `beams` its likeliest next tokens, with their log-probabilities: num_candidates of
                them, or the whole vocabulary if it is smaller.

        Returns:
            For each of the next `beams`, in order, its parent and its newest token. Empty when the search is over.
        """
        width, length = self.params.beam_width, len(self.beams[0].token_ids) + 1
        hypotheses = sorted(
            (
                (beam.log_prob + log_prob, Step(parent, token_id))
                for parent, (beam, next_tokens) in enumerate(zip(self.beams, candidates, strict=True))
                for token_id, log_prob in next_tokens
            ),
            key=lambda hypothesis: -hypothesis[0],
        )[: self.num_candidates]
        going_on: list[tuple[float, Step]] = []
        for rank, (log_prob, step) in enumerate(hypotheses):
            stops = step.token_id in self.stop_token_ids
            if not stops and length < self.max_tokens:
                going_on.append((log_prob, step))
            elif rank < width:
                token_ids = [*self.beams[step.parent].token_ids, step.token_id]
                self.keep(Beam(token_ids, self.score(log_prob, length), "stop" if stops else "length"))
        going_on = going_on[:width]
        self.beams = [
            Hypothesis((*self.beams[step.parent].token_ids, step.token_id), log_prob) for log_prob, step in going_on
        ]
        full = len(self.answers) == width
        if not going_on or (full and self.score(going_on[0][0], length) <= self.answers[-1].score):
            self.is_over, self.beams = True, []
            return []
        return [step for _, step in going_on]

    def give_up(self, finish_reason: str = "capacity") -> None:
        """End the search now: the beams so far count as answers, with this finish reason."""
        for beam in self.beams:
            score = self.score(beam.log_prob, max(1, len(beam.token_ids)))
            self.keep(Beam([*beam.token_ids], score, finish_reason))
        self.is_over, self.beams = True, []

    def score(self, log_prob: float, length: int) -> float:
        """The score of an answer: log_prob / length ^ length_penalty. Higher is better.

        Args:
            log_prob: the sum of an answer's log-probabilities, ≤ 0.
            length: its number of tokens, ≥ 1.
        """
        return log_prob / float(length**self.params.length_penalty)

    def keep(self, answer: Beam) -> None:
        """Add an answer to `answers`, which stay sorted, the best first; only the k best are kept."""
        self.answers.append(answer)
        self.answers.sort(key=lambda each: -each.score)
        del self.answers[self.params.beam_width :]
