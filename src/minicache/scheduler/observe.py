"""Watch any scheduler from outside: which requests arrived, what was scheduled, what came of it.

`observe(scheduler, observer, …)` gives a scheduler that does what the given one does and notifies its observers. A
stage does not know that it is watched, and pays nothing when it is not. `Recorder` writes traces; the auditor of
phase 6 (`minicache.scheduler.audit`) is another observer. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.trace import TraceEntry, TraceEvent, TraceStep


class Observer:
    """Is notified of what a scheduler does, after it has done it. A subclass overrides what it needs."""

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """`request` was added."""

    def on_refuse(self, scheduler: Scheduler, request: Request, error: RequestTooLargeError) -> None:
        """`request` was refused."""

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """`parent` was forked, and has the child `child` (phase 8)."""

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """`output` was scheduled. The requests' computed tokens are those before the step."""

    def on_tokens(self, scheduler: Scheduler, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> None:
        """`output` is about to be committed with these tokens. If that raises, nothing has changed."""

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """The tokens of `output` were recorded, and `finished` have finished with it."""

    def on_recover(self, scheduler: Scheduler) -> None:
        """A step failed: every request waits again, with nothing computed."""

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """`request` was finished from outside: aborted, stopped by a string, or failed."""


class ObservedScheduler(Scheduler):
    """A scheduler that notifies observers of what another one does; see `observe`."""

    def __init__(self, scheduler: Scheduler, observers: tuple[Observer, ...]) -> None:
        # Not super().__init__(): queues, pool and all other attributes are the watched scheduler's, by __getattr__.
        self.scheduler = scheduler
        self.observers = observers
        # The class has these, so __getattr__ is not called for them.
        self.host_pool, self.prefix_caching = scheduler.host_pool, scheduler.prefix_caching
        self.first_come, self.chunks_prompts = scheduler.first_come, scheduler.chunks_prompts
        self.overlaps = scheduler.overlaps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    def add_request(self, request: Request) -> None:
        """As the scheduler's own."""
        try:
            self.scheduler.add_request(request)
        except RequestTooLargeError as error:
            for observer in self.observers:
                observer.on_refuse(self.scheduler, request, error)
            raise
        for observer in self.observers:
            observer.on_add(self.scheduler, request)

    def fork_request(
        self, request_id: RequestId, child_id: RequestId, output_token_ids: Sequence[int] | None = None
    ) -> Request:
        """As the scheduler's own, if it forks."""
        scheduler: Any = self.scheduler
        child: Request = scheduler.fork_request(request_id, child_id, output_token_ids)
        parent = next(each for each in self.scheduler.running if each.request_id == request_id)
        for observer in self.observers:
            observer.on_fork(self.scheduler, parent, child)
        return child

    def finish_request(self, request_id: RequestId, status: RequestStatus) -> bool:
        """As the scheduler's own."""
        request = self.scheduler.waiting.get(request_id)  # the queue may be long, the batch is not
        if request is None:
            request = next((each for each in self.scheduler.running if each.request_id == request_id), None)
        done = self.scheduler.finish_request(request_id, status)
        if done and request is not None:
            for observer in self.observers:
                observer.on_finish(self.scheduler, request)
        return done

    def schedule(self) -> SchedulerOutput:
        """As the scheduler's own."""
        lost = self.scheduler.outstanding
        if lost is not None and lost.has_work and not self.overlaps:
            self.recover()  # what the scheduler would do by itself, and observers must know of
        output = self.scheduler.schedule()
        for observer in self.observers:
            observer.on_schedule(self.scheduler, output)
        return output

    def update_from_output(self, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> list[Request]:
        """As the scheduler's own."""
        for observer in self.observers:
            observer.on_tokens(self.scheduler, output, token_ids)
        finished = self.scheduler.update_from_output(output, token_ids)
        for observer in self.observers:
            observer.on_update(self.scheduler, output, finished)
        return finished

    def recover(self) -> None:
        """As the scheduler's own."""
        self.scheduler.recover()
        for observer in self.observers:
            observer.on_recover(self.scheduler)

    def blocks_to_admit(self, request: Request) -> int:
        """As the scheduler's own."""
        return self.scheduler.blocks_to_admit(request)

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As the scheduler's own."""
        self.scheduler.schedule_running(output)

    def may_admit(self, output: SchedulerOutput) -> bool:
        """As the scheduler's own."""
        return self.scheduler.may_admit(output)

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """As the scheduler's own."""
        self.scheduler.schedule_waiting(output)

    def check_size(self, request: Request) -> None:
        """As the scheduler's own."""
        self.scheduler.check_size(request)

    def largest_chunk(self, num_tokens: int) -> int:
        """As the scheduler's own."""
        return self.scheduler.largest_chunk(num_tokens)

    def check(self) -> None:
        """As the scheduler's own."""
        self.scheduler.check()


def observe(scheduler: Scheduler, *observers: Observer) -> Scheduler:
    """A scheduler that works as `scheduler`, whose calls and attributes it passes on, and notifies `observers`.

    Use it in place of `scheduler` from then on: what is called on `scheduler` directly is not seen. A scheduler that is
    observed already is returned itself: it notifies these observers too, after those that it has.
    """
    if not observers:
        return scheduler
    if isinstance(scheduler, ObservedScheduler):
        scheduler.observers += observers
        return scheduler
    return ObservedScheduler(scheduler, observers)


class _OpenStep(NamedTuple):
    """A step that was scheduled, its events so far, and which of them the schedule brought."""

    output: SchedulerOutput
    step: TraceStep
    events: list[TraceEvent]
    moves: slice


class Recorder(Observer):
    """Makes a `TraceStep` of every step that is scheduled and committed while it watches.

    A step's events are those since the step before it was committed; so what happens after the last step is in none. If
    a step is scheduled while the one before is outstanding, what happens from then on is in the new step, also that
    tokens of the older one finish a request. A step that failed leaves no step, and of its events only those of
    requests that it finished. Instead, every request that was in the batch or swapped out before it gets an event
    "preempt" with the reason "the step failed", in the order of the waiting queue.

    Args:
        sink: is called with each step as soon as it is over; `list.append`, or what writes a line to a file.
        clock: the time in seconds. None counts steps: step k begins at k and takes 1.
    """

    def __init__(self, sink: Callable[[TraceStep], object], clock: Callable[[], float] | None = None) -> None:
        self._sink = sink
        self._clock = clock
        self._num_steps = 0
        self._seen: set[RequestId] = set()  # unfinished requests that have been in a batch
        self._out: set[RequestId] = set()  # of those, the ones that have lost their batch slot
        self._swapped: set[RequestId] = set()  # of those, the ones whose blocks are in CPU swap space
        self._events: list[TraceEvent] = []  # of the last step that was scheduled, until it is committed
        self._open: list[_OpenStep] = []  # scheduled, and not committed yet: one, or two that overlap

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """Note the arrival, for the next step."""
        self._events.append(TraceEvent("arrive", request.request_id))

    def on_refuse(self, scheduler: Scheduler, request: Request, error: RequestTooLargeError) -> None:
        """Note the refusal, for the next step."""
        self._events.append(TraceEvent("refuse", request.request_id, str(error)))

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """Note the end, for the step that is being computed, or for the next."""
        self._note_end(request.request_id, request.finish_reason)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Begin a step."""
        if not scheduler.overlaps:
            self._open.clear()  # a step without work needs no commit
        elif self._open:  # its events end here
            self._events = []
        moves = self._note_moves(output)
        entries = (
            TraceEntry(
                request.request_id,
                request.num_computed_tokens,
                num_new,
                request.num_prompt_tokens,
                len(request.output_token_ids) + request.num_placeholders,
                len(output.draft_token_ids.get(request.request_id, ())),
            )
            for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True)
        )
        step = TraceStep(
            step=self._num_steps + len(self._open),
            time=self._now(),
            seconds=1.0,
            batch=tuple(entries),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_swapped=len(self._swapped),
            num_used_blocks=scheduler.pool.num_used,
            num_free_blocks=scheduler.pool.num_free,
            events=(),
        )
        self._open.append(_OpenStep(output, step, self._events, moves))

    def on_recover(self, scheduler: Scheduler) -> None:
        """Forget the steps that failed; their batch has lost its slots, and what was swapped out is lost too."""
        undo: dict[str, Callable[[RequestId], None]] = {
            "admit": self._seen.discard,
            "resume": self._out.add,
            "preempt": self._out.discard,
            "swap_out": self._swapped.discard,
            "swap_in": self._swapped.add,
        }
        finished: set[RequestId] = set()
        for failed in reversed(self._open):
            moves, start = failed.events[failed.moves], failed.moves.start
            del failed.events[failed.moves]
            finished |= {event.request_id for event in failed.events[start:] if event.kind == "finish"}
            for move in reversed(moves):
                if move.request_id not in finished:
                    undo[move.kind](move.request_id)
        if self._open:
            self._events = [event for failed in self._open for event in failed.events]
            self._open = []
        lost = (self._seen - self._out) | self._swapped
        for request_id in scheduler.waiting:
            if request_id in lost:
                self._events.append(TraceEvent("preempt", request_id, "the step failed"))
        self._out |= lost
        self._swapped.clear()

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """The step is over: hand it to the sink."""
        for request in finished:
            self._note_end(request.request_id, request.finish_reason)
        if not self._open or self._open[0].output is not output:  # scheduled before anybody watched
            return
        over = self._open.pop(0)
        seconds = 1.0 if self._clock is None else self._now() - over.step.time
        step = replace(over.step, seconds=seconds, events=tuple(over.events))
        if output.draft_token_ids:
            step = replace(step, batch=tuple(_with_accepted(entry, output) for entry in step.batch))
        if not self._open:
            self._events = []
        self._num_steps += 1
        self._sink(step)

    def _now(self) -> float:
        return float(self._num_steps + len(self._open)) if self._clock is None else self._clock()

    def _note_moves(self, output: SchedulerOutput) -> slice:
        """Which requests left the batch, which joined it; returns which of `_events` these are."""
        start = len(self._events)
        for request_id in output.preempted:
            self._out.add(request_id)
            self._events.append(TraceEvent("preempt", request_id))
            if request_id in output.swapped_out:
                self._swapped.add(request_id)
                self._events.append(TraceEvent("swap_out", request_id))
        for request_id in output.num_scheduled_tokens:
            if request_id in self._out:
                self._out.remove(request_id)
                self._events.append(TraceEvent("resume", request_id))
            elif request_id not in self._seen:
                self._seen.add(request_id)
                self._events.append(TraceEvent("admit", request_id))
            if request_id in output.swapped_in:
                self._swapped.discard(request_id)
                self._events.append(TraceEvent("swap_in", request_id))
        moves = slice(start, len(self._events))
        for request_id in output.finished:
            self._note_end(request_id, RequestStatus.FINISHED_CAPACITY.finish_reason)
        return moves

    def _note_end(self, request_id: RequestId, reason: str | None) -> None:
        for ids in (self._seen, self._out, self._swapped):
            ids.discard(request_id)
        self._events.append(TraceEvent("finish", request_id, reason))


def _with_accepted(entry: TraceEntry, output: SchedulerOutput) -> TraceEntry:
    """A request's share of a step that was committed: what was accepted is known."""
    if not entry.num_draft_tokens:
        return entry
    num_own = entry.num_new_tokens - entry.num_draft_tokens
    return replace(entry, num_accepted_tokens=output.num_scheduled_tokens[entry.request_id] - num_own)
