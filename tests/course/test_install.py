"""`minicache init` and `minicache update`: a learner's folder without git, and what an update may do to it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tomllib
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import pytest
from tests.toys import TABLE
from typer.testing import CliRunner

from minicache_cli import app, learn
from minicache_course import install
from minicache_course.errors import CourseError
from minicache_course.install import CARRIED, PYTEST_INI, init, update
from minicache_course.pages import address
from minicache_course.progress import Progress, TaskRecord
from minicache_course.results import Outcome
from minicache_course.starters import starter
from minicache_course.workspace import CHECKOUT, fingerprint, is_edited, open_workspace, read_record

DENSE = "labs/phase-01-dense-cache/cache/dense.py"
NOTEBOOK = "notebooks/phase-01-dense-cache.ipynb"
TEST = "tests/phase-01-dense-cache/test_task_1.py"


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`: path → content."""
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `init` makes of the real course."""
    folder = tmp_path_factory.mktemp("init") / "my-course"
    init(folder)
    return folder


# init


def test_the_folder_has_what_a_clone_has(whole: Path) -> None:
    made = tree(whole)
    for pattern in CARRIED:
        files = list(CHECKOUT.glob(pattern))
        assert files, f"{pattern} matches nothing"
        for file in files:
            assert made[file.relative_to(CHECKOUT).as_posix()] == file.read_bytes()
    assert {each.folder for each in open_workspace(whole).course if each.tasks} == {
        each.name for each in (whole / "tests").glob("phase-*")
    }


def test_its_starters_are_current_and_name_a_command_for_each_page(whole: Path) -> None:
    workspace = open_workspace(whole)
    phase = workspace.course.phase(1)
    for module, file in workspace.lab_files(phase).items():
        assert file.read_text(encoding="utf-8") == starter(phase, module)
        assert not is_edited(workspace, phase, module)
    assert phase.task(2).page == "minicache docs 1.2"
    assert "read minicache docs 1.2" in (whole / DENSE).read_text(encoding="utf-8")


def test_a_phases_tests_read_no_file_that_the_folder_lacks() -> None:
    for file in CHECKOUT.glob("tests/phase-*/*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if ".parents[1] / " in line:
                needed = CHECKOUT / "tests" / line.split('.parents[1] / "')[1].split('"')[0]
                inside = [each for pattern in CARRIED for each in CHECKOUT.glob(pattern) if needed in each.parents]
                assert inside, f"{file}: {line}"


def test_pytest_runs_as_in_a_clone() -> None:
    (theirs := ConfigParser()).read_string(PYTEST_INI)
    ours = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    for key, value in theirs["pytest"].items():
        wanted = ours[key]
        assert value == (" ".join(wanted) if isinstance(wanted, list) else str(wanted))


def test_the_wheel_carries_the_same_files() -> None:
    wheel = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"][
        "targets"
    ]
    folders = {pattern.split("/")[0] for pattern in CARRIED}
    assert folders | {"src", "site"} == set(wheel["wheel"]["sources"])


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CourseError, match=r"is not empty \(notes\.txt\): name a new folder, such as `minicache init"):
        init(tmp_path)
    with pytest.raises(CourseError, match="is a file"):
        init(tmp_path / "notes.txt")
    assert tree(tmp_path) == {"notes.txt": b"mine"}


def test_a_course_is_told_to_update(whole: Path) -> None:
    with pytest.raises(CourseError, match="already has the course: run `minicache update`"):
        init(whole)


# A small course: what `course_files` gives is what this version has


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """This version's files, to be changed; `init` has made the working directory of them."""
    files = {
        name: f"{name}, first".encode()
        for name in ("labs/course.toml", "labs/starters.sha256", DENSE, NOTEBOOK, TEST, "tests/conftest.py")
    }
    monkeypatch.setattr(install, "course_files", lambda: files)
    init(tmp_path / "course")
    monkeypatch.chdir(tmp_path / "course")
    return files


def done() -> dict[str, str]:
    """Updates; file → what was done about it."""
    return {change.file: change.what for change in update(Path.cwd())}


@pytest.mark.usefixtures("course")
def test_an_update_to_the_same_version_does_nothing() -> None:
    Path(DENSE).write_text("edited")
    before = tree(Path.cwd())
    assert done() == {}
    assert tree(Path.cwd()) == before


def test_what_was_not_edited_is_replaced(course: dict[str, bytes]) -> None:
    for name in (DENSE, TEST, "labs/course.toml"):
        course[name] = b"second"
    course["tests/new.py"] = b"second"
    said = done()
    assert set(said) == {DENSE, TEST, "labs/course.toml", "tests/new.py"}
    assert said[DENSE] == "replaced: you had not edited it"
    assert {name: content for name, content in tree(Path.cwd()).items() if not name.startswith(".")} == course
    assert done() == {}


@pytest.mark.parametrize("name", [DENSE, NOTEBOOK])
def test_what_was_edited_stays_and_the_new_one_is_laid_beside_it(course: dict[str, bytes], name: str) -> None:
    Path(name).write_text("edited")
    course[name] = b"second"
    (change,) = update(Path.cwd())
    assert change.what == "kept with your changes; the new version is next to it"
    assert change.beside
    assert Path(change.beside).read_bytes() == b"second"
    assert Path(change.beside).parent == Path(name).parent
    assert Path(name).read_text() == "edited"
    assert done() == {}  # it has been said
    course[name] = b"third"
    assert set(done()) == {name}
    assert (Path(name).read_text(), Path(change.beside).read_bytes()) == ("edited", b"third")


def test_a_test_that_was_edited_is_the_courses_again_and_a_copy_is_kept(course: dict[str, bytes]) -> None:
    Path(TEST).write_text("edited")
    course[TEST] = b"second"
    said = done()[TEST]
    assert Path(TEST).read_bytes() == b"second"
    assert Path(said.split("your edited copy is ")[1]).read_text() == "edited"


def test_what_the_course_no_longer_has(course: dict[str, bytes]) -> None:
    Path(DENSE).write_text("edited")
    for name in (DENSE, NOTEBOOK, TEST):
        del course[name]
    said = done()
    assert Path(DENSE).read_text() == "edited"
    assert said[DENSE] == "kept with your changes; the course no longer has this file"
    assert not Path(NOTEBOOK).exists()
    assert not Path(TEST).exists()  # or it would be graded
    assert done() == {}


def test_files_of_the_learners_own_are_not_touched(course: dict[str, bytes]) -> None:
    own = [Path("labs/phase-01-dense-cache/notes.md"), Path("tests/phase-01-dense-cache/test_mine.py"), Path("x.py")]
    for file in own:
        file.write_text("own")
    course[TEST] = b"second"
    assert set(done()) == {TEST}
    assert all(file.read_text() == "own" for file in own)


def test_a_new_starter_where_the_learner_has_a_file(course: dict[str, bytes]) -> None:
    name = "labs/phase-01-dense-cache/cache/new.py"
    Path(name).write_text("own")
    course[name] = b"second"
    assert done() == {name: "kept with your changes; the new version is next to it"}
    assert Path(name).read_text() == "own"


def test_a_file_that_is_missing_comes_back(course: dict[str, bytes]) -> None:
    Path(DENSE).unlink()
    assert done() == {DENSE: "new"}
    assert Path(DENSE).read_bytes() == course[DENSE]


def test_a_file_whose_module_has_moved_is_carried_over_with_what_it_has_passed(
    course: dict[str, bytes],
) -> None:
    old, new = (f"labs/phase-10-serving/{folder}/streaming.py" for folder in ("server", "serving/http"))
    first = b"from minicache.server.streaming import STREAM  # starter"
    course[old] = first
    assert done() == {old: "new"}
    mine = "from minicache.server.streaming import STREAM  # mine"
    Path(old).write_text(mine)
    record = TaskRecord(Outcome.PASSED, 10, fingerprint(Path(old)), "2026-01-01T00:00:00")
    course["labs/course.toml"] = TABLE.encode()
    Path("labs/course.toml").write_text(TABLE)
    saved = Progress.load(open_workspace(Path.cwd()))
    saved.tasks["10.1"] = record
    saved.save()
    del course[old]
    course[new] = b"from minicache.serving.http.streaming import STREAM  # starter"

    changes = [change for change in update(Path.cwd()) if change.file == new]

    assert [Path(each).read_bytes().decode() for each in (new, changes[1].beside or "")] == [
        "from minicache.serving.http.streaming import STREAM  # mine",
        course[new].decode(),
    ]
    assert not Path(old).parent.exists()
    assert changes[0].what.startswith(f"moved here from {old}, its imports brought up to date; as it was: ")
    assert Path(changes[0].what.split("as it was: ")[1]).read_text() == mine
    carried = Progress.load(open_workspace(Path.cwd())).tasks["10.1"]
    assert carried == replace(record, sha256=fingerprint(Path(new)))
    assert done() == {}


def test_an_update_that_cannot_write_changes_nothing(course: dict[str, bytes]) -> None:
    Path(DENSE).write_text("edited")
    before = tree(Path.cwd())
    course |= dict.fromkeys((DENSE, NOTEBOOK, TEST), b"second")
    course["tests/conftest.py/no.py"] = b"below a file"
    with pytest.raises(CourseError, match="nothing was updated"):
        done()
    assert tree(Path.cwd()) == before


@pytest.mark.parametrize("survived", range(1, 6))
def test_an_update_that_was_killed_is_finished_by_the_next(
    course: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    Path(NOTEBOOK).write_text("edited")
    course |= {name: f"{name}, second".encode() for name in (DENSE, NOTEBOOK, "tests/conftest.py")}
    del course[TEST]
    move, unlink, left = os.replace, Path.unlink, iter(range(survived))

    def dying(*arguments: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        (move if len(arguments) == 2 else unlink)(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        patch.setattr(Path, "unlink", dying)
        try:
            done()
        except KeyboardInterrupt:
            assert survived < 5
        else:
            assert survived == 5  # three files, a removal, and the record
    done()
    now = {name: content for name, content in tree(Path.cwd()).items() if not name.startswith(".")}
    assert now == course | {NOTEBOOK: b"edited", "notebooks/phase-01-dense-cache.new.ipynb": course[NOTEBOOK]}
    assert done() == {}


def test_an_init_that_cannot_write_leaves_nothing(
    course: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = Path.write_bytes, iter(range(3))

    def full(self: Path, content: bytes) -> int:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CourseError, match="No space left"):
        init(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_init_that_was_killed_begins_again(course: dict[str, bytes], tmp_path: Path) -> None:
    shutil.copytree(Path.cwd(), tmp_path / "other" / install._STAGING)
    init(tmp_path / "other")
    assert tree(tmp_path / "other") == tree(Path.cwd())


def test_a_clone_is_told_to_pull(tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="`git pull`"):
        update(tmp_path)


def test_a_damaged_record_is_named(course: dict[str, bytes]) -> None:
    Path(".minicache/files.json").write_text("{")
    with pytest.raises(CourseError, match=r"files\.json is damaged"):
        done()


# The commands


def test_the_command_says_what_it_did_line_by_line(course: dict[str, bytes]) -> None:
    course["labs/course.toml"] = (CHECKOUT / "labs/course.toml").read_bytes()
    update(Path.cwd())
    Path(DENSE).write_text("edited")
    course |= {DENSE: b"second", TEST: b"second"}
    lines = CliRunner().invoke(app, ["update"]).output.splitlines()
    assert lines[0] == f"{DENSE}: kept with your changes; the new version is next to it"
    assert lines[1].strip() == f"to see the difference: diff -u {DENSE} {DENSE.removesuffix('.py')}.new.py"
    assert lines[2] == f"{TEST}: replaced: you had not edited it"
    assert lines[3].endswith("; files changed: 2.")


def test_a_folder_of_another_version_is_told_to_update(
    course: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    course["labs/course.toml"] = (CHECKOUT / "labs/course.toml").read_bytes()
    update(Path.cwd())
    assert "minicache update" not in CliRunner().invoke(app, ["status"]).output
    monkeypatch.setattr(learn, "__version__", "9.9.9")
    assert "was made by minicache" in (output := CliRunner().invoke(app, ["status"]).output)
    assert "9.9.9 is installed: `minicache update`" in " ".join(output.split())


def test_where_a_page_is() -> None:
    assert address(None) == ""
    assert address("1") == address("dense-cache") == "phase-01-dense-cache/"
    assert address("0.2") == "phase-00-decode-arithmetic/lab/01-write-the-arithmetic/"
    with pytest.raises(CourseError, match="no task 99"):
        address("0.99")


def test_the_record_is_what_was_written(course: dict[str, bytes]) -> None:
    assert read_record(Path.cwd())["files"] == {
        name: hashlib.sha256(content).hexdigest() for name, content in course.items()
    }
