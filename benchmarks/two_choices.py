"""Two choices at random, twice: balls into bins, and a hundred queues whose lengths are known late.

Balls: n balls into n bins, each into one bin drawn at random, or into the emptier of two or three. Queues: 100 replicas
that each serve one request at a time, a second on average, 90 requests a second in all, gaps and times exponential. A
board shows every replica's number of unfinished requests and is updated every so many seconds; requests are routed by
what it shows (Mitzenmacher 2000). "two" is the course's own `PowerOfTwoRouter`. Then several routers, each with a board
of its own, on which it adds what it has sent itself.

    python -m benchmarks.two_choices
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from rich.console import Console

from benchmarks._record import record
from minicache.fleet import PowerOfTwoRouter, ReplicaView, RoutedRequest

SIZES = (100, 1_000, 10_000)
NUM_REPLICAS, LOAD = 100, 0.9
AGES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Seconds between two updates of the board; 0: it is always right."""
NUM_REQUESTS, NUM_WARM_UP = 100_000, 20_000

ROUTERS, ROUTERS_AGE = (1, 4, 16, 64), 3.0
"""How many routers share the requests, and how old their boards get."""

Choose = Callable[[list[ReplicaView]], int]


def main() -> None:
    figures = {
        "balls": {str(size): balls(size) for size in SIZES},
        "queues": [{"seconds": age} | {name: queues(age, name) for name in POLICIES} for age in AGES],
        "counting": [
            {"routers": number} | {name: queues(ROUTERS_AGE, name, num_routers=number) for name in ("two", "all")}
            for number in ROUTERS
        ],
        "counting_age": ROUTERS_AGE,
        "num_replicas": NUM_REPLICAS,
        "load": LOAD,
        "expected": expected(LOAD),
    }
    Console(highlight=False).print_json(data=figures)
    record("two_choices", figures)


# --- balls into bins --------------------------------------------------------------------------------------------------


def balls(size: int) -> dict[str, Any]:
    """The fullest bin of `size`, on average, by the number of choices; and how many bins hold how many balls."""
    num_runs = max(10, 200_000 // size)
    choices: dict[str, Any] = {}
    for num_choices in (1, 2, 3):
        loads = [throw(size, num_choices, Random(run)) for run in range(num_runs)]
        counts = Counter(load for each in loads for load in each)
        choices[str(num_choices)] = {
            "fullest": round(statistics.fmean(map(max, loads)), 2),
            "bins": {str(load): round(counts[load] / num_runs, 1) for load in range(9)},
        }
    one, two = math.log(size) / math.log(math.log(size)), math.log(math.log(size)) / math.log(2)
    return choices | {"num_runs": num_runs, "formula": {"1": round(one, 2), "2": round(two, 2)}}


def throw(size: int, num_choices: int, rng: Random) -> list[int]:
    """`size` balls into `size` bins: how many each bin has in the end."""
    bins = [0] * size
    for _ in range(size):
        bins[min(rng.sample(range(size), num_choices), key=bins.__getitem__)] += 1
    return bins


# --- queues whose lengths are known late ------------------------------------------------------------------------------


def one(rng: Random) -> Choose:
    """A replica drawn at random; the board is not read."""
    return lambda board: rng.randrange(len(board))


def two(rng: Random) -> Choose:
    """The course's router."""
    router, request = PowerOfTwoRouter(seed=rng.randrange(2**32)), RoutedRequest("", (), 0)
    return lambda board: int(router.choose(request, board))


def all_of_them(rng: Random) -> Choose:
    """The least busy of all, by the board; of equals one at random."""

    def choose(board: list[ReplicaView]) -> int:
        least = min(view.num_unfinished for view in board)
        return rng.choice([index for index, view in enumerate(board) if view.num_unfinished == least])

    return choose


POLICIES = {"one": one, "two": two, "all": all_of_them}


def queues(age: float, policy: str, *, num_routers: int = 0) -> dict[str, float]:
    """Serve the requests; how long they took from arrival to answer, and the longest queue.

    Args:
        age: seconds between two updates of the boards.
        policy: a name of POLICIES.
        num_routers: routers that take the requests in turn and count what they send; 0: one that does not count.
    """
    rng = Random(0)
    choose = POLICIES[policy](Random(1))
    free_at = [0.0] * NUM_REPLICAS
    lengths = [0] * NUM_REPLICAS
    boards = [[ReplicaView(str(index), 0, 10**9) for index in range(NUM_REPLICAS)] for _ in range(num_routers or 1)]
    departures: list[tuple[float, int]] = []
    seconds, longest, updated_at = [], 0, 0.0
    for number, now in enumerate(arrivals(rng)):
        changed = set()
        while departures and departures[0][0] <= now:
            index = heapq.heappop(departures)[1]
            lengths[index] -= 1
            changed.add(index)
        if age == 0:
            update(boards[0], lengths, changed)
        elif now - updated_at >= age:
            updated_at = now
            for each in boards:
                update(each, lengths, range(NUM_REPLICAS))
        board = boards[number % len(boards)]
        chosen = choose(board)
        free_at[chosen] = max(now, free_at[chosen]) + rng.expovariate(1.0)
        heapq.heappush(departures, (free_at[chosen], chosen))
        lengths[chosen] += 1
        if age == 0:
            update(board, lengths, {chosen})
        elif num_routers:
            board[chosen] = replace(board[chosen], num_unfinished=board[chosen].num_unfinished + 1)
        if number >= NUM_WARM_UP:
            seconds.append(free_at[chosen] - now)
            longest = max(longest, lengths[chosen])
    seconds.sort()
    return {
        "mean": round(statistics.fmean(seconds), 2),
        "p99": round(seconds[int(0.99 * len(seconds))], 1),
        "longest": longest,
    }


def arrivals(rng: Random) -> Iterator[float]:
    """When the requests come."""
    now = 0.0
    for _ in range(NUM_REQUESTS):
        now += rng.expovariate(LOAD * NUM_REPLICAS)
        yield now


def update(board: list[ReplicaView], lengths: list[int], changed: Iterable[int]) -> None:
    """Show the lengths as they are."""
    for index in changed:
        board[index] = replace(board[index], num_unfinished=lengths[index])


def expected(load: float) -> dict[str, float]:
    """Mean seconds by theory, for very many replicas and a board that is always right (Mitzenmacher 2001)."""
    two_choices = sum(load ** (2**turn - 2) for turn in range(1, 20))
    return {"one": round(1 / (1 - load), 2), "two": round(two_choices, 2)}


if __name__ == "__main__":
    main()
