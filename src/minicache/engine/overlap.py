"""The engine's loop with asynchronous scheduling: while the model runs step n, step n + 1 is scheduled.

    the engine's thread    schedule n + 1 │ commit n − 1, emit │ schedule n + 2 │ commit n, emit
    the worker's thread         model n, pick n                │     model n + 1, pick n + 1

`minicache.scheduler.async_chunked` decides the steps, with placeholders for tokens that are not known. Here is the side
that knows them: a step is copied when it is scheduled (`ScheduledRequest`), because the scheduler goes on; the worker
puts the tokens of the step before into the copies, and runs the steps one after the other. No phase builds this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import cast

from minicache.engine.answers import Answer, Chunk, TokenLogprobs
from minicache.engine.logprobs import token_logprobs
from minicache.engine.loop import EngineLoop
from minicache.engine.options import EngineOptions
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import SchedulerOutput


def require_overlap(options: EngineOptions) -> None:
    """Refuse an engine's options that do not go together with asynchronous scheduling.

    Args:
        options: of the engine, with async_scheduling.

    Raises:
        ValueError: which, and what to do.
    """
    scheduler: object = options.scheduler
    if scheduler not in ("chunked", "async") and not getattr(scheduler, "overlaps", False):
        name = repr(scheduler) if isinstance(scheduler, str) else type(scheduler).__name__
        raise ValueError(
            f"async_scheduling: the scheduler {name} cannot schedule while a step is outstanding: take "
            f'"chunked", or leave out async_scheduling'
        )
    if options.cache != "paged":
        raise ValueError(f'async_scheduling: a cache {options.cache!r} has no blocks to schedule ahead: take "paged"')
    if options.tensor_parallel_size != 1:
        raise ValueError(
            f"async_scheduling: a model on {options.tensor_parallel_size} processes runs one step at a time: leave out "
            f"tensor_parallel_size or async_scheduling"
        )
    if options.speculative is not None:
        raise ValueError(
            "async_scheduling: how many draft tokens are accepted is not known when the next step is scheduled: leave "
            "out speculative or async_scheduling"
        )


class ScheduledRequest:
    """A request as it was when its step was scheduled: the attributes that `run_model` reads of a `Request`.

    Args:
        request: of the step that `schedule()` has just returned.
        num_new: how many tokens it computes.

    Attributes:
        request: as given.
        request_id: its id.
        num_computed_tokens: where the step's tokens begin.
        num_tokens: its tokens, the placeholder included.
        block_ids: its blocks.
        draft_token_ids: none.
        inputs: the tokens that the step computes. In the placeholder's position there is 0, until it is known.
        num_unknown: 1 if there is one, else 0.
    """

    __slots__ = (
        "block_ids",
        "draft_token_ids",
        "inputs",
        "num_computed_tokens",
        "num_tokens",
        "num_unknown",
        "request",
        "request_id",
    )

    def __init__(self, request: Request, num_new: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.num_computed_tokens = start = request.num_computed_tokens
        self.block_ids = request.block_ids.copy()
        self.draft_token_ids: Sequence[int] = ()
        self.num_unknown = request.num_placeholders
        self.num_tokens = request.num_prompt_tokens + len(request.output_token_ids) + self.num_unknown
        self.inputs = [0] if self.num_unknown else request.token_ids(start, start + num_new)

    @property
    def output_token_ids(self) -> list[int]:
        """Its tokens of output, the placeholder's included: what a constraint reads."""
        num_known = self.num_tokens - self.num_unknown - self.request.num_prompt_tokens
        known = self.request.output_token_ids[:num_known]  # the commit may have added to them
        return [*known, *self.inputs] if self.num_unknown else known

    def token_ids(self, start: int, stop: int) -> list[int]:
        """As `Request.token_ids`, of the tokens that the step computes."""
        start, stop = start - self.num_computed_tokens, stop - self.num_computed_tokens
        if not 0 <= start <= stop <= len(self.inputs):
            raise IndexError(f"request {self.request_id!r} computes {len(self.inputs)} tokens in this step")
        return self.inputs[start:stop]

    def __repr__(self) -> str:
        return f"ScheduledRequest({self.request!r})"


@dataclass(slots=True, eq=False)
class Flight:
    """A step from its schedule to its commit.

    Attributes:
        output: of `schedule()`.
        work: the same, of `ScheduledRequest`s.
        unknown: requests of `work` whose token is that of the step before.
        rows: of `work`, those that get a token.
        answers: of these.
        places: how many tokens of output these have before it.
        future: the worker's result; None for a step without work.
    """

    output: SchedulerOutput
    work: SchedulerOutput
    unknown: list[ScheduledRequest]
    rows: list[int]
    answers: list[Answer]
    places: list[int]
    future: Future[Picked] | None = None


@dataclass(slots=True)
class Picked:
    """What the worker has made of a step.

    Attributes:
        tokens: request → its token, in batch order; None where the logits give none.
        logprobs: of those that have asked for them.
    """

    tokens: dict[Request, int | None] = field(default_factory=dict)
    logprobs: dict[Request, TokenLogprobs] = field(default_factory=dict)


class Overlap:
    """Serves the requests of an engine as `EngineLoop.step` does, with one step more in flight.

    A request gets the tokens that it gets there, because its tokens are picked in the order of the steps, with the same
    sampler, one for each position. What was picked for a request that has finished since is dropped.

    **When a step fails**, the worker runs none of those behind it. Tokens that were picked and not committed are kept
    (`Answer.drawn`): they are taken when their positions are computed again, and no random generator moves twice.

    Args:
        loop: the engine; its scheduler overlaps.

    Attributes:
        flights: the steps that are not committed, the oldest first: between two calls at most one.
        answers: those that get a token in the step that the worker runs, by their requests' ids. In the engine's own
            `answers` an id may be another request's by now. One that the step before has finished is not among them:
            its constraint allows nothing more.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._worker = ThreadPoolExecutor(1, "minicache-model")
        self.flights: deque[Flight] = deque()
        self.answers: dict[RequestId, Answer] = {}

    def step(self, *, drain: bool) -> list[Chunk]:
        """Schedule a step and have the worker run it; then commit the step before, and emit its chunks.

        Args:
            drain: schedule none, so after the commit no step is in flight.

        Returns:
            As `EngineLoop.step`.

        Raises:
            Exception: as `EngineLoop.step`.
        """
        loop, flights = self._loop, self.flights
        try:
            has_older = bool(flights)
            if loop.scheduler.has_unfinished and not (drain and has_older):
                self._launch()
            if not has_older:
                return loop.collect()
            picked = self._commit(flights[0])
        except BaseException:  # KeyboardInterrupt too: the next step must find everything in order
            loop.recover()
            raise
        output = flights.popleft().output
        for request_id in output.finished:
            answer = loop.answers.get(request_id)
            if answer is not None and answer.request.status.is_finished:  # the id may be another request's by now
                loop.emit(request_id, None)
        for request, token_id in picked.tokens.items():
            answer = loop.answers.get(request.request_id)
            if answer is not None and answer.request is request:
                loop.emit(request.request_id, token_id)
        failed = [each for each, token_id in picked.tokens.items() if token_id is None]
        if flights and loop.scheduler.prefix_caching and any(each.finish_reason == "error" for each in failed):
            loop.recover()  # the step in flight may have found blocks of a request that has just failed
        return loop.collect()

    def give_up(self) -> None:
        """A step has failed: wait for the worker, and keep what was picked and not committed. No step is in flight."""
        flights, self.flights = self.flights, deque()
        for flight in flights:
            if flight.future is None or flight.future.exception() is not None:
                continue
            tokens = flight.future.result().tokens
            for answer, place in zip(flight.answers, flight.places, strict=True):
                if (token_id := tokens[answer.request]) is not None:
                    answer.drawn[place] = token_id

    # In the engine's thread

    def _launch(self) -> None:
        """Schedule a step, and have the worker run it after the one before."""
        loop = self._loop
        output = loop.scheduler.schedule()
        scheduled: list[ScheduledRequest] = []
        flight = Flight(output, output, [], [], [], [])
        for row, (request, num_new) in enumerate(
            zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True)
        ):
            copied = ScheduledRequest(request, num_new)
            scheduled.append(copied)
            if request.num_placeholders:
                flight.unknown.append(copied)
            if copied.num_computed_tokens + num_new == copied.num_tokens:
                flight.rows.append(row)
                flight.answers.append(loop.answers[copied.request_id])
                flight.places.append(copied.num_tokens - request.num_prompt_tokens)
        flight.work = replace(output, scheduled=cast("list[Request]", scheduled))
        before = self.flights[-1].future if self.flights else None
        self.flights.append(flight)
        if output.has_work:
            flight.future = self._worker.submit(self._run, flight, before)

    def _commit(self, flight: Flight) -> Picked:
        """Wait for a step's tokens, and commit them, as `EngineLoop.step` does."""
        picked = Picked() if flight.future is None else flight.future.result()
        token_ids = {}
        for answer in flight.answers:
            request, logprobs = answer.request, picked.logprobs.get(answer.request)
            token_id = picked.tokens[request]
            if token_id is not None:
                token_ids[request.request_id] = token_id
            elif not request.status.is_finished:
                self._loop.scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
            if logprobs is not None:
                answer.logprobs = [logprobs]
        self._loop.scheduler.update_from_output(flight.output, token_ids)
        return picked

    # In the worker's thread

    def _run(self, flight: Flight, before: Future[Picked] | None) -> Picked:
        """Run the model on a step, and pick its tokens; or raise what the step before has raised."""
        loop, work, picked = self._loop, flight.work, Picked()
        tokens_before = {} if before is None else before.result().tokens
        over: set[Request] = set()  # whose token of this step will be dropped
        for each in flight.unknown:
            token_id, request = tokens_before[each.request], each.request
            if token_id is None or (token_id in request.stop_token_ids and not request.ignore_eos):
                over.add(request)
            each.inputs[-1] = token_id or 0
        loop.memory.move_blocks(work)
        if not work.scheduled:
            return picked
        self.answers = {each.request.request_id: each for each in flight.answers if each.request not in over}
        logits = loop.run_model(work)
        drawn = [answer.drawn.get(place) for answer, place in zip(flight.answers, flight.places, strict=True)]
        to_pick = [index for index, token_id in enumerate(drawn) if token_id is None]
        rows, samplers = [flight.rows[i] for i in to_pick], [flight.answers[i].sampler for i in to_pick]
        for index, picked_token in zip(to_pick, loop.sample(logits, rows, samplers), strict=True):
            drawn[index] = picked_token
        requests = [answer.request for answer in flight.answers]
        picked.tokens = dict(zip(requests, drawn, strict=True))
        asked = [
            (request, row, token_id, answer.num_logprobs)
            for request, row, token_id, answer in zip(requests, flight.rows, drawn, flight.answers, strict=True)
            if answer.num_logprobs is not None and token_id is not None
        ]
        if asked:
            their, rows_asked, tokens, counts = zip(*asked, strict=True)
            found = token_logprobs(logits[list(rows_asked)], list(tokens), counts)
            picked.logprobs = dict(zip(their, found, strict=True))
        return picked
