"""`timed` counts the steps, not what the caller does between them."""

import time
from collections.abc import Iterator

import pytest

from minicache.engine.timing import timed


def test_items_come_through_and_only_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def steps() -> Iterator[str]:
        for item, seconds in (("a", 1.0), ("b", 2.5)):
            clock[0] += seconds
            yield item

    seen = []
    for item in timed(steps()):
        clock[0] += 100.0  # the caller at work
        seen.append(item)
    assert seen == [("a", 1.0), ("b", 2.5)]


def test_an_error_comes_through() -> None:
    def steps() -> Iterator[int]:
        yield 1
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        list(timed(steps()))
