"""A request: its client's parameters, and the server's progress with it.

Every scheduler, the engine and the simulator use this class. The client's parameters never change; the scheduler
updates the rest, which any code may read. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from math import isfinite
from typing import Final

from minicache.errors import require_count

RequestId = Hashable
"""The id of a request: a string, an int, or any other key of a dict."""


class RequestStatus(Enum):
    """The state of a request."""

    WAITING = "waiting"
    """In the queue, without memory: new, or preempted by recompute."""
    RUNNING = "running"
    """In the batch, with memory."""
    SWAPPED = "swapped"
    """In the queue, its keys and values in CPU swap space: preempted by swap."""
    FINISHED_STOPPED = "finished_stopped"
    """The model generated one of its stop tokens, or its text contains a stop string."""
    FINISHED_LENGTH = "finished_length"
    """It has max_tokens of output, or is as long as the model allows."""
    FINISHED_CAPACITY = "finished_capacity"
    """It has outgrown the whole cache."""
    FINISHED_ABORTED = "finished_aborted"
    """Its client has left."""
    FINISHED_ERROR = "finished_error"
    """Its logits gave no token, or the tokenizer could not decode its tokens."""

    @property
    def is_finished(self) -> bool:
        """Whether this is one of the FINISHED states."""
        return self in _REASONS

    @property
    def finish_reason(self) -> str | None:
        """Why the request has finished: "stop", "length", "capacity", "abort" or "error"; None if it has not."""
        return _REASONS.get(self)


_REASONS: Final = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_CAPACITY: "capacity",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


class Request:
    """A client's parameters, and the progress of the request.

    Args:
        request_id: unique among the unfinished requests of a scheduler.
        prompt_token_ids: the prompt, at least one token id ≥ 0.
        max_tokens: the most tokens to generate, ≥ 1.
        stop_token_ids: generating one of these finishes the request; the token stays in the output.
        ignore_eos: generate max_tokens tokens and ignore stop_token_ids.
        priority: lower values are served first, by a scheduler with priorities.
        arrival_time: seconds, on any one clock.
        group: its compatibility class: only requests of one class may share a batch, for a scheduler with such classes.
        cache_salt: requests with different salts never share cached blocks (phase 8).
        adapter: the adapter of the weights that computes it, by name (LoRA; Hu et al. 2021); None: the base
            weights. Requests with different adapters share no cached blocks. `LLM` has no adapters.

    Attributes:
        status: its state.
        output_token_ids: the tokens generated so far.
        arrival_index: its number in the order of arrival at its scheduler, from 0; −1 before.
        num_computed_tokens: tokens whose keys and values are in the cache. A request in decode has one token more: the
            newest, which the next step computes.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache and not computed (phase 8).
        num_preemptions: how often it was preempted.
        num_outputs_at_admission: tokens of output that it had when it was last admitted (phase 9); a fork's is 0.
        block_ids: the blocks that hold its keys and values, in order; position p is in block_ids[p // block_size].
            With several groups of layers, the first group's.
        other_block_ids: the same of the other groups (phase 12), a list each.
        host_block_ids: while it is swapped out, the blocks of the CPU swap space that hold them.
        block_hashes: the hashes of its first full blocks (phase 8), as many as were needed so far.
        fork_index: n for the n-th fork of its scheduler (phase 8); 0 if it is none.
        num_placeholders: 1 while it runs and its newest token is counted on, and not known yet (phase 12); else 0.
        draft_token_ids: draft tokens that the current step verifies (`minicache.scheduler.speculative`); else empty.

    Raises:
        TypeError: an argument has the wrong type; an id that cannot be a dict's key, or a group, a salt or an adapter
            that is not a string.
        ValueError: an empty prompt, a negative token id, max_tokens below 1, or an arrival time that is not finite.
    """

    __slots__ = (
        "adapter",
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "draft_token_ids",
        "fork_index",
        "group",
        "host_block_ids",
        "ignore_eos",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_outputs_at_admission",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "other_block_ids",
        "output_token_ids",
        "priority",
        "prompt_token_ids",
        "request_id",
        "status",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        arrival_time: float = 0.0,
        group: str = "text",
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> None:
        hash(request_id)  # raises TypeError if it cannot be a key
        prompt, stops = list(prompt_token_ids), frozenset(stop_token_ids)
        require_count("max_tokens", max_tokens)
        if not prompt:
            raise ValueError(f"request {request_id!r} has an empty prompt: it needs at least one token")
        for token in (*prompt, *stops):
            if type(token) is not int or token < 0:
                require_count("a token id", token, at_least=0)
        if type(priority) is not int:
            raise TypeError(f"priority must be an int, got {priority!r}")
        if not isinstance(group, str):
            raise TypeError(f"group must be a string, got {group!r}")
        for name, key in (("cache_salt", cache_salt), ("adapter", adapter)):
            if key is not None and not isinstance(key, str):
                raise TypeError(f"{name} must be a string or None, got {key!r}")
        if not isfinite(arrival_time):
            raise ValueError(f"arrival_time must be finite seconds, got {arrival_time!r}")
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.stop_token_ids = stops
        self.ignore_eos = ignore_eos
        self.priority = priority
        self.arrival_time = arrival_time
        self.group = group
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.status = RequestStatus.WAITING
        self.output_token_ids: list[int] = []
        self.arrival_index = -1
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_outputs_at_admission = 0
        self.block_ids: list[int] = []
        self.other_block_ids: Sequence[list[int]] = ()
        self.host_block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.fork_index = 0
        self.num_placeholders = 0
        self.draft_token_ids: list[int] = []

    def child(self, request_id: RequestId) -> Request:
        """A new request with the same parameters, under another id."""
        return Request(
            request_id,
            self.prompt_token_ids,
            self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            arrival_time=self.arrival_time,
            group=self.group,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )

    @property
    def num_tokens(self) -> int:
        """Its tokens: the prompt and the generated ones."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def finish_reason(self) -> str | None:
        """Why it has finished: "stop", "length", "capacity", "abort" or "error"; None if it has not."""
        return self.status.finish_reason

    @property
    def group_block_ids(self) -> list[list[int]]:
        """Its block tables, one for each group of layers (phase 12); the first is `block_ids`.

        In a group with a window, an entry is −1 where no later token sees the block: it has gone back to the pool.
        """
        return [self.block_ids, *self.other_block_ids]

    @group_block_ids.setter
    def group_block_ids(self, tables: list[list[int]]) -> None:
        self.block_ids, *self.other_block_ids = tables

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The tokens at positions start … stop − 1 of prompt, output and draft tokens together.

        Args:
            start: 0 … stop.
            stop: start … num_tokens, plus the number of draft tokens.

        Raises:
            IndexError: `start` or `stop` is out of range. Negative positions do not count from the end.
        """
        prompt, outputs = self.num_prompt_tokens, self.output_token_ids
        if self.draft_token_ids:
            outputs = outputs + self.draft_token_ids
        if not 0 <= start <= stop <= prompt + len(outputs):
            raise IndexError(f"no tokens {start} … {stop - 1}: request {self.request_id!r} has {self.num_tokens}")
        if start >= prompt:  # a decode step, on every token: no copy of the prompt
            return outputs[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:stop] + outputs[: max(0, stop - prompt)]

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_prompt_tokens} + "
            f"{len(self.output_token_ids)}/{self.max_tokens} tokens, {self.num_computed_tokens} computed"
            f"{', and a placeholder' if self.num_placeholders else ''})"
        )
