"""What is graded in a browser: in a Python with pytest and Hypothesis and nothing else, as `minicache grade` does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from scripts.browser import course
from scripts.browser.build import archive
from tests.browser.command_line import ROOT, on_the_command_line

from minicache_course.server import PytestServer
from minicache_course.table import Phase, load_course
from minicache_course.workspace import reference_file

WHEELS = [line.split()[0] for line in (ROOT / "scripts/browser/wheels.txt").read_text().splitlines() if "==" in line]
GLUE = """
import json, sys
from pathlib import Path
from scripts.browser.grade import grade, prepare
prepare()
posted = []
grade(json.loads(sys.argv[1]), posted.append, Path.cwd())
assert not {"torch", "numpy", "rich"} & set(sys.modules)
Path("posted.json").write_text(json.dumps(posted))
"""

RESERVATION = "labs/phase-02-fragmentation/memory/reservation.py"
ROWS = "    return len(lengths) * max(lengths)\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that the browser installs, and no other."""
    folder = tmp_path_factory.mktemp("packages")
    for wheel in WHEELS:
        installed = distribution(wheel.split("==")[0])
        for name in {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}:
            (folder / name).symlink_to(installed.locate_file(name))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What the worker unpacks, unpacked."""
    for path, content in (*course.package_files(course.PURE), *course.grading_files()):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    return tmp_path


@pytest.fixture(scope="module")
def server() -> Iterator[PytestServer]:
    with PytestServer(["hypothesis"]) as server:
        yield server


def in_the_browser(home: Path, packages: Path, phase: int, task: int | None, files: dict[str, str]) -> dict:
    """What the glue posts last, run by a Python that has no other packages."""
    asked = {"phase": phase, "task": task, "files": files, "told": []}
    path = [str(home / "src"), str(home), str(packages)]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {path}\n{GLUE}", json.dumps(asked)]
    done = subprocess.run(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    last: dict = json.loads((home / "posted.json").read_text())[-1]
    assert "account" in last, done.stdout[-3000:] + str(last)
    return last


def solved(phase: Phase) -> dict[str, str]:
    """Path → the reference, for the files of a phase's tasks that open in the browser."""
    tasks = course.pure_tasks()[phase]
    return {f"labs/{phase.folder}/{task.file}": reference_file(task.module).read_text() for task in tasks}


@pytest.mark.parametrize(
    ("find", "replace"),
    [
        pytest.param("", "", id="solved", marks=pytest.mark.slow),
        pytest.param(ROWS, "    return sum(lengths)\n", id="wrong-value"),
        pytest.param(ROWS, "    print('here')\n    return lengths[99]\n", id="exception", marks=pytest.mark.slow),
        pytest.param(ROWS, "    return (\n", id="syntax", marks=pytest.mark.slow),
    ],
)
def test_it_tells_what_the_command_line_tells(
    home: Path, packages: Path, server: PytestServer, tmp_path_factory: pytest.TempPathFactory, find: str, replace: str
) -> None:
    reference = reference_file("minicache.memory.reservation").read_text()
    assert find in reference
    files = {RESERVATION: reference.replace(find, replace, 1)}
    posted = in_the_browser(home, packages, 2, 1, files)
    expected = on_the_command_line(tmp_path_factory.mktemp("clone"), server, 2, 1, files)
    assert posted["account"] == expected
    assert posted["passed"] == ([] if find else ["2.1"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [phase.number for phase in course.pure_tasks()])
def test_the_tasks_that_open_in_the_browser_need_nothing_but_python(home: Path, packages: Path, number: int) -> None:
    phase = load_course(ROOT / "labs" / "course.toml").phase(number)
    posted = in_the_browser(home, packages, number, None, solved(phase))
    assert posted["passed"] == [task.id for task in course.pure_tasks()[phase]]


def test_which_tasks_open_in_the_browser() -> None:
    numbers = {phase.number: [task.number for task in tasks] for phase, tasks in course.pure_tasks().items()}
    assert numbers == {
        0: [1, 2, 3, 4, 5, 6],
        2: [1, 2, 3, 4, 5],
        3: [1, 2, 3, 4],
        5: [1, 2, 3, 4],
        6: [1, 2, 3, 4, 5, 7],
        7: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        8: [1, 2, 3, 4],
        9: [1, 2, 3],
        11: [1, 2, 3, 4, 5, 6, 7],
        12: [1, 2, 3, 4, 5, 6, 7, 9, 10, 11],
    }


def test_the_table_there_has_these_tasks_and_no_other(home: Path) -> None:
    there = load_course(home / "labs" / "course.toml")
    assert {task.id for phase in there for task in phase.tasks} == {
        task.id for tasks in course.pure_tasks().values() for task in tasks
    }


def test_an_archive_depends_on_its_files_only() -> None:
    files = [("b.py", b"2"), ("a.py", b"1")]
    assert archive(files) == archive(reversed(files))
    assert archive(files) != archive([("b.py", b"2"), ("a.py", b"3")])


def test_the_wheels_are_the_versions_that_are_tested() -> None:
    pinned = {line.split(" ")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert WHEELS
    assert set(WHEELS) <= pinned
