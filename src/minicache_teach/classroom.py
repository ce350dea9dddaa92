"""A whole class, graded several submissions at a time.

Grading runs what was handed in: do it on a machine that you can do without.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Lock

from rich.console import Console

from minicache_course.errors import CourseError
from minicache_course.grading import grade
from minicache_course.record import Audit
from minicache_course.report import print_result, printable, write_gradescope
from minicache_course.results import Outcome, PhaseResult
from minicache_course.table import Phase
from minicache_course.workspace import Workspace, reference_file
from minicache_teach import controls
from minicache_teach.gradebook import Row
from minicache_teach.sandbox import Sandbox, why_unavailable
from minicache_teach.submissions import Submission

_MAX_NOTE_LENGTH = 500


@dataclass(frozen=True, slots=True)
class Grade:
    """What a submission got.

    Attributes:
        submission: whose it is, and the files.
        result: the grading, or None if it could not be done.
        notes: what a teacher should know, each in a line.
        files: the fingerprint of the files that were graded; "" if it could not be done.
    """

    submission: Submission
    result: PhaseResult | None
    notes: tuple[str, ...]
    files: str = ""

    @property
    def note(self) -> str:
        """All notes in one line."""
        return "; ".join(self.notes)

    def row(self, phase: Phase) -> Row:
        """The line for the CSV."""
        earned = tuple(task.earned for task in self.result.tasks) if self.result else (0,) * len(phase.tasks)
        total = sum(earned)
        return Row(self.submission.student, self.submission.id, earned, total, total, None, self.note, self.files)


class Class:
    """Grades submissions, `jobs` at a time. A context manager: what still runs at its end is ended.

    A submission that could not be graded is graded a second time, alone, when all others are done: it may have been
    another one that ended its process.

    Args:
        workspace: the course, with the tests.
        phase: what is graded.
        jobs: submissions at the same time; one at a time where they cannot be isolated.
        timeout: seconds without progress after which a test counts as an endless loop.
        seed: draws the random cases of the tests anew; the usual ones by default.
    """

    def __init__(
        self, workspace: Workspace, phase: Phase, *, jobs: int, timeout: float, seed: int | None = None
    ) -> None:
        self._workspace, self._phase, self._timeout, self._seed = workspace, phase, timeout, seed
        # Where nothing keeps one submission from another, it runs alone: what it leaves is then known to be its own.
        self._jobs = 1 if why_unavailable() else jobs
        self._pool = ThreadPoolExecutor(self._jobs)
        self._lock = Lock()
        self._running: set[Sandbox] = set()
        self._audit: Audit | None = None
        self._ended = False

    def __enter__(self) -> Class:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is KeyboardInterrupt:  # it is about to end: a second Ctrl-C must not leave the others running
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self._lock:
            self._ended = True
            for sandbox in self._running:
                sandbox.end()
        self._pool.shutdown(cancel_futures=True)

    def grade(self, submissions: list[Submission]) -> Iterator[Grade]:
        """Grade all; each grade is yielded as soon as it is there, and not kept here.

        Raises:
            CourseError: the reference does not pass its tests on this machine.
        """
        if not submissions:
            return
        self._audit = self._audit or self._audit_of_reference()
        failed = []
        for done in self._grade(submissions, self._jobs):
            if done.result is None and len(submissions) > 1:
                failed.append(done.submission)
            else:
                yield done
        yield from self._grade(failed, 1)

    def _grade(self, submissions: list[Submission], jobs: int) -> Iterator[Grade]:
        left = iter(submissions)
        running: set[Future[Grade]] = set()
        while True:
            running |= {self._pool.submit(self._grade_one, each) for each in islice(left, jobs - len(running))}
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def _grade_one(self, submission: Submission) -> Grade:
        """Grade one submission in a folder and a sandbox of its own. Its notes list every problem."""
        phase, unread, notes = self._phase, [], list[str]()
        try:
            notes = submission.remarks(phase)
            digest = submission.digest()
            with tempfile.TemporaryDirectory(prefix="minicache-labs-", ignore_cleanup_errors=True) as folder:
                theirs = replace(self._workspace, labs=Path(folder))
                for module, file in theirs.lab_files(phase).items():
                    file.parent.mkdir(parents=True, exist_ok=True)
                    try:
                        if module in submission.files:
                            file.write_bytes(submission.files[module].read())
                    except CourseError:  # a remark tells it
                        unread.append(module)
                result = self._judge(theirs, self._audit)
        except Exception as error:  # whatever a submission brings about, it is the only one that it costs
            why = str(error) if isinstance(error, CourseError) else f"{type(error).__name__}: {error}"
            return Grade(submission, None, tuple(map(_line, [*notes, f"not graded: {why}"])))
        notes += [why for module, why in result.problems.items() if module in submission.files and module not in unread]
        lost = [graded for graded in result.tasks if graded.outcome.is_lost]
        notes += [f"{graded.task.id}: {graded.first_problem.message}" for graded in lost if graded.first_problem]
        return Grade(submission, result, tuple(map(_line, notes)), digest)

    def _audit_of_reference(self) -> Audit:
        """Which tests there are: those that the reference passes here, graded as a submission is."""
        with tempfile.TemporaryDirectory(prefix="minicache-labs-") as folder:
            solved = replace(self._workspace, labs=Path(folder))
            for module, file in solved.lab_files(self._phase).items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(reference_file(module).read_bytes())
            result = self._judge(solved, None)
        failed = [each for each in result.tasks if each.outcome not in (Outcome.PASSED, Outcome.NOT_GRADED)]
        for each in failed:
            why = each.first_problem.message if each.first_problem else "it has no tests"
            raise CourseError(f"the reference does not pass task {each.task.id} on this machine:\n{why}")
        tests = {each.task.id: frozenset(test.id for test in each.tests) for each in result.tasks}
        return Audit(tests, controls.__name__)

    def _judge(self, theirs: Workspace, audit: Audit | None) -> PhaseResult:
        """Grade the files of one submission in a sandbox, which the class's end ends too."""
        with Sandbox(theirs, self._phase) as sandbox:
            with self._lock:
                if self._ended:
                    raise CourseError("interrupted")
                self._running.add(sandbox)
            try:
                return grade(theirs, self._phase, timeout=self._timeout, seed=self._seed, server=sandbox, audit=audit)
            finally:
                with self._lock:
                    self._running.discard(sandbox)


def write_report(grade_: Grade, folder: Path) -> None:
    """Write what the student may see into `folder/<student>`: `report.txt` and Gradescope's `results.json`."""
    theirs = folder / folder_name(grade_.submission.student)
    theirs.mkdir(parents=True, exist_ok=True)
    with (theirs / "report.txt").open("w", encoding="utf-8", errors="replace") as stream:
        if grade_.result is None:
            stream.write(grade_.note + "\n")
            return
        print_result(grade_.result, Console(file=stream, width=120))
        remarks = grade_.submission.remarks(grade_.result.phase)
        stream.writelines(f"Note: {remark}\n" for remark in map(_line, remarks))
    write_gradescope(grade_.result, theirs / "results.json", remarks)


def folder_name(student: str) -> str:
    """A student's name as that of one folder: a platform's names may have a slash in them, or be `..`."""
    name = student.replace("/", "_").replace("\0", "_")
    return name if name.strip(".") else f"_{name}"


def _line(text: str) -> str:
    """A note in one line that a CSV and a terminal can show."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= _MAX_NOTE_LENGTH else f"{text[:_MAX_NOTE_LENGTH]} …"
