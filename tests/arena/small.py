"""A few requests, short ones, that are served in no time."""

from __future__ import annotations

from minicache_course.arena.machine import Service
from minicache_course.arena.workloads import Session, Turn

SERVICE = Service("small", ttft=0.5, tpot=0.05, max_tokens=64)


def tokens(number: int, count: int) -> tuple[int, ...]:
    """A prompt like no other."""
    return tuple(1 + (number * 7919 + place * 31) % 40_000 for place in range(count))


def few() -> list[Session]:
    """Eight sessions of one or two turns, with long and short answers, begun within half a second."""
    lengths = (40, 3, 25, 64, 8, 30, 2, 16)
    return [
        Session(
            SERVICE,
            number * 0.06,
            (),
            (Turn(tokens(number, 120 + 40 * number), length), Turn(tokens(50 + number, 30), 5, 0.25))[: 1 + number % 2],
        )
        for number, length in enumerate(lengths)
    ]
