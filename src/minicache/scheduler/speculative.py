"""Speculation: a request in decode computes its newest token and draft tokens after it, and keeps the accepted ones.

It extends the scheduler of phase 9. Draft tokens count in the token budget and take blocks, as vLLM's do; the blocks of
rejected ones are returned before the step is committed, so between two steps the state is that without speculation.
Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Unpack

from minicache.errors import require_count
from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.chunked import ChunkedOptions
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.vllm_options import VllmOptionsScheduler

PLACEHOLDER: Final = -1
"""A draft token that is not known yet: its slot is reserved, and the engine fills it in before the model runs."""

Propose = Callable[[Request, int], list[int]]
"""Called with a request in decode and the most draft tokens that it may have, ≥ 1; returns at most so many."""


def placeholders(request: Request, num_tokens: int) -> list[int]:
    """A `Propose` that reserves all slots, for a draft model that runs inside the step."""
    return [PLACEHOLDER] * num_tokens


@dataclass(slots=True)
class DraftStats:
    """How many draft tokens were accepted, in committed steps.

    Attributes:
        num_drafts: how often a request had draft tokens in a step.
        num_draft_tokens: how many they were.
        num_accepted_tokens: how many of them were accepted.
        num_accepted_per_position: the accepted ones by their position in the draft, the first one's first.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """The part of the draft tokens that was accepted, 0 … 1; 0 if there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a request with draft tokens gained in a step, the model's own included; 1 if there were none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count one request's draft tokens of one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_per_position)
        self.num_accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1


class SpeculativeOptions(ChunkedOptions, total=False):
    """The keyword arguments of `SpeculativeScheduler`, which documents them; `propose` is the engine's."""

    num_speculative_tokens: int


class SpeculativeScheduler(VllmOptionsScheduler):
    """`VllmOptionsScheduler`, in which requests in decode may also compute draft tokens.

    A request of the batch with one token left to compute, which it has generated since it was admitted, gets draft
    tokens after it (`propose`), k at most. So a request that is in its prompt, has just been admitted, or is computed
    again has none. They are in `Request.draft_token_ids` until the step is over and in
    `SchedulerOutput.draft_token_ids`, and count in `num_scheduled_tokens` and in the token budget. There are fewer than
    k where

    - the request's output would exceed max_tokens or max_model_len if all of them were accepted;
    - the budget is short: every later request of the batch can still compute a token (in vLLM it may not);
    - blocks are short: draft tokens take only free blocks that no request of the batch needs for its own tokens in this
      step. They never cause a preemption.

    **A step** is `schedule()`, the model, `accept()`, `update_from_output()`. `accept` gets the tokens of each
    request with draft tokens. It records the accepted ones, corrects `num_scheduled_tokens` to the tokens whose KV
    entries stay, returns the blocks after them to the pool, and returns the argument of `update_from_output`. Without
    it, all draft tokens count as rejected. (vLLM counts scheduled tokens as computed at once, and subtracts the
    rejected ones later. Here they are counted at the commit.) If the step fails before its commit, `recover` removes
    the accepted tokens.

    The prefix cache never holds draft tokens: a block that accepted ones have filled is noted at the commit.

    vLLM's draft tokens may exceed max_tokens, cost later requests their token, and preempt them; rejected ones keep
    their blocks; and a request is admitted with k of −1, if it has one token to compute. These five differences are
    intended: `docs/en/reference/vllm-differences.md`.

    Args:
        num_speculative_tokens: k, ≥ 1.
        propose: proposes the tokens while the step is scheduled.
        options: `VllmOptionsScheduler`'s.

    Attributes:
        num_speculative_tokens: as given.
        propose: as given; an engine replaces it by its own.
        draft_stats: acceptance so far.

    Raises:
        TypeError, ValueError: as `VllmOptionsScheduler`, or num_speculative_tokens is no int ≥ 1.
    """

    Options = SpeculativeOptions

    def __init__(
        self, *, num_speculative_tokens: int, propose: Propose = placeholders, **options: Unpack[ChunkedOptions]
    ) -> None:
        super().__init__(**options)
        require_count("num_speculative_tokens", num_speculative_tokens)
        self.num_speculative_tokens = num_speculative_tokens
        self.propose = propose
        self.draft_stats = DraftStats()
        self._missing: dict[RequestId, int] = {}  # blocks of the batch's own tokens, of requests not yet scheduled
        self._num_missing = 0  # their sum
        self._is_accepted = False  # whether the outstanding step has had its `accept`
        self._accepted: list[tuple[Request, int]] = []  # what `accept` has recorded, and no commit has confirmed

    # Before the model

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_running`, with draft tokens for requests in decode.

        Only the requests' own tokens are noted for the prefix cache.
        """
        self._is_accepted = False
        self._missing = {request.request_id: self.blocks_missing(request) for request in self.running}
        self._num_missing = sum(self._missing.values())
        super().schedule_running(output)
        self._missing = {}
        for request_id, drafts in output.draft_token_ids.items():
            output.num_scheduled_tokens[request_id] += len(drafts)

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_tokens`, and draft tokens, if the request is one in decode."""
        super().schedule_tokens(request, output)
        if request.request_id not in self._missing:  # it has just been admitted
            return
        self._num_missing -= self._missing.pop(request.request_id)
        if request.num_tokens - request.num_computed_tokens == 1 and self.has_gained_token(request):
            self.schedule_drafts(request, output)

    def schedule_drafts(self, request: Request, output: SchedulerOutput) -> None:
        """Have the step compute draft tokens of a request too, as many as `max_drafts` and `propose` give.

        They go into `output.draft_token_ids` and `request.draft_token_ids`, which are one list; the blocks for them are
        allocated, and the budget is charged.

        Args:
            request: of the batch, in decode; its own token is scheduled.
            output: the step so far.
        """
        limit = self.max_drafts(request, output)
        drafts = self.propose(request, limit)[:limit] if limit > 0 else []
        if not drafts:
            return
        needed = blocks_for(request.num_tokens + len(drafts), self.pool.block_size)
        request.block_ids += self.pool.allocate(max(0, needed - len(request.block_ids)))
        request.draft_token_ids = output.draft_token_ids[request.request_id] = drafts
        self.token_budget -= len(drafts)

    def max_drafts(self, request: Request, output: SchedulerOutput) -> int:
        """How many draft tokens a request may have in this step; not positive: none. Changes nothing.

        Args:
            request: of the batch, in decode; its own token is scheduled, unless no budget was left.
            output: the step so far.
        """
        num_tokens, num_later = request.num_tokens, len(self.running) - len(output.scheduled)
        limit = min(
            self.num_speculative_tokens,
            self.largest_chunk(1 + self.num_speculative_tokens) - 1,
            self.token_budget - num_later,
            request.max_tokens - len(request.output_token_ids) - 1,
        )
        if self.max_model_len is not None:
            limit = min(limit, self.max_model_len - num_tokens - 1)
        num_spare = max(0, self.pool.num_free - self._num_missing)
        return min(limit, (len(request.block_ids) + num_spare) * self.pool.block_size - num_tokens)

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.preempt`; the blocks that the victim was missing are no longer kept free for it."""
        super().preempt(request, output)
        self._num_missing -= self._missing.pop(request.request_id)

    # After the model

    def accept(self, output: SchedulerOutput, tokens: Mapping[RequestId, Sequence[int]]) -> dict[RequestId, int]:
        """Record the accepted draft tokens of a step, and return the blocks of the rejected ones.

        A request's tokens are cut after its first stop token (unless it ignores them); they cannot exceed its length
        limits. All but the last are appended to its output_token_ids, and `output.num_scheduled_tokens` becomes the
        number of KV entries that stay: the newest token's and the accepted ones'. Later blocks are freed, the last one
        first. The last token is not recorded: pass it to `update_from_output`.

        Call it once, between the model and `update_from_output`.

        Args:
            output: the return value of the last `schedule()`.
            tokens: id → the tokens of a request of `output.draft_token_ids`: the accepted draft tokens, then the
                model's own, 1 … 1 + k tokens. A request that is left out, or has none, keeps no draft token.

        Returns:
            id → the last token, of each request that was given any, in batch order.

        Raises:
            ValueError: `output` is not the outstanding one, or had its `accept`; or there are more tokens than that, or
                tokens for a request without draft tokens. Nothing has changed.
        """
        self._check_accepted(output, tokens)
        self._is_accepted = True
        last_tokens = {}
        for request in output.scheduled:
            request_id = request.request_id
            drafts = output.draft_token_ids.get(request_id)
            if drafts is None:
                continue
            request.draft_token_ids = []
            output.num_scheduled_tokens[request_id] -= len(drafts)
            if request.status is not RequestStatus.RUNNING:  # finished from outside
                continue
            given = _up_to_stop(request, tokens.get(request_id, ()))
            request.output_token_ids += given[:-1]
            output.num_scheduled_tokens[request_id] = num_new = max(1, len(given))
            self.return_blocks(request, request.num_computed_tokens + num_new)
            self._accepted.append((request, num_new - 1))
            if given:
                last_tokens[request_id] = given[-1]
        return last_tokens

    def return_blocks(self, request: Request, num_tokens: int) -> None:
        """Free the blocks of a request behind its first `num_tokens` tokens, the last one first."""
        num_kept = blocks_for(num_tokens, self.pool.block_size)
        self.pool.free(request.block_ids[num_kept:][::-1])
        del request.block_ids[num_kept:]

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """As `Scheduler.update_from_output`. If the step had no `accept`, its draft tokens are rejected first.

        Requests whose accepted tokens have filled a block are noted for the prefix cache, and `draft_stats` counts.
        """
        if output is self.outstanding and output.draft_token_ids:
            if not self._is_accepted:
                self.accept(output, {})
            self._check_tokens(output, token_ids)
            for request, num_accepted in self._accepted:
                if request.status is RequestStatus.RUNNING:
                    self.draft_stats.count(len(output.draft_token_ids[request.request_id]), num_accepted)
                    start = request.num_computed_tokens + 1  # behind its own token, which was noted before
                    if self.prefix_caching and start % self.pool.block_size + num_accepted >= self.pool.block_size:
                        self._filled.append((request, start, start + num_accepted))
            self._accepted.clear()
        return super().update_from_output(output, token_ids)

    def recover(self) -> None:
        """As `VllmOptionsScheduler.recover`; tokens that `accept` has recorded and no commit has confirmed go."""
        if self.outstanding is not None:
            for request in self.outstanding.scheduled:
                request.draft_token_ids = []
        for request, num_accepted in self._accepted:
            if num_accepted and not request.status.is_finished:
                del request.output_token_ids[-num_accepted:]
        self._accepted.clear()
        super().recover()

    def _check_accepted(self, output: SchedulerOutput, tokens: Mapping[RequestId, Sequence[int]]) -> None:
        """Raise unless `tokens` can be those of the outstanding step."""
        if output is not self.outstanding or self._is_accepted:
            raise ValueError("this output is not outstanding, or its draft tokens were accepted before")
        for request_id, given in tokens.items():
            drafts = output.draft_token_ids.get(request_id)
            if drafts is None:
                raise ValueError(f"request {request_id!r} has no draft tokens in this step: give update_from_output it")
            if len(given) > 1 + len(drafts):
                raise ValueError(
                    f"request {request_id!r} has {len(drafts)} draft tokens, so at most {1 + len(drafts)} tokens; "
                    f"got {len(given)}"
                )


def _up_to_stop(request: Request, tokens: Sequence[int]) -> list[int]:
    """The tokens up to the first that finishes the request, that one included."""
    if not request.ignore_eos:
        for index, token in enumerate(tokens):
            if token in request.stop_token_ids:
                return list(tokens[: index + 1])
    return list(tokens)
