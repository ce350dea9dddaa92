"""How much work a call is, counted and not timed: a clock on a busy machine says little.

Pure standard library. Tests of cost compare two sizes: `effort(pool.free, [7])` with 50 blocks and with 5,000.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

_BYTES_AN_INSTRUCTION = 64
"""Allocating so many bytes counts as one instruction, so copying a list counts by its length."""


def effort(fn: Callable[..., object], *args: object) -> int:
    """The bytecode instructions that a call runs, in every function that it calls, and the memory that it allocates.

    What a function written in C does without allocating memory (`in`, `index`, `==`) counts as one instruction, unless
    it calls back: an `__eq__` written in Python counts each time.

    Args:
        fn: what to call. It raises what it raises.
        args: its arguments.
    """
    counted, held = 0, 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted, held
        frame.f_trace_opcodes = True
        if event == "opcode":
            now, peak = tracemalloc.get_traced_memory()
            counted += 1 + max(0, peak - held) // _BYTES_AN_INSTRUCTION
            tracemalloc.reset_peak()
            held = now
        return trace

    traced, before = tracemalloc.is_tracing(), sys.gettrace()
    tracemalloc.start()
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    sys.settrace(trace)
    try:
        fn(*args)
    finally:
        sys.settrace(before)
        if not traced:
            tracemalloc.stop()
    return counted
