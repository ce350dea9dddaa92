"""Several cases at once, one to a processor; one after the other where there are no processes to be had.

Processes are forked: they have a learner's modules as they are. Pure standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, MutableSequence, Sequence
from typing import Final

from minicache.verifier.explore import Case, Report, explore
from minicache.verifier.rules import INVARIANTS, PROPERTIES
from minicache.verifier.world import Property

REFRESH_SECONDS: Final = 0.1
PATIENCE: Final = 30
"""Seconds that the search may take for a few hundred states before the call that it waits for counts as endless."""

_shared: tuple[Sequence[Case], Sequence[Property], Sequence[Property], int, MutableSequence[int]]
"""What the processes do, and where each tells how many states it has found: they are forked with it."""


class _StoppedError(Exception):
    """The report is not waited for any longer."""


def explore_all(
    cases: Sequence[Case],
    properties: Sequence[Property] = PROPERTIES,
    invariants: Sequence[Property] = INVARIANTS,
    *,
    limit: int = sys.maxsize,
    tell: Callable[[int], None] = lambda num_states: None,
) -> Generator[Report, None, None]:
    """Explore cases, as many at once as there are processors.

    Args:
        cases: what is explored.
        properties: what must hold of every action.
        invariants: what must hold in every state.
        limit: the most states of a case.
        tell: called with the states found so far in all of them, now and then.

    Yields:
        A report of each, as soon as it is done. Closing the iterator stops the searches that still run.
    """
    global _shared
    num_processes = min(len(cases), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if num_processes < 2:
        counts = [0] * (len(cases) + 1)
        _shared = cases, properties, invariants, limit, counts
        for number in range(len(cases)):
            yield _explore(number, lambda _: tell(sum(counts)))
        return
    import multiprocessing  # here, as a browser has none
    from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

    context = multiprocessing.get_context("fork")
    shared = context.Array("Q", len(cases) + 1, lock=False)  # the last: whether to stop
    _shared = cases, properties, invariants, limit, shared
    with ProcessPoolExecutor(num_processes, context) as pool:
        left = {pool.submit(_watched, number) for number in range(len(cases))}
        try:
            while left:
                done, left = wait(left, REFRESH_SECONDS, FIRST_COMPLETED)
                tell(sum(shared))
                for future in done:
                    yield future.result()
        finally:
            shared[-1] = 1


def _watched(number: int) -> Report:
    """Explore a case; a call that does not return raises an error, which the search attributes to the scheduler."""

    def late(*_: object) -> None:
        raise TimeoutError(f"the call has not returned after {PATIENCE} s")

    signal.signal(signal.SIGALRM, late)
    try:
        return _explore(number, lambda _: signal.alarm(PATIENCE))
    finally:
        signal.alarm(0)


def _explore(number: int, told: Callable[[int], object]) -> Report:
    cases, properties, invariants, limit, counts = _shared

    def tell(num_states: int) -> None:
        if counts[-1]:
            raise _StoppedError
        counts[number] = num_states
        told(num_states)

    tell(0)
    report = explore(cases[number], properties, invariants, limit=limit, tell=tell)
    tell(report.num_states)
    return report
