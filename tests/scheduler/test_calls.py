"""How many calls a step of the default scheduler takes: a reader follows each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minicache.request import Request
from minicache.scheduler import Scheduler, create_scheduler


def calls_of(function: Callable[[], object]) -> list[str]:
    """The Python functions that are called, in order; each is indented below the one that calls it."""
    calls: list[str] = []
    depth = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        if event == "call":
            module = frame.f_globals.get("__name__", "").removeprefix("minicache.")
            calls.append("  " * depth + f"{module}: {frame.f_code.co_qualname}")
        depth += {"call": 1, "return": -1}.get(event, 0)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def admission(scheduler: Scheduler, num_prompt_tokens: int) -> list[str]:
    """The calls of a step that admits one request, alone on the server."""
    scheduler.add_request(Request("r", list(range(num_prompt_tokens)), 9))
    return calls_of(scheduler.schedule)


@pytest.mark.parametrize(
    ("prefix_caching", "num_prompt_tokens", "most"),
    [
        (False, 15, 30),
        (False, 1000, 30),
        (True, 15, 34),  # the free list of a prefix cache is no deque: four calls
        (True, 16, 41),  # a full block: it is hashed, looked for and cached
        (True, 160, 71),  # three more for each more block, and three
    ],
)
def test_an_admission(prefix_caching: bool, num_prompt_tokens: int, most: int) -> None:
    calls = admission(create_scheduler("chunked", num_blocks=99, prefix_caching=prefix_caching), num_prompt_tokens)
    assert len(calls) <= most, f"{len(calls)} calls:\n" + "\n".join(calls)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_decode(prefix_caching: bool) -> None:
    scheduler = create_scheduler("chunked", num_blocks=99, prefix_caching=prefix_caching)
    admission(scheduler, 20)
    assert scheduler.outstanding is not None
    scheduler.update_from_output(scheduler.outstanding, {"r": 7})
    calls = calls_of(scheduler.schedule)
    assert len(calls) <= 10, f"{len(calls)} calls:\n" + "\n".join(calls)
