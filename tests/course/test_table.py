"""The table is checked when it is read, and an error names file and key."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from tests.toys import TABLE, Toys

from minicache_course.errors import CourseError
from minicache_course.table import load_course
from minicache_course.workspace import find_workspace, open_workspace


def test_what_the_table_says(toys: Toys) -> None:
    course = toys.workspace.course
    assert [phase.folder for phase in course] == ["phase-00-toys", "phase-01-later"]
    assert [task.id for task in toys.phase.tasks] == ["0.1", "0.2"]
    assert toys.phase.points == 100
    assert toys.phase.files["minicache.palette"] == PurePosixPath("palette.py")
    assert toys.workspace.lab_files(toys.phase)["minicache.arithmetic.arithmetic"] == toys.nbytes


def test_a_task_may_say_where_its_starters_begin(tmp_path: Path) -> None:
    file = tmp_path / "course.toml"
    start = 'points = 70\nstarts_from = { dtype_nbytes = "minicache.palette:color" }'
    file.write_text(TABLE.replace("points = 70", start), encoding="utf-8")
    tasks = load_course(file).phase(0).tasks
    assert [task.starts_from for task in tasks] == [(), (("dtype_nbytes", "minicache.palette:color"),)]


@pytest.mark.parametrize("name", ["0", "00", 0, "toys", "phase-00-toys"])
def test_a_phase_has_several_names(toys: Toys, name: str | int) -> None:
    assert toys.workspace.course.phase(name) is toys.phase


def test_an_unknown_phase_or_task_lists_those_there_are(toys: Toys) -> None:
    with pytest.raises(CourseError, match=r"no phase '7': there are 0 \(toys\), 1 \(later\)"):
        toys.workspace.course.phase("7")
    with pytest.raises(CourseError, match="phase 0 has no task 3: there are 1, 2"):
        toys.phase.task(3)


@pytest.mark.parametrize(
    ("find", "put", "message"),
    [
        ('title = "Toys"\n', "", "phase 0: title is missing"),
        ("points = 70", 'points = "70"', "task 2: points = '70' must be an integer"),
        ("points = 70", "points = true", "must be an integer"),
        ("points = 70", "points = 0", "must be an integer ≥ 1"),
        ('slug = "toys"', 'slug = "The Toys"', "phase 0: slug"),
        ('slug = "later"', 'slug = "toys"', "slugs: 'toys' appears twice"),
        ("number = 2", "number = 1", "task numbers: 1 appears twice"),
        ('targets = ["color"]', 'targets = "color"', "targets = 'color' must be a list of strings"),
        ('targets = ["color"]', 'target = ["color"]', "targets is missing"),
        ("points = 70", "points = 70\npoint = 7", "unknown point"),
        ('module = "minicache.palette"', 'module = "os.path"', "module = 'os.path'"),
        ("points = 70", "points = 70\nstarts_from = 'x'", "starts_from = 'x' must be a table of strings"),
        ("points = 70", "points = 70\nstarts_from = {dtype_nbytes = 'os:walk'}", "dtype_nbytes = 'os:walk' does not"),
        ("points = 70", "points = 70\nstarts_from = {color = 'minicache.x:y'}", "starts_from has color, which targets"),
        ("[[phase]]", "[[phase]", "not TOML"),
    ],
)
def test_an_error_names_file_and_key(tmp_path: Path, find: str, put: str, message: str) -> None:
    file = tmp_path / "course.toml"
    file.write_text(TABLE.replace(find, put, 1), encoding="utf-8")
    with pytest.raises(CourseError) as error:
        load_course(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_the_course_is_found_from_anywhere_inside(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINICACHE_ROOT")
    monkeypatch.chdir(toys.tests)
    assert find_workspace().root == toys.workspace.root


def test_a_root_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINICACHE_ROOT", str(tmp_path))
    with pytest.raises(CourseError, match="MINICACHE_ROOT"):
        find_workspace()


def test_labs_that_are_no_folder_are_refused(toys: Toys) -> None:
    with pytest.raises(CourseError, match="is not a folder"):
        open_workspace(toys.workspace.root, Path("nowhere"))
