"""One run: the policy's scheduler serves sessions in simulated time. Pure standard library.

The model's part is played here: a request asks for as many tokens as its class allows, and the loop generates a stop
token when its answer has the length that was drawn. So nothing that a policy is given has that length in it. Whatever
the policy writes into a request, the loop keeps an account of its own.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple, TypeVar

from minicache.errors import InvariantError, MinicacheError, RequestTooLargeError
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import observe
from minicache.scheduler.output import SchedulerOutput
from minicache.simulator.costs import StepLoad
from minicache_course.arena.audit import PolicyAuditor
from minicache_course.arena.machine import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, Arena, Machine, Service, the_machine
from minicache_course.arena.workloads import STOP, WINDOW, Session, answer
from minicache_course.errors import CourseError
from minicache_course.language import said

Policy = Callable[[Arena], Scheduler]
"""What a policy's file defines as `create`."""

Result = TypeVar("Result")

Place = tuple[int, int]
"""Which request: the numbers of session and turn."""


def made_by(policy: Policy, arena: Arena) -> Scheduler:
    """The scheduler that a policy makes.

    Raises:
        PolicyRefusedError: it makes something else.
    """
    scheduler = policy(arena)
    if not isinstance(scheduler, Scheduler):
        raise PolicyRefusedError("create", said("create(arena) returned {got}, no Scheduler", got=repr(scheduler)))
    return scheduler


class PolicyRefusedError(CourseError):
    """A policy breaks a rule of the arena.

    Attributes:
        rule: which, in one word.
        message: what it did.
        line: of its file, if it is known; else None.
    """

    def __init__(self, rule: str, message: str, line: int | None = None) -> None:
        super().__init__(said("refused ({rule}): {message}", rule=rule, message=message))
        self.rule, self.message, self.line = rule, message, line

    def on(self, load: str) -> PolicyRefusedError:
        """The same, with the load on which it happened."""
        return PolicyRefusedError(self.rule, said("{load}: {message}", load=load, message=self.message), self.line)


class PolicyStopped(BaseException):
    """What is raised in a policy to stop it. No `Exception`: a policy that catches those would go on.

    Attributes:
        refused: what the policy is refused for.
    """

    def __init__(self, refused: PolicyRefusedError) -> None:
        super().__init__(refused)
        self.refused = refused


class Outcome(NamedTuple):
    """What a request's client saw.

    Attributes:
        service: its class.
        ttft: seconds until its first token.
        tpot: seconds per token after the first; 0 if there is none.
    """

    service: Service
    ttft: float
    tpot: float

    @property
    def is_good(self) -> bool:
        """Whether both limits are met."""
        return self.ttft <= self.service.ttft and self.tpot <= self.service.tpot


@dataclass(slots=True)
class Run:
    """What came of a run.

    Attributes:
        outcomes: of the requests, in the order in which they finished.
        digests: after each step, the hash of the whole schedule up to it.
        seconds: the time.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_good(self) -> int:
        """Requests whose limits were met."""
        return sum(outcome.is_good for outcome in self.outcomes)


@dataclass(slots=True)
class _Client:
    """The loop's own account of a request."""

    place: Place
    request: Request
    prompt: tuple[int, ...]
    answer: list[int]
    arrival: float
    first: float = 0.0


POLICY_FILE: Final = "policy.py"
"""What a policy's code is called in a traceback."""

MOST_STEPS: Final = 100_000
"""No run of a policy that makes progress has as many."""


class Loop:
    """Serves sessions with a policy; `run` goes on where it has stopped.

    Args:
        sessions: in the order of their starts.
        policy: makes the scheduler.
        machine: what serves; None: the arena's.
        audit: check every step. It takes most of a run's time.
        oracle: tell the policy the length of every answer.
        lengths: answers that have another length than was drawn.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        policy: Policy,
        *,
        machine: Machine | None = None,
        audit: bool = True,
        oracle: bool = False,
        lengths: Mapping[Place, int] | None = None,
    ) -> None:
        self._machine = machine or the_machine()
        self._sessions, self._policy, self._audit, self._oracle = sessions, policy, audit, oracle
        self._lengths = lengths or {}
        self._run, self._hash = Run(), hashlib.sha256()
        self._scheduler: Scheduler | None = None
        self._coming: list[tuple[float, int, int, tuple[int, ...]]] = []  # arrival, session, turn, prompt
        self._clients: dict[RequestId, _Client] = {}
        self._num_arrived = 0

    def run(self, steps: int | None = None) -> Run:
        """Serve all requests.

        Args:
            steps: stop once there were so many; None: when all requests have finished.

        Returns:
            What came of it so far; the same object at each call.

        Raises:
            PolicyRefusedError: the policy breaks a rule.
        """
        run = self._run
        if self._scheduler is None:
            for number, session in enumerate(self._sessions):
                heappush(self._coming, (session.start, number, 0, session.prefix + session.turns[0].prompt))
            self._scheduler = self._guarded(self._create)
        while (self._coming or self._clients) and (steps is None or len(run.digests) < steps):
            if not self._clients:
                run.seconds = max(run.seconds, self._coming[0][0])
            self._receive(self._scheduler)
            output = self._guarded(self._scheduler.schedule)
            self._check_machine(self._scheduler)
            self._check(output)
            self._hash.update(_as_bytes(output))
            run.digests.append(self._hash.digest())
            self._commit(self._scheduler, output)
            if len(run.digests) >= MOST_STEPS:
                raise PolicyRefusedError("progress", said("{count} requests never finish", count=len(self._clients)))
        return run

    def unfinished(self) -> dict[Place, int]:
        """The requests that have arrived and are not finished, and how many tokens of its answer each has."""
        return {client.place: len(client.request.output_token_ids) for client in self._clients.values()}

    def _create(self) -> Scheduler:
        clients = self._clients
        length = (lambda request: len(clients[request.request_id].answer)) if self._oracle else None
        arena = Arena(
            self._machine.options,
            lambda: self._run.seconds,
            lambda request: self._sessions[clients[request.request_id].place[0]].service,
            lambda batch: self._machine.cost.step_seconds(StepLoad.of(batch)),
            length,
        )
        scheduler = made_by(self._policy, arena)
        self._check_machine(scheduler)
        return observe(scheduler, PolicyAuditor()) if self._audit else scheduler

    def _check_machine(self, scheduler: Scheduler) -> None:
        """The scheduler has no more memory and no more batch slots than there are."""
        host = 0 if scheduler.host_pool is None else scheduler.host_pool.num_blocks
        pool, most = scheduler.pool, self._machine.num_blocks
        is_larger = pool.num_blocks > most or host > most or scheduler.max_num_seqs > MAX_NUM_SEQS
        if is_larger or pool.block_size != BLOCK_SIZE:
            blocks = said("{most} blocks of {size} tokens, and as many on the host", most=most, size=BLOCK_SIZE)
            raise PolicyRefusedError(
                "machine", said("there are {blocks}, and {slots} batch slots", blocks=blocks, slots=MAX_NUM_SEQS)
            )

    def _receive(self, scheduler: Scheduler) -> None:
        """Hand over every request that has arrived by now."""
        while self._coming and self._coming[0][0] <= self._run.seconds:
            arrival, number, turn, prompt = heappop(self._coming)
            session = self._sessions[number]
            length = self._lengths.get((number, turn), session.turns[turn].length)
            request = Request(
                self._num_arrived,
                prompt,
                session.service.max_tokens,
                stop_token_ids=(STOP,),
                arrival_time=arrival,
            )
            self._num_arrived += 1
            client = _Client((number, turn), request, prompt, answer(length, session.service), arrival)
            self._clients[request.request_id] = client
            self._guarded(partial(scheduler.add_request, request))

    def _check(self, output: SchedulerOutput) -> None:
        """What must hold even where no auditor looks."""
        if output.finished:
            raise PolicyRefusedError(
                "dropped", said("request {id} was given up, and fits into the machine", id=output.finished[0])
            )
        if not output.scheduled:
            raise PolicyRefusedError(
                "progress", said("nothing is scheduled, with {count} requests unfinished", count=len(self._clients))
            )

    def _commit(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Let the step's time pass, and give every request of it the token that the model generates."""
        run, cost = self._run, self._machine.cost
        tokens, pairs, newcomers = dict[RequestId, int](), list[tuple[int, int]](), list[_Client]()
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            client = self._clients.get(request.request_id)
            if client is None or client.request is not request:
                raise PolicyRefusedError("work", said("{request} was never sent", request=repr(request)))
            num_had = len(request.output_token_ids)
            pairs.append((num_new, request.num_computed_tokens))
            tokens[request.request_id] = client.answer[num_had] if num_had < len(client.answer) else STOP
            if not num_had and request.num_computed_tokens + num_new == len(client.prompt):
                newcomers.append(client)
        run.seconds += cost.step_seconds(StepLoad.of(pairs))
        num_swapped = sum(map(len, output.swapped_out.values())) + sum(map(len, output.swapped_in.values()))
        if num_swapped:
            run.seconds += cost.swap_seconds(num_swapped * BLOCK_SIZE)
        for client in newcomers:
            client.first = run.seconds
        for request in self._guarded(lambda: scheduler.update_from_output(output, tokens)):
            self._finish(request)

    def _finish(self, request: Request) -> None:
        """A request has its answer; the session's next turn is on its way."""
        client = self._clients.pop(request.request_id)
        number, turn = client.place
        session = self._sessions[number]
        as_sent = (
            request.output_token_ids == client.answer
            and len(request.prompt_token_ids) == len(client.prompt)
            and (request.max_tokens, request.arrival_time) == (session.service.max_tokens, client.arrival)
            and request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)
        )
        if not as_sent:
            raise PolicyRefusedError("dropped", said("{request} was changed or cut short", request=repr(request)))
        num_more = len(client.answer) - 1
        tpot = (self._run.seconds - client.first) / num_more if num_more else 0.0
        self._run.outcomes.append(Outcome(session.service, client.first - client.arrival, tpot))
        if turn + 1 < len(session.turns):
            following = session.turns[turn + 1]
            arrival = self._run.seconds + following.pause
            prompt = client.prompt + tuple(client.answer) + following.prompt
            if arrival < WINDOW and len(prompt) + session.service.max_tokens <= MAX_MODEL_LEN:
                heappush(self._coming, (arrival, number, turn + 1, prompt))

    def _guarded(self, call: Callable[[], Result]) -> Result:
        """Call the policy. What it raises is why it is refused."""
        try:
            return call()
        except PolicyRefusedError:
            raise
        except RequestTooLargeError as error:
            raise PolicyRefusedError("dropped", str(error)) from error
        except InvariantError as error:
            aborted = RequestStatus.FINISHED_ABORTED
            given_up = [client.request for client in self._clients.values() if client.request.status is aborted]
            if given_up:
                message = said("{request} was aborted by the policy", request=repr(given_up[0]))
                raise PolicyRefusedError("dropped", message) from error
            raise PolicyRefusedError("audit", str(error)) from error
        except Exception as error:
            raise refused_for(error) from error


def refused_for(error: Exception) -> PolicyRefusedError:
    """What a policy has raised, and in which of its lines."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == POLICY_FILE]
    what = str(error) if isinstance(error, MinicacheError) else f"{type(error).__name__}: {error}"
    message = said("line {line}: {what}", line=lines[-1], what=what) if lines else what
    return PolicyRefusedError("error", message, lines[-1] if lines else None)


def _as_bytes(output: SchedulerOutput) -> bytes:
    """A step, for the hash."""
    swapped = [
        (name, len(blocks)) for moved in (output.swapped_out, output.swapped_in) for name, blocks in moved.items()
    ]
    return repr((list(output.num_scheduled_tokens.items()), output.preempted, swapped)).encode()
