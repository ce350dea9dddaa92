"""What grading found out: tests, the tasks that they belong to, a phase's points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from minicache.course.table import Phase, Task


class Outcome(StrEnum):
    """How a test, or all tests of a task, went."""

    PASSED = "passed"
    CRASHED = "crashed"  # the process died in it
    STALLED = "endless loop?"  # no answer came, and the process had to be stopped
    FAILED = "failed"
    NOT_WRITTEN = "not written"
    NOT_GRADED = "not graded"

    @property
    def is_lost(self) -> bool:
        """Whether the process was lost, so that the rest of the task's tests did not run."""
        return self in (Outcome.CRASHED, Outcome.STALLED)


_WORST_FIRST = (
    Outcome.CRASHED,
    Outcome.STALLED,
    Outcome.FAILED,
    Outcome.NOT_WRITTEN,
    Outcome.NOT_GRADED,
    Outcome.PASSED,
)


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test.

    Attributes:
        id: pytest's node id.
        title: what it checks: the first line of its docstring, else its name; then its parameters, if it has any.
        outcome: how it went. A skipped test is not graded.
        message: what a learner is told; "" if it passed.
        printed: the end of what the learner's code printed.
        needs: of a test that is not written, the id of another task if it is that one's code which is missing.
    """

    __test__ = False

    id: str
    title: str
    outcome: Outcome
    message: str = ""
    printed: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task: its points are earned when all of its tests pass, and there is at least one."""

    task: Task
    tests: tuple[TestResult, ...]

    @property
    def outcome(self) -> Outcome:
        """Passed only if every test did; no test at all is a failure."""
        found = {test.outcome for test in self.tests} or {Outcome.FAILED}
        return next(outcome for outcome in _WORST_FIRST if outcome in found)

    @property
    def earned(self) -> int:
        """All of the task's points, or none."""
        return self.task.points if self.outcome is Outcome.PASSED else 0

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(test.outcome is Outcome.PASSED for test in self.tests)

    @property
    def first_problem(self) -> TestResult | None:
        """The first test that did not pass, the worst kind first."""
        return next((test for test in self.tests if test.outcome is self.outcome is not Outcome.PASSED), None)

    @property
    def needs(self) -> str:
        """The id of another task that has to be written before this one can be graded, or ""."""
        missing = [test.needs for test in self.tests if test.outcome is Outcome.NOT_WRITTEN]
        return missing[0] if self.outcome is Outcome.NOT_WRITTEN and all(missing) else ""

    @property
    def other_problems(self) -> list[TestResult]:
        """The other tests that did not pass, in their order."""
        return [test for test in self.tests if test.outcome is not Outcome.PASSED and test is not self.first_problem]


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One grading of a phase, or of one of its tasks.

    Attributes:
        phase: the phase.
        tasks: the tasks that were graded.
        files: module → the learner's file, for all modules of the phase.
        fingerprints: module → the file's SHA-256 when grading began; "" if it was not there.
        problems: module → why its file could not be used; the reference stood in for it.
    """

    phase: Phase
    tasks: tuple[TaskResult, ...]
    files: dict[str, Path]
    fingerprints: dict[str, str]
    problems: dict[str, str] = field(default_factory=dict)

    def goes_on_with(self, graded: TaskResult) -> Task:
        """The task to write next for `graded` to pass: its own, or the one that it needs."""
        return next((task for task in self.phase.tasks if task.id == graded.needs), graded.task)

    @property
    def earned(self) -> int:
        """Points earned."""
        return sum(task.earned for task in self.tasks)

    @property
    def points(self) -> int:
        """Points that the graded tasks are worth."""
        return sum(task.task.points for task in self.tasks)

    @property
    def passed(self) -> bool:
        """Whether every graded task passed."""
        return all(task.outcome is Outcome.PASSED for task in self.tasks)


def pointers(task: Task) -> str:
    """Where a learner who is stuck goes on: the page, and the hints."""
    return f"read on   {task.page}\nhint      minicache hint {task.id}"


def by_task(tasks: Sequence[Task], tests: dict[str, list[TestResult]]) -> tuple[TaskResult, ...]:
    """The tests of each task, given by the task's id; a task without any has failed."""
    return tuple(TaskResult(task, tuple(tests.get(task.id, ()))) for task in tasks)
