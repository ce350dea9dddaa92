"""Grading one phase: pytest in a child process, followed through its journal.

A learner's file may end the process, crash it or never return. The child writes down what it is about to do, so the
parent knows which test (or import) it was lost in. That task is failed, and a new child goes on with the others.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from minicache.course.journal import Event, Journal
from minicache.course.resident import ResidentServer
from minicache.course.results import Outcome, PhaseResult, TestResult, by_task
from minicache.course.server import Child, PytestServer, preload_for
from minicache.course.stall import Stopwatch, where
from minicache.course.table import Phase, Task
from minicache.course.workspace import Workspace, fingerprint
from minicache.errors import CourseError

TIMEOUT = 10.0
"""Seconds of computing or sleeping without a sign of life, after which a child is stopped. A test may use all of them.

The reference takes less than one in any test. A function that never returns is called in several tasks. So that nobody
waits for each as long as for the first, half of it is enough once a child had to be stopped.
"""

_START = 60.0  # seconds that a child has before its first sign of life: it may import torch, and runs no learner's code
_POLL = 0.01  # seconds between two looks at the journal
_NUM_STACKS = 5  # of a child that is stopped, to see which of its frames stay
_GRACE = 0.4  # seconds that it has to write each


def grade(
    workspace: Workspace,
    phase: Phase,
    *,
    task: int | None = None,
    timeout: float = TIMEOUT,
    on_event: Callable[[Event], None] = lambda event: None,
    server: PytestServer | None = None,
    until_failure: bool = False,
) -> PhaseResult:
    """Grade the learner's files of a phase.

    Args:
        workspace: the course, and in its `labs` the files to grade.
        phase: the phase.
        task: one task of it; all of them by default.
        timeout: seconds without progress after which a test counts as an endless loop.
        on_event: called with each event of the run, for showing progress.
        server: starts the runs; by default the user's resident server.
        until_failure: stop at the first test that fails: whether there is one is all that is asked.

    Returns:
        The result of every task asked for. A task without tests has failed.

    Raises:
        CourseError: the phase has no tasks, there is no such task, or pytest could not be run at all.
    """
    if not phase.tasks:
        raise CourseError(f"phase {phase.number} ({phase.slug}) is planned: it has no tasks yet")
    tasks = phase.tasks if task is None else (phase.task(task),)
    tests = workspace.tests(phase)
    if not tests.is_dir():
        raise CourseError(f"phase {phase.number} has no tests: {tests} is not there")
    files = workspace.lab_files(phase)
    fingerprints = {module: fingerprint(file) for module, file in files.items()}
    run = _Run(workspace, files, tests, timeout, on_event)
    with ExitStack() as stack:
        server = server or stack.enter_context(ResidentServer(preload_for(phase)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minicache-")))
        journal, log = Journal(folder / "journal.jsonl"), folder / "pytest.log"
        arguments = _arguments(workspace, tests, task, journal.file)
        arguments += ["--maxfail=1"] if until_failure else []
        while not run.follow(server.start(arguments, workspace.root, log), journal, log):
            pass
    return PhaseResult(
        phase, by_task(tasks, run.results_of(tasks), run.num_collected), files, fingerprints, run.unimportable
    )


@dataclass
class _Run:
    """One grading: its children, one after the other, and what their journal has told so far."""

    workspace: Workspace
    files: dict[str, Path]
    tests: Path
    timeout: float
    on_event: Callable[[Event], None]
    results: dict[str, tuple[str, TestResult]] = field(default_factory=dict)  # node id → task id, result
    num_collected: dict[str, int] = field(default_factory=dict)  # task id → its tests
    unimportable: dict[str, str] = field(default_factory=dict)
    doing: Event | None = None
    last: Event | None = None
    finished: bool = False
    waiting: bool = False
    patience: float = field(init=False)

    def __post_init__(self) -> None:
        self.patience = self.timeout

    def follow(self, child: Child, journal: Journal, log: Path) -> bool:
        """Follow one child to its end, or until it is lost; True if the grading is complete."""
        self.finished = False
        try:
            stalled = self._watch(child, journal)
            if stalled:
                self._take_stacks(child, log)
        finally:
            returncode = child.stop()
        if self.finished and self.doing is None:
            return True
        # A thread can end the process between two tests: then the last one is to blame.
        culprit = self.doing or self.last
        if culprit is None or culprit.kind not in ("import", "file", "test", "result"):
            raise CourseError(f"pytest could not grade {self.workspace.labs}:\n{_tail(log)}")
        if stalled:
            kind = "endless wait?" if self.waiting else "endless loop?"
            outcome, reason = Outcome.STALLED, f"{kind} No answer within {self.patience:g} s"
            self.patience = self.timeout / 2
        else:
            outcome = Outcome.CRASHED
            reason = "pytest was made to stop" if self.finished else _how_it_ended(returncode)
        places = where(log, self.files.values(), self.tests, waiting=self.waiting)
        journal.write(self._lose(culprit, outcome, "\n".join([reason, *places])))
        return False

    def results_of(self, tasks: tuple[Task, ...]) -> dict[str, list[TestResult]]:
        """Task id → its tests' results."""
        found: dict[str, list[TestResult]] = {task.id: [] for task in tasks}
        for task_id, result in self.results.values():
            found[task_id].append(result)
        return found

    def _watch(self, child: Child, journal: Journal) -> bool:
        """Read the journal until the child ends; True if it had to be given up."""
        clock = Stopwatch(child.pid)
        while True:
            ended = child.poll() is not None  # before reading, so that nothing written at the end is missed
            for event in journal.new_events():
                if event.kind == "lost":  # this process's own line
                    continue
                self._hear(event)
                self.on_event(event)
                clock.restart()
            if ended or self.finished:  # a finished child has nothing more to say; a learner's thread may keep it alive
                return False
            if clock.read() > (self.patience if self.last else _START):
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

    def _hear(self, event: Event) -> None:
        if event.kind == "result":
            outcome = Outcome(event.outcome)
            told = (event.message, event.printed, event.needs, event.distance)
            self.results[event.name] = (event.task, TestResult(event.name, event.title, outcome, *told))
        elif event.kind == "task":
            self.num_collected[event.task] = event.total
        elif event.kind == "unimportable":
            self.unimportable[event.name] = event.message
        if event.kind != "finished":  # which pytest also says when a test made it stop
            self.doing = event if event.kind in ("import", "file", "test") else None
        self.last = event
        self.finished = event.kind == "finished"

    def _lose(self, event: Event, outcome: Outcome, reason: str) -> Event:
        """Record that a child was lost while doing `event`, or just after it."""
        if event.kind != "import":  # a module's tasks fail one by one when the next child cannot use it
            message = f"{reason}\nin        {event.title or event.name}"
            self.results[event.name] = (event.task, TestResult(event.name, event.title, outcome, message))
        self.doing = self.last = None
        lost = replace(event, kind="lost", message=reason)
        self.on_event(lost)
        return lost


def _how_it_ended(returncode: int) -> str:
    if returncode < 0:
        return f"the process crashed ({signal.strsignal(-returncode)})"
    return f"the process was ended (exit code {returncode})"


def _arguments(workspace: Workspace, tests: Path, task: int | None, journal: Path) -> list[str]:
    """What pytest is started with. The course's root may have no settings of its own, so that all are given here."""
    arguments = [str(tests), f"--rootdir={workspace.root}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    arguments += ["--mine", f"--labs={workspace.labs}", f"--course-journal={journal}"]
    return arguments + ([f"--task={task}"] if task is not None else [])


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
