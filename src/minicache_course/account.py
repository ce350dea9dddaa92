"""The report of a grading: whose files, the points of each task, and what to do first if one failed.

Plain data in the reader's language, the same wherever it is shown: `report.py` prints it in a terminal, a page shows it
in a browser.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minicache_course.finder import show
from minicache_course.language import said, translated
from minicache_course.predictions import check
from minicache_course.results import Outcome, PhaseResult, TaskResult, TestResult, pointers
from minicache_course.table import Task

_MAX_LISTED = 10  # of a task's tests that did not pass, below the first


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text.

    Attributes:
        text: all of it.
        label: what it begins with, padded to a width; what wraps stays behind it. May be empty.
        strong: the part of the text that stands out, or "".
        faint: whether it is of less weight.
    """

    text: str
    label: str = ""
    strong: str = ""
    faint: bool = False


@dataclass(frozen=True, slots=True)
class File:
    """One of the learner's files; `note` says why it cannot be used, or is ""."""

    module: str
    path: str
    note: str


@dataclass(frozen=True, slots=True)
class Row:
    """A task's points; `told` is its outcome in words."""

    id: str
    title: str
    file: str
    num_passed: int
    num_tests: int
    earned: int
    points: int
    outcome: Outcome
    told: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a task, or with a file of several."""

    title: str
    outcome: Outcome
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """The whole report, from top to bottom; `end` after the problems."""

    head: Line
    files: tuple[File, ...]
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    end: tuple[Line, ...]


def account(result: PhaseResult) -> Account:
    """What to tell of a grading."""
    phase = result.phase
    title = translated(f"Phase {phase.number}, {phase.title}.")
    drawn = "" if result.seed is None else f", with random cases from seed {result.seed}"
    told = [graded for graded in result.tasks if _is_told(graded) and graded.task.module not in result.problems]
    return Account(
        head=Line(f"{title} {translated(f'Graded: your files{drawn}.')}", strong=title),
        files=tuple(_files(result)),
        rows=tuple(_row(result, graded) for graded in result.tasks),
        problems=(
            *_unusable_files(result),
            *(_problem(graded, result.goes_on_with(graded), in_full=graded is told[0]) for graded in told),
        ),
        end=tuple(_end(result, told)),
    )


def _files(result: PhaseResult) -> Iterator[File]:
    for module, file in result.files.items():
        broken = module in result.problems
        note = f"{_unusable(result, module)}: its tasks fail; the reference stands in for other tasks" if broken else ""
        yield File(module, show(file), translated(note))


def _row(result: PhaseResult, graded: TaskResult) -> Row:
    task = graded.task
    told = f"needs {graded.needs} first" if graded.needs else str(graded.outcome)
    if task.module in result.problems:
        told = _unusable(result, task.module)
    counts = (graded.num_passed, graded.num_tests, graded.earned, task.points)
    return Row(task.id, translated(task.title), task.file.name, *counts, graded.outcome, translated(told))


def _unusable_files(result: PhaseResult) -> Iterator[Problem]:
    for module, problem in result.problems.items():
        tasks = [graded.task for graded in result.tasks if graded.task.module == module]
        texts = (problem, *map(pointers, tasks[:1]))
        lines = [line for text in texts for line in _labelled(text)]
        yield Problem(translated("cannot be used"), Outcome.FAILED, tuple(lines))


def _unusable(result: PhaseResult, module: str) -> str:
    return "cannot be imported" if result.fingerprints[module] else "not there"


def _is_told(graded: TaskResult) -> bool:
    """Whether there is more to say of a task than the table does: it has failed, or is written in part."""
    begun = graded.outcome is Outcome.NOT_WRITTEN and graded.num_passed > 0
    return begun or graded.outcome is Outcome.FAILED or graded.outcome.is_lost


def _end(result: PhaseResult, told: list[TaskResult]) -> Iterator[Line]:
    """The end of the report: where to start, what was predicted, what was not graded, what comes next, the points."""
    if len(told) > 1:
        yield Line(translated(f"Start with task {told[0].task.id}: its mistakes may make later tasks fail."))
    for graded in result.tasks:
        yield from _predicted(graded.task, result.files[graded.task.module])
    idle = [graded.first_problem for graded in result.tasks if graded.outcome is Outcome.NOT_GRADED]
    for reason in dict.fromkeys(test.message.removeprefix("skipped: ") for test in idle if test):
        yield Line(translated(f"Not graded: {reason}"))
    if unfinished := [graded for graded in result.tasks if graded.outcome is Outcome.NOT_WRITTEN]:
        task = result.goes_on_with(unfinished[0])
        following = f"task {task.id}, {task.title}"
        stop = "" if following.endswith("?") else "."
        yield Line(translated(f"Next: {following}{stop} Read {task.page}"), strong=translated(following))
    points = translated(f"{result.earned} of {result.points} points")
    yield Line(points, strong=points)


def _predicted(task: Task, file: Path) -> Iterator[Line]:
    """What came of a task's predictions, if any was made."""
    checked = check(task, file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else {}
    if any(is_right is not None for is_right in checked.values()):
        wrong = ", ".join(name for name, is_right in checked.items() if is_right is False)
        yield Line(translated(f"Predicted: {list(checked.values()).count(True)} of {len(checked)} right"))
        if wrong:
            yield Line(translated(f"Not right: {wrong}. Think again, or unfold the answers on the page."))


def _problem(graded: TaskResult, goes_on_with: Task, *, in_full: bool) -> Problem:
    """The most telling failure of a task, where to read on, and, in full, a line for each of the other failures."""
    test = graded.first_problem
    lines = _labelled(test.message if test else "no tests were collected, so nothing was graded")
    if test and test.printed.strip():
        printed = f"{translated('your code printed:')}\n{test.printed.rstrip()}"
        lines += [Line(line, faint=True) for line in printed.split("\n")]
    lines += _labelled(pointers(goes_on_with))
    others = graded.other_problems
    if others and not in_full:
        lines += [Line(""), Line(translated(f"{len(others)} more did not pass"), faint=True)]
    elif others:
        groups: dict[tuple[Outcome, str], list[TestResult]] = {}
        for other in others:
            groups.setdefault((other.outcome, _check(other)), []).append(other)
        listed = list(groups.items())[:_MAX_LISTED]
        width = max(12, *(len(translated(outcome)) + 2 for (outcome, _), _ in listed))
        lines.append(Line(""))
        for (outcome, check), tests in listed:
            title = tests[0].title if len(tests) == 1 else f"×{len(tests)}  {translated(check)}"
            lines.append(Line(translated(title), label=f"{translated(outcome):<{width}}"))
        left: Counter[str] = Counter()
        for (outcome, _), tests in list(groups.items())[_MAX_LISTED:]:
            left[str(outcome)] += len(tests)
        if left:
            rest = ", ".join(translated(f"{count} more {said(outcome)}") for outcome, count in left.items())
            lines.append(Line(translated(f"… and {rest}")))
    if graded.outcome.is_lost:
        lines.append(Line(translated("This task's remaining tests were not run."), faint=True))
    return Problem(f"{graded.task.id} {translated(graded.task.title)}", graded.outcome, tuple(lines))


def _labelled(message: str) -> list[Line]:
    """The lines of a message. Most begin with a label of ten characters."""
    parts = []
    for line in translated(message).splitlines():
        label, text = line[:10], line[10:]
        parts.append(Line(text, label=label) if label.endswith("  ") and text else Line(line))
    return parts


def _check(test: TestResult) -> str:
    """A test's title without its parameters: what it has in common with those that check the same."""
    return test.title.removesuffix(f" [{test.id.partition('[')[2]}")
