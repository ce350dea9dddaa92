# Phase 9, chunked-prefill: your file. It stands in for minicache.scheduler.chunked.
# Write what raises NotImplementedError. `minicache grade 9` grades it, `minicache hint 9.K` helps with task K.
"""Chunked prefill: one budget of tokens a step, and prompts that are computed in pieces beside the decodes.

Phase 9 builds it, on the schedulers of phases 7 and 8. There are no two kinds of steps any more: every request has
computed some of its tokens, and the step lets it catch up, by as many as the budget has left. So a long prompt never
holds up those who are in decode for longer than one such step takes (Sarathi-Serve: Agrawal et al., OSDI 2024, §4).
Pure standard library.
"""

from __future__ import annotations

from typing import Unpack

from minicache.errors import RequestTooLargeError, require_count
from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestStatus
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache.scheduler.sharing import FairSharingScheduler, SharingOptions


class ChunkedOptions(SharingOptions, total=False):
    """The keyword arguments of `ChunkedPrefillScheduler`, which documents them."""

    long_prefill_threshold: int


class ChunkedPrefillScheduler(FairSharingScheduler):
    """Spends max_num_batched_tokens a step: first on the batch, in order, then on those who wait.

    A request in decode takes one token of it, a request in its prompt as many as it has left to compute, but no more
    than the budget has left. Who gets only a part of its prompt computed stays in the batch, with the blocks of that
    part, and goes on in the next step. So a prompt may be longer than max_num_batched_tokens.

    **The bound.** As with `FairScheduler`, of any STARVATION_BOUND + 1 admissions in a row one is of the request that
    arrived first. There an admission is worth a token; here one may be preempted before its token has come, and begin
    anew. If that happens for the sake of somebody who came later, it is `due`: nobody else is admitted until it has
    caught up. But the bound comes first: if the one that arrived first of all that wait is another, and has been
    overtaken STARVATION_BOUND times, that one is next.

    Args:
        long_prefill_threshold: the most tokens of one request in one step, so that several prompts can go on side by
            side; 0: as many as the budget has left.
        options: `FairSharingScheduler`'s.

    Attributes:
        long_prefill_threshold: as given.
        due: who must catch up before anybody else is admitted; None if nobody must.

    Raises:
        TypeError, ValueError: as `FairSharingScheduler`.
    """

    def __init__(self, *, long_prefill_threshold: int = 0, **options: Unpack[SharingOptions]) -> None:
        super().__init__(**options)
        require_count("long_prefill_threshold", long_prefill_threshold, at_least=0)
        self.long_prefill_threshold = long_prefill_threshold
        self.due: Request | None = None
        self._left = self.max_num_batched_tokens  # what the step that is being scheduled may still compute

    def check_size(self, request: Request) -> None:
        """Raise unless the request can be served once it has the server to itself. Changes nothing.

        Its prompt must leave room for one more token within max_model_len, if there is one, and its blocks must not be
        more than the whole pool. It may be longer than a step.

        Raises:
            RequestTooLargeError: the message says which limit (max_model_len, or the pool's num_blocks), and what to
                change.
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def schedule(self) -> SchedulerOutput:
        """As `PagedScheduler.schedule`, with one budget of max_num_batched_tokens for all that it orders.

        Each step begins with the whole budget (`_left`), whatever became of the one before. And whoever is `due` and
        has ended, or `has_caught_up`, is due no more.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def head(self) -> Request | None:
        """Who may be admitted next.

        Returns:
            As `FairScheduler.head`, if nobody is `due`, or num_overtakes has reached STARVATION_BOUND: one who is due
            may be admitted, and preempted, again and again, while one waits that came before it. Else the one who is
            due, where it waits and is compatible with the batch; None while it is in the batch, or not compatible.
        """
        raise NotImplementedError(
            "phase 9, task 3: Who was overtaken; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `FairSharingScheduler.preempt`; and a request that was overtaken before its token came is `due`.

        It is due, in place of whoever was, if all three hold. It had not caught up (`has_caught_up`) when it lost its
        place: swapped out or to be recomputed, no token came of its admission. Somebody who arrived after it is still
        in the batch. And of all that wait now, it arrived first.

        Args:
            request: the last of the batch.
            output: the step so far, in which it has not been ordered.
        """
        raise NotImplementedError(
            "phase 9, task 3: Who was overtaken; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def has_caught_up(self, request: Request) -> bool:
        """Whether a request is in the batch, and a token has come since it was admitted (`num_outputs_at_admission`).

        Of one that waits the answer is no, whatever it has on the host. To have little left to compute is not enough:
        one token short of the end of its prompt, a request may be preempted as at its beginning.
        """
        raise NotImplementedError(
            "phase 9, task 3: Who was overtaken; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def enter(self, request: Request, output: SchedulerOutput) -> None:
        """As `FairSharingScheduler.enter`; and it is noted how many tokens of output the request has by now."""
        request.num_outputs_at_admission = len(request.output_token_ids)
        super().enter(request, output)

    def largest_chunk(self, num_tokens: int) -> int:
        """As `Scheduler.largest_chunk`: at most long_prefill_threshold, unless that is 0."""
        return min(num_tokens, self.long_prefill_threshold) if self.long_prefill_threshold else num_tokens

    def chunk(self, num_tokens: int) -> int:
        """Of so many tokens that a request has to compute, how many it may in this step.

        At most their `largest_chunk`, and at most what the budget of the step has left (`_left`). Takes nothing of it.

        Args:
            num_tokens: ≥ 0.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def num_new_tokens(self, request: Request) -> int:
        """Tokens that this step computes if `request` is admitted in it: a `chunk` of those that are left.

        Left are those of `FairSharingScheduler.num_new_tokens`: what is computed or found is not computed again.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def blocks_to_admit(self, request: Request) -> int:
        """Blocks that a request has once it is admitted: up to the end of its first chunk.

        They hold what it need not compute, and behind it the `num_new_tokens` of this step. What it need not compute is
        what is computed already, if it was swapped out, or else what `find_prefix` finds, in full blocks.
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def can_allocate(self, request: Request) -> AllocStatus:
        """As `PagedScheduler.can_allocate`, of its `blocks_to_admit`; LATER also if the step has no token left.

        For nobody can be admitted without a token to compute. (`PagedScheduler.admit` does not ask: it admits whoever
        has no more tokens to compute than the step has left, and a chunk never has more.)
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def order(self, request: Request, output: SchedulerOutput) -> None:
        """Have the step compute a `chunk` of what the request has left to compute, and take it from the budget.

        If the budget has nothing left for it, it is not in this step at all.

        Args:
            request: of the batch, and not in the step yet.
            output: the step so far. The request goes to the end of `scheduled`, with its tokens in
                `num_scheduled_tokens`.
        """
        raise NotImplementedError(
            "phase 9, task 1: One budget; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request in the batch must get before its next chunk is computed, copies included.

        Those up to the end of the chunk, less those that it has, but never below 0: after a step that failed it may
        have more than this chunk needs. And while `_may_share_tails` is True, as in `SharingScheduler.blocks_missing`,
        one for each of `written_and_shared`; while it is False nothing is copied (`copy_on_write`), and nothing must be
        counted. None at all if the step has no token left for it: it writes nothing.
        """
        raise NotImplementedError(
            "phase 9, task 2: Blocks for a chunk; read docs/en/phase-09-chunked-prefill/lab/00-one-budget.md"
        )
