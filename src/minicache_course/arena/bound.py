"""How many requests no policy can serve better than: a relaxation that knows every length. Pure standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, fsum
from typing import NamedTuple

from minicache.memory.prefix import BlockHash, block_hash, root_hash
from minicache_course.arena.machine import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, Machine, Service, the_machine
from minicache_course.arena.workloads import WINDOW, Session, answer

GRID = 32
"""Moments between which the work is counted. More make the bound a little sharper, and slower to compute."""

ROUNDING = 1e-9
"""What a sum of fractions may be short of a whole number."""


class Job(NamedTuple):
    """What a request must have from the machine, at least, to be served within its limits.

    Attributes:
        start: seconds; no policy can have it arrive earlier.
        first: by when its first token must be there, if it arrives as late as it can.
        end: likewise its last.
        prompt: seconds of multiplying that its prompt takes.
        multiplying: with its answer.
        reading: seconds of reading, and its part of the memory as a part of each step's reading of the weights.
        is_possible: whether it meets its limits when it is alone on the machine.
    """

    start: float
    first: float
    end: float
    prompt: float
    multiplying: float
    reading: float
    is_possible: bool


def bound(sessions: Sequence[Session], machine: Machine | None = None) -> int:
    """The most requests whose limits can be met.

    Proof. A step takes as long as its multiplying and as long as its reading, and an overhead; a part of the overhead
    (one of `MAX_NUM_SEQS`) is charged to each request of the step, and of weights and overhead the part of the cache
    that the request holds alone, which adds up to no more than the step. So whatever the policy, the seconds charged to
    the requests are no more than the seconds that pass, and the same is true of any mean of two such accounts. A
    request that meets its limits is charged at least what `Job` says: every block that any other request could have
    left in a cache is found, and one step generates one of its tokens; and all of it between its earliest arrival and
    the latest moment that its limits allow. So if a set of requests meets its limits, then in every interval of time
    the jobs that lie within it need no more than its length. The most jobs of such a set, where a part of a job counts
    as that part, is found by taking the smallest first, as much of each as all intervals allow (a polymatroid's greedy
    algorithm: Edmonds 1970); rounding the jobs' times outwards to a grid can only allow more.

    Args:
        sessions: in the order of their starts.
        machine: what serves; None: the arena's.
    """
    machine = machine or the_machine()
    jobs = [job for job in jobs_of(sessions, machine) if job.is_possible]
    accounts = (
        [(job.start, job.first, job.prompt) for job in jobs],
        [(job.start, job.end, job.multiplying) for job in jobs],
        [(job.start, job.end, job.reading) for job in jobs],
        [(job.start, job.end, (job.multiplying + job.reading) / 2) for job in jobs],
    )
    return min(_most(account) for account in accounts)


def _most(jobs: Sequence[tuple[float, float, float]]) -> int:
    """The most of these jobs (start, end, seconds) that one machine can do, parts of jobs included; rounded down."""
    if not jobs:
        return 0
    starts = _grid(start for start, _, _ in jobs)
    ends = [-end for end in _grid(-end for _, end, _ in jobs)][::-1]
    slack = [[max(0.0, end - start) for end in ends] for start in starts]
    parts = []
    for start, end, seconds in sorted(jobs, key=lambda job: (job[2], job)):
        last = max(place for place, moment in enumerate(starts) if moment <= start)
        first = min(place for place, moment in enumerate(ends) if moment >= end)
        done = min(seconds, *[min(row[first:]) for row in slack[: last + 1]])
        parts.append(done / seconds)
        for row in slack[: last + 1]:
            row[first:] = [left - done for left in row[first:]]
    return floor(fsum(parts) + ROUNDING)


def _grid(moments: Iterable[float]) -> list[float]:
    """Some of the moments, the first included: each has one of them at or before it."""
    ordered = sorted(set(moments))
    return ordered[:: -(-len(ordered) // GRID)]


@dataclass(slots=True)
class _Sent:
    """A request as it is sent, if the turns before it had the lengths that were drawn."""

    session: int
    service: Service
    start: float
    is_first: bool
    pause: float
    num_prompt: int
    length: int
    hashes: list[BlockHash]


def jobs_of(sessions: Sequence[Session], machine: Machine) -> Iterator[Job]:
    """Those of all requests that can arrive in the window."""
    sent = [_session(number, session) for number, session in enumerate(sessions)]
    holders: dict[BlockHash, set[int]] = {}
    counts: dict[BlockHash, int] = {}
    for request in (request for requests in sent for request in requests):
        for each in request.hashes:
            holders.setdefault(each, set()).add(request.session)
            counts[each] = counts.get(each, 0) + 1
    for requests in sent:
        arrives = 0.0
        for request in requests:
            arrives = request.start if request.is_first else arrives + request.pause
            if arrives >= WINDOW and not request.is_first:
                break
            found = shared = 0
            for place, each in enumerate(request.hashes[: (request.num_prompt - 1) // BLOCK_SIZE], start=1):
                found = place if counts[each] > 1 else found
                shared = place if len(holders[each]) > 1 else shared
            job, done = _job(request, arrives, found * BLOCK_SIZE, shared * BLOCK_SIZE, machine)
            yield job
            arrives = done


def _session(number: int, session: Session) -> list[_Sent]:
    """The requests of a session."""
    requests: list[_Sent] = []
    said, hashes, parent = list(session.prefix), list[BlockHash](), root_hash(None, None)
    for turn in session.turns:
        said += turn.prompt
        if requests and len(said) + session.service.max_tokens > MAX_MODEL_LEN:
            break
        num_prompt, its_answer = len(said), answer(turn.length, session.service)
        said += its_answer
        for start in range(len(hashes) * BLOCK_SIZE, len(said) - BLOCK_SIZE, BLOCK_SIZE):  # the last token has no row
            parent = block_hash(parent, said[start : start + BLOCK_SIZE])
            hashes.append(parent)
        is_first = not requests
        requests.append(
            _Sent(
                number, session.service, session.start, is_first, turn.pause, num_prompt, len(its_answer), list(hashes)
            )
        )
    return requests


def _job(request: _Sent, arrives: float, num_found: int, num_shared: int, machine: Machine) -> tuple[Job, float]:
    """What a request needs, and when it is over, at the earliest."""
    cost, service = machine.cost, request.service
    num_prompt, num_more = request.num_prompt, request.length - 1
    last = num_prompt + num_more  # tokens that are computed or found
    prompt = (num_prompt - num_found) * cost.seconds_per_token
    prompt += (_pairs(num_prompt) - _pairs(num_found)) * cost.seconds_per_pair
    decode = num_more * cost.seconds_per_token + (_pairs(last) - _pairs(num_prompt)) * cost.seconds_per_pair
    overhead = cost.overhead_seconds / MAX_NUM_SEQS
    rows = _pairs(last) - _pairs(num_prompt - 1)  # read by the steps that generate its tokens, one after the other
    weights = cost.seconds_of_weights + cost.overhead_seconds
    alone = rows - request.length * num_shared
    reading = rows * cost.seconds_per_row + alone * weights / (machine.num_blocks * BLOCK_SIZE)
    # When it is alone on the machine.
    ttft = max(prompt, cost.seconds_of_weights + num_prompt * cost.seconds_per_row) + cost.overhead_seconds
    rest = num_more * weights + (rows - num_prompt) * cost.seconds_per_row
    done = arrives + ttft + rest
    latest = arrives if request.is_first else max(arrives, WINDOW)
    first = latest + service.ttft
    job = Job(
        arrives,
        first,
        first + num_more * service.tpot,
        prompt + overhead,
        prompt + decode + request.length * overhead,
        reading,
        ttft <= service.ttft and rest <= num_more * service.tpot,
    )
    return job, done


def _pairs(num_tokens: int) -> int:
    """(token, token it attends to) pairs of the first tokens of a request."""
    return num_tokens * (num_tokens + 1) // 2
