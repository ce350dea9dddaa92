"""A result, told to people, to CI servers and to Gradescope; and remembered."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from rich.console import Console
from tests.toys import Toys

from minicache_course.errors import CourseError
from minicache_course.progress import Progress
from minicache_course.report import print_result, print_way_on, write_gradescope, write_junit
from minicache_course.results import Outcome, PhaseResult, TaskResult, TestResult
from minicache_course.table import Course, Phase

BAD_OUTCOME = '{"tasks": {"0.1": {"outcome": "splendid", "sha256": "", "graded_at": ""}}, "hints": {}}'


@pytest.fixture
def result(toys: Toys) -> PhaseResult:
    """Task 1 has passed; of task 2's tests one passed, one failed, one was skipped."""
    one, two = toys.phase.tasks
    tests = (
        TestResult("t.py::c", "It is so.", Outcome.PASSED),
        TestResult("t.py::d[<&>]", "It is <so> & not \x1b[31mso\x00.", Outcome.FAILED, "got 1 < 2\x00", "printed\x1b"),
        TestResult("t.py::e", "It needs a GPU.", Outcome.NOT_GRADED, "skipped: no GPU"),
    )
    graded = (TaskResult(one, (TestResult("t.py::a", "A.", Outcome.PASSED),)), TaskResult(two, tests))
    files = toys.workspace.lab_files(toys.phase)
    return PhaseResult(toys.phase, graded, files, {module: f"sha of {module}" for module in files})


def test_in_the_terminal(result: PhaseResult) -> None:
    text = shown(result)
    for part in ("labs/phase-00-toys/palette.py", "30/30", "23/70", "got 1 < 2", "printed", "53 of 100 points"):
        assert part in text


def shown(result: PhaseResult) -> str:
    stream = io.StringIO()
    print_result(result, Console(file=stream, width=100))
    return stream.getvalue()


def test_the_points_of_a_task_are_shared_among_its_tests(result: PhaseResult) -> None:
    task = result.phase.tasks[1]
    passed = [TestResult(f"t.py::{i}", "P.", Outcome.PASSED) for i in range(38)]

    def earned(*others: Outcome, num_collected: int = 0) -> int:
        tests = (*passed, *(TestResult(f"t.py::o{i}", "O.", outcome) for i, outcome in enumerate(others)))
        return TaskResult(task, tests, num_collected).earned

    assert earned() == 70
    assert earned(Outcome.FAILED) == 68
    assert earned(Outcome.CRASHED, num_collected=76) == 35  # those that were not run have not passed
    assert earned(Outcome.FAILED, Outcome.NOT_WRITTEN) == 0
    assert TaskResult(task, ()).earned == 0


def test_the_most_telling_failure_comes_first(result: PhaseResult) -> None:
    def first(*distances: int) -> str:
        tests = [TestResult(str(d), "T.", Outcome.FAILED, distance=d) for d in distances]
        crash = TestResult("c", "C.", Outcome.NOT_WRITTEN)
        problem = TaskResult(result.phase.tasks[1], (crash, *tests)).first_problem
        assert problem is not None
        return problem.id

    assert first(2, 0, 1) == "0"
    assert first(3, 2, 1) == "1"


def test_all_points_lead_on(toys: Toys, result: PhaseResult) -> None:
    def way_on(result: PhaseResult, *others: Phase) -> str:
        stream = io.StringIO()
        course = Course((toys.phase, *others))
        print_way_on(result, course, Console(file=stream, width=100))
        return stream.getvalue()

    one, two = toys.phase.tasks
    both = tuple(TaskResult(task, (TestResult("a", "A.", Outcome.PASSED),)) for task in (one, two))
    assert way_on(result) == ""
    assert "Next: task 0.2, Bytes. Read docs/en/toys.md, then `minicache grade 0.2`" in way_on(
        replace(result, tasks=both[:1])
    )
    blocks = replace(toys.phase, number=1, title="Blocks", slug="blocks", page="docs/en/phase-01-blocks/index.md")
    text = way_on(replace(result, tasks=both), blocks)
    assert "jupyter lab notebooks/phase-00-toys.ipynb" in text
    assert "Next: phase 1, Blocks. Read docs/en/phase-01-blocks/index.md" in text


def test_each_problem_of_a_task_has_a_line(result: PhaseResult) -> None:
    kinds = [Outcome.PASSED, *[Outcome.FAILED] * 12, *[Outcome.NOT_WRITTEN] * 2]
    tests = tuple(TestResult(f"t.py::{i}", f"Number {i}.", kind, f"got {i}") for i, kind in enumerate(kinds))
    text = shown(replace(result, tasks=(TaskResult(result.phase.tasks[1], tests),)))
    assert text.count("Bytes") == 2  # in the table, and over the panel
    assert "got 1 " in text
    assert "got 2 " not in text
    assert "read on   docs/en/toys.md" in text
    assert "hint      minicache hint 0.2" in text
    assert [line.split()[1:4] for line in text.splitlines() if "failed      Number" in line] == [
        ["failed", "Number", f"{i}."] for i in range(2, 12)
    ]
    assert "… and 1 more failed, 2 more not written" in text


def test_tests_that_check_the_same_share_a_line(result: PhaseResult) -> None:
    tests = [TestResult(f"t.py::a[{i}-[]]", f"It fits. [{i}-[]]", Outcome.FAILED, f"got {i}") for i in range(41)]
    tests.append(TestResult("t.py::b[k]", "It is alone. [k]", Outcome.FAILED, "got k"))
    text = shown(replace(result, tasks=(TaskResult(result.phase.tasks[1], tuple(tests)),)))
    assert "failed      ×40  It fits. " in text
    assert "failed      It is alone. [k]" in text
    assert text.count("It fits.") == 1
    assert "more failed" not in text


def test_a_task_that_was_begun_says_what_is_missing(result: PhaseResult) -> None:
    missing = TestResult("t.py::b", "B.", Outcome.NOT_WRITTEN, "missing   dtype_nbytes is not written yet")
    passed = TestResult("t.py::a", "A.", Outcome.PASSED)
    task = result.phase.tasks[1]
    assert "dtype_nbytes is not written yet" in shown(replace(result, tasks=(TaskResult(task, (passed, missing)),)))
    assert "dtype_nbytes" not in shown(replace(result, tasks=(TaskResult(task, (missing,)),)))


def test_a_task_that_needs_another_points_to_that_one(result: PhaseResult) -> None:
    one, two = result.phase.tasks
    other = TestResult("t.py::a", "A.", Outcome.NOT_WRITTEN, "missing   color is not written yet", needs=one.id)
    passed = TestResult("t.py::b", "B.", Outcome.PASSED)
    text = shown(replace(result, tasks=(TaskResult(two, (passed, other)),)))
    for part in ("needs 0.1 first", "hint      minicache hint 0.1", "Next: task 0.1, Colours"):
        assert part in text
    own = replace(other, needs="")
    text = shown(replace(result, tasks=(TaskResult(two, (passed, other, own)),)))
    for part in ("not written", "hint      minicache hint 0.2", "Next: task 0.2, Bytes"):
        assert part in text


def test_a_file_that_cannot_be_imported_is_told_once(result: PhaseResult) -> None:
    text = shown(replace(result, problems={"minicache.arithmetic.arithmetic": "because of this"}))
    assert "its tasks fail; the reference stands in for other tasks" in text
    assert text.count("cannot be imported") == 2  # next to the file, and in the table
    assert text.count("because of this") == 1
    assert text.count("hint      minicache hint 0.2") == 1
    assert "got 1 < 2" not in text


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.STALLED])
def test_a_lost_process_leaves_a_way_on(result: PhaseResult, outcome: Outcome) -> None:
    lost = TestResult("t.py::b", "B.", outcome, "no answer")
    text = shown(replace(result, tasks=(TaskResult(result.phase.tasks[1], (lost,)),)))
    for part in (outcome, "no answer", "hint      minicache hint 0.2", "tests were not run"):
        assert part in text


def test_junit_can_be_parsed_and_counts(result: PhaseResult, tmp_path: Path) -> None:
    write_junit(result, tmp_path / "junit.xml")
    suites = Xml.parse(tmp_path / "junit.xml").getroot()
    counts = [(suite.get("tests"), suite.get("failures"), suite.get("skipped")) for suite in suites]
    assert counts == [("1", "0", "0"), ("3", "1", "1")]
    points = [[each.get("value") for each in suite.iter("property")] for suite in suites]
    assert points == [["30", "30"], ["23", "70"]]
    cases = suites[1].findall("testcase")
    failure = cases[1].find("failure")
    assert failure is not None
    assert "got 1 < 2" in str(failure.text)
    assert cases[1].findtext("system-out") == "printed�"


def test_junit_of_a_task_without_tests_has_a_failure(result: PhaseResult, tmp_path: Path) -> None:
    empty = PhaseResult(result.phase, (TaskResult(result.phase.tasks[0], ()),), result.files, result.fingerprints)
    write_junit(empty, tmp_path / "junit.xml")
    suite = Xml.parse(tmp_path / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), len(suite.findall("testcase/failure"))) == ("1", "1", 1)


def test_gradescope_has_a_test_for_each_task(result: PhaseResult, tmp_path: Path) -> None:
    write_gradescope(result, tmp_path / "results.json")
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["score"] == 53
    assert [(t["number"], t["score"], t["max_score"], t["status"]) for t in data["tests"]] == [
        ("0.1", 30, 30, "passed"),
        ("0.2", 23, 70, "failed"),
    ]
    assert "got 1 < 2" in data["tests"][1]["output"]


def test_progress_is_saved_and_loaded(toys: Toys, result: PhaseResult) -> None:
    progress = Progress.load(toys.workspace)
    progress.record(result)
    progress.hints["0.1"] = 2
    progress.save()
    again = Progress.load(toys.workspace)
    assert again == progress
    one, two = toys.phase.tasks
    assert (again.passed(one), again.passed(two), again.warning) == (True, False, "")
    assert (again.earned(one), again.earned(two)) == (30, 23)
    assert again.is_stale(one, toys.color)  # its fingerprint was made up
    assert [file.name for file in toys.workspace.state.iterdir()] == ["progress.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tasks": {"0.1": 3}, "hints": {}}', BAD_OUTCOME, '{"hints": {}}'])
def test_damaged_progress_is_put_aside_and_said(toys: Toys, damage: str) -> None:
    toys.workspace.state.mkdir()
    file = toys.workspace.state / "progress.json"
    file.write_text(damage)
    progress = Progress.load(toys.workspace)
    assert (progress.tasks, progress.hints) == ({}, {})
    (aside,) = toys.workspace.state.iterdir()
    assert aside.name in progress.warning
    assert aside.read_text() == damage
    progress.save()
    assert Progress.load(toys.workspace).warning == ""


def test_progress_that_cannot_be_saved_is_an_error_and_leaves_the_old_one(toys: Toys) -> None:
    toys.workspace.state.write_text("in the way")
    with pytest.raises(CourseError, match="could not be saved"):
        Progress(toys.workspace.state / "progress.json").save()
