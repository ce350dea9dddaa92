"""What the tests of phase 2 share: a memory without buddies, one truth value per slot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minicache.memory.reservation import BuddyAllocator, ContiguousReservation
from minicache_course.follow import following


@pytest.fixture(autouse=True)
def _scenario() -> Iterator[None]:
    """A failure shows the memory and its allocations."""
    with (
        following(BuddyAllocator, "__init__", "allocate", "free"),
        following(ContiguousReservation, "__init__", "admit", "grow", "release"),
    ):
        yield


class Bitmap:
    """A slow allocator that keeps no lists: every answer is computed anew from the allocated slots.

    Nothing is split and nothing merges here. A free run is an aligned run of free slots, a power of two long, that is
    not half of a longer one.
    """

    def __init__(self, num_slots: int) -> None:
        self.taken = [False] * num_slots
        self.sizes: dict[int, int] = {}

    def free_runs(self) -> list[tuple[int, int]]:
        runs, start = [], 0
        while start < len(self.taken):
            if self.taken[start]:
                start += 1
                continue
            size = 1
            while start % (2 * size) == 0 and self.all_free(start, 2 * size):
                size *= 2
            runs.append((start, size))
            start += size
        return runs

    def all_free(self, start: int, size: int) -> bool:
        slots = self.taken[start : start + size]
        return len(slots) == size and not any(slots)

    def allocate(self, count: int) -> int | None:
        size = 1
        while size < count:
            size *= 2
        fitting = [(length, start) for start, length in self.free_runs() if length >= size]
        if not fitting:
            return None
        _, start = min(fitting)
        self.taken[start : start + size] = [True] * size
        self.sizes[start] = size
        return start

    def free(self, start: int) -> None:
        size = self.sizes.pop(start)
        self.taken[start : start + size] = [False] * size


@pytest.fixture(scope="session")
def bitmap() -> type[Bitmap]:
    return Bitmap
