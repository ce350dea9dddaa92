"""The author gates: what has to hold for every phase that has tasks. `minicache course gates N` runs those of one."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from minicache_course.results import Outcome
from minicache_course.server import PytestServer, preload_for
from minicache_course.starters import starter
from minicache_course.table import Phase, Task
from minicache_course.workspace import RECORD, open_workspace, reference_file
from minicache_course.wrong import Wrong, grade_solution, grade_wrong, load_wrong

WORKSPACE = open_workspace(Path(__file__).parents[2])
PHASES = [phase for phase in WORKSPACE.course if phase.tasks]
MIN_WRONG = 5

each_phase = pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.folder)
each_task = pytest.mark.parametrize(
    ("phase", "task"),
    [pytest.param(phase, task, id=f"{phase.folder}-task-{task.number}") for phase in PHASES for task in phase.tasks],
)
each_wrong = pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=f"{phase.folder}-task-{wrong.caught_by}-{wrong.story}")
        for phase in PHASES
        for wrong in (load_wrong(WORKSPACE, phase) if (WORKSPACE.tests(phase) / "wrong.toml").is_file() else ())
    ],
)


@pytest.fixture(scope="module")
def server() -> Iterator[PytestServer]:
    """One for all gates of a worker: each run is forked from it with torch loaded."""
    with PytestServer(sorted({name for phase in PHASES for name in preload_for(phase)})) as started:
        yield started


@each_phase
def test_the_starters_are_those_of_this_reference(phase: Phase) -> None:
    """Compared by recorded fingerprint, so a learner's edited files do not fail the project's tests."""
    recorded = (WORKSPACE.root / "labs" / RECORD).read_text(encoding="utf-8").splitlines()
    for module, file in phase.files.items():
        digest = hashlib.sha256(starter(phase, module).encode()).hexdigest()
        assert f"{digest}  {phase.folder}/{file}" in recorded, f"{module} has changed: run `minicache course starters`"


def test_the_scheduler_of_the_auditors_tests_is_this_reference() -> None:
    file = WORKSPACE.root / "tests/phase-06-preemption/right_paged.py"
    packed = gzip.decompress(file.with_suffix(".py.gz").read_bytes())
    assert packed == reference_file("minicache.scheduler.paged").read_bytes(), f"it has changed: run {file}"


@pytest.mark.slow
@each_phase
def test_the_starters_fail_every_task(phase: Phase, server: PytestServer) -> None:
    starters = {module: starter(phase, module) for module in phase.files}
    result = grade_solution(WORKSPACE, phase, starters, server)
    assert result.problems == {}
    others = [graded for graded in result.tasks if graded.outcome is not Outcome.NOT_WRITTEN]
    assert result.earned == 0
    assert not others, [(test.id, test.outcome, test.message) for graded in others for test in graded.tests]


@pytest.mark.slow
@each_task
def test_no_task_needs_a_later_one(phase: Phase, task: Task, server: PytestServer) -> None:
    solved = range(task.number + 1)
    sources = {module: starter(phase, module, solved=solved) for module in phase.files}
    graded = grade_solution(WORKSPACE, phase, sources, server, task=task.number).tasks[0]
    assert graded.outcome is Outcome.PASSED, graded.first_problem and graded.first_problem.message


@pytest.mark.slow
@each_wrong
def test_a_wrong_solution_is_caught_by_its_task(wrong: Wrong, server: PytestServer) -> None:
    result = grade_wrong(WORKSPACE, wrong, server)
    assert result.problems == {}
    assert result.tasks[0].outcome is Outcome.FAILED or result.tasks[0].outcome.is_lost
    told = result.tasks[0].first_problem
    assert told
    for text in wrong.shows:
        assert text in told.message, f"{text!r} is not in the first failure that a learner sees:\n{told.message}"


@each_phase
def test_there_are_enough_wrong_solutions(phase: Phase) -> None:
    assert len(load_wrong(WORKSPACE, phase)) >= MIN_WRONG


@each_task
def test_a_task_has_hints_a_page_and_tests(phase: Phase, task: Task) -> None:
    assert len(task.hints) >= 2
    assert (WORKSPACE.root / task.page).is_file(), f"{task.page} is not there"
    assert list(WORKSPACE.tests(phase).glob(f"test_task_{task.number}_*.py"))


@each_phase
def test_every_test_file_belongs_to_a_task(phase: Phase) -> None:
    for file in WORKSPACE.tests(phase).glob("test_*.py"):
        number = file.stem.split("_")[2]
        assert file.name.startswith("test_task_"), f"{file} grades nothing"
        assert number.isdecimal()
        phase.task(int(number))
