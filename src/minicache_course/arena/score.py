"""All runs of a policy, checked, and what they are worth. Pure standard library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from minicache_course.arena.bound import bound
from minicache_course.arena.limits import load_policy, parse, unchanged
from minicache_course.arena.loop import Loop, Outcome, Place, PolicyRefusedError, Run
from minicache_course.arena.workloads import WINDOW, WORKLOADS, Session
from minicache_course.language import said


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a workload at a load.

    Attributes:
        workload: its name.
        rate: sessions per second.
        num_requests: that arrived, and finished.
        num_good: of them, those whose limits were met.
        bound: how many could at most; of a fleet, less what they cost at least.
        ttft_p90: seconds.
        tpot_p90: seconds.
        schedule: the hash of all that was scheduled, in hexadecimal digits.
        cost: of a fleet, what its replicas cost, in good requests.
    """

    workload: str
    rate: float
    num_requests: int
    num_good: int
    bound: float
    ttft_p90: float
    tpot_p90: float
    schedule: str
    cost: float = 0.0

    @property
    def goodput(self) -> float:
        """Requests per second whose limits were met."""
        return self.num_good / WINDOW

    @property
    def share(self) -> float:
        """Of the bound, 0 … 1."""
        return max(0.0, self.num_good - self.cost) / self.bound if self.bound else 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy is worth.

    Attributes:
        policy: the SHA-256 of its file.
        seed: of the workloads.
        cells: in the order of the workloads and their loads.
    """

    policy: str
    seed: int
    cells: tuple[Cell, ...]

    @property
    def percent(self) -> float:
        """The mean of the cells' shares of their bounds, 0 … 100."""
        return 100 * fsum(cell.share for cell in self.cells) / len(self.cells)


Load = tuple[str, float, list[Session]]
"""A workload's name, its rate, and its sessions."""


def loads(seed: int) -> Iterator[Load]:
    """All workloads at all loads, for a seed."""
    for workload in WORKLOADS:
        for number, rate in enumerate(workload.rates):
            yield workload.name, rate, workload.sessions(number, seed)


NUM_LOADS = sum(len(workload.rates) for workload in WORKLOADS)
"""How many `loads` gives."""


def score(
    text: str,
    *,
    seed: int = 0,
    given: Sequence[Load] | None = None,
    oracle: bool = False,
    tell: Callable[[int], object] = lambda num_done: None,
) -> Score:
    """Run a policy on all loads, and check it.

    Args:
        text: of its file.
        seed: of the workloads. A class may keep its own secret.
        given: other loads, from a trace.
        oracle: it is a baseline that knows every length.
        tell: is called with the number of loads that are done.

    Raises:
        PolicyRefusedError: it breaks a rule; the message names the rule, and the workload.
    """
    parse(text)  # before anything is served
    cells = []
    for number, (name, rate, sessions) in enumerate(loads(seed) if given is None else given):
        try:
            with unchanged():
                run = checked_run(text, sessions, oracle=oracle)
        except PolicyRefusedError as error:
            raise error.on(said("{workload} at {rate} sessions/s", workload=name, rate=rate)) from error
        cells.append(_cell(name, rate, run, bound(sessions)))
        tell(number + 1)
    return Score(digest(text), seed, tuple(cells))


def digest(text: str) -> str:
    """The SHA-256 of a policy's file, whatever its line ends."""
    return hashlib.sha256("\n".join(text.splitlines()).encode()).hexdigest()


def checked_run(text: str, sessions: Sequence[Session], *, oracle: bool = False) -> Run:
    """Serve sessions with a policy; and again, to see whether it does the same, and whether it knows what will be.

    The second run must schedule as the first. In the third, the answers that are unfinished half-way through have other
    lengths, the long ones short and the short ones long, and what has not begun by then never comes. No policy can know
    of either before half-way, so up to there all must be as it was, wherever a policy may have its knowledge from.

    Args:
        text: of the policy's file, which is loaded anew for each run.
        sessions: in the order of their starts.
        oracle: it knows every length.

    Returns:
        The first run, in which every step was audited.

    Raises:
        PolicyRefusedError: it breaks a rule.
    """
    run = Loop(sessions, load_policy(text), oracle=oracle).run()
    half = len(run.digests) // 2
    again = Loop(sessions, load_policy(text), audit=False, oracle=oracle)
    now = again.run(half).seconds
    unfinished = again.unfinished()
    if again.run().digests != run.digests:
        raise PolicyRefusedError("chance", said("two runs of the same requests were scheduled differently"))
    if oracle:
        return run
    begun = [session for session in sessions if session.start <= now]
    other = Loop(begun, load_policy(text), audit=False, lengths=_other_lengths(begun, unfinished))
    if other.run(half).digests[:half] != run.digests[:half]:
        raise PolicyRefusedError("future", said("other answers in the future change what was scheduled before"))
    return run


def _other_lengths(sessions: Sequence[Session], unfinished: dict[Place, int]) -> dict[Place, int]:
    """The lengths of unfinished answers and of all later turns, turned round."""
    current = dict(unfinished.keys())
    other = {}
    for number, session in enumerate(sessions):
        for turn in range(current.get(number, len(session.turns)), len(session.turns)):
            most = session.service.max_tokens
            other[number, turn] = max(unfinished.get((number, turn), 0) + 1, most + 1 - session.turns[turn].length)
    return other


def _cell(name: str, rate: float, run: Run, most: int) -> Cell:
    ttft, tpot = (p90([value(each) for each in run.outcomes]) for value in (_ttft, _tpot))
    last = run.digests[-1].hex() if run.digests else ""
    return Cell(name, rate, len(run.outcomes), run.num_good, most, ttft, tpot, last)


def _ttft(outcome: Outcome) -> float:
    return outcome.ttft


def _tpot(outcome: Outcome) -> float:
    return outcome.tpot


def p90(values: list[float]) -> float:
    """The ninth decile: the smallest value that nine tenths do not exceed."""
    return sorted(values)[-(-9 * len(values) // 10) - 1] if values else 0.0
