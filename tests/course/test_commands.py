"""The command line, as a learner types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.toys import COLOR, NBYTES, Toys
from typer.testing import CliRunner

from minicache import __version__
from minicache.errors import MinicacheError
from minicache_cli import app
from minicache_cli.learn import names, phases_of
from minicache_course import workspace
from minicache_course.errors import CourseError
from minicache_course.starters import write_all


def run(*arguments: str, status: int = 0, typed: str = "") -> str:
    """The output of `minicache arguments`, whose words are joined by single blanks."""
    result = CliRunner(env={"COLUMNS": "120", "TERM": "xterm"}).invoke(app, arguments, typed)
    if isinstance(result.exception, MinicacheError):
        raise result.exception
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_version() -> None:
    assert run("--version") == f"minicache {__version__}"


def test_all_commands_are_there() -> None:
    output = run("--help")
    for command in ("status", "grade", "hint", "watch", "reset", "doctor", "grade-class", "generate", "train", "demo"):
        assert command in output


def test_a_learners_command_imports_no_other(toys: Toys) -> None:
    learners = {"status", "grade", "hint", "compare", "watch", "reset", "python", "ipython", "doctor"}
    assert names() == learners
    code = """if True:
        import sys
        from minicache_cli import main
        try:
            main()
        finally:
            print("all" if "minicache_cli.commands" in sys.modules else "one")
        """
    for arguments, imported in (["status"], "one"), (["simulate", "--help"], "all"), ([], "all"):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.stdout.endswith(f"{imported}\n")


def test_from_the_first_look_to_all_points(toys: Toys) -> None:
    write_all(toys.workspace)
    assert "0/100" in run("status")
    output = run("grade", "0", status=1)
    assert "0 of 100 points" in output
    assert "Next: task 0.1, Colours. Read docs/en/toys.md" in output
    toys.write(nbytes=NBYTES.replace("return 2", "return 8"))
    output = run("grade", "toys", status=1)
    assert "65 of 100 points" in output  # of two tests of task 2, one
    assert "got 8" in output
    assert "65/100" in run("status")
    assert "You are here: 0.1 Colours Next: 0.2 Bytes docs/en/toys.md" in run("status")
    toys.write()
    assert "edited since" in run("status")
    output = run("grade", "00")
    assert "100 of 100 points" in output
    assert "jupyter lab notebooks/phase-00-toys.ipynb" in output
    assert "This was the last phase" in output
    assert "100/100" in run("status")
    assert "Next:" not in run("status")


def test_one_task_is_graded_and_the_others_are_remembered(toys: Toys) -> None:
    run("grade", "0")
    toys.write(color="broken\n", nbytes=NBYTES)
    assert "70 of 70 points Next: the whole phase: `minicache grade 0`" in run("grade", "0.2")
    status = run("status")
    assert "100/100" in status
    assert "passed, edited since" in status


def test_result_files(toys: Toys, tmp_path: Path) -> None:
    run("grade", "0", "--junit", str(tmp_path / "j.xml"), "--gradescope", str(tmp_path / "g.json"))
    assert json.loads((tmp_path / "g.json").read_text())["score"] == 100
    assert "<testsuites" in (tmp_path / "j.xml").read_text()


def test_grading_somebody_elses_files_is_not_progress(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "phase-00-toys").mkdir(parents=True)
    run("grade", "0", "--labs", str(tmp_path / "theirs"), status=1)
    assert not toys.workspace.state.exists()


def test_hints_come_one_by_one(toys: Toys) -> None:
    first = run("hint", "0.2")
    assert "1. count" in first
    assert "a dict" not in first
    assert "2. a dict" in run("hint", "0.2")
    last = run("hint", "0.2")
    assert "3. {'float16': 2}" in last
    assert "That was the last hint" in run("hint", "0.2")
    assert "2. PALETTE[role].shade(scheme)" in run("hint", "0.1", "--all")


def test_reset_keeps_a_copy(toys: Toys) -> None:
    output = run("reset", "0", "--file", "palette.py")
    assert "labs/phase-00-toys/palette.py has been reset to the starter; yours is kept" in output
    assert "single file" not in output
    (copy,) = toys.workspace.state.glob("backups/toys/*/palette.py")
    assert copy.read_text() == COLOR
    assert "NotImplementedError" in toys.color.read_text()
    assert toys.nbytes.read_text() == NBYTES
    assert "Nothing to do" in run("reset", "0", "--file", "palette.py")
    (command,) = re.findall("To restore it: (cp .*)", output)
    subprocess.run(command, shell=True, check=True)
    assert toys.color.read_text() == COLOR


def test_reset_of_a_phase_says_how_to_reset_one_file(toys: Toys) -> None:
    assert "To reset a single file: minicache reset 0 --file palette.py" in run("reset", "0")


@pytest.fixture
def outside(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toys:
    """The course is the clone that minicache was installed from, and the working directory is next to it."""
    monkeypatch.delenv("MINICACHE_ROOT")
    monkeypatch.setattr(workspace, "CHECKOUT", toys.workspace.root)
    monkeypatch.chdir(tmp_path)
    return toys


def test_reset_outside_the_course_asks_first(outside: Toys) -> None:
    root = outside.workspace.root
    for typed in "n\n", "":  # "": a script, which cannot answer
        output = run("reset", "0", typed=typed, status=1)
        assert f"one minicache was installed from: {root} " in output
        assert f"Put the starters back in {root}/labs/phase-00-toys? [y/N]" in output
        assert outside.color.read_text() == COLOR
    assert "palette.py has been reset" in run("reset", "0", "--file", "palette.py", typed="y\n")
    assert "Put the starters back" not in run("reset", "0", "--yes")
    assert "NotImplementedError" in outside.nbytes.read_text()


def test_grade_and_update_outside_the_course_name_it(outside: Toys, tmp_path: Path) -> None:
    named = f"You are outside a course folder. Used instead is the one minicache was installed from: {tmp_path}/course"
    assert named in run("grade", "0")
    assert named not in run("grade", "0", "--labs", str(outside.workspace.labs))
    result = CliRunner().invoke(app, ["update"])
    assert (named in result.output, type(result.exception)) == (True, CourseError)


@pytest.mark.parametrize("where", ["course", "course/labs/phase-00-toys"])
def test_inside_the_course_nothing_is_asked(
    outside: Toys, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / where)
    output = run("reset", "0") + run("grade", "0", status=1)
    assert "outside" not in output
    assert "Put the starters back" not in output


def test_a_course_that_is_named_is_not_asked_about(outside: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINICACHE_ROOT", str(outside.workspace.root))
    assert "outside" not in run("reset", "0")


def test_status_says_what_to_do_about_a_file_that_is_not_there(toys: Toys) -> None:
    toys.nbytes.unlink()
    assert "no file: rename it back, or minicache reset 0 --file" in run("status")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grade", "9"), "no phase '9': there are 0 (toys), 1 (later)"),
        (("grade", "later"), "phase 1 (later) is planned"),
        (("grade", "0.5"), "phase 0 has no task 5: there are 1, 2"),
        (("hint", "0"), "'0' is no task: expected phase and task, such as 1.3"),
        (("hint", "1.1"), "phase 1 (later) is planned: it has no tasks yet"),
        (
            ("reset", "0", "--file", "cache.py"),
            "phase 0 has no file cache.py: there are palette.py, arithmetic/arithmetic.py",
        ),
        (("grade-class", "nowhere", "--phase", "0"), "nowhere is not a folder"),
        (("course", "starters", "--check"), "the starters are out of date"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(toys: Toys, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CourseError) as error:
        run(*arguments)
    assert message in str(error.value)


def test_an_error_is_one_line_on_stderr(toys: Toys) -> None:
    command = [sys.executable, "-c", "from minicache_cli import main; main()", "grade", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "minicache: no phase '9': there are 0 (toys), 1 (later)\n"


@pytest.mark.slow
def test_doctor(toys: Toys) -> None:
    output = run("doctor")
    for part in ("ok Python", "ok torch", "ok pytest plugin active", "ok your files", "ok progress"):
        assert part in output


@pytest.mark.slow
def test_doctor_says_what_to_do(toys: Toys) -> None:
    toys.nbytes.unlink()
    output = run("doctor", status=1)
    assert (
        "no your files labs/phase-00-toys/arithmetic/arithmetic.py is missing"
        " → rename it back, or minicache reset 0 --file arithmetic/arithmetic.py"
    ) in output
    for part in ("ok Python", "ok torch", "ok pytest plugin active", "ok progress"):
        assert part in output


def test_starters(toys: Toys) -> None:
    output = run("course", "starters")
    assert "labs/phase-00-toys/palette.py written; the old file is kept as .minicache/backups/toys/" in output
    assert "up to date" in run("course", "starters", "--check")


def test_watch_grades_the_phases_whose_files_changed(toys: Toys) -> None:
    phases = list(toys.workspace.course)
    assert phases_of(toys.workspace, phases, {toys.color, Path("elsewhere.py")}) == [toys.phase]
    assert phases_of(toys.workspace, phases, {Path("elsewhere.py")}) == []
