# Phase 12, production-defaults: your file. It stands in for minicache.scheduler.async_chunked.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
#
# Predict, before you write task 12.1. `minicache grade` checks it, without points.
# Blocks have 4 slots. A request has a prompt of 8 tokens and max_tokens 5, and every step is scheduled before the one
# before it is committed. How many blocks does it hold after the second schedule()?
# 12.1a =
# What is its num_computed_tokens after the third schedule(), before step 2 is committed?
# 12.1b =
# It never stops early. Which schedule(), counted from 1, is the first to give it no token?
# 12.1c =
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
        awaited: once the outstanding step is counted (`count`), the requests that it generates a token for, in batch
            order. They stay here if they are preempted, or finished from outside.
    """

    overlaps = True

    def __init__(self, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        self.ahead: SchedulerOutput | None = None
        self.awaited: list[Request] = []
        self._capacity = self.pool.num_blocks * self.pool.block_size  # tokens of the whole pool
        self._longest = min(self.max_model_len or sys.maxsize, self._capacity + 1)  # with so many tokens, it ends

    # Ahead of the tokens

    def schedule(self) -> SchedulerOutput:
        """As `VllmOptionsScheduler.schedule`; but an outstanding step is counted (`count`), and stays outstanding.

        It is not given up: that a step has failed is not known here. Then `recover` is called. A step without work is
        one too.

        Returns:
            The step's work. If another step is outstanding, it is the one `ahead`; else it is outstanding itself.

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
        noted in `awaited`, in batch order.

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
        num_new = min(self.num_uncomputed(request), self._max_chunk, self.token_budget)
        if not num_new:
            return 0
        missing = -(-(request.num_computed_tokens + num_new) // self.pool.block_size) - len(request.block_ids)
        return missing + len(self.written_and_shared(request)) if self._may_share_tails else missing

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_tokens`, for a chunk of `num_uncomputed` tokens."""
        num_new = min(self.num_uncomputed(request), self._max_chunk, self.token_budget)
        if num_new:
            output.num_scheduled_tokens[request.request_id] = num_new
            output.scheduled.append(request)
            self.token_budget -= num_new

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_running`; but blocks are cached at once (`cache_known`), and none is noted.

        A note says that all tokens of a block are known. With a placeholder in it, that is not so.
        """
        super().schedule_running(output)
        self._filled.clear()
        if self.prefix_caching:
            self.cache_known(output)

    def cache_known(self, output: SchedulerOutput) -> None:
        """Cache the blocks whose tokens are all known by now, and computed when the step has run (`cache_blocks`).

        For each request of the step these are its full blocks before the end of its chunk, and before its placeholder,
        which is not hashed. So a block that a step fills with a placeholder is cached by the next call. The time does
        not depend on how many tokens a request has: a block is not cached again in every step.

        Args:
            output: the step, with the requests of the batch.
        """
        raise NotImplementedError(
            "phase 12, task 1: Ahead of the tokens; read docs/en/phase-12-production-defaults/lab/00-one-step-ahead.md"
        )

    # One step late

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """Commit the oldest outstanding step; the step `ahead`, if there is one, is then the outstanding one.

        A step is counted once (`count`): by the `schedule()` that ran ahead of it, or here, if none did.

        Each request that the step generates a token for (`awaited`), and that has not finished since, gets it
        (`append_token`). A request that has been preempted since gets its stale token too, and no counter of it
        changes. Requests that finish with their token leave the batch, or the waiting queue; they are released, and
        their ids are free again (`_forget`). The others keep their order.

        Blocks that the step has filled are cached (`cache_computed`), those of requests that finish now included.

        Args:
            output: the oldest outstanding step.
            token_ids: as for `Scheduler.update_from_output`. Tokens for requests that have finished since, and for
                those with prompt left to compute, are ignored.

        Returns:
            The requests that have just finished, in batch order. They hold nothing, though the step `ahead` may compute
            them.

        Raises:
            ValueError, TypeError: as `check_commit`. Nothing has changed.
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
            awaited = self.awaited
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
        """Replace a placeholder by its token; or, if the request was preempted, append the stale token.

        Returns:
            Whether it finishes the request: as FINISHED_STOPPED or FINISHED_LENGTH, by the rules of
            `Scheduler.update_from_output`; or as FINISHED_CAPACITY, if the whole pool cannot hold its tokens and the
            step `ahead` has passed it over for that. It is then still in the batch or the queue, with all that it has.
        """
        request.num_placeholders = 0
        request.output_token_ids.append(token)
        if token in request.stop_token_ids and not request.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
        elif len(request.output_token_ids) >= request.max_tokens or request.num_tokens == self.max_model_len:
            request.status = RequestStatus.FINISHED_LENGTH
        elif self.ahead is not None and request.num_tokens > self._capacity:
            request.status = RequestStatus.FINISHED_CAPACITY
        return request.status.is_finished

    def cache_computed(self) -> None:
        """Cache the blocks that the outstanding step has filled with tokens which `cache_known` did not know.

        The step is counted, and its requests still have their blocks. One that was preempted since has none, and
        nothing of it is cached.
        """
        for request in self.awaited if self.prefix_caching else ():
            num_computed = request.num_computed_tokens
            if request.status is RequestStatus.RUNNING and num_computed % self.pool.block_size == 0:
                self.cache_blocks(request, num_computed - 1, num_computed)

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
        awaited = set(map(id, self.awaited)) if self.ahead is not None else set()
        for request in self._requests.values():
            expected = request.status is RequestStatus.RUNNING and id(request) in awaited
            if request.num_placeholders != expected:
                raise InvariantError(f"{request!r} has {request.num_placeholders} placeholders, should be {expected:d}")
