"""A learner's progress, in `.minicache/progress.json`: what passed, with which version of the file, and hints shown."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from minicache import __version__
from minicache_course.errors import CourseError
from minicache_course.results import Outcome, PhaseResult
from minicache_course.table import Phase, Task
from minicache_course.workspace import Workspace, fingerprint


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """How a task was graded last.

    Attributes:
        outcome: how it went.
        earned: its points.
        sha256: the fingerprint of the learner's file that was graded.
        graded_at: local time, ISO 8601.
        version: of the minicache that graded it; "" if it was older than this field.
        seed: of its random cases; None: the usual ones.
    """

    outcome: Outcome
    earned: int
    sha256: str
    graded_at: str
    version: str = ""
    seed: int | None = None


@dataclass
class Progress:
    """What is remembered between commands.

    Attributes:
        file: where it is saved.
        tasks: task id → how it was graded last.
        hints: task id → how many hints were shown.
        warning: what was wrong with the saved file, or "".
    """

    file: Path
    tasks: dict[str, TaskRecord] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    warning: str = ""

    @classmethod
    def load(cls, workspace: Workspace) -> Progress:
        """The saved progress; none if nothing was saved. A damaged file is put aside, and `warning` says where."""
        file = workspace.state / "progress.json"
        if not file.exists():
            return cls(file)
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            tasks = {
                task: TaskRecord(
                    Outcome(record["outcome"]),
                    int(record["earned"]),
                    str(record["sha256"]),
                    str(record["graded_at"]),
                    str(record.get("version", "")),
                    None if record.get("seed") is None else int(record["seed"]),
                )
                for task, record in data["tasks"].items()
            }
            hints = {task: int(count) for task, count in data["hints"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            aside = file.with_suffix(f".damaged-{datetime.now():%Y%m%d-%H%M%S-%f}.json")
            file.rename(aside)
            return cls(file, warning=f"{file} was damaged: it is kept as {aside.name}, and progress starts from zero")
        return cls(file, tasks, hints)

    def save(self) -> None:
        """Write the file whole or not at all.

        Raises:
            CourseError: it cannot be written.
        """
        text = json.dumps({"tasks": {task: asdict(each) for task, each in self.tasks.items()}, "hints": self.hints})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False, encoding="utf-8") as stream:
                stream.write(text)
            os.replace(stream.name, self.file)
        except OSError as error:
            raise CourseError(f"progress could not be saved in {self.file}: {error.strerror}") from error

    def record(self, result: PhaseResult) -> None:
        """Remember a grading."""
        now = datetime.now().isoformat(timespec="seconds")
        for graded in result.tasks:
            sha256 = result.fingerprints[graded.task.module]
            self.tasks[graded.task.id] = TaskRecord(
                graded.outcome, graded.earned, sha256, now, __version__, result.seed
            )

    def passed(self, task: Task) -> bool:
        """Whether the task passed when it was graded last, whatever happened to the file since."""
        return task.id in self.tasks and self.tasks[task.id].outcome is Outcome.PASSED

    def passed_at(self) -> dict[str, str]:
        """Id of each task that passed when it was graded last → when that was, ISO 8601."""
        return {name: record.graded_at for name, record in self.tasks.items() if record.outcome is Outcome.PASSED}

    def earned(self, task: Task) -> int:
        """The points that the task earned when it was graded last."""
        return self.tasks[task.id].earned if task.id in self.tasks else 0

    def is_stale(self, task: Task, file: Path) -> bool:
        """Whether the task was graded and its file has changed since."""
        return task.id in self.tasks and self.tasks[task.id].sha256 != fingerprint(file)

    def missing(self, phase: Phase, module: str, file: Path) -> str:
        """What keeps the learner's `file` from being finished, or ""."""
        tasks = [task for task in phase.tasks if task.module == module]
        if open_tasks := [task.id for task in tasks if not self.passed(task)]:
            return f"not passed yet: task {', '.join(open_tasks)}"
        if any(self.is_stale(task, file) for task in tasks):
            return f"edited since it passed: minicache grade {phase.number}"
        return ""
