"""The second league: a router and an autoscaler for a fleet of the arena's machines. Pure standard library.

A fleet's worth is what it serves within its limits, less what its replicas cost. A router sees what `minicache.fleet`
shows it: the blocks of a prompt, and the replicas' loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import fsum
from random import Random
from typing import Any, Final

from minicache.errors import MinicacheError
from minicache.fleet import Autoscaler, FleetView, ReplicaView, RoutedRequest, Router
from minicache.fleet.router import no_replica
from minicache.fleet.views import ReplicaId
from minicache.request import Request, RequestId
from minicache.scheduler import ChunkedPrefillScheduler
from minicache.simulator.fleet import FleetReport, FleetSimulation, Scaling
from minicache.simulator.workload import varying_arrivals
from minicache_course.arena.bound import jobs_of
from minicache_course.arena.limits import load, parse, unchanged
from minicache_course.arena.loop import PolicyRefusedError, refused_for
from minicache_course.arena.machine import MAX_REPLICAS, PRICE, START_SECONDS, FleetArena, the_machine
from minicache_course.arena.score import Cell, Score, digest, p90
from minicache_course.arena.workloads import Session, Turn, agent, answer, chat, microseconds
from minicache_course.language import said

SECONDS: Final = 150.0
"""In which sessions begin."""

INTERVAL: Final = 5.0
"""Seconds from one question to the autoscaler to the next."""

TOKEN_SECONDS: Final = 0.04
"""How long a token takes in the server where these sessions came from. The next turn does not wait for this one."""


Rate = Callable[[float], float]
Maker = Callable[[Random, str], Session]

WAVES: Final[tuple[tuple[str, float, Rate, Maker], ...]] = (
    ("day", 5.0, lambda time: 5.0 - 4.0 * abs(time - SECONDS / 2) / (SECONDS / 2), chat),
    ("step", 4.0, lambda time: 4.0 if SECONDS / 3 <= time < 2 * SECONDS / 3 else 1.0, chat),
    ("agents", 2.0, lambda time: 2.0, agent),
)
"""Name, highest rate, rate of sessions over time, and what a session is."""


def requests_of(wave: int, seed: int) -> list[Session]:
    """The requests of a load, each a session of one turn, in the order of their times."""
    name, most, rate, make = WAVES[wave]
    found = list[Session]()
    for number, start in enumerate(varying_arrivals(rate, most, Random(f"starts {name} {seed}"))):
        if start >= SECONDS:
            break
        found += _turns(make(Random(f"{number} {name} {seed}"), f"{name} {seed}"), microseconds(start))
    return sorted(found, key=lambda each: each.start)


def _turns(session: Session, time: float) -> Iterator[Session]:
    """The turns of a session, at the times at which another server would have let them come."""
    told = session.prefix
    for number, turn in enumerate(session.turns):
        time += turn.pause if number else 0.0
        told += turn.prompt
        if len(told) + session.service.max_tokens > the_machine().options["max_model_len"]:
            return
        yield Session(session.service, microseconds(time), (), (Turn(told, turn.length),))
        told += tuple(answer(turn.length, session.service))
        time += turn.length * TOKEN_SECONDS


class _Watched(Router, Autoscaler):
    """A policy's router and autoscaler, and a note of all that they decide.

    Attributes:
        log: (time, what was decided), in order.
        ended: when each request finished.
    """

    def __init__(self, create: Callable[[FleetArena], object]) -> None:
        self.log: list[tuple[float, object]] = []
        self.ended: dict[RequestId, float] = {}
        self.clock: Callable[[], float] = lambda: 0.0
        made = _guarded(lambda: create(FleetArena(lambda: self.clock())))
        router, scaler = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
        if not isinstance(router, Router) or not isinstance(scaler, Autoscaler):
            raise PolicyRefusedError("create", said("create(arena) must return a Router and an Autoscaler"))
        self._router, self._scaler = router, scaler

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> ReplicaId:
        free = [each.replica_id for each in replicas if not each.is_full]
        if not free:  # nothing to choose from: the request waits
            raise no_replica(replicas)
        chosen: ReplicaId = _guarded(lambda: self._router.choose(request, replicas))
        if chosen not in free:
            raise PolicyRefusedError("machine", said("the router has chosen {name}, which is full", name=repr(chosen)))
        self.log.append((self.clock(), (request.request_id, chosen)))
        return chosen

    def on_sent(self, request: RoutedRequest, replica_id: ReplicaId) -> None:
        _guarded(lambda: self._router.on_sent(request, replica_id))

    def on_finished(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        self.ended[request_id] = self.clock()
        _guarded(lambda: self._router.on_finished(request_id, replica_id))

    def on_left(self, replica_id: ReplicaId) -> None:
        _guarded(lambda: self._router.on_left(replica_id))

    def decide(self, view: FleetView, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        number, its_state = _guarded(lambda: self._scaler.decide(view, state))
        if not isinstance(number, int) or not 1 <= number <= MAX_REPLICAS:
            raise PolicyRefusedError(
                "machine",
                said("the autoscaler wants {number} replicas of 1 to {most}", number=number, most=MAX_REPLICAS),
            )
        self.log.append((self.clock(), number))
        return number, dict(its_state)

    def leaving(self, replicas: Sequence[ReplicaView], count: int) -> list[ReplicaId]:
        names: list[ReplicaId] = _guarded(lambda: self._scaler.leaving(replicas, count))
        self.log.append((self.clock(), tuple(names)))
        return names


def _guarded(call: Callable[[], Any]) -> Any:
    """Call the policy. What it raises is why it is refused."""
    try:
        return call()
    except PolicyRefusedError:
        raise
    except Exception as error:
        raise refused_for(error) from error


def _serve(text: str, sent: Sequence[Session], lengths: Mapping[int, int]) -> tuple[FleetReport, _Watched]:
    """One run."""
    watched, machine = _Watched(load(text)), the_machine()
    requests = (
        Request(
            number,
            each.turns[0].prompt,
            lengths.get(number, each.turns[0].length),
            ignore_eos=True,
            arrival_time=each.start,
        )
        for number, each in enumerate(sent)
    )
    options = machine.options | {"max_num_batched_tokens": 512}
    simulation = FleetSimulation(
        watched,
        lambda: ChunkedPrefillScheduler(**options, prefix_caching=True),
        machine.cost,
        requests,
        num_replicas=2,
        scaling=Scaling(watched, INTERVAL, START_SECONDS),
    )
    watched.clock = lambda: simulation.now
    try:
        return simulation.run(), watched
    except PolicyRefusedError:
        raise
    except MinicacheError as error:
        raise PolicyRefusedError("dropped", str(error)) from error


def checked_run(text: str, sent: Sequence[Session]) -> tuple[FleetReport, str]:
    """Serve requests with a fleet's policy, and check it, as `minicache_course.arena.score.checked_run` does.

    Returns:
        The report, and the hash of all that was decided.

    Raises:
        PolicyRefusedError: it breaks a rule.
    """
    report, first = _serve(text, sent, {})
    if _serve(text, sent, {})[1].log != first.log:
        raise PolicyRefusedError("chance", said("two runs of the same requests were scheduled differently"))
    half = SECONDS / 2
    begun = [each for each in sent if each.start <= half]
    later = [number for number in range(len(begun)) if first.ended[number] > half]
    other = _serve(text, begun, {number: begun[number].service.max_tokens for number in later})[1]
    if [each for each in other.log if each[0] < half] != [each for each in first.log if each[0] < half]:
        raise PolicyRefusedError("future", said("other answers in the future change what was scheduled before"))
    return report, sha256(repr(first.log).encode()).hexdigest()


def bound(sent: Sequence[Session]) -> float:
    """What no fleet exceeds: all requests that meet their limits when alone, less what serving all of them costs.

    Proof. Every request is served by some replica, and the steps of a replica are no shorter than what is charged to
    their requests (`minicache_course.arena.bound`). So the replicas are there for at least the sum of what the requests
    need, each as if every block that another one leaves in a cache were found.
    """
    jobs = list(jobs_of(sent, the_machine()))
    return sum(job.is_possible for job in jobs) - PRICE * fsum(max(job.multiplying, job.reading) for job in jobs)


def score(text: str, *, seed: int = 0, tell: Callable[[int], object] = lambda num_done: None) -> Score:
    """Run a fleet's policy on all loads, and check it.

    Args:
        text: of its file.
        seed: of the loads.
        tell: is called with the number of loads that are done.

    Raises:
        PolicyRefusedError: it breaks a rule.
    """
    parse(text)  # before anything is served
    cells = []
    for number, (name, most, _, _) in enumerate(WAVES):
        sent = requests_of(number, seed)
        try:
            with unchanged():
                report, log = checked_run(text, sent)
        except PolicyRefusedError as error:
            raise error.on(said("{workload} at {rate} sessions/s", workload=name, rate=most)) from error
        times, service = report.times, sent[0].service
        felt = [
            (first, (latency - first) / max(1, count - 1))
            for first, latency, count in zip(times.first_token, times.latency, times.num_output_tokens, strict=True)
        ]
        good = sum(first <= service.ttft and tpot <= service.tpot for first, tpot in felt)
        cost = PRICE * fsum(each.seconds for each in report.replicas)
        ttft, tpot = (p90([each[place] for each in felt]) for place in (0, 1))
        cells.append(Cell(name, most, len(felt), good, bound(sent), ttft, tpot, log, cost))
        tell(number + 1)
    return Score(digest(text), seed, tuple(cells))
