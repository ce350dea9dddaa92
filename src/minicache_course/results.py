"""What grading found out: tests, the tasks that they belong to, a phase's points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from minicache_course.language import joined, labelled
from minicache_course.table import Phase, Task


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
        """Whether the process was lost, so the rest of the task's tests did not run."""
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
        message: the learner's message; "" if it passed.
        printed: the end of what the learner's code printed.
        needs: of a test that is not written, the id of another task if it is that one's code which is missing.
        distance: of a test that failed, how far what it tells may be from the mistake. 0: a check of what a call gave,
            or a rule that a `check()` found broken; 1: likewise, of an example that Hypothesis has found; 2 and 3: an
            error raised on the way to one.
    """

    __test__ = False

    id: str
    title: str
    outcome: Outcome
    message: str = ""
    printed: str = ""
    needs: str = ""
    distance: int = 0


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task.

    Attributes:
        task: the task.
        tests: those that ran, the smallest scenario first: the order in which the test file has them.
        num_collected: all that it has. Where the process was lost, not all of them ran.
    """

    task: Task
    tests: tuple[TestResult, ...]
    num_collected: int = 0

    @property
    def num_tests(self) -> int:
        """The tests that its points are shared among."""
        return max(self.num_collected, len(self.tests))

    @property
    def outcome(self) -> Outcome:
        """Passed only if every test did; no test at all is a failure."""
        found = {test.outcome for test in self.tests} or {Outcome.FAILED}
        return next(outcome for outcome in _WORST_FIRST if outcome in found)

    @property
    def earned(self) -> int:
        """The tests' share of the task's points, rounded down; none while a function of it is not written yet."""
        if any(test.outcome is Outcome.NOT_WRITTEN for test in self.tests):
            return 0
        return self.task.points * self.num_passed // max(self.num_tests, 1)

    @property
    def num_passed(self) -> int:
        """Tests that passed."""
        return sum(test.outcome is Outcome.PASSED for test in self.tests)

    @property
    def first_problem(self) -> TestResult | None:
        """The most telling of the tests that did not pass.

        The worst kind first; of failures, the one nearest to the mistake; of these, the smallest scenario.
        """
        problems = [test for test in self.tests if test.outcome is self.outcome is not Outcome.PASSED]
        return min(problems, key=lambda test: test.distance, default=None)

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
        seed: what the random cases of the tests were drawn under; None for the usual ones.
    """

    phase: Phase
    tasks: tuple[TaskResult, ...]
    files: dict[str, Path]
    fingerprints: dict[str, str]
    problems: dict[str, str] = field(default_factory=dict)
    seed: int | None = None

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
    return joined("\n", [labelled("read on", task.page), labelled("hint", f"minicache hint {task.id}")])


def by_task(
    tasks: Sequence[Task], tests: Mapping[str, Sequence[TestResult]], num_collected: Mapping[str, int]
) -> tuple[TaskResult, ...]:
    """The tests of each task, and how many it has, given by the task's id; a task without any has failed."""
    return tuple(TaskResult(task, tuple(tests.get(task.id, ())), num_collected.get(task.id, 0)) for task in tasks)
