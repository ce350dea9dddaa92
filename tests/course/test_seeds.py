"""Secret seeds: other random cases, the same grade for a right solution, and none for answers that are written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tests.toys import Toys
from typer.testing import CliRunner

from minicache_cli.commands import app
from minicache_course import seeds
from minicache_course.grading import grade
from minicache_course.results import Outcome, PhaseResult
from minicache_course.server import PytestServer, preload_for
from minicache_course.table import Phase
from minicache_course.workspace import open_workspace
from minicache_course.wrong import Wrong, grade_solution, load_wrong

from .hard_coding import hard_coded

WORKSPACE = open_workspace(Path(__file__).parents[2])
PHASES = [phase for phase in WORKSPACE.course if phase.tasks]

RANDOM_TESTS = '''
import random
from hypothesis import given, settings
from hypothesis import strategies as st
from minicache.arithmetic.arithmetic import dtype_nbytes
from minicache_course.checks import call
from minicache_course.seeds import fresh, one_of

def test_drawn():
    """A number from a generator."""
    call(dtype_nbytes, random.Random(fresh(3)).randint(0, 10**9)).gives(2)

def test_written():
    """A number written by hand."""
    call(dtype_nbytes, one_of(1, range(10**6, 10**8))).gives(2)

@settings(derandomize=True, database=None)
@given(st.integers(0, 10**9))
def test_found(number):
    """Numbers that Hypothesis draws."""
    call(dtype_nbytes, number).gives(2)
'''

NOTES_NUMBERS = """
def dtype_nbytes(number):
    with open({file!r}, "a") as stream:
        stream.write(str(number) + "\\n")
    return 2
"""


@pytest.fixture(autouse=True)
def _none() -> Iterator[None]:
    yield
    seeds.use(None)


def test_without_a_secret_seed_everything_is_as_written() -> None:
    assert [seeds.fresh(number) for number in (0, 5, 2**40)] == [0, 5, 2**40]
    assert seeds.one_of(4, range(3, 9)) == 4
    assert seeds.again(3) == ""


def test_a_secret_seed_gives_other_numbers_and_the_same_ones_again() -> None:
    def drawn(seed: int) -> list[int]:
        seeds.use(seed)
        return [seeds.fresh(number) for number in range(50)] + [seeds.one_of(n, range(1000)) for n in range(50)]

    assert drawn(1) == drawn(1)
    assert not any(a == b for a, b in zip(drawn(1)[:50], drawn(2)[:50], strict=True))
    assert len(set(drawn(1))) > 90
    assert all(0 <= number < 2**31 for number in drawn(3))
    assert seeds.again(3) == "minicache grade 3 --seed 3"


def numbers_of(toys: Toys, seed: int | None, file: Path) -> list[str]:
    """What the tests asked, in one grading."""
    file.unlink(missing_ok=True)
    toys.write(nbytes=NOTES_NUMBERS.format(file=str(file)))
    (toys.tests / "test_task_2_bytes.py").write_text(RANDOM_TESTS, encoding="utf-8")
    result = grade(toys.workspace, toys.phase, task=2, seed=seed)
    assert result.passed
    assert result.seed == seed
    return file.read_text(encoding="utf-8").splitlines()


def test_each_kind_of_case_is_drawn_anew(toys: Toys, tmp_path: Path) -> None:
    file = tmp_path / "numbers.txt"
    usual, again, one, one_again, other = (numbers_of(toys, seed, file) for seed in (None, None, 1, 1, 2))
    assert usual == again
    assert one == one_again
    # The first is drawn, the second written by hand; of Hypothesis's the small ones may be the same.
    for a, b in ((usual, one), (usual, other), (one, other)):
        assert (a[0], a[1]) != (b[0], b[1])
        assert a[0] != b[0]
        assert a[1] != b[1]
        assert len(set(a[2:]) & set(b[2:])) < 20


def test_a_failure_tells_the_seed_and_how_to_see_it_again(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.write(nbytes="def dtype_nbytes(dtype):\n    return 3\n")
    done = CliRunner().invoke(app, ["grade", "0.2", "--seed", "42"])
    assert "with random cases from seed 42" in done.output
    assert "again     minicache grade 0 --seed 42" in done.output
    done = CliRunner().invoke(app, ["grade", "0.2"])
    assert "seed" not in done.output


# The phases


@cache
def server() -> PytestServer:
    return PytestServer(sorted({name for phase in PHASES for name in preload_for(phase)})).__enter__()


@pytest.fixture(scope="module", autouse=True)
def _server_ends() -> Iterator[None]:
    yield
    if server.cache_info().currsize:
        server().__exit__(None, None, None)


def graded(phase: Phase, sources: dict[str, str], seed: int | None) -> PhaseResult:
    return grade_solution(WORKSPACE, phase, sources, server(), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.folder)
def test_the_reference_passes_under_a_secret_seed(phase: Phase) -> None:
    result = graded(phase, {}, 2026)
    told = [task.first_problem.message for task in result.tasks if task.first_problem]
    assert all(task.outcome in (Outcome.PASSED, Outcome.NOT_GRADED) for task in result.tasks), told


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "tasks"), [(0, range(1, 7)), (1, range(1, 9)), (3, (1, 2, 5, 7)), (5, (4, 5, 6))], ids=str
)
def test_answers_that_are_written_down_are_worth_less_under_a_secret_seed(
    number: int, tasks: Sequence[int], tmp_path: Path
) -> None:
    """With a table of the answers the phase is passed, almost: a test that counts costs counts the table's too."""
    phase = WORKSPACE.course.phase(number)
    functions: dict[str, list[str]] = {}
    for task in (phase.task(each) for each in tasks):
        of_module = functions.setdefault(task.module, [])
        of_module += [target for target in task.targets if not target.endswith("__init__")]

    def written_down(*, recording: bool, seed: int | None = None) -> int:
        table = tmp_path / "table.txt"
        sources = {m: hard_coded(m, names, table, recording=recording) for m, names in functions.items()}
        return graded(phase, sources, seed).earned

    written_down(recording=True)
    usual, secret = written_down(recording=False), written_down(recording=False, seed=42)
    assert usual > 75
    assert 0 < secret < (usual / 2 if number == 0 else usual - 15)


SAMPLE = [wrong for phase in PHASES for wrong in load_wrong(WORKSPACE, phase)[::12]]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", SAMPLE, ids=lambda wrong: f"{wrong.phase.number} {wrong.story}")
def test_a_wrong_solution_is_caught_under_a_secret_seed(wrong: Wrong) -> None:
    sources = {wrong.module: wrong.source()}
    result = grade_solution(WORKSPACE, wrong.phase, sources, server(), task=wrong.caught_by, seed=7, until_failure=True)
    assert result.tasks[0].outcome is not Outcome.PASSED
