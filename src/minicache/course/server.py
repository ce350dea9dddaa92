"""A process that imports pytest (and, if asked to, torch) once and forks a child for each run.

Importing torch takes seconds, and a class or an author's gates mean a hundred runs. A forked child has everything
loaded and nothing of the runs before it. `python -m minicache.course.server MODULE…` is the process; `PytestServer` is
its owner's end. They talk in lines: a job as JSON goes in, `pid N` and at its end `exit N` come out.
`resident.py` keeps such a process between commands.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from minicache.course.table import Phase
from minicache.course.workspace import needs_torch, phase_imports
from minicache.errors import CourseError, KernelUnavailableError

PLUGINS = ("minicache.course.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""What a run loads, and no other plugin that is installed: looking for those takes longer than most tasks' tests."""

_POLL = 0.01  # seconds between two looks at a run
_MAX_FILE_NBYTES = 2**28  # of what one run may write to a file: a loop that prints must not fill the disk


class Child:
    """One pytest run. Its process leads a group of its own, so that what it starts can be ended with it."""

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
            [sys.executable, "-P", "-m", "minicache.course.server", *self._preload],
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

    def start(self, arguments: list[str], folder: Path, log: Path) -> Child:
        """Run `pytest arguments` in `folder`, its output going to the file `log`."""
        print(json.dumps([arguments, str(folder), str(log), self._environment]), file=self._jobs, flush=True)
        return Child(self._answers, _answer(self._answers, "pid"))


def _answer(answers: IO[str], kind: str) -> int:
    """The next number of this kind that the server says: a run that nobody waited for may have left its exit code.

    An exit code taken for a process id would be a signal to process 0 or 1, that is to everything.
    """
    while line := answers.readline():
        said, number = line.split()
        if said == kind:
            return int(number)
    raise CourseError("the process that runs pytest has ended: was it killed, or is memory short?")


def preload_for(phase: Phase) -> tuple[str, ...]:
    """What many runs of a phase should have loaded once: hypothesis, torch and Triton if the reference needs them."""
    if sys.platform != "linux":
        return ()  # macOS frameworks do not survive a fork, so there each child loads its own
    needed = ["torch"] if needs_torch(phase) else []
    return ("hypothesis", *needed, *(["triton"] if phase_imports(phase, "triton") else []))


def load(preload: Sequence[str]) -> dict[str, str]:
    """Import what runs need, in the process that will fork them.

    Returns:
        The environment variables that were set for it: a run has them too.
    """
    before = dict(os.environ)
    for name in ("pytest", *PLUGINS, "minicache.course.session"):
        import_module(name)
    for name in preload:
        with suppress(ImportError, KernelUnavailableError):  # the run that needs it will say so
            if name in ("torch", "triton"):  # whichever imports Triton: built for the interpreter or not, for all runs
                runtime = import_module("minicache.kernels.runtime")
                runtime.interpret_without_gpu()
                if name == "triton":
                    runtime.require_triton(runtime.usual_device())  # its canary runs once, here
            import_module(name)
        if name == "torch":  # whose first tensor on "meta", or first dispatch mode, imports as much again, Triton too
            torch = sys.modules["torch"]
            torch.stack([torch.arange(1, device="meta")])
    gc.collect()
    gc.freeze()  # what is loaded stays: no run need look through it for garbage, and pytest looks five times at its end
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def serve(jobs: IO[str], answers: IO[str], loaded: Mapping[str, str]) -> None:
    """Fork a run for each line of `jobs`, until there is no more.

    Args:
        jobs: each line is a JSON list: pytest's arguments, the folder to run in, the file for the output, and the
            environment.
        answers: for each job `pid N` and `exit N` are written.
        loaded: environment variables to set in addition, from `load`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a run that is asked where it is before it can tell goes on
    owner = select.poll()
    owner.register(jobs, 0)  # which tells one thing: that the other end is closed
    for line in jobs:
        pid = os.fork()
        if pid == 0:
            arguments, folder, log, environment = json.loads(line)
            _run(arguments, folder, log, environment | loaded)
        print("pid", pid, file=answers, flush=True)
        status = _end_of(pid, owner)
        with suppress(ProcessLookupError):  # what it has started goes with it: mostly nothing
            os.killpg(pid, signal.SIGKILL)
        if owner.poll(0):
            break
        print("exit", os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(arguments: list[str], folder: str, log: str, environment: dict[str, str]) -> NoReturn:
    """One run, in its forked process."""
    code = 70  # EX_SOFTWARE, should pytest itself fail
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_NBYTES, _MAX_FILE_NBYTES))
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.register(signal.SIGUSR1, file=os.dup(output))  # a test's output goes elsewhere
        import pytest

        code = pytest.main(arguments, [sys.modules[name] for name in PLUGINS])
    finally:
        os._exit(code)


def _end_of(pid: int, owner: select.poll) -> int:
    """Wait for a run's end, and end it if the owner goes first: a run may loop for ever; its exit status."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if owner.poll(_POLL * 1000):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout, load(sys.argv[1:]))
    gc.unfreeze()  # or Triton would speak of leaks when it is unloaded
