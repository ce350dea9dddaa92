"""Speculation with vLLM 0.33's rules in place of ours, one by one: what the pages count, and what the tests show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import SchedulerOutput, SpeculativeScheduler

RULES: Final = ("length", "budget", "blocks", "returned", "admission")
"""Where ours differs, on purpose: `docs/en/reference/vllm-differences.md`."""


class AsVllm(SpeculativeScheduler):
    """`SpeculativeScheduler` without these rules of ours: without all of them, it is vLLM's.

    | rule | ours | vLLM's |
    |---|---|---|
    | length | no draft token beyond max_tokens | up to max_model_len |
    | budget | a token for every later request of the batch | a request's draft tokens first |
    | blocks | draft tokens take spare blocks only | they preempt |
    | returned | the blocks of rejected ones are freed | they stay |
    | admission | none for a request just admitted | k of −1, if it has one token to compute |
    """

    def __init__(self, *, without: Sequence[str] = RULES, **options: Any) -> None:
        super().__init__(**options)
        self.without = frozenset(without)

    def num_drafts(self, request: Request, budget: int, num_later: int) -> int:
        """Draft tokens that a request may have, if so much budget is left behind its own token; but for its blocks."""
        limit = min(self.num_speculative_tokens, self.largest_chunk(1 + self.num_speculative_tokens) - 1)
        limit = min(limit, budget if "budget" in self.without else budget - num_later)
        if "length" not in self.without:
            limit = min(limit, request.max_tokens - len(request.output_token_ids) - 1)
        if self.max_model_len is not None:
            limit = min(limit, self.max_model_len - request.num_tokens - 1)
        return max(0, limit)

    def max_drafts(self, request: Request, output: SchedulerOutput) -> int:
        limit = self.num_drafts(request, self.token_budget, len(self.running) - len(output.scheduled))
        if "blocks" in self.without:
            return limit
        num_spare = max(0, self.pool.num_free - self._num_missing)
        return min(limit, (len(request.block_ids) + num_spare) * self.pool.block_size - request.num_tokens)

    def blocks_missing(self, request: Request) -> int:
        left = request.num_tokens - request.num_computed_tokens
        num_new = self.chunk(left)
        if "blocks" in self.without and left == num_new == 1 and self.has_gained_token(request):
            place = next(place for place, each in enumerate(self.running) if each is request)
            limit = self.num_drafts(request, self.token_budget - 1, len(self.running) - place - 1)
            num_new += len(self.propose(request, limit)[:limit]) if limit else 0
        needed = blocks_for(request.num_computed_tokens + num_new, self.pool.block_size) if num_new else 0
        return max(0, needed - len(request.block_ids))

    def return_blocks(self, request: Request, num_tokens: int) -> None:
        if "returned" not in self.without:
            super().return_blocks(request, num_tokens)

    def accept(self, output: SchedulerOutput, tokens: Mapping[RequestId, Sequence[int]]) -> dict[RequestId, int]:
        most = {each.request_id: each.max_tokens - len(each.output_token_ids) for each in output.scheduled}
        return super().accept(output, {name: given[: most[name]] for name, given in tokens.items()})

    # Admission

    def schedule_running(self, output: SchedulerOutput) -> None:
        super().schedule_running(output)
        self._num_scheduled = len(output.scheduled)
        self._in_prompt = not all(map(self.has_gained_token, output.scheduled))

    def num_pads(self, request: Request, found: Sequence[int]) -> int:
        """Draft tokens of −1 that the request is admitted with."""
        alone = not self._num_scheduled and not found
        if "admission" not in self.without or self._in_prompt or alone or super().num_new_tokens(request, found) != 1:
            return 0
        left = request.num_tokens - max(request.num_computed_tokens, len(found) * self.pool.block_size)
        return self.num_speculative_tokens if left == 1 else 0

    def head(self) -> Request | None:
        request = super().head()
        if request is not None and self.num_pads(request, self.find_prefix(request)) >= self.token_budget:
            return None
        return request

    def blocks_to_take(self, request: Request, found: Sequence[int] = ()) -> int:
        needed, used = super().blocks_to_take(request, found), sum(self.pool.ref_count(each) > 0 for each in found)
        if num_pads := self.num_pads(request, found):
            needed = max(needed, blocks_for(request.num_tokens + num_pads, self.pool.block_size) - used)
        return needed

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        num_pads = self.num_pads(request, found)
        super().admit(request, output, found)
        if num_pads:
            drafts = [-1] * num_pads
            needed = blocks_for(request.num_tokens + num_pads, self.pool.block_size) - len(request.block_ids)
            request.block_ids += self.pool.allocate(needed)
            request.draft_token_ids = output.draft_token_ids[request.request_id] = drafts
            output.num_scheduled_tokens[request.request_id] += num_pads
            self.token_budget -= num_pads
        assert request.status is RequestStatus.RUNNING
