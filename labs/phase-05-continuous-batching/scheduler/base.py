# Phase 5, continuous-batching: your file. It stands in for minicache.scheduler.base.
# Write what raises NotImplementedError. `minicache grade 5` grades it, `minicache hint 5.K` helps with task K.
"""The base of every scheduler: a waiting queue, a batch, a pool of blocks, and the life cycle of a request.

Phase 5 builds it. An engine calls `schedule()`, runs the model on the scheduled tokens, and passes the generated tokens
to `update_from_output()`; between steps, requests arrive (`add_request`) and are aborted (`abort_request`). The stages
differ in which tokens of the batch are scheduled, which waiting requests join it, and what happens when memory runs
out: the hooks at the end of the class. Pure standard library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Required, TypedDict

from minicache.errors import InvariantError, RequestTooLargeError, require_count
from minicache.memory.blocks import BlockPool
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.queue import PriorityKey, RequestQueue


class SchedulerOptions(TypedDict, total=False):
    """The keyword arguments of `Scheduler`, which documents them."""

    num_blocks: Required[int]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None


class Scheduler(ABC):
    """Decides at every step which tokens of which requests are computed, and which request holds which block.

    A step is `schedule()`, the model, `update_from_output()`. If the step fails before its tokens are recorded, call
    `recover()`.

    Stages override methods and rely on these calls: `add_request` calls `register`, `admit` calls `schedule_tokens`,
    `abort_request` calls `finish_request`, and the blocks of every finished request are freed through `release`.

    Args:
        num_blocks: blocks of the cache, ≥ 1.
        block_size: tokens of a block, ≥ 1.
        max_num_seqs: batch slots, ≥ 1: the most requests in the batch.
        max_num_batched_tokens: the token budget of one step, ≥ 1.
        max_model_len: the most tokens of one request, prompt and output together, ≥ 2. None: as many as fit.

    Attributes:
        Options: a TypedDict of the stage's keyword arguments.
        pool: the `BlockPool`.
        waiting: the `RequestQueue` of requests without a batch slot: a mapping id → request, the next one first.
        running: the batch, in the order of `priority_key`.
        token_budget: tokens that the step being scheduled may still compute.
        outstanding: the last step, until it is committed; else None.
        max_num_seqs: as given.
        max_num_batched_tokens: as given.
        max_model_len: as given.
        host_pool: the `BlockPool` of the CPU swap space (phase 6); None without one.
        prefix_caching: whether there is a prefix cache (phase 8).
        first_come: whether the stage keeps the order of arrival: every request of `running` arrived before those of
            `waiting`, which are in order too. False for a stage with another order.
        chunks_prompts: whether a prompt may be longer than one step (phase 9).
        overlaps: whether `schedule()` may be called while a step is outstanding (phase 12).

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of its bounds.
    """

    Options: ClassVar[type] = SchedulerOptions
    host_pool: BlockPool | None = None
    prefix_caching = False
    first_come = True
    chunks_prompts = False
    overlaps = False

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
    ) -> None:
        require_count("max_num_seqs", max_num_seqs)
        require_count("max_num_batched_tokens", max_num_batched_tokens)
        if max_model_len is not None:
            require_count("max_model_len", max_model_len, at_least=2)
        self.pool = BlockPool(num_blocks, block_size)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting = RequestQueue(self.priority_key)
        self.running: list[Request] = []
        self.token_budget = max_num_batched_tokens
        self.outstanding: SchedulerOutput | None = None
        self._requests: dict[RequestId, Request] = {}  # all unfinished ones: those of `waiting` and `running`
        self._num_added = 0  # requests registered so far: the next one's arrival_index

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a batch slot, those swapped out included."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    def add_request(self, request: Request) -> None:
        """Register a new request (`register`), and add it to the waiting queue.

        Args:
            request: a new one: WAITING, without a number (`arrival_index` −1), nothing computed, nothing generated.

        Raises:
            TypeError, ValueError, RequestTooLargeError: as `register`. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    def register(self, request: Request) -> None:
        """Check a new request and number it (`arrival_index`: 0, 1, 2, …), without queueing it.

        It is then unfinished and its id is in use. Once it has finished, another request may have the id.

        Args:
            request: as for `add_request`.

        Raises:
            TypeError: it is not a Request.
            ValueError: an unfinished request has the same id, or this one is not new. Nothing has changed.
            RequestTooLargeError: it can never be served (`check_size`). Nothing has changed, no number was used, and
                the request may be given to another scheduler.
        """
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    def check_size(self, request: Request) -> None:
        """Raise unless the request can be served when it is alone on the server. Changes nothing.

        Its prompt must leave space for one more token within max_model_len, if there is one; it must fit into one step
        (max_num_batched_tokens), unless the stage computes prompts in chunks (`chunks_prompts`); and `blocks_to_admit`
        must not exceed the whole pool, used or free.

        Raises:
            RequestTooLargeError: the message names the limit (max_model_len, max_num_batched_tokens or blocks), and
                what to change.
        """
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: which requests are computed, and how many tokens of each.

        The step begins with the whole token budget. Requests of the batch come first (`schedule_running`), then waiting
        ones (`schedule_waiting`), if there are any and the stage admits requests in this step (`may_admit`). If the
        previous step had work and was never committed, it has failed and is given up first (`recover`).

        Returns:
            The step's work. Pass it to `update_from_output` with the generated tokens.
        """
        if self.outstanding is not None and self.outstanding.has_work:
            self.recover()
        output = SchedulerOutput()
        self.token_budget = self.max_num_batched_tokens
        self.schedule_running(output)
        if len(self._requests) > len(self.running) and self.may_admit(output):  # some request waits
            self.schedule_waiting(output)
        self.outstanding = output
        return output

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """Commit a step: record what it computed, and finish the requests that are done.

        For each request of the step that is still RUNNING, in batch order: num_computed_tokens grows by the number that
        the step scheduled. If tokens are left to compute, it is still in prefill, and a token for it is ignored.
        Otherwise the token generated for it is appended to output_token_ids. Then it is finished

        - as FINISHED_STOPPED, if the token is one of its stop_token_ids and ignore_eos is false;
        - else as FINISHED_LENGTH, if it has max_tokens of output, or max_model_len of prompt and output together.

        Finished requests leave the batch and their blocks are freed (`release`); the others keep their order. Requests
        that were finished from outside since `schedule()` are skipped, and need no token. The time is proportional to
        the batch, however many finish.

        Args:
            output: what the last `schedule()` returned.
            token_ids: request id → the token generated for it, an int ≥ 0.

        Returns:
            The requests that have just finished, in batch order.

        Raises:
            ValueError: `output` is not the last one, or was committed before; a token is missing, is negative, or is
                for a request that the step did not have. Nothing has changed: correct the tokens and call again.
            TypeError: a token is not an int; a bool or a tensor does not count as one. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    def recover(self) -> None:
        """Discard what is computed: a step failed, and its copies and KV entries may or may not have been written.

        Every request of the batch goes back to the waiting queue, counted as preempted (`num_preemptions`). Then every
        request of the queue starts over (`restart`), swapped-out ones too. Tokens already generated stay. No step is
        outstanding any more. Steps fail rarely, so recovery need not be fast; it must be right.
        """
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    def abort_request(self, request_id: RequestId) -> bool:
        """Finish a request whose client has left, as FINISHED_ABORTED: see `finish_request`.

        Returns:
            Whether there was such a request: False, and nothing has changed, if no unfinished one has this id.
        """
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """Finish a request from outside, waiting, running or swapped out: a stop string was found, or its client left.

        It leaves the queue or the batch, in which the others keep their order; then it gets its status; then its blocks
        are freed (`release`, which may read the status); then its id is free. It keeps its tokens. A commit finishes
        requests in the same order. May be called at any time. Between `schedule()` and the model, the step must still
        be computed as scheduled: another request may share a block that this one fills.

        Args:
            request_id: the request's id.
            status: its final status, one of the FINISHED ones.

        Returns:
            Whether there was such a request: False, and nothing has changed, if no unfinished one has this id.

        Raises:
            ValueError: `status` is not a FINISHED one. Nothing has changed.
        """
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    # The hooks that stages override: for subclasses, not for servers.

    def priority_key(self, request: Request) -> PriorityKey:
        """The key by which `waiting` and `running` are ordered, the lowest first: arrival. Keys are unique."""
        return request.arrival_index, request.fork_index

    def head(self) -> Request | None:
        """The next waiting request to be admitted, which stays in the queue; None if there is none."""
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    @abstractmethod
    def blocks_to_admit(self, request: Request) -> int:
        """Blocks for all tokens that must be stored before the request can generate its next one. Changes nothing."""

    @abstractmethod
    def schedule_running(self, output: SchedulerOutput) -> None:
        """Schedule tokens of the requests in the batch."""

    @abstractmethod
    def may_admit(self, output: SchedulerOutput) -> bool:
        """Whether waiting requests may join the batch in this step."""

    @abstractmethod
    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit waiting requests, from the `head` on, while they fit."""

    def blocks_missing(self, request: Request) -> int:
        """Blocks that the request still needs before its next tokens are computed."""
        return self.blocks_to_admit(request) - len(request.block_ids)

    def largest_chunk(self, num_tokens: int) -> int:
        """The most of a request's `num_tokens` uncomputed tokens that one step may compute: here all of them.

        If the budget suffices, the step computes exactly this many. Phase 9 sets a limit.
        """
        return num_tokens

    def admit(self, request: Request, output: SchedulerOutput) -> None:
        """Move a request from the waiting queue into the batch, at its `priority_key`.

        Its `blocks_missing` are allocated and appended to its blocks, it is RUNNING, and its tokens are scheduled in
        this step (`schedule_tokens`).

        Args:
            request: in `waiting`. Its blocks are free.
            output: the step so far, to which it is added.
        """
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    def schedule_tokens(self, request: Request, output: SchedulerOutput) -> None:
        """Schedule all uncomputed tokens of the request, and subtract them from the `token_budget`.

        Args:
            request: of the batch, and not in the step yet.
            output: the step so far; the request and its number of tokens are added.
        """
        raise NotImplementedError(
            "phase 5, task 1: Into the queue, into the batch; read docs/en/phase-05-continuous-batching/lab/00-the-scheduler.md"
        )

    def restart(self, request: Request) -> None:
        """Reset a request outside the batch: it holds no blocks, nothing is computed, and it is WAITING."""
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    def release(self, request: Request) -> None:
        """Free the request's blocks in one call, the last one first, and clear its `block_ids`.

        Does nothing for a request without blocks.
        """
        raise NotImplementedError(
            "phase 5, task 2: Commit a step, or recover; read docs/en/phase-05-continuous-batching/lab/01-commit-or-recover.md"
        )

    def check(self) -> None:
        """Raise unless the scheduler's state is consistent. Takes time proportional to the pool: it is for tests.

        Blocks: free + used = all, and each has as many references as there are requests that list it. Requests: each
        is either in the batch and RUNNING, or in the queue and WAITING or SWAPPED; a waiting one holds no block; a
        running one has blocks for what it has computed.

        Raises:
            InvariantError: the state is not consistent. The message names a request or a block.
        """
        self.pool.check()
        in_batch = {id(request) for request in self.running}
        in_queue = {id(request) for request in self.waiting.values()}
        if len(in_batch) < len(self.running) or len(self.running) + len(self.waiting) != len(self._requests):
            raise InvariantError(
                f"{len(self._requests)} requests are unfinished, but {len(self.running)} are in the batch and "
                f"{len(self.waiting)} waiting"
            )
        for request in self._requests.values():
            places = id(request) in in_batch, id(request) in in_queue
            if places != (request.status is RequestStatus.RUNNING, request.status in _IN_QUEUE):
                raise InvariantError(f"{request!r} is in the batch: {places[0]}, in the queue: {places[1]}")
            if request.status is not RequestStatus.RUNNING and any(request.group_block_ids):
                raise InvariantError(f"{request!r} is waiting and holds blocks {request.group_block_ids}")
            if request.num_computed_tokens > len(request.block_ids) * self.pool.block_size and places[0]:
                raise InvariantError(
                    f"{request!r} has {len(request.block_ids)} blocks: too few for its computed tokens"
                )
        tables = [table for request in self._requests.values() for table in request.group_block_ids]
        references = Counter(block_id for table in tables for block_id in table)
        for block_id in range(self.pool.num_blocks):
            if references[block_id] != self.pool.ref_count(block_id):
                counted, listed = self.pool.ref_count(block_id), references[block_id]
                raise InvariantError(f"block {block_id} has {counted} references, but {listed} requests list it")


_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.SWAPPED)
