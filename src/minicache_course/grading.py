"""Grading one phase: pytest in a child process, followed through what it tells.

A learner's file may end the process, crash it or never return. The child tells what it is about to do, so the parent
knows which test (or import) it was lost in. That task is failed, and a new child goes on with the others.

Another person's submission is not trusted: see `Audit`.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from minicache_course.errors import CourseError
from minicache_course.journal import Event, Events, Job
from minicache_course.language import joined
from minicache_course.record import TIMEOUT, Audit, Record
from minicache_course.resident import ResidentServer
from minicache_course.results import Outcome, PhaseResult
from minicache_course.server import preload_for
from minicache_course.stall import Stopwatch, held, stacks, where
from minicache_course.table import Phase
from minicache_course.workspace import Workspace

MAX_MEMORY = 4 * 2**30
"""Bytes that a run may hold, not counting what is reserved and never touched; the reference needs a tenth of it."""

_START = 60.0  # seconds that a child has before its first sign of life: it may import torch, and runs no learner's code
_POLL = 0.01  # seconds between two looks at the journal
_NUM_STACKS = 5  # of a child that is stopped, to see which of its frames stay
_GRACE = 0.4  # seconds that it has to write each


class Child(Protocol):
    """One run, to the one who follows it."""

    @property
    def pid(self) -> int:
        """Of its process, as this process sees it."""

    def poll(self) -> int | None:
        """The exit code, −N if signal N ended it, or None while it runs."""

    def ask(self) -> None:
        """Have it write to the log where it is."""

    def stop(self) -> int:
        """End it, and whatever it has started, if it still runs; the exit code."""


class Runner(Protocol):
    """Starts runs: `PytestServer`, or a `Sandbox`.

    Attributes:
        hides_reference: whether the reference of a module that has the learner's file cannot be read in a run. Where
            that file cannot be imported, another run is started, which can read it.
    """

    hides_reference: bool

    def start(self, job: Job) -> Child:
        """Begin a run, its output going to `job.log`."""


def grade(
    workspace: Workspace,
    phase: Phase,
    *,
    task: int | None = None,
    timeout: float = TIMEOUT,
    seed: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    server: Runner | None = None,
    audit: Audit | None = None,
    until_failure: bool = False,
) -> PhaseResult:
    """Grade the learner's files of a phase.

    Args:
        workspace: the course, and in its `labs` the files to grade.
        phase: the phase.
        task: one task of it; all of them by default.
        timeout: seconds without progress after which a test counts as an endless loop.
        seed: draws the random cases of the tests anew; the usual ones by default.
        on_event: called with each event of the run, for showing progress.
        server: starts the runs; by default the user's resident server.
        audit: for another person's submission.
        until_failure: stop at the first test that fails: whether there is one is all that is asked.

    Returns:
        The result of every task asked for. A task without tests has failed.

    Raises:
        CourseError: the phase has no tasks, there is no such task, or pytest could not be run at all.
        TamperingError: the learner's code has changed the grader.
    """
    record = Record(workspace, phase, task, timeout, seed, audit)
    if not record.tests.is_dir():
        raise CourseError(f"phase {phase.number} has no tests: {record.tests} is not there")
    run = _Run(record, on_event)
    with ExitStack() as stack:
        server = server or stack.enter_context(ResidentServer(preload_for(phase)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minicache-")))
        arguments = record.arguments() + (["--maxfail=1"] if until_failure else [])
        job = Job(arguments, str(workspace.root), log=str(folder / "pytest.log"), guard=audit.guard if audit else "")
        while not run.follow(server, job):
            pass
    return record.result()


@dataclass
class _Run:
    """One grading's children, one after the other."""

    record: Record
    on_event: Callable[[Event], None]
    waiting: bool = False
    num_bytes: int = 0  # that the child held when it was given up
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        audit = self.record.audit
        self.deadline = time.monotonic() + (audit.seconds if audit else float("inf"))

    def follow(self, server: Runner, job: Job) -> bool:
        """Follow one child to its end, or until it is lost; True if the grading is complete."""
        record = self.record
        log, key = Path(job.log), os.urandom(32)
        pipe = log.with_name("events")
        pipe.unlink(missing_ok=True)
        self.num_bytes = 0
        unusable = dict(record.unusable)
        with closing(Events(pipe, key)) as events:
            child = server.start(replace(record.begin(job), events=str(pipe), key=key.hex()))
            try:
                stalled = self._watch(child, events, hides_reference=server.hides_reference)
                if stalled and self.num_bytes <= MAX_MEMORY:  # it would only hold more
                    self._take_stacks(child, log)
            finally:
                returncode = child.stop()
        if unusable != record.unusable and server.hides_reference:
            return False
        if record.is_complete:
            return True
        if record.culprit is None:
            raise CourseError(f"pytest could not grade {record.workspace.labs}:\n{_tail(log)}")
        if self.num_bytes > MAX_MEMORY:
            outcome, reason = Outcome.CRASHED, f"it used more than {MAX_MEMORY >> 30} GiB of memory, and was killed"
        elif stalled:
            outcome, reason = Outcome.STALLED, record.no_answer(waiting=self.waiting)
            if self.num_bytes > MAX_MEMORY // 4:
                used = f"{self.num_bytes / 2**30:.1f} GiB of memory"
                reason = f"No answer within {record.patience:g} s, and by then it used {used}"
        else:
            outcome = Outcome.CRASHED
            reason = "pytest was stopped" if record.finished else _how_it_ended(returncode)
        if time.monotonic() > self.deadline:
            reason = "the time limit for grading is over"
        places = where(stacks(log), record.files.values(), record.tests, waiting=self.waiting)
        self.on_event(record.lose(outcome, joined("\n", [reason, *places])))
        return time.monotonic() > self.deadline

    def _watch(self, child: Child, events: Events, *, hides_reference: bool) -> bool:
        """Hear what the child tells until it ends; True if it had to be given up."""
        record = self.record
        clock = Stopwatch(child.pid)
        unusable = len(record.unusable)
        while True:
            ended = child.poll() is not None  # before reading, so the last output is not missed
            for event in events.new():
                record.hear(event)
                self.on_event(event)
                clock.restart()
                if event.kind in ("task", "file") and hides_reference and len(record.unusable) > unusable:
                    return False
            if ended or record.finished:  # it has nothing more to say; a learner's thread may keep it alive
                return False
            self.num_bytes = held(child.pid)
            if self.num_bytes > MAX_MEMORY:
                return True
            if clock.read() > (record.patience if record.last else _START) or time.monotonic() > self.deadline:
                self.waiting = clock.has_slept
                return True
            time.sleep(_POLL)

    def _take_stacks(self, child: Child, log: Path) -> None:
        """Have a child that gives no sign of life write down where it is, several times."""
        for _ in range(_NUM_STACKS):
            size, until = log.stat().st_size, time.monotonic() + _GRACE
            child.ask()
            while log.stat().st_size == size and time.monotonic() < until:
                time.sleep(_POLL)
            time.sleep(_POLL)


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"the process crashed ({signal.strsignal(-returncode)})"
    return f"the process exited (exit code {returncode})"


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
