"""The one table of the course, `labs/course.toml`, read into dataclasses and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from minicache_course.errors import CourseError


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to write, graded by `tests/phase-NN-slug/test_task_K_*.py`.

    Attributes:
        phase: the phase's number.
        number: the task's number in its phase, from 1.
        title: a few words.
        module: the module it is written in, `minicache.cache.dense`.
        targets: qualified names in `module` that it asks for, `KVCache.append`. May be empty: the task then grades
            more of what an earlier one asked for.
        points: what it is worth.
        page: the lab page to read, from the course's root; in a folder that has no pages, the command that shows it.
        hints: from a nudge to nearly the line.
        starts_from: pairs (target, `module:Class.method`): the starter gives this target that body to mend, in place
            of none.
        predictions: pairs (question, answer), to be answered before writing.
        why: why the reference is as it is, to be read once the task has passed; may be empty.
    """

    phase: int
    number: int
    title: str
    module: str
    targets: tuple[str, ...]
    points: int
    page: str
    hints: tuple[str, ...]
    starts_from: tuple[tuple[str, str], ...] = ()
    predictions: tuple[tuple[str, str], ...] = ()
    why: str = ""

    @property
    def id(self) -> str:
        """`1.3`: phase and task."""
        return f"{self.phase}.{self.number}"

    @property
    def file(self) -> PurePosixPath:
        """The learner's file in the phase's folder: the path of `module` in the package, `cache/dense.py`."""
        return PurePosixPath(*self.module.split(".")[1:]).with_suffix(".py")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the course. Without tasks it is planned.

    Attributes:
        page: its first page, from the course's root; in a folder that has no pages, the command that shows it.
    """

    number: int
    slug: str
    title: str
    builds: str
    theory: str
    tasks: tuple[Task, ...]
    page: str

    @property
    def folder(self) -> str:
        """`phase-01-dense-cache`, its name under labs/, tests/ and docs/en/."""
        return f"phase-{self.number:02d}-{self.slug}"

    @property
    def points(self) -> int:
        """The points of all its tasks."""
        return sum(task.points for task in self.tasks)

    @property
    def files(self) -> dict[str, PurePosixPath]:
        """Module → the learner's file in the phase's folder, in the order of the tasks."""
        return {task.module: task.file for task in self.tasks}

    def restoring(self, module: str) -> str:
        """The command that puts the starter of one module back."""
        return f"minicache reset {self.number} --file {self.files[module]}"

    def require_tasks(self) -> None:
        """Refuse a phase that is only planned.

        Raises:
            CourseError: it has no tasks yet.
        """
        if not self.tasks:
            raise CourseError(f"phase {self.number} ({self.slug}) is planned: it has no tasks yet")

    def task(self, number: int) -> Task:
        """Task `number`.

        Raises:
            CourseError: there is none; the message lists those there are.
        """
        for task in self.tasks:
            if task.number == number:
                return task
        self.require_tasks()
        there = ", ".join(str(task.number) for task in self.tasks)
        raise CourseError(f"phase {self.number} has no task {number}: there are {there}")


@dataclass(frozen=True, slots=True)
class Course:
    """All phases, in order."""

    phases: tuple[Phase, ...]

    def __iter__(self) -> Iterator[Phase]:
        return iter(self.phases)

    def reading_by_command(self) -> Course:
        """This course for a folder without docs/: the page of a phase or task is the command that shows it."""
        phases = []
        for phase in self.phases:
            tasks = tuple(replace(task, page=f"minicache docs {task.id}") for task in phase.tasks)
            phases.append(replace(phase, tasks=tasks, page=f"minicache docs {phase.number}"))
        return Course(tuple(phases))

    def phase(self, name: str | int) -> Phase:
        """A phase by number (`1`, `"01"`), slug (`"dense-cache"`) or folder (`"phase-01-dense-cache"`).

        Raises:
            CourseError: there is none; the message lists those there are.
        """
        wanted = str(name)
        for phase in self.phases:
            by_number = wanted.isdecimal() and int(wanted) == phase.number
            if by_number or wanted in (phase.slug, phase.folder):
                return phase
        there = ", ".join(f"{phase.number} ({phase.slug})" for phase in self.phases)
        raise CourseError(f"no phase {wanted!r}: there are {there}")


def load_course(file: Path) -> Course:
    """Read and check `labs/course.toml`.

    Raises:
        CourseError: the file cannot be read, or an entry is missing, of the wrong type or at odds with another. The
            message names the file and the key.
    """
    root = Entry(read_toml(file), str(file))
    course = Course(tuple(_phase(entry) for entry in root.entries("phase")))
    root.done()
    _check_unique([phase.number for phase in course], f"{file}: phase numbers")
    _check_unique([phase.slug for phase in course], f"{file}: slugs")
    _check_unique([module for phase in course for module in phase.files], f"{file}: modules of phases")
    return course


def read_toml(file: Path) -> dict[str, Any]:
    """A TOML file's content.

    Raises:
        CourseError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CourseError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{file}: not TOML: {error}") from error


def _phase(entry: Entry) -> Phase:
    number = entry.integer("number", at_least=0)
    entry.where += f" {number}"
    slug = entry.text("slug", r"[a-z0-9]+(-[a-z0-9]+)*")
    title, builds, theory = (entry.text(key) for key in ("title", "builds", "theory"))
    tasks = tuple(_task(each, number) for each in entry.entries("task"))
    entry.done()
    _check_unique([task.number for task in tasks], f"{entry.where}: task numbers")
    _check_unique([(task.module, name) for task in tasks for name in task.targets], f"{entry.where}: targets")
    return Phase(number, slug, title, builds, theory, tasks, f"docs/en/phase-{number:02d}-{slug}/index.md")


def _task(entry: Entry, phase: int) -> Task:
    number = entry.integer("number", at_least=1)
    entry.where += f" {number}"
    task = Task(
        phase=phase,
        number=number,
        title=entry.text("title"),
        module=entry.text("module", r"minicache(_course)?(\.[a-z_]\w*)+"),
        targets=entry.texts("targets"),
        points=entry.integer("points", at_least=1),
        page=entry.text("page", r"docs/.+\.md"),
        hints=entry.texts("hints"),
        starts_from=entry.pairs("starts_from", r"minicache(_course)?(\.\w+)+:\w+(\.\w+)*"),
        predictions=tuple(_prediction(each) for each in entry.entries("prediction")),
        why=entry.text("why") if "why" in entry.data else "",
    )
    entry.done()
    if strangers := [name for name, _ in task.starts_from if name not in task.targets]:
        raise CourseError(f"{entry.where}: starts_from has {', '.join(strangers)}, which targets do not have")
    return task


def _prediction(entry: Entry) -> tuple[str, str]:
    found = entry.text("question"), entry.text("answer")
    entry.done()
    return found


@dataclass
class Entry:
    """A TOML table that is being read: what is taken out is checked, what is left over is refused."""

    data: dict[str, Any]
    where: str

    def text(self, key: str, pattern: str = r"\S.*") -> str:
        """Take a string that matches `pattern`."""
        value = self._take(key, str, "a string")
        if not re.fullmatch(pattern, value):
            raise CourseError(f"{self.where}: {key} = {value!r} does not look like {pattern}")
        return str(value)

    def integer(self, key: str, at_least: int) -> int:
        """Take an integer."""
        value = self._take(key, int, "an integer")
        if isinstance(value, bool) or value < at_least:
            raise CourseError(f"{self.where}: {key} = {value!r} must be an integer ≥ {at_least}")
        return int(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Take a list of strings."""
        values = self._take(key, list, "a list of strings")
        if not all(isinstance(value, str) and value.strip() for value in values):
            raise CourseError(f"{self.where}: {key} must be a list of strings, none empty")
        return tuple(values)

    def pairs(self, key: str, pattern: str) -> tuple[tuple[str, str], ...]:
        """Take a table of strings that match `pattern`; it may be absent."""
        if key not in self.data:
            return ()
        inside = Entry(dict(self._take(key, dict, "a table of strings")), f"{self.where}: {key}")
        return tuple((name, inside.text(name, pattern)) for name in list(inside.data))

    def entries(self, key: str) -> list[Entry]:
        """Take an array of tables; it may be absent."""
        values = self.data.pop(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise CourseError(f"{self.where}: {key} must be tables, written [[{key}]]")
        return [Entry(dict(value), f"{self.where}: {key}") for value in values]

    def done(self) -> None:
        """Refuse unread entries."""
        if self.data:
            raise CourseError(f"{self.where}: unknown {', '.join(sorted(self.data))}")

    def _take(self, key: str, kind: type, wanted: str) -> Any:
        if key not in self.data:
            raise CourseError(f"{self.where}: {key} is missing: {wanted}")
        value = self.data.pop(key)
        if not isinstance(value, kind):
            raise CourseError(f"{self.where}: {key} = {value!r} must be {wanted}")
        return value


def _check_unique(values: list[Any], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise CourseError(f"{what}: {value!r} appears twice")
