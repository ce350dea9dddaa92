# Phase 9, chunked-prefill: your file. It stands in for minicache.scheduler.chunked.
# Write what raises NotImplementedError. `minicache grade 9` grades it, `minicache hint 9.K` helps with task K.
#
# Predict, before you write task 9.1. `minicache grade` checks it, without points.
# A step has 50 tokens, and there is no cap. Three prompts of 40 tokens arrive together. How many tokens does the third
# get in the second step?
# 9.1a =
# A step has 50 tokens, and long_prefill_threshold is 30. A prompt of 100 is alone. After which step, counted from 1,
# does it have its first token?
# 9.1b =
# A step has 32 tokens. A request with a prompt of 60 was preempted by recompute with 21 output tokens, and is alone
# now. How many steps does it take until its next token?
# 9.1c =
"""Chunked prefill: one token budget a step, and prompts that are computed in chunks while other requests decode.

Phase 9 builds it, on the scheduler of phase 8. Prefill and decode are no longer separate: every request has
computed some of its tokens, and the step computes as many more as the budget allows. So a long prompt never delays
the requests in decode by more than one such step (Sarathi-Serve: Agrawal et al., OSDI 2024, §4). Pure standard
library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Unpack

from minicache.errors import require_count
from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestStatus
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.prefix_caching import PrefixCachingOptions
from minicache.scheduler.queue import arrival_key
from minicache.scheduler.sharing import SharingScheduler


class ChunkedOptions(PrefixCachingOptions, total=False):
    """The keyword arguments of `ChunkedPrefillScheduler`, which documents them."""

    long_prefill_threshold: int
    reserve_full_prompt: bool


class ChunkedPrefillScheduler(SharingScheduler):
    """Spends a token budget of max_num_batched_tokens a step: first on the batch, in order, then on waiting requests.

    A request in decode takes one token of it, a request in its prompt as many as it has left to compute, but no more
    than the budget has left. A request whose prompt is only partly computed stays in the batch, with the blocks
    of that part, and continues in the next step. So a prompt may be longer than max_num_batched_tokens.

    **Admission** requires that the blocks of the whole prompt are free, though it allocates only those of the first
    chunk. Otherwise the first chunk of every waiting prompt could be admitted, and the batch would run out of blocks
    long before one of them has generated a token (vLLM's `scheduler_reserve_full_isl`).

    **The bound.** As with `FairScheduler`, of any STARVATION_BOUND + 1 admissions in a row one is of the request that
    arrived first. There each admission yields a token; here a request may be preempted before it has generated one,
    and start again. If that happens while a later arrival stays in the batch, it is `protected`: no other is admitted
    until it has generated a token. But the bound comes first: if another request arrived first of all waiting ones, and
    has been bypassed STARVATION_BOUND times, that one is next.

    Args:
        long_prefill_threshold: the most tokens of one request in one step, which lets several prompts advance
            together; 0: as many as the budget has left.
        reserve_full_prompt: admit a request only if the blocks of its whole prompt are free. False: those of its first
            chunk are enough.
        options: `SharingScheduler`'s.

    Attributes:
        long_prefill_threshold: as given.
        reserve_full_prompt: as given.
        protected: the request that must generate a token before any other is admitted; None if there is none.

    Raises:
        TypeError, ValueError: as `SharingScheduler`.
    """

    Options = ChunkedOptions
    chunks_prompts = True

    def __init__(
        self,
        *,
        long_prefill_threshold: int = 0,
        reserve_full_prompt: bool = True,
        **options: Unpack[PrefixCachingOptions],
    ) -> None:
        super().__init__(**options)
        require_count("long_prefill_threshold", long_prefill_threshold, at_least=0)
        if not isinstance(reserve_full_prompt, bool):
            raise TypeError(f"reserve_full_prompt must be True or False; got {reserve_full_prompt!r}")
        self.long_prefill_threshold = long_prefill_threshold
        self._max_chunk = long_prefill_threshold or sys.maxsize  # of one request in one step, whatever the budget
        self.reserve_full_prompt = reserve_full_prompt
        self.protected: Request | None = None

    # One budget

    def largest_chunk(self, num_tokens: int) -> int:
        """As `Scheduler.largest_chunk`: at most long_prefill_threshold, unless that is 0."""
        return min(num_tokens, self._max_chunk)

    def chunk(self, num_tokens: int) -> int:
        """How many of a request's `num_tokens` uncomputed tokens this step may compute. Spends nothing.

        At most their `largest_chunk`, and at most what is left of the `token_budget`.

        Args:
            num_tokens: ≥ 0.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def num_new_tokens(self, request: Request, found: Sequence[int] = ()) -> int:
        """Tokens that this step computes if `request` is admitted: a `chunk` of what is neither computed nor found."""
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """Have the step compute a `chunk` of what the request has left to compute, and charge the `token_budget`.

        If no budget is left, the request is not in this step.

        Args:
            request: in the batch, and not in the step yet.
            output: the step so far. The request goes to the end of `scheduled`, with its tokens in
                `num_scheduled_tokens`.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    # Blocks for a chunk

    def blocks_to_take(self, request: Request, found: Sequence[int] = ()) -> int:
        """Free blocks needed to admit `request`: those of its whole prompt, less the found ones in use.

        Without `reserve_full_prompt`: those up to the end of its first chunk, less the same.
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request still needs before its next chunk is computed, copies included.

        Those up to the end of the chunk, less those that it has; and while `_may_share_tails` is True, one for each of
        `written_and_shared`, as in `SharingScheduler.blocks_missing`. 0 if the step has no token left for it, because
        it writes nothing.
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    # The bound, where an admission may yield no token

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `SharingScheduler.schedule_running`; but first, protection ends if the request has gained its token."""
        raise NotImplementedError(
            "phase 9, task 3: The protected request; read docs/en/phase-09-chunked-prefill/lab/01-the-protected-request.md"
        )

    def head(self) -> Request | None:
        """The waiting request that may be admitted next.

        Returns:
            As `FairScheduler.head`, if no request is `protected`, or num_bypasses has reached STARVATION_BOUND: a
            protected request may be admitted and preempted many times while an earlier one waits. Otherwise the
            protected one, if it waits and is compatible with the batch; None while it is in the batch or incompatible.
        """
        raise NotImplementedError(
            "phase 9, task 3: The protected request; read docs/en/phase-09-chunked-prefill/lab/01-the-protected-request.md"
        )

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `SharingScheduler.preempt`; a request that loses its token to a later arrival is `protected`.

        It replaces the previous one, if three conditions hold: it has gained no token since its admission
        (`has_gained_token`); a request that arrived after it is still in the batch; and it arrived first of all
        requests that wait now.

        Args:
            request: the last of the batch.
            output: the step so far, in which it has not been scheduled.
        """
        raise NotImplementedError(
            "phase 9, task 3: The protected request; read docs/en/phase-09-chunked-prefill/lab/01-the-protected-request.md"
        )

    def has_gained_token(self, request: Request) -> bool:
        """Whether a request is in the batch, and has generated a token since it was admitted.

        Computed tokens do not count: a request may be preempted one token short of the end of its prompt.
        """
        raise NotImplementedError(
            "phase 9, task 3: The protected request; read docs/en/phase-09-chunked-prefill/lab/01-the-protected-request.md"
        )

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `SharingScheduler.admit`; and `num_outputs_at_admission` is set."""
        request.num_outputs_at_admission = len(request.output_token_ids)
        super().admit(request, output, found)
