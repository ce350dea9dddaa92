"""A process of its own for what a stranger may have written: a timer ends it, and its memory has a bound.

Nothing in a process can end a thread that computes for hours. So what may do so runs in a child: a script that answers
one line of JSON with another, and is started when it is first asked. Pure standard library. No phase builds this
module.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

SECONDS: Final = 1.0
"""How long the child may compute for one answer."""

MAX_NBYTES: Final = 2**29
"""The memory of the child."""


class TimedProcess:
    """Asks a script, which calls `answer_lines`. Threads may share it.

    Args:
        path: of the script.
        head: what it gets first, as JSON.
    """

    def __init__(self, path: str, head: Any) -> None:
        self._path = path
        self._head = _line(head)
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()

    def ask(self, question: Any) -> Any:
        """The answer to a question; both go over as JSON.

        Raises:
            ValueError: what the script has raised; or it takes too long or too much memory.
        """
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(_line(question))
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise ValueError(self._bury())
        said: dict[str, Any] = json.loads(answer)
        if "error" in said:
            raise ValueError(said["error"])
        return said["answer"]

    def _start(self) -> None:
        # By its path: with the package, it would import far more than it needs.
        command = [sys.executable, "-P", self._path]
        self._process = process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._head)

    def _bury(self) -> str:
        """The process has ended; why."""
        assert self._process is not None
        assert self._end is not None
        status = self._process.wait()
        self._end()
        self._process = None
        if status == -signal.SIGPROF:
            return f"it takes more than {SECONDS:.0f} s of computing"
        return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def answer_lines(prepare: Callable[[Any], Callable[[Any], Any]]) -> None:
    """In the child: answer each line, until there is none.

    Args:
        prepare: is given the head; returns what answers a question. What either raises is the answer to a question.
    """
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    with suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_NBYTES, MAX_NBYTES))
    head = json.loads(sys.stdin.buffer.readline())
    answer = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of computing; its signal ends the process, whatever that is at
        try:
            answer = answer or prepare(head)
            said = {"answer": answer(json.loads(line))}
        except MemoryError:
            said = {"error": f"it takes more than {MAX_NBYTES >> 20} MiB of memory"}
        except Exception as error:  # a program of a stranger's may raise what it likes
            said = {"error": str(error) or type(error).__name__}
        sys.stdout.buffer.write(_line(said))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.flush()
