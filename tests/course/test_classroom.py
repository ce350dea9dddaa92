"""A class: whatever one submission does, the others are graded, and all of them are in the CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from minicache.course.classroom import find_submissions, grade_class, write_csv, write_report
from minicache.course.workspace import open_workspace
from minicache.errors import CourseError

from .conftest import COLOR, NBYTES, Toys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four submissions, each laid out in another way."""
    files = {
        "ada/labs/phase-00-toys": {"palette.py": COLOR, "arithmetic/arithmetic.py": NBYTES},
        "bob/phase-00-toys": {"palette.py": COLOR, "arithmetic/arithmetic.py": "def dtype_nbytes(dtype)\n"},
        "cleo": {"palette.py": COLOR, "notes.txt": "I ran out of time."},
        "dan": {
            "palette.py": "import time\ndef color(role, scheme='light'):\n    time.sleep(60)\n",
            "arithmetic/arithmetic.py": NBYTES,
        },
    }
    for place, contents in files.items():
        (tmp_path / "class" / place).mkdir(parents=True)
        for name, text in contents.items():
            file = tmp_path / "class" / place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return tmp_path / "class"


def test_a_class(toys: Toys, folder: Path, tmp_path: Path) -> None:
    grades = []
    for grade in grade_class(toys.workspace, toys.phase, find_submissions(folder, toys.phase), jobs=2, timeout=1):
        grades.append(grade)
        write_report(grade, tmp_path / "reports")
    write_csv(grades, toys.phase, tmp_path / "grades.csv")

    with (tmp_path / "grades.csv").open(newline="", encoding="utf-8") as stream:
        rows = {row.pop("student"): row for row in csv.DictReader(stream)}
    assert list(rows) == ["ada", "bob", "cleo", "dan"]
    assert {student: (row["0.1"], row["0.2"], row["total"], row["max"]) for student, row in rows.items()} == {
        "ada": ("30", "70", "100", "100"),
        "bob": ("30", "0", "30", "100"),
        "cleo": ("30", "0", "30", "100"),
        "dan": ("0", "70", "70", "100"),
    }
    assert rows["ada"]["note"] == ""
    assert "arithmetic/arithmetic.py:1 def dtype_nbytes(dtype)" in rows["bob"]["note"]
    assert rows["cleo"]["note"] == "not handed in: arithmetic/arithmetic.py"
    assert "0.1: endless wait?" in rows["dan"]["note"]

    assert "SyntaxError" in (tmp_path / "reports" / "bob" / "report.txt").read_text()
    assert json.loads((tmp_path / "reports" / "dan" / "results.json").read_text())["score"] == 70


def test_a_file_of_a_subfolder_may_be_handed_in_without_it(tmp_path: Path) -> None:
    phase = open_workspace(Path(__file__).parents[2]).course.phase("paged-cache")
    for place in ("ada/kernels", "bob"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "plain.py").write_text("")
    found = {each.student: each.files for each in find_submissions(tmp_path, phase)}
    assert found["ada"] == {"minicache.kernels.plain": tmp_path / "ada" / "kernels" / "plain.py"}
    assert found["bob"] == {"minicache.kernels.plain": tmp_path / "bob" / "plain.py"}


def test_a_submission_that_cannot_be_graded_is_noted(toys: Toys, folder: Path) -> None:
    (toys.tests / "conftest.py").write_text("syntax error\n")
    submissions = find_submissions(folder, toys.phase)[:1]
    (grade,) = grade_class(toys.workspace, toys.phase, submissions, jobs=1, timeout=10)
    assert grade.result is None
    assert grade.note.startswith("not graded: ")


def test_links_are_not_followed(toys: Toys, folder: Path) -> None:
    theirs = folder / "ada" / "labs" / "phase-00-toys" / "arithmetic"
    (folder / "cleo" / "arithmetic.py").symlink_to(theirs / "arithmetic.py")
    cleo = find_submissions(folder, toys.phase)[2]
    assert list(cleo.files) == ["minicache.palette"]


def test_an_empty_folder_is_refused(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="no submissions"):
        find_submissions(toys.tests, toys.phase)
