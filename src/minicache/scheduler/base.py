"""What every scheduler is: a waiting line, a batch, a pool of blocks, and the life of a request between them.

Phase 5 builds it. A server calls `schedule()`, runs the model on what the output says, and reports the new tokens to
`update_from_output()`; in between, requests come (`add_request`) and go (`abort_request`). The stages from `static` to
`fair` differ in `schedule()` alone: who is admitted, and what happens when memory runs out. Pure standard library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Required, TypedDict

from minicache.errors import InvariantError, RequestTooLargeError, require_count
from minicache.memory.blocks import BlockPool
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.output import SchedulerOutput


class SchedulerOptions(TypedDict, total=False):
    """The keyword arguments of `Scheduler`, which documents them."""

    num_blocks: Required[int]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None


class Scheduler(ABC):
    """Decides, step by step, which requests compute which tokens, and who owns which block.

    A step is `schedule()`, then `update_from_output()`. If the tokens of a step never come, because the model failed,
    `schedule()` may be called again: it orders the same work once more. (Copies are ordered once: blocks that a step
    swaps or copies must be moved even if its model then fails.)

    Args:
        num_blocks: blocks of the cache, ≥ 1.
        block_size: tokens of a block, ≥ 1.
        max_num_seqs: the most requests in the batch, ≥ 1.
        max_num_batched_tokens: the most tokens of one step, ≥ 1.
        max_model_len: the most tokens of one request, prompt and output together, ≥ 2. None: as many as fit.

    Attributes:
        pool: the `BlockPool`.
        waiting: id → request, for those that are not in the batch, the next one first.
        running: the batch, in order.
        max_num_seqs: as given.
        max_num_batched_tokens: as given.
        max_model_len: as given.
        first_come: whether the stage promises that nobody in `waiting` arrived before anybody ahead of it there, or in
            `running`. A stage with another order says False.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is out of its bounds.
    """

    first_come = True

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
        # Ordered, so that a request can leave from anywhere in the line and come back at its head, in constant time.
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.running: list[Request] = []
        self._requests: dict[RequestId, Request] = {}  # all that have not ended, waiting and running
        self._num_added = 0  # requests taken on so far: the next one's arrival_index
        self._issued: SchedulerOutput | None = None  # the step whose tokens are awaited

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, those swapped out included."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    def add_request(self, request: Request) -> None:
        """Take on a new request: number it (`arrival_index`: 0, 1, 2, …), and let it wait (`line_up`).

        From here on it is unfinished, and its id is taken. Once it has ended, another request may use the id.

        Args:
            request: a new one: WAITING, without a number (`arrival_index` −1), nothing computed, nothing generated.

        Raises:
            TypeError: it is no Request.
            ValueError: an unfinished request has the same id, or this one is not new. Nothing has changed.
            RequestTooLargeError: it can never be served; `check_size` says why. Nothing has changed, no number was
                used up, and the request may be given to another scheduler.
        """
        if not isinstance(request, Request):
            raise TypeError(f"a scheduler serves a Request(request_id, prompt_token_ids, max_tokens); got {request!r}")
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is here already: give every request an id of its own")
        new = request.status is RequestStatus.WAITING and request.arrival_index < 0
        if not new or request.num_computed_tokens or request.output_token_ids:
            raise ValueError(f"{request!r} has been given to a scheduler before: make a new Request")
        self.check_size(request)
        request.arrival_index = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self.line_up(request)

    def check_size(self, request: Request) -> None:
        """Raise unless the request can be served once it has the server to itself. Changes nothing.

        Its prompt must leave room for one more token within max_model_len, if there is one; it must fit into one step
        (max_num_batched_tokens); and what `blocks_to_admit` says must not be more than the whole pool, used or free.

        Raises:
            RequestTooLargeError: the message says which limit, and what to change.
        """
        name, num_prompt = f"request {request.request_id!r}", request.num_prompt_tokens
        if self.max_model_len is not None and num_prompt >= self.max_model_len:
            raise RequestTooLargeError(
                f"{name}: a prompt of {num_prompt} tokens leaves no room for an answer within max_model_len "
                f"{self.max_model_len}: shorten the prompt"
            )
        if num_prompt > self.max_num_batched_tokens:
            raise RequestTooLargeError(
                f"{name}: a prompt of {num_prompt} tokens does not fit into one step: shorten it, or raise "
                f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if (needed := self.blocks_to_admit(request)) > self.pool.num_blocks:
            raise RequestTooLargeError(
                f"{name} needs {needed} blocks and the whole pool has {self.pool.num_blocks}: "
                f"shorten it, or raise num_blocks"
            )

    @abstractmethod
    def blocks_to_admit(self, request: Request) -> int:
        """Blocks that the request must get when it is admitted. Changes nothing."""

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decide the next step: who is in the batch, and how many tokens each computes.

        Returns:
            The step's work. Give it back to `update_from_output` with the tokens that came of it.
        """

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """Record what a step computed, and end the requests that are done.

        For each request of the step that is still RUNNING, in batch order: as many of its tokens are computed now as
        the step scheduled. If any are left to compute, it is still in its prompt, and a token for it is ignored.
        Otherwise it gets the token that the model gave for it, at the end of output_token_ids. Then it ends

        - as FINISHED_STOPPED, if that is one of its stop_token_ids (and it does not ignore them: ignore_eos);
        - else as FINISHED_LENGTH, if it has max_tokens of output, or max_model_len of prompt and output together.

        Whoever ends leaves the batch and gives all blocks back (`release`); those who stay keep their order. Requests
        that were ended from outside since `schedule()` are passed over, and need no token.

        Args:
            output: what the last `schedule()` returned (see `issue`).
            token_ids: request id → the token generated for it, an int ≥ 0.

        Returns:
            The requests that have just ended, in batch order.

        Raises:
            ValueError: `output` is not the last one, or was reported before; a token is missing, is negative, or is for
                a request that the step did not have. Nothing has changed: the report may be made again, and right.
            TypeError: a token is not an int. Nothing has changed.
        """
        self._check_report(output, token_ids)
        self._issued = None
        ended = []
        running, max_model_len = RequestStatus.RUNNING, self.max_model_len
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            if request.status is not running:  # ended from outside
                continue
            # This loop and `order` are what a token costs: no properties here, and nothing is looked up twice.
            request.num_computed_tokens = num_computed = request.num_computed_tokens + num_new
            outputs = request.output_token_ids
            num_tokens = request.num_prompt_tokens + len(outputs)
            if num_computed < num_tokens:  # still in its prompt
                continue
            token = token_ids[request.request_id]
            outputs.append(token)
            if token in request.stop_token_ids and not request.ignore_eos:
                request.status = RequestStatus.FINISHED_STOPPED
            elif len(outputs) >= request.max_tokens or num_tokens + 1 == max_model_len:
                request.status = RequestStatus.FINISHED_LENGTH
            else:
                continue
            ended.append(request)
        if ended:
            self.running = [request for request in self.running if request.status is running]
            for request in ended:
                self._forget(request)
        return ended

    def abort_request(self, request_id: RequestId) -> bool:
        """End a request whose client has left, as FINISHED_ABORTED: see `finish_request`.

        Returns:
            Whether there was such a request: False, and nothing has changed, if no unfinished one has this id.
        """
        return self.finish_request(request_id, RequestStatus.FINISHED_ABORTED)

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """End a request from outside, waiting, running or swapped out: a stop string was found, its client has left.

        It leaves the line or the batch, in which the others keep their order, gives back all that it holds
        (`release`), and is unfinished no more. It keeps the tokens that it has. Any time will do, between `schedule()`
        and the report too.

        Args:
            request_id: which.
            status: how it ends, one of the FINISHED ones.

        Returns:
            Whether there was such a request: False, and nothing has changed, if no unfinished one has this id.

        Raises:
            ValueError: `status` is not an end. Nothing has changed.
        """
        if not status.is_finished:
            raise ValueError(f"{status.name} is not the end of a request")
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            del self.waiting[request_id]
        request.status = status
        self._forget(request)
        return True

    # What the stages are made of: for subclasses, not for servers.

    def line_up(self, request: Request, *, first: bool = False) -> None:
        """Let a request wait in `waiting`: at the end of the line, or `first`, as the next one.

        Args:
            request: one that is in neither queue.
            first: it has lost its place in the batch, and is to get the next that there is.
        """
        self.waiting[request.request_id] = request
        if first:
            self.waiting.move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        """Who is next in the waiting line, and stays there; None if nobody waits. Takes the same time in any line."""
        return next(iter(self.waiting.values()), None)

    def largest_chunk(self, num_tokens: int) -> int:
        """Of so many tokens that a request has left to compute, the most that a step may compute: here all of them.

        A step that has room for so many computes no fewer. A stage that computes prompts in pieces (phase 9) may set a
        limit of its own.
        """
        return num_tokens

    def issue(self, output: SchedulerOutput) -> SchedulerOutput:
        """Remember `output` as the step whose tokens are awaited: the last thing that every `schedule` does.

        `update_from_output` takes this one, once, and no other.

        Returns:
            `output`.
        """
        self._issued = output
        return output

    def release(self, request: Request) -> None:
        """Give the request's blocks back to the pool in one call, the last one first, and leave it without any.

        A request that holds none is left as it is.
        """
        if request.block_ids:
            self.pool.free(request.block_ids[::-1])
            request.block_ids = []

    def check(self) -> None:
        """Raise unless the scheduler's books agree. Takes time in proportion to the pool: it is for tests.

        Blocks: free + used = all, and each has as many owners as there are requests that list it. Requests: each is
        either in the batch and RUNNING, or in the line and WAITING or SWAPPED; who waits holds no block; who runs has
        blocks for what it has computed.

        Raises:
            InvariantError: they do not. The message names a request or a block.
        """
        self.pool.check()
        in_batch = {id(request) for request in self.running}
        in_line = {id(request) for request in self.waiting.values()}
        if len(in_batch) < len(self.running) or len(self.running) + len(self.waiting) != len(self._requests):
            raise InvariantError(
                f"{len(self._requests)} requests are unfinished, and {len(self.running)} in the batch, "
                f"{len(self.waiting)} waiting"
            )
        for request in self._requests.values():
            places = id(request) in in_batch, id(request) in in_line
            if places != (request.status is RequestStatus.RUNNING, request.status in _IN_LINE):
                raise InvariantError(f"{request!r} is in the batch: {places[0]}, in the line: {places[1]}")
            if request.status is not RequestStatus.RUNNING and request.block_ids:
                raise InvariantError(f"{request!r} waits and holds blocks {request.block_ids}")
            if request.num_computed_tokens > len(request.block_ids) * self.pool.block_size and places[0]:
                raise InvariantError(f"{request!r} has {len(request.block_ids)} blocks: too few for that")
        owners = Counter(block_id for request in self._requests.values() for block_id in request.block_ids)
        for block_id in range(self.pool.num_blocks):
            if owners[block_id] != self.pool.ref_count(block_id):
                counted = self.pool.ref_count(block_id)
                raise InvariantError(f"block {block_id} has {counted} owners, and {owners[block_id]} requests list it")

    def _check_report(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> None:
        """Raise unless `token_ids` is what the step that was last issued has to bring."""
        if output is not self._issued:
            raise ValueError("this output was reported before, or a later schedule() took its place")
        ordered = output.num_scheduled_tokens
        if token_ids.keys() != ordered.keys():  # seldom, and slower to look into than all the rest
            if strangers := token_ids.keys() - ordered.keys():
                raise ValueError(f"tokens for requests that this step did not have: {sorted(map(repr, strangers))}")
            for request in output.scheduled:
                request_id = request.request_id
                awaited = request.num_computed_tokens + ordered[request_id] == request.num_tokens
                if awaited and request.status is RequestStatus.RUNNING and request_id not in token_ids:
                    raise ValueError(f"no token for request {request_id!r}, which has computed its last one")
        for kind in set(map(type, token_ids.values())):
            if kind is not int:
                raise TypeError(f"a token id must be an int; got {kind.__name__}: .tolist() or int() makes it one")
        if token_ids and (lowest := min(token_ids.values())) < 0:
            raise ValueError(f"a token id must be at least 0, got {lowest}")

    def _forget(self, request: Request) -> None:
        """The end of a request that is in neither queue any more."""
        self.release(request)
        del self._requests[request.request_id]


_IN_LINE = (RequestStatus.WAITING, RequestStatus.SWAPPED)
