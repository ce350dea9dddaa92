# Phase 12, production-defaults: your file. It stands in for minicache.scheduler.async_chunked.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
"""Asynchronous scheduling: step n + 1 is scheduled while the model runs step n.

Phase 12 builds it, on the scheduler of phase 9. A step's tokens are unknown until its commit, so the next step counts
on a placeholder for each; and what a token decides, whether its request has finished, is noticed one step late (as in
vLLM's AsyncScheduler). Pure standard library.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Unpack

from minicache.errors import InvariantError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.chunked import ChunkedOptions
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.vllm_options import VllmOptionsScheduler


class AsyncChunkedScheduler(VllmOptionsScheduler):
    """`VllmOptionsScheduler`, of which `schedule()` may be called while one step is outstanding.

    The loop of an engine that overlaps: `schedule()`, start the model on that step, wait for the step before, commit
    that one (`update_from_output`). If each step is committed before the next, this is phase 9's scheduler.

    **Ahead of the tokens.** `schedule()` first counts the outstanding step as computed (`count`). A request whose
    tokens are then all computed has one more on its way, its placeholder (`Request.num_placeholders`), and the new step
    computes that: one token, at a position that is known, with a value that is not. A request whose last token is on
    its way is passed over. It keeps its batch slot and its blocks until the commit.

    **One step late.** A stop token is noticed when the next step has scheduled the request again. It leaves, its blocks
    are freed, and its token of that next step is dropped. The step may still write into the freed blocks; the steps run
    one after the other, so what a later step writes there stays. A request that is preempted while its token is on its
    way gives up its placeholder. The token is then *stale*: the commit appends it, and it may finish the request, but
    it changes no counter.

    **Prefix cache.** A block is cached when all its tokens are known and scheduled. So a block that decode fills is
    cached one `schedule()` later than in phase 9, or at the commit, if that comes first.

    Arguments and errors are `VllmOptionsScheduler`'s.

    Attributes:
        outstanding: the oldest step that was not committed; None if there is none.
        ahead: the step that was scheduled while that one was outstanding; else None.
    """

    overlaps = True

    def __init__(self, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        self.ahead: SchedulerOutput | None = None
        self._awaited: list[Request] = []  # of the outstanding step, if it is counted: those that get a token
        self._capacity = self.pool.num_blocks * self.pool.block_size  # tokens of the whole pool
        self._longest = min(self.max_model_len or sys.maxsize, self._capacity + 1)  # tokens of a finished request

    # Ahead of the tokens

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`; but a step that is outstanding is counted (`count`) and stays outstanding.

        Returns:
            The step's work. It is `ahead` if another step is outstanding.

        Raises:
            ValueError: two steps are outstanding. Nothing has changed: commit the older one, or call `recover`.
        """
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def count(self, output: SchedulerOutput) -> None:
        """Count the tokens of a step as computed, before the tokens that it generates are known.

        For each request of the step that is still RUNNING, num_computed_tokens grows by the number that the step
        scheduled. If no token is left to compute, the step generates one: num_placeholders is 1, and the request is
        noted in `_awaited`, in batch order.

        Args:
            output: the outstanding step; no other is.
        """
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def num_uncomputed(self, request: Request) -> int:
        """Tokens that a request of the batch has left to compute, its placeholder included.

        0 if its last token is on its way: with the placeholder it has max_tokens of output, or max_model_len tokens, or
        more tokens than the whole pool can hold.
        """
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def blocks_missing(self, request: Request) -> int:
        """As `VllmOptionsScheduler.blocks_missing`, for a chunk of `num_uncomputed` tokens."""
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_tokens`, for a chunk of `num_uncomputed` tokens."""
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_running`; but blocks are cached at once, as far as tokens are known.

        No placeholder is hashed. A block that the step fills with one is cached when its value is known: by the next
        `schedule()`, which looks one token further back for that, or by `update_from_output`.
        """
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    # One step late

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """Commit the oldest outstanding step, as `Scheduler.update_from_output`; it is counted once (`count`).

        Each unfinished request that the step generates a token for gets it (`append_token`), and may finish. That
        includes waiting ones: theirs are stale tokens. Blocks that the step has filled are cached first
        (`cache_computed`), while requests that finish have them.

        Args:
            output: the oldest outstanding step.
            token_ids: as for `Scheduler.update_from_output`. Tokens for requests that have finished since, and for
                those with prompt left to compute, are ignored.

        Returns:
            The requests that have just finished, in batch order. They hold nothing, though the step `ahead` may compute
            them.

        Raises:
            ValueError, TypeError: as `Scheduler.update_from_output`. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 12, task 2: One step late; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def check_commit(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> None:
        """Raise unless `token_ids` are tokens of the oldest outstanding step, and none is missing. Changes nothing.

        Raises:
            ValueError, TypeError: as `update_from_output`.
        """
        if output is not self.outstanding:
            raise ValueError(
                "this output is not the oldest outstanding step: it was already committed or given up, or an older one "
                "has to be committed first"
            )
        scheduled = output.num_scheduled_tokens
        if token_ids.keys() != scheduled.keys():
            if strangers := token_ids.keys() - scheduled.keys():
                raise ValueError(f"tokens for requests that this step did not have: {sorted(map(repr, strangers))}")
            awaited = self._awaited
            if self.ahead is None:  # the step is not counted yet
                pairs = zip(output.scheduled, scheduled.values(), strict=True)
                awaited = [each for each, num_new in pairs if each.num_computed_tokens + num_new == each.num_tokens]
            for request in awaited:
                if request.request_id not in token_ids and not request.status.is_finished:
                    raise ValueError(f"no token for request {request.request_id!r}, whose last token was computed")
        for token in token_ids.values():
            if type(token) is not int:
                raise TypeError(
                    f"a token id must be an int; got {type(token).__name__}: .tolist() or int() makes it one"
                )
            if token < 0:
                raise ValueError(f"a token id must be at least 0, got {token}")

    def append_token(self, request: Request, token: int) -> bool:
        """Put a token in its placeholder's stead; or, if the request was preempted, append the stale token.

        Returns:
            Whether it finishes the request: as FINISHED_STOPPED or FINISHED_LENGTH, by the rules of
            `Scheduler.update_from_output`; or as FINISHED_CAPACITY, if the whole pool cannot hold its tokens and the
            step `ahead` has passed it over for that.
        """
        raise NotImplementedError(
            "phase 12, task 2: One step late; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def cache_computed(self) -> None:
        """Cache the blocks that the outstanding step has filled with tokens which `schedule_running` did not know.

        A request that was preempted since has no blocks, and nothing of it is cached.
        """
        raise NotImplementedError(
            "phase 12, task 2: One step late; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def release(self, request: Request) -> None:
        """As `VllmOptionsScheduler.release`; a request without blocks has no placeholder.

        So a token that is on its way to it is stale if it was preempted, and dropped if it has finished.
        """
        raise NotImplementedError(
            "phase 12, task 2: One step late; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def recover(self) -> None:
        """As `VllmOptionsScheduler.recover`; both steps are given up, and tokens on their way are lost."""
        raise NotImplementedError(
            "phase 12, task 2: One step late; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    def check(self) -> None:
        """As `VllmOptionsScheduler.check`; and the running requests with a token on its way have a placeholder each.

        Raises:
            InvariantError: the books do not agree.
        """
        super().check()
        awaited = set(map(id, self._awaited)) if self.ahead is not None else set()
        for request in self._requests.values():
            expected = request.status is RequestStatus.RUNNING and id(request) in awaited
            if request.num_placeholders != expected:
                raise InvariantError(f"{request!r} has {request.num_placeholders} placeholders, should be {expected:d}")
