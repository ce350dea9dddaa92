"""Long work in the event loop, one slice at a time. No phase builds this module.

A body of a megabyte takes tens of milliseconds to parse, an answer with thousands of log probabilities seconds to
write. In a thread it would hold the GIL as long; so it is done in slices, and the event loop turns between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

Result = TypeVar("Result")

SLICE: Final = 512
"""The most tokens and log probabilities that are written in one slice: some milliseconds."""


class Turns:
    """Has one slice of long work run in each turn of the event loop, of all that there is: first come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def slice(self) -> AsyncIterator[None]:
        """A context for one slice. Everything else that is ready runs before it."""
        async with self._lock:
            await asyncio.sleep(0)
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
