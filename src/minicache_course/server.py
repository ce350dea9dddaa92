"""A process that imports pytest (and, if asked to, torch) once and forks a child for each run.

Importing torch takes seconds, and a class or an author's gates mean a hundred runs. A forked child has everything
loaded and nothing of the runs before it. `python -m minicache_course.server MODULE…` is the process; `PytestServer` is
its owner's end. They talk in lines: a job as JSON goes in, `pid N` and at its end `exit N` come out.
`resident.py` keeps such a process between commands.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import IO, NoReturn

from minicache_course.errors import CourseError
from minicache_course.journal import Job
from minicache_course.run import load, run
from minicache_course.table import Phase
from minicache_course.workspace import needs_torch, phase_imports

_POLL = 0.01  # seconds between two looks at a run
_GRACE = 0.5  # seconds that a process has to end its run


class Child:
    """One pytest run. Its process leads a group of its own, so its child processes can be ended with it."""

    def __init__(self, answers: IO[str], pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers

    def poll(self) -> int | None:
        """The exit code, −N if signal N ended it, or None while it runs."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self._read()
        return self.returncode

    def ask(self) -> None:
        """Have it write to the log where it is."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def stop(self) -> int:
        """End it, and whatever it has started, if it still runs; the exit code."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may have ended just now: then its exit code is under way
                os.kill(self.pid, signal.SIGKILL)
        return self._read() if self.returncode is None else self.returncode

    def _read(self) -> int:
        self.returncode = _answer(self._answers, "exit")
        return self.returncode


class PytestServer:
    """The owner's end: a context manager that starts runs, one at a time.

    Args:
        preload: modules to import once instead of in every run.
    """

    hides_reference = False

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        # One thread: the tests are small, several runs share a machine, and only a process without threads can fork.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        self._environment = kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> PytestServer:
        self._connect()
        return self

    def _connect(self) -> None:
        """Start the process."""
        self._process: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-P", "-m", "minicache_course.server", *self._preload],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the owner, who then ends this
        )
        assert self._process.stdin
        assert self._process.stdout
        self._jobs: IO[str] = self._process.stdin
        self._answers: IO[str] = self._process.stdout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.close()
        if self._process:
            self._process.wait()
        self._answers.close()

    def end(self) -> None:
        """End the process and its run, from another thread: who waits for an answer gets an error."""
        self._jobs.close()  # it ends its run, and itself
        if self._process:
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()  # it is still importing, and has no run

    def start(self, job: Job) -> Child:
        """Begin a run."""
        print(json.dumps([asdict(job), self._environment]), file=self._jobs, flush=True)
        return Child(self._answers, _answer(self._answers, "pid"))


def _answer(answers: IO[str], kind: str) -> int:
    """The next number of this kind from the server: a run without a waiting caller may have left its exit code.

    An exit code taken for a process id would be a signal to process 0 or 1, that is to everything.
    """
    while line := answers.readline():
        said, number = line.split()
        if said == kind:
            return int(number)
    raise CourseError("the process that runs pytest has died: it was killed, or memory is short")


def preload_for(phase: Phase) -> tuple[str, ...]:
    """What many runs of a phase should have loaded once: hypothesis, torch and Triton if the reference needs them."""
    if sys.platform != "linux":
        return ()  # macOS frameworks do not survive a fork, so there each child loads its own
    needed = ["torch"] if needs_torch(phase) else []
    return ("hypothesis", *needed, *(["triton"] if phase_imports(phase, "triton") else []))


def load_kept(preload: Sequence[str]) -> dict[str, str]:
    """Import what runs need, in the process that will fork them.

    Returns:
        The environment variables that were set for it: a run has them too.
    """
    before = dict(os.environ)
    load(preload)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def serve(jobs: IO[str], answers: IO[str], loaded: Mapping[str, str]) -> None:
    """Fork a run for each line of `jobs`, until there is no more.

    Args:
        jobs: each line is a JSON list: a `Job`, and the environment.
        answers: for each job `pid N` and `exit N` are written.
        loaded: environment variables to set in addition, from `load_kept`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a run that is asked where it is before it can tell goes on
    owner = select.poll()
    owner.register(jobs, 0)  # which tells one thing: that the other end is closed
    for line in jobs:
        pid = os.fork()
        if pid == 0:
            job, environment = json.loads(line)
            _become(Job(**job), environment | loaded)
        print("pid", pid, file=answers, flush=True)
        status = _end_of(pid, owner)
        with suppress(ProcessLookupError):  # what it has started goes with it: mostly nothing
            os.killpg(pid, signal.SIGKILL)
        if owner.poll(0):
            break
        print("exit", os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(job: Job, environment: dict[str, str]) -> NoReturn:
    """One run, in its forked process."""
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        run(job)
    finally:
        os._exit(70)


def _end_of(pid: int, owner: select.poll) -> int:
    """Wait for a run's end, and end it if the owner goes first: a run may loop forever; its exit status."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if owner.poll(_POLL * 1000):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout, load_kept(sys.argv[1:]))
    gc.unfreeze()  # or Triton would speak of leaks when it is unloaded
