"""Long work in the event loop, one slice at a time. No phase builds this module.

A body of a megabyte takes tens of milliseconds to parse, an answer with thousands of log probabilities seconds to
write. In a thread it would hold the GIL as long; so it is done in slices, and the event loop turns between two of them.

It sleeps between them, too. A loop that is always busy gives the GIL up only while it polls, for some microseconds: it
has it back before another thread wakes, and that thread's wait of 5 ms, after which it would be given the GIL, starts
again. So a prompt could wait for the thread that tokenises it until another client's long answer was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Final, Generic, TypeVar

Result = TypeVar("Result")

SLICE: Final = 512
"""The most tokens and log probabilities that are written in one slice: some milliseconds."""
PAUSE_SECONDS: Final = 0.001
"""The event loop's sleep between two slices: as short as a poll can wait."""


class Together(Generic[Result]):
    """Does some work in a thread: once for all who ask before it begins, and never twice at a time.

    Args:
        work: what to do.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._lock = asyncio.Lock()
        self._next: asyncio.Future[Result] | None = None

    async def result(self) -> Result:
        """What the work returns that begins next."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> Result:
        async with self._lock:
            self._next = None
            return await asyncio.to_thread(self._work)


class Turns:
    """Has one slice of long work run in each turn of the event loop, of all that there is: first come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_done = SLICE  # since the last pause

    @asynccontextmanager
    async def slice(self, size: int = SLICE) -> AsyncIterator[None]:
        """A context for one piece of work, in tokens and log probabilities. Small pieces share a slice."""
        async with self._lock:
            self._num_done += size
            if self._num_done > SLICE:
                await asyncio.sleep(PAUSE_SECONDS)
                self._num_done = size
            yield

    async def run(self, work: Generator[None, None, Result]) -> Result:
        """Do some work that yields after each slice; returns what it returns."""
        while True:
            async with self.slice():
                try:
                    next(work)
                except StopIteration as end:
                    result: Result = end.value
                    return result
