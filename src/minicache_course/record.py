"""What the runs of one grading have told, one after the other, and what follows from it.

A run tells what it begins. When it is lost, the last that it told says in which test: that task is failed, and the next
run goes on with the others. Nothing here starts or watches a run: `grading.py` does, with processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minicache_course.errors import TamperingError
from minicache_course.finder import show
from minicache_course.journal import Event, Job
from minicache_course.language import joined, labelled, remember, said, translations
from minicache_course.results import Outcome, PhaseResult, TestResult, by_task
from minicache_course.table import Phase, Task
from minicache_course.workspace import Workspace, fingerprint

TIMEOUT = 10.0
"""Seconds of computing or sleeping without a sign of life, after which a run is stopped. A test may use all of them.

The reference takes less than one in any test. A function that never returns is called in several tasks. To
shorten the wait, half of it is enough once a run had to be stopped.
"""

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # what a terminal would obey, or is no text


@dataclass(frozen=True, slots=True)
class Audit:
    """What a submission is held to: its tests are those that the reference has, and a test that must fail does.

    A submission shares a process with its tests. Were it to make all of them pass, it would a task's control, too; and
    what it leaves out is known.

    Attributes:
        tests: task id → the ids of its tests.
        guard: the module that adds that test, and notices tampering (`Job.guard`).
        seconds: that all of the grading may take.
    """

    tests: Mapping[str, frozenset[str]]
    guard: str
    seconds: float = 900.0


@dataclass
class Record:
    """One grading of a phase, or of a task of it.

    Args:
        workspace: the course, and in its `labs` the files to grade.
        phase: the phase.
        task: one task of it; all of them by default.
        timeout: seconds without progress after which a test counts as an endless loop.
        seed: draws the random cases of the tests anew; the usual ones by default.
        audit: for another person's submission.

    Attributes:
        files: module → the learner's file.
        tests: the folder of the tests.
        unusable: module → why its file cannot be used.
        patience: seconds without a sign of life that a run has from now on.
        doing: what the present run has begun and not ended.
        last: what the present run told last.
        finished: whether the present run came to its end.

    Raises:
        CourseError: the phase has no tasks, or there is no such task.
    """

    workspace: Workspace
    phase: Phase
    task: int | None = None
    timeout: float = TIMEOUT
    seed: int | None = None
    audit: Audit | None = None
    files: dict[str, Path] = field(init=False)
    tests: Path = field(init=False)
    unusable: dict[str, str] = field(init=False, default_factory=dict)
    patience: float = field(init=False)
    doing: Event | None = field(init=False, default=None)
    last: Event | None = field(init=False, default=None)
    finished: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.phase.require_tasks()
        self._tasks = self.phase.tasks if self.task is None else (self.phase.task(self.task),)
        self.files = self.workspace.lab_files(self.phase)
        self.tests = self.workspace.tests(self.phase)
        self.patience = self.timeout
        self._fingerprints = {module: fingerprint(file) for module, file in self.files.items()}
        self._results: dict[str, tuple[str, TestResult]] = {}  # node id → task id, result
        self._num_collected: dict[str, int] = {}  # task id → its tests
        self._lost_tasks: list[str] = []
        self._controls: dict[str, str] = {}  # node id → task id, of the present run
        if self.audit:
            self._num_collected = {task: len(tests) for task, tests in self.audit.tests.items()}

    def arguments(self) -> list[str]:
        """What pytest is started with: all settings, as the course's root may have none of its own."""
        arguments = [str(self.tests), f"--rootdir={self.workspace.root}", "--import-mode=importlib"]
        arguments += ["-p", "no:cacheprovider", "--mine", f"--labs={self.workspace.labs}"]
        arguments += [f"--task={self.task}"] if self.task is not None else []
        return arguments + ([f"--course-seed={self.seed}"] if self.seed is not None else [])

    def begin(self, job: Job) -> Job:
        """The next run's input: `job`, and what earlier runs have done."""
        self.finished, self._controls = False, {}
        done, lost = list(self._results), list(self._lost_tasks)
        shown = translations(*self.unusable.values())
        return replace(job, done=done, lost_tasks=lost, unusable=dict(self.unusable), shown=shown)

    def hear(self, event: Event) -> None:
        """Note what the present run tells.

        Raises:
            TamperingError: the learner's code has changed the grader.
        """
        remember(event.shown)
        if event.kind == "result":
            self._keep(event)
        elif event.kind == "task" and not self.audit:
            self._num_collected[event.task] = event.total
        elif event.kind == "control":
            self._controls[event.name] = event.task
        elif event.kind == "unimportable":
            self.unusable[event.name] = event.message
        elif event.kind == "tampered":
            raise TamperingError(f"it replaced {event.name}")
        if event.kind != "finished":  # which pytest also says when a test made it stop
            self.doing = event if event.kind in ("import", "file", "test") else None
        self.last = event
        self.finished = event.kind == "finished"

    @property
    def is_complete(self) -> bool:
        """Whether the present run did all that was left.

        Raises:
            TamperingError: a test that must fail did not run.
        """
        if not self.finished or self.doing is not None:
            return False
        if self._controls:
            raise TamperingError(f"a test that must fail did not run, in {', '.join(self._controls.values())}")
        return True

    @property
    def culprit(self) -> Event | None:
        """What a run that was lost was doing; None if it was nothing of the learner's.

        A thread can end the process between two tests: then the last one is to blame.
        """
        culprit = self.doing or self.last
        return culprit if culprit and culprit.kind in ("import", "file", "test", "result") else None

    def no_answer(self, *, waiting: bool = False) -> str:
        """Why a run that gave no sign of life is stopped; `waiting` if it slept rather than computed."""
        what = said("wait") if waiting else said("loop")
        return f"endless {what}? No answer within {self.patience:g} s"

    def lose(self, outcome: Outcome, reason: str) -> Event:
        """Note that the present run was lost, in its culprit; the event that tells of it."""
        event = self.culprit
        assert event
        if outcome is Outcome.STALLED:
            self.patience = self.timeout / 2
        if event.kind == "import":  # a module's tasks fail one by one when the next run cannot use it
            self.unusable[event.name] = f"importing {show(self.files[event.name])}: {reason}"
        else:
            message = joined("\n", [reason, labelled("in", event.title or event.name)])
            self._results[event.name] = (event.task, TestResult(event.name, event.title, outcome, message))
            self._lost_tasks.append(event.task)
        self.doing = self.last = None
        return replace(event, kind="lost", outcome=outcome, message=reason, shown=translations(reason))

    def result(self) -> PhaseResult:
        """What came of it. A task without tests has failed."""
        graded = by_task(self._tasks, self._results_of(self._tasks), self._num_collected)
        return PhaseResult(self.phase, graded, self.files, self._fingerprints, self.unusable, self.seed)

    def _results_of(self, tasks: Sequence[Task]) -> dict[str, list[TestResult]]:
        found: dict[str, list[TestResult]] = {task.id: [] for task in tasks}
        for task_id, result in self._results.values():
            found[task_id].append(result)
        return found

    def _keep(self, event: Event) -> None:
        """Note a result, unless it is a control's."""
        outcome = Outcome(event.outcome)
        if event.name in self._controls:
            if outcome is not Outcome.FAILED:
                raise TamperingError(f"a test of task {event.task} that must fail has {outcome}")
            del self._controls[event.name]
            return
        if self.audit and event.name in self._results:
            raise TamperingError(f"{event.name} has two results")
        is_file = outcome is not Outcome.PASSED  # a file of tests that cannot be imported has a result, too
        if self.audit and not is_file and event.name not in self.audit.tests.get(event.task, ()):
            raise TamperingError(f"there is no test {event.name}")
        texts = [event.message, event.printed]
        if self.audit:  # another person's terminal shows them
            texts = [_COMMANDS.sub("�", text) for text in texts]
        told = (texts[0], texts[1], event.needs, event.distance)
        self._results[event.name] = (event.task, TestResult(event.name, event.title, outcome, *told))
