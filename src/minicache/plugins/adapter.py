"""Our scheduler inside an engine that has requests, a KV cache and a loop of its own. Phase 11 builds it.

    engine's loop:   schedule ──▶ forward pass, sampling ──▶ its own bookkeeping ──▶ schedule ──▶ …
    the adapter:     commit the last step, schedule the next, translate in both directions

The engine here is `transformers`' continuous batching, and the names are its names (`minicache.plugins.transformers`
plugs the adapter in); this module imports nothing of it, and works with any objects that have the same attributes. The
engine's cache has as many blocks as our pool: our scheduler decides *how many* blocks a request holds, the engine
*which*. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from minicache.errors import PluginError, RequestTooLargeError
from minicache.request import Request, RequestId
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class EngineRequest(Protocol):
    """The engine's own record of a request: `transformers`' RequestState, as far as the adapter uses it.

    Attributes:
        request_id: its id, in the engine and in our scheduler.
        initial_tokens: the prompt.
        max_new_tokens: the most tokens to generate; None: no limit.
        generated_tokens: the tokens generated so far. The engine appends to it after each forward pass.
        tokens_to_process: the tokens that the next forward pass computes. The adapter writes it.
        remaining_prefill_tokens: the known tokens after those, which later steps compute; if empty, the forward pass
            yields a new token. The adapter writes it.
        position_offset: how many of its tokens have keys and values in the engine's cache, so the position of the first
            of tokens_to_process. The engine advances it by the tokens of each step.
    """

    request_id: str
    initial_tokens: list[int]
    max_new_tokens: int | None
    generated_tokens: list[int]
    tokens_to_process: list[int]
    remaining_prefill_tokens: list[int]
    position_offset: int


class EngineCache(Protocol):
    """The engine's own KV cache: `transformers`' PagedAttentionCache, as far as the adapter uses it."""

    def can_store_request_tokens(self, state: EngineRequest, request_len: int, /) -> bool:
        """Allocate the blocks that a request lacks for its next `request_len` tokens, from position_offset on.

        Returns:
            Whether there were enough free blocks. If not, nothing was allocated.
        """
        ...

    def free_blocks(self, request_id: str, /) -> None:
        """Free all blocks of a request, if it has any."""
        ...


class Batch(NamedTuple):
    """The decisions of `SchedulerAdapter.schedule`, in the engine's terms.

    Attributes:
        scheduled: for each request of the step, in the scheduler's order, the engine's record and how many tokens it
            computes.
        preempted: the engine's records of the requests that lost their batch slot and their blocks.
    """

    scheduled: list[tuple[EngineRequest, int]]
    preempted: list[EngineRequest]


class SchedulerAdapter:
    """Lets a scheduler of minicache decide for an engine.

    For each request there are two records: the scheduler's `Request`, and the engine's state. The scheduler writes the
    first, the engine the second, and the adapter carries news between them. Between two steps, for every unfinished
    request, after `commit`:

        request.output_token_ids == state.generated_tokens
        request.num_computed_tokens == state.position_offset

    Args:
        scheduler: of any stage, without requests. Its pool is as large as the engine's cache, and its preemption is by
            recompute: the engine swaps nothing out.
        cache: the engine's.

    Attributes:
        scheduler: as given.
        cache: as given.
        states: id → the engine's record, of every request that is unfinished for the scheduler.
        output: the step that the engine is computing or has just computed; None if there is none to commit.
        max_tokens_per_request: the most tokens of a request that fit, prompt and output together: the whole pool; and
            at most what a step computes (max_num_batched_tokens), if the scheduler computes prompts in one step: after
            a preemption it computes prompt and output in one step too, and the engine's input buffers end there.
    """

    def __init__(self, scheduler: Scheduler, cache: EngineCache) -> None:
        self.scheduler = scheduler
        self.cache = cache
        self.states: dict[str, EngineRequest] = {}
        self.output: SchedulerOutput | None = None
        self.max_tokens_per_request = scheduler.pool.num_blocks * scheduler.pool.block_size
        if not scheduler.chunks_prompts:
            self.max_tokens_per_request = min(self.max_tokens_per_request, scheduler.max_num_batched_tokens)

    def add(self, state: EngineRequest, stop_token_ids: Iterable[int] = ()) -> None:
        """Add a new request of the engine to the scheduler, as a `Request`.

        It has the engine's id, prompt and limit, and finishes at one of `stop_token_ids`, as it does in the engine. So
        both detect after the same token that a request has finished.

        Args:
            state: a new one, with nothing generated.
            stop_token_ids: the tokens after which the engine finishes it, ≥ 0.

        Raises:
            RequestTooLargeError: the request has no limit, or with all of its tokens it would not fit
                (`max_tokens_per_request`); or the scheduler refuses it. Nothing has changed.
        """
        if state.max_new_tokens is None:
            raise RequestTooLargeError(f"request {state.request_id!r} may grow without end: give it max_new_tokens")
        num_tokens = len(state.initial_tokens) + state.max_new_tokens
        if num_tokens > self.max_tokens_per_request:
            raise RequestTooLargeError(
                f"request {state.request_id!r} may have {num_tokens} tokens, prompt and output, and at most "
                f"{self.max_tokens_per_request} fit: shorten it, or give the engine more memory or a larger batch"
            )
        request = Request(
            state.request_id, state.initial_tokens, state.max_new_tokens, stop_token_ids=frozenset(stop_token_ids)
        )
        self.scheduler.add_request(request)
        self.states[state.request_id] = state

    def abort(self, request_id: str) -> None:
        """End a request that has not finished by its own tokens: it failed, or its client has disconnected.

        May be called at any time, also between a step's `schedule` and its `commit`. An unknown id is ignored.
        """
        if self.states.pop(request_id, None) is not None:
            self.scheduler.abort_request(request_id)

    def commit(self) -> list[str]:
        """Commit the last step's tokens to the scheduler, if there is a step to commit.

        The engine does not pass on the tokens that it sampled: it has appended them to its records. A request of the
        step that is unfinished (`abort` may have come in between) and whose last known token was computed has one token
        more there than in the scheduler; one that is still in its prompt, or recomputes what it lost, has none.
        Requests that the scheduler finishes with these tokens leave `states`.

        Returns:
            The ids of the requests that have just finished, in batch order. Empty if there was no step.

        Raises:
            PluginError: a token is missing, as the engine schedules a step before it knows the tokens of the last one.
                Nothing has changed.
        """
        if self.output is None:
            return []
        tokens: dict[RequestId, int] = {}
        for request, num_new in zip(self.output.scheduled, self.output.num_scheduled_tokens.values(), strict=True):
            if request.status.is_finished or request.num_computed_tokens + num_new < request.num_tokens:
                continue
            request_id = str(request.request_id)
            generated = self.states[request_id].generated_tokens
            if len(generated) != len(request.output_token_ids) + 1:
                raise PluginError(
                    f"request {request_id!r} has {len(generated)} tokens in the engine and should have "
                    f"{len(request.output_token_ids) + 1}: the engine must not schedule ahead of its tokens"
                )
            tokens[request_id] = generated[-1]
        finished = [str(request.request_id) for request in self.scheduler.update_from_output(self.output, tokens)]
        self.output = None
        for request_id in finished:
            del self.states[request_id]
        return finished

    def schedule(self) -> Batch:
        """Let the scheduler decide the next step, and prepare the engine for it.

        The last step is committed first, if it was not yet. Then, for the scheduler's next step:

        1. Each preempted request loses its blocks in the engine's cache, and its position there: it will be computed
           from its first token on.
        2. Each scheduled request, in order, gets the tokens that this step computes (`tokens_to_process`) and those
           that later steps will (`remaining_prefill_tokens`), and blocks for the former. The scheduler's `Request` has
           both, prompt and output alike.

        Returns:
            The step. It is kept in `output`, to be committed once the engine has computed it.

        Raises:
            PluginError: the last step cannot be committed, or the engine has no blocks for a request that the
                scheduler has allocated blocks for.
        """
        self.commit()
        self.output = self.scheduler.schedule()
        preempted = [self.states[str(request_id)] for request_id in self.output.preempted]
        for state in preempted:
            self.cache.free_blocks(state.request_id)
            state.position_offset = 0
        scheduled = []
        for request, num_new in zip(self.output.scheduled, self.output.num_scheduled_tokens.values(), strict=True):
            state = self.states[str(request.request_id)]
            end = request.num_computed_tokens + num_new
            state.tokens_to_process = request.token_ids(request.num_computed_tokens, end)
            state.remaining_prefill_tokens = request.token_ids(end, request.num_tokens)
            if not self.cache.can_store_request_tokens(state, num_new):
                raise PluginError(f"the engine's cache has too few free blocks for request {state.request_id!r}")
            scheduled.append((state, num_new))
        return Batch(scheduled, preempted)
