"""Standard output and standard error of a server: a thread writes them, and nothing else waits for that or fails by it.

A pipe that is not read is full after some 240 lines, and a write to it never returns; a full disk or a terminal that
has gone makes a write fail. Neither may hold up an answer.
"""

from __future__ import annotations

import io
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any, Final, Literal, TextIO

MAX_CHARACTERS: Final = 4 * 2**20
"""The most that waits to be written; what comes then is dropped."""
FINISH_SECONDS: Final = 1.0
"""How long the end waits for what is not written yet."""


class Output:
    """A text stream in front of another: `write` never blocks and never fails.

    Args:
        stream: what is written to, by a thread. What it cannot take is dropped.
        on_lost: is called with the number of dropped writes, in that thread, as soon as a later one has succeeded.
    """

    def __init__(self, stream: TextIO, on_lost: Callable[[int], object] = lambda number: None) -> None:
        self._stream, self._on_lost = stream, on_lost
        self._texts: deque[str] = deque()
        self._num_characters = self._num_lost = 0
        self._is_closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="minicache-output", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:  # isatty, encoding, fileno, …
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Have it written, or count it as lost."""
        with self._changed:
            if self._num_characters + len(text) > MAX_CHARACTERS:
                self._num_lost += 1
            else:
                self._texts.append(text)
                self._num_characters += len(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes what there is."""

    def close(self) -> None:
        """Write what is left, for FINISH_SECONDS at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(FINISH_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._is_closed)
                if not self._texts:
                    return
                text = self._texts.popleft()
            try:
                _write(self._stream, text)
            except (OSError, ValueError):  # ValueError: it is closed
                num_lost, is_lost = 0, True
            else:
                num_lost, is_lost = self._num_lost, False
            with self._changed:
                self._num_characters -= len(text)
                self._num_lost += is_lost - num_lost
            if num_lost:
                self._on_lost(num_lost)


def _write(stream: TextIO, text: str) -> None:
    """Write to the file itself: at its end, Python would wait for a buffer that a thread cannot write."""
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # a test's
        stream.write(text)
        stream.flush()
        return
    data = text.encode(stream.encoding, "backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def written_by_a_thread(
    name: Literal["stdout", "stderr"], on_lost: Callable[[int], object] = lambda number: None
) -> Iterator[None]:
    """Have a thread write what is written to `sys.stdout` or `sys.stderr`, until the block is left.

    Args:
        name: which.
        on_lost: as `Output`.
    """
    stream = getattr(sys, name)
    output = Output(stream, on_lost)
    setattr(sys, name, output)
    try:
        yield
    finally:
        setattr(sys, name, stream)
        output.close()
