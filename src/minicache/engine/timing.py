"""How long each step of a stream takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def timed(steps: Iterable[Item]) -> Iterator[tuple[Item, float]]:
    """Each item of `steps` with the seconds it took to come; what the caller does in between is not counted."""
    iterator = iter(steps)
    while True:
        start = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item, time.perf_counter() - start
