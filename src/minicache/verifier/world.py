"""A scheduler, what lies in its memory, and all that can happen to it next.

A `World` knows the actions that are possible in its state, does one, and tells by a key whether two states are the same
but for names: of blocks, and of requests that are alike. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, get_args

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import fair
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.queue import arrival_key
from minicache.verifier.contents import Memory, parts, work_of

STOP: Final = 9
"""The stop token of all requests."""
STOPS: Final = frozenset((STOP,))
TOKEN: Final = 1
"""Every other token that the model generates."""
OTHER: Final = 2
"""The last token of a fork that differs from its parent."""

Kind = Literal["arrive", "fork", "branch", "abort", "error", "schedule", "commit", "fail", "retry"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class Action(NamedTuple):
    """Something that can happen.

    | kind | what happens |
    |---|---|
    | arrive | a request is added; `subject` is the number of its shape |
    | fork, branch | the request `subject` gets a child with the same output, or with another last token |
    | abort | the client of request `subject` leaves |
    | error | the request `subject` of the step that runs has failed alone |
    | schedule | the next step is scheduled |
    | commit | the step is computed; the requests of `stops` generate a stop token |
    | fail | the step fails, and `recover()` is called |
    | retry | the step fails, and only `schedule()` is called |
    """

    kind: Kind
    subject: Any = None
    stops: tuple[RequestId, ...] = ()


class Shape(NamedTuple):
    """A request that may arrive: the arguments of `Request`.

    All requests of a shape have this one list as prompt. Two shapes differ in the prompt's length, max_tokens or
    priority.
    """

    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    arrival_time: float = 0.0
    group: str = "text"
    cache_salt: str | None = None


class Was(NamedTuple):
    """An unfinished request before an action."""

    status: RequestStatus
    num_computed_tokens: int
    output_token_ids: tuple[int, ...]
    num_preemptions: int
    block_ids: tuple[int, ...]


class Admission(NamedTuple):
    """A request that a step admitted, and what was there then.

    Attributes:
        waiting: the requests that waited, this one included.
        batch: the batch that it joined.
        num_bypasses: `Moment.num_bypasses` before it.
    """

    request: Request
    waiting: tuple[Request, ...]
    batch: tuple[Request, ...]
    num_bypasses: int


@dataclass(slots=True)
class Moment:
    """One action and what came of it: what a property judges.

    Attributes:
        action: what happened.
        scheduler: the scheduler after it.
        before: id → what each unfinished request was before it.
        after: the unfinished requests after it: the batch in order, then the queue in order.
        output: the step that was scheduled (schedule, retry) or committed (commit); else None.
        finished: requests that finished by the action.
        admissions: of schedule and retry, the requests that were admitted, in order.
        num_bypasses: how many requests in a row, up to now, were admitted while one that arrived before them waited;
            at most STARVATION_BOUND + 1.
        protected: the id of the request that was `protected` before it (phase 9); None if none was.
        memory: what lies in the slots once the scheduled step is computed.
        auditor: one that has seen the state before, and nothing since.
    """

    action: Action
    scheduler: Scheduler = field(repr=False)
    before: Mapping[RequestId, Was] = field(repr=False)
    memory: Memory = field(repr=False)
    auditor: Auditor = field(repr=False)
    after: list[Request] = field(default_factory=list)
    output: SchedulerOutput | None = None
    finished: list[Request] = field(default_factory=list)
    admissions: tuple[Admission, ...] = field(default=(), repr=False)
    num_bypasses: int = 0
    protected: RequestId | None = None


@dataclass(slots=True)
class Start:
    """What every action of a state begins with.

    Attributes:
        requests: the unfinished requests: the batch in order, then the queue in order.
        num_running: how many of them are the batch.
        was: id → what each of them is.
        auditor: has seen this state, and nothing else.
        protected: as `Moment.protected`.
    """

    requests: list[Request]
    num_running: int
    was: dict[RequestId, Was]
    auditor: Auditor
    protected: RequestId | None


class World:
    """A scheduler, its memory, and the requests that may still arrive.

    Attributes:
        scheduler: the scheduler.
        memory: the contents of its blocks.
        num_left: how many requests may still arrive.
        num_bypasses: as `Moment.num_bypasses`.
    """

    __slots__ = ("memory", "num_bypasses", "num_left", "scheduler")

    def __init__(self, scheduler: Scheduler, num_left: int) -> None:
        self.scheduler = scheduler
        self.memory = Memory(scheduler.pool.block_size)
        self.num_left = num_left
        self.num_bypasses = 0

    def actions(self, shapes: Sequence[Shape]) -> Iterator[Action]:
        """All that can happen next, always in the same order."""
        scheduler = self.scheduler
        output = scheduler.outstanding
        runs = output is not None and output.has_work
        if output is not None and runs:
            for stops in _subsets(_may_stop(output)):
                yield Action("commit", None, stops)
        elif scheduler.has_unfinished:
            yield Action("schedule")
        if self.num_left:
            for number in range(len(shapes)):
                yield Action("arrive", number)
            if output is None and hasattr(scheduler, "fork_request"):
                yield from self._forks()
        for request in self.unfinished():
            yield Action("abort", request.request_id)
        if output is not None and runs:
            for request in output.scheduled:
                if not request.status.is_finished:
                    yield Action("error", request.request_id)
            yield Action("fail")
            yield Action("retry")

    def _forks(self) -> Iterator[Action]:
        scheduler = self.scheduler
        if len(scheduler.running) < scheduler.max_num_seqs:
            for request in scheduler.running:
                if request.output_token_ids:
                    yield Action("fork", request.request_id)
                    yield Action("branch", request.request_id)

    def unfinished(self) -> list[Request]:
        """The batch in order, then the queue in order."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        return running + [waiting[request_id] for request_id in waiting] if waiting else running[:]

    def start(self) -> Start:
        """This state, as it is before an action."""
        auditor = SharingAuditor() if hasattr(self.scheduler, "fork_request") else Auditor()
        auditor.begin(self.scheduler)
        requests = self.unfinished()
        was = {
            each.request_id: Was(
                each.status,
                each.num_computed_tokens,
                tuple(each.output_token_ids),
                each.num_preemptions,
                tuple(each.block_ids),
            )
            for each in requests
        }
        protected = getattr(self.scheduler, "protected", None)
        protected_id = None if protected is None or protected.status.is_finished else protected.request_id
        return Start(requests, len(self.scheduler.running), was, auditor, protected_id)

    def do(self, action: Action, shapes: Sequence[Shape], start: Start | None = None) -> Moment | None:
        """Do one of the `actions`.

        Args:
            action: what happens.
            shapes: of the requests that may arrive.
            start: `start()`, which is the same for all actions of a state.

        Returns:
            What came of it; None if nothing has changed, because the request was refused.

        Raises:
            Exception: whatever the scheduler raises: it is at fault.
        """
        scheduler: Any = self.scheduler
        kind, subject = action.kind, action.subject
        start = start or self.start()
        moment = Moment(action, scheduler, start.was, self.memory, start.auditor)
        if kind == "abort":
            moment.finished = [_with_id(subject, start.requests)]
            scheduler.abort_request(subject)
        elif kind == "commit":
            output: SchedulerOutput = scheduler.outstanding
            moment.output = output
            tokens = {each: STOP if each in action.stops else TOKEN for each in _awaited(output)}
            moment.finished = scheduler.update_from_output(output, tokens)
        elif kind == "error":
            moment.finished = self._spoil(subject)
            for request in moment.finished:
                scheduler.finish_request(request.request_id, RequestStatus.FINISHED_ERROR)
        elif kind == "fail":
            scheduler.recover()
            self.memory = moment.memory = Memory(scheduler.pool.block_size)
        elif kind == "schedule" or kind == "retry":
            if kind == "retry":
                self.memory = moment.memory = Memory(scheduler.pool.block_size)
            moment.auditor = self._primed(start.auditor)
            num_running = 0 if kind == "retry" else start.num_running  # it loses its batch first
            moment.output, moment.protected = scheduler.schedule(), start.protected
            moment.admissions = self._admissions(
                moment.output, start.requests[:num_running], start.requests[num_running:]
            )
            moment.finished = [each for each in start.requests if each.status.is_finished]
            for operation in self.memory.operations(moment.output, work_of(moment.output)):
                operation()
        elif kind == "arrive":
            shape = shapes[subject]
            request = Request(_free_id(start.was), stop_token_ids=STOPS, **shape._asdict())
            request.prompt_token_ids = shape.prompt_token_ids
            try:
                scheduler.add_request(request)
            except RequestTooLargeError:
                return None
            self.num_left -= 1
        else:  # "fork", "branch"
            parent = _with_id(subject, start.requests)
            outputs = None if kind == "fork" else [*parent.output_token_ids[:-1], OTHER]
            child = scheduler.fork_request(parent.request_id, _free_id(start.was), outputs)
            child.prompt_token_ids = parent.prompt_token_ids
            self.num_left -= 1
        moment.num_bypasses, moment.after = self.num_bypasses, self.unfinished()
        return moment

    def key(self, requests: Sequence[Request], own: Sequence[str] = ()) -> int:
        """The state without names, as a number: states with the same number are the same, but for one pair in 10¹⁹.

        Blocks are numbered as they are first listed, requests by their arrival; ids, and free blocks without contents
        that can be found, do not matter. What a request has computed is not in it, as long as it lies where it should.

        Args:
            requests: those that are unfinished, the batch first.
            own: attributes of the scheduler that belong to its state, beyond those that every scheduler has.
        """
        scheduler: Any = self.scheduler
        pool, output, host_pool = scheduler.pool, scheduler.outstanding, scheduler.host_pool
        in_order = requests if len(requests) < 2 else sorted(requests, key=_arrival)
        order = {id(each): place for place, each in enumerate(in_order)}
        labels: dict[int, int] = {}
        state: list[Any] = [self.num_left, self.num_bypasses, len(scheduler.running), len(scheduler._requests)]
        for each in requests:
            outputs, block_ids = each.output_token_ids, each.block_ids
            for block_id in block_ids:
                if block_id not in labels:
                    labels[block_id] = len(labels)
            state += (
                order[id(each)],
                each.num_prompt_tokens,
                each.max_tokens,
                each.priority,
                id(each.status),  # faster than an Enum's own hash
                each.num_computed_tokens,
                bytes(outputs),
                each.num_preemptions > 0,
                len(outputs) > each.num_outputs_at_admission,
                len(each.host_block_ids),
                tuple([labels[block_id] for block_id in block_ids]),
            )
        if output is not None:
            state.append(tuple(output.num_scheduled_tokens.values()))
            state += [order.get(id(each), -1) for each in output.scheduled]
        # The books of a scheduler that is wrong may not agree: so what the blocks' own say is in it too.
        refs, free = pool.ref_counts, list(pool.free_list)
        state += (output is None, len(free), sum(refs))
        state += [refs[each] for each in labels if 0 <= each < len(refs)]
        state += [each for each in free if each in labels]
        if host_pool is not None:
            state += (len(host_pool.free_list), sum(host_pool.ref_counts))
        for name in own:
            value = getattr(scheduler, name)
            state.append(value if type(value) in _PLAIN else _plain(value, order))
        hashes = getattr(pool, "_hash_of", None)
        if hashes:  # blocks that can be found differ by what they hold; the next to be evicted is first
            first = {
                next(iter(blocks), None) for blocks in getattr(pool, "_blocks_of", {}).values()
            }  # a learner may keep hashes otherwise
            blocks, label = self.memory.blocks, labels.get
            for each in (*labels, *free):
                if each in hashes:
                    state += (label(each, -1), each in first, *blocks.get(each, ()))
        return hash(tuple(state))

    def _primed(self, auditor: Auditor) -> Auditor:
        """A copy that knows what the full blocks hold, and whose notes may change."""
        primed: Auditor = _new(type(auditor))
        vars(primed).update(vars(auditor), notes=dict(auditor.notes))
        if isinstance(primed, SharingAuditor):
            primed.contents = {
                block_id: (0, salt, None, tokens)
                for block_id, entries in self.memory.blocks.items()
                if entries[-1] is not None
                for salt, tokens in [parts(entries[-1])]
            }
        return primed

    def _admissions(
        self, output: SchedulerOutput, batch: list[Request], waiting: list[Request]
    ) -> tuple[Admission, ...]:
        """The admissions of a step, in order; those ahead of the request that arrived first are counted."""
        before, admissions = {id(each) for each in batch}, []
        if all(id(each) in before for each in output.scheduled):
            return ()
        waiting = [each for each in waiting if not each.status.is_finished]
        waiting += [each for each in batch if each.request_id in output.preempted]
        batch = [each for each in batch if each.status is RequestStatus.RUNNING]
        for request in output.scheduled:
            if id(request) not in before:
                admissions.append(Admission(request, tuple(waiting), tuple(batch), self.num_bypasses))
                waiting = [each for each in waiting if each is not request]
                batch = [*batch, request]
                bypassed = any(arrival_key(each) < arrival_key(request) for each in waiting)
                self.num_bypasses = min(self.num_bypasses + 1, fair.STARVATION_BOUND + 1) if bypassed else 0
        return tuple(admissions)

    def _spoil(self, request_id: RequestId) -> list[Request]:
        """Have a request of the step compute garbage; the requests of the step that fail with it, itself first."""
        output, memory = self.scheduler.outstanding, self.memory
        assert output is not None
        work = [each for each in work_of(output) if not each.request.status.is_finished]
        culprit = next(each for each in work if each.request.request_id == request_id)
        memory.write(culprit, garbage=True)
        spoilt = set(culprit.block_ids[culprit.start // memory.block_size :])
        return [
            each.request
            for each in work
            if each is culprit or (not spoilt.isdisjoint(each.block_ids) and not memory.reads_right(each))
        ]


def _with_id(request_id: RequestId, requests: Sequence[Request]) -> Request:
    return next(each for each in requests if each.request_id == request_id)


def _free_id(used: Mapping[RequestId, Was]) -> int:
    """The lowest id that no unfinished request has: a client may use an id again."""
    return next(number for number in range(len(used) + 1) if number not in used)


def _awaited(output: SchedulerOutput) -> list[RequestId]:
    """The requests that get a token from a step."""
    return [
        each.request_id
        for each in output.scheduled
        if not each.status.is_finished
        and each.num_computed_tokens + output.num_scheduled_tokens[each.request_id] == each.num_tokens
    ]


def _may_stop(output: SchedulerOutput) -> list[RequestId]:
    """Of the requests that get a token, those that would not finish with any."""
    awaited = set(_awaited(output))
    return [
        each.request_id
        for each in output.scheduled
        if each.request_id in awaited and len(each.output_token_ids) + 1 < each.max_tokens
    ]


def _subsets(ids: list[RequestId]) -> Iterable[tuple[RequestId, ...]]:
    """All subsets, the empty one first."""
    for chosen in product((False, True), repeat=len(ids)):
        yield tuple(each for each, is_chosen in zip(ids, chosen, strict=True) if is_chosen)


def _plain(value: Any, order: Mapping[int, int]) -> Any:
    """A value of a scheduler's own, without names."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Request:
        return "request", order.get(id(value), -1)
    if isinstance(value, Mapping):
        return tuple((_plain(key, order), _plain(each, order)) for key, each in value.items())
    if isinstance(value, Iterable):
        return tuple(_plain(each, order) for each in value)
    return tuple(_plain(each, order) for each in vars(value).values()) if hasattr(value, "__dict__") else kind.__name__


_arrival: Final = attrgetter("arrival_index", "fork_index")
_new: Final[Callable[[type], Any]] = object.__new__
_PLAIN: Final = frozenset((int, bool, str, float, bytes, type(None)))

Property = Callable[[Moment], str | None]
"""What must hold: None, or what is wrong, in words."""
