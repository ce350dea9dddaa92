"""`pytest --mine`: whose code is graded, which tests run, what a failure says."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.toys import COLOR, NBYTES, Toys

from minicache_course.journal import Job
from minicache_course.server import PytestServer


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One process that has pytest loaded, and forks a run each."""
    with PytestServer() as SERVERS["it"]:
        yield


SERVERS: dict[str, PytestServer] = {}


def run(toys: Toys, *arguments: str, folder: str = "tests/phase-00-toys") -> tuple[int, str]:
    """Exit status and output of pytest in the small course, without the plugins that are nothing to it."""
    given = ["-p", "no:cacheprovider", "--import-mode=importlib", *arguments, folder]
    log = toys.workspace.root / "log"
    child = SERVERS["it"].start(Job(given, str(toys.workspace.root), log=str(log)))
    while child.poll() is None:
        time.sleep(0.01)
    return child.stop(), log.read_text()


def test_the_reference_is_graded_by_default(toys: Toys) -> None:
    toys.write(color="broken\n", nbytes="broken\n")
    # With plugins as pytest finds them: this is where it has to find ours.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", str(toys.tests)]
    done = subprocess.run(command, cwd=toys.workspace.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "grading the reference" in done.stdout
    assert "4 passed" in done.stdout


def test_the_header_says_whose_code_and_where(toys: Toys) -> None:
    toys.write(nbytes="syntax error\n")
    status, output = run(toys, "--mine")
    assert status == 1
    assert "grading YOUR files in labs" in output
    assert "labs/phase-00-toys/palette.py\n" in output
    assert (
        "labs/phase-00-toys/arithmetic/arithmetic.py   "
        "CANNOT BE IMPORTED: its tasks fail; the reference stands in for other tasks" in output
    )


def test_points_are_listed(toys: Toys) -> None:
    toys.write(nbytes=NBYTES.replace("return 2", "return 3"))
    status, output = run(toys, "--mine")
    assert status == 1
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "0.1 Colours 30 / 30 2 of 2 tests passed" in lines
    assert "0.2 Bytes 35 / 70 1 of 2 tests failed" in lines


def test_another_folder_of_labs(toys: Toys) -> None:
    other = toys.workspace.root / "theirs" / "phase-00-toys"
    other.mkdir(parents=True)
    (other / "palette.py").write_text(COLOR)
    (other / "arithmetic").mkdir()
    (other / "arithmetic/arithmetic.py").write_text(NBYTES.replace("2\n", "3\n"))
    status, output = run(toys, "--mine", "--labs", "theirs")
    assert status == 1
    assert "theirs/phase-00-toys/palette.py" in output
    assert "1 failed, 3 passed" in output


def test_a_failure_is_short_and_the_traceback_a_matter_of_vv(toys: Toys) -> None:
    toys.write(color="def color(role, scheme='light'):\n    return [][3]\n")
    _, output = run(toys, "--mine", "--task", "1")
    assert "called    color('prompt')" in output
    assert "IndexError: list index out of range  (labs/phase-00-toys/palette.py:2: return [][3])" in output
    assert "phase 0, task 1: Colours\nchecks    A prompt token is yellow." in output
    assert "hint      minicache hint 0.1" in output
    assert "Traceback" not in output
    assert "checks.py" not in output
    _, long = run(toys, "--mine", "--task", "1", "-vv")
    assert "palette.py:2: IndexError" in long


def test_a_plain_assert_is_told_by_pytest(toys: Toys) -> None:
    (toys.tests / "test_task_1_colours.py").write_text("def test_it():\n    got = 3\n    assert got == 4\n")
    _, output = run(toys, "--mine")
    assert "assert 3 == 4" in output


def test_one_task(toys: Toys) -> None:
    status, output = run(toys, "--mine", "--task", "2")
    assert status == 0
    assert "2 passed" in output
    assert "Colours" not in output


@pytest.mark.parametrize("mode", [(), ("--mine",)])
def test_no_tests_is_a_failure(toys: Toys, mode: tuple[str, ...]) -> None:
    for file in toys.tests.iterdir():
        file.write_text("")
    other = toys.workspace.root / "tests" / "other"
    other.mkdir()
    (other / "test_other.py").write_text("def test_other():\n    pass\n")
    status, output = run(toys, *mode, folder="tests")
    assert status != 0
    assert "phase 0: no tests were collected" in output


def test_mine_runs_only_what_grades_a_task(toys: Toys) -> None:
    other = toys.workspace.root / "tests" / "test_other.py"
    other.write_text("def test_other():\n    assert False\n")
    status, output = run(toys, "--mine", folder="tests")
    assert status == 0
    assert "4 passed" in output


def test_mine_outside_a_course_is_refused(toys: Toys) -> None:
    (toys.workspace.root / "labs" / "course.toml").unlink()
    status, output = run(toys, "--mine")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "has no labs/course.toml" in output


def test_mine_without_a_phase_is_refused(toys: Toys) -> None:
    (toys.workspace.root / "other").mkdir()
    status, output = run(toys, "--mine", folder="other")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "none of these are tests of a phase" in output


def test_the_plugin_brings_in_nothing_heavy() -> None:
    code = "import minicache_course.plugin, sys; print({'torch', 'numpy', 'libcst', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
