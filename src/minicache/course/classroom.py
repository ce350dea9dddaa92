"""A whole class: a folder of submissions, graded in parallel, into one CSV.

Grading runs what was handed in, with the rights of whoever grades: do it on a machine that you can do without.
"""

from __future__ import annotations

import csv
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from minicache.course.grading import grade
from minicache.course.report import print_result, write_gradescope
from minicache.course.results import PhaseResult
from minicache.course.server import PytestServer, preload_for
from minicache.course.table import Phase
from minicache.course.workspace import Workspace
from minicache.errors import CourseError


@dataclass(frozen=True, slots=True)
class Submission:
    """One student's folder.

    Attributes:
        student: the folder's name.
        files: module → the file that was found for it; a file that was not handed in is absent.
    """

    student: str
    files: dict[str, Path]


@dataclass(frozen=True, slots=True)
class Grade:
    """What a submission got.

    Attributes:
        student: whose it is.
        result: the grading, or None if it could not be done.
        note: what a teacher should know, in a line; "" if all is well.
    """

    student: str
    result: PhaseResult | None
    note: str


def find_submissions(folder: Path, phase: Phase) -> list[Submission]:
    """The sub-folders of `folder`, each with the lab files that it has.

    A lab file is looked for as `labs/phase-03-paged-cache/kernels/plain.py`, `phase-03-paged-cache/kernels/plain.py`,
    `kernels/plain.py` and `plain.py`.

    Raises:
        CourseError: there is no sub-folder.
    """
    students = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    if not students:
        raise CourseError(f"{folder} has no submissions: one sub-folder for each student is expected")
    found = []
    for student in students:
        files = {}
        for module, name in phase.files.items():
            folders = [student / "labs" / phase.folder, student / phase.folder, student]
            places = [*(folder / name for folder in folders), student / name.name]
            # A link could point to anything on the grader's machine.
            if existing := [place for place in places if place.is_file() and not place.is_symlink()]:
                files[module] = existing[0]
        found.append(Submission(student.name, files))
    return found


def grade_class(
    workspace: Workspace, phase: Phase, submissions: list[Submission], *, jobs: int, timeout: float
) -> Iterator[Grade]:
    """Grade every submission, `jobs` at a time; each grade comes as soon as it is there."""
    waiting: SimpleQueue[PytestServer] = SimpleQueue()

    def grade_next(submission: Submission) -> Grade:
        server = waiting.get()  # as many servers as threads: there is one
        try:
            return _grade_one(workspace, phase, submission, timeout, server)
        finally:
            waiting.put(server)

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            waiting.put(stack.enter_context(PytestServer(preload_for(phase))))
        for done in as_completed([pool.submit(grade_next, each) for each in submissions]):
            yield done.result()


def _grade_one(
    workspace: Workspace, phase: Phase, submission: Submission, timeout: float, server: PytestServer
) -> Grade:
    """Grade one submission in a folder of its own. Whatever is wrong with it is told in its note."""
    absent = [str(name) for module, name in phase.files.items() if module not in submission.files]
    notes = [f"not handed in: {', '.join(absent)}"] if absent else []
    try:
        with tempfile.TemporaryDirectory(prefix="minicache-labs-") as folder:
            theirs = replace(workspace, labs=Path(folder))
            for module, file in theirs.lab_files(phase).items():
                file.parent.mkdir(parents=True, exist_ok=True)
                if module in submission.files:
                    shutil.copyfile(submission.files[module], file)
            result = grade(theirs, phase, timeout=timeout, server=server)
    except (CourseError, OSError) as error:
        return Grade(submission.student, None, f"not graded: {error}")
    notes += [why for module, why in result.problems.items() if module in submission.files]
    lost = [graded for graded in result.tasks if graded.outcome.is_lost]
    notes += [f"{graded.task.id}: {graded.first_problem.message}" for graded in lost if graded.first_problem]
    return Grade(submission.student, result, "; ".join(" ".join(note.split()) for note in notes))


def write_csv(grades: list[Grade], phase: Phase, file: Path) -> None:
    """Write a line a student: points of each task, total, maximum, note."""
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["student", *(task.id for task in phase.tasks), "total", "max", "note"])
        for grade_ in sorted(grades, key=lambda each: each.student):
            result = grade_.result
            earned = [task.earned for task in result.tasks] if result else [0] * len(phase.tasks)
            writer.writerow([grade_.student, *earned, sum(earned), phase.points, grade_.note])


def write_report(grade_: Grade, folder: Path) -> None:
    """Write what the student may see into `folder/<student>`: `report.txt` and Gradescope's `results.json`."""
    theirs = folder / grade_.student
    theirs.mkdir(parents=True, exist_ok=True)
    with (theirs / "report.txt").open("w", encoding="utf-8") as stream:
        if grade_.result is None:
            stream.write(grade_.note + "\n")
            return
        print_result(grade_.result, Console(file=stream, width=120))
    write_gradescope(grade_.result, theirs / "results.json")
