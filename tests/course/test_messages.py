"""What notes and reports say of odd submissions: what is wrong, and nothing meant for a learner's own folder."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.toys import COLOR, NBYTES, Toys
from typer.testing import CliRunner

from minicache_cli.commands import app

SUBMISSIONS: dict[str, dict[str, bytes]] = {
    "right": {"palette.py": COLOR.encode(), "arithmetic.py": NBYTES.encode()},
    "windows": {"palette.py": COLOR.replace("\n", "\r\n").encode("utf-8-sig"), "arithmetic.py": NBYTES.encode()},
    "tabs": {"palette.py": COLOR.replace("    ", "\t").encode(), "arithmetic.py": NBYTES.encode()},
    "nothing": {"README.md": b"sorry"},
    "capital": {"Palette (1).py": COLOR.encode(), "arithmetic.py.txt": NBYTES.encode()},
    "notebook": {"homework.ipynb": b"{}"},
    "latin": {"palette.py": b"x = 1\ny = 'caf\xe9'\n" + COLOR.encode(), "arithmetic.py": NBYTES.encode("utf-16")},
    "empty": {"palette.py": b"\n", "arithmetic.py": NBYTES.encode()},
    "broken": {"palette.py": b"def color(:\n", "arithmetic.py": b"import nowhere\n"},
    "unusual": {"palette.py": b"import os\n" + COLOR.encode(), "arithmetic.py": NBYTES.encode() + b"exec('x = 1')\n"},
    "opens": {"palette.py": b"open('there_is_no_such_file')\n", "arithmetic.py": NBYTES.encode()},
}


Told = dict[str, tuple[dict[str, str], str]]
"""Student → the line in the CSV, and the report."""


@pytest.fixture(scope="module")
def _once() -> Told:
    return {}


@pytest.fixture
def told(toys: Toys, tmp_path: Path, _once: Told) -> Told:
    """Student → the line in the CSV, and the report."""
    if not _once:
        for student, files in SUBMISSIONS.items():
            for name, content in files.items():
                file = tmp_path / "class" / student / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
        where = [str(tmp_path / "class"), "--csv", str(tmp_path / "g.csv"), "--reports", str(tmp_path / "reports")]
        done = CliRunner().invoke(app, ["grade-class", *where, "--phase", "0"])
        assert done.exit_code == 0, done.output
        with (tmp_path / "g.csv").open(encoding="utf-8-sig", newline="") as stream:
            for row in csv.DictReader(stream):
                report = tmp_path / "reports" / row["student"]
                texts = [(report / name).read_text(encoding="utf-8") for name in ("report.txt", "results.json")]
                _once[row["student"]] = row, "\n".join(texts)
    return _once


@pytest.mark.slow
def test_notes_say_what_is_wrong(told: Told) -> None:
    notes = {student: row["note"] for student, (row, _) in told.items()}
    points = {student: int(row["total"]) for student, (row, _) in told.items()}
    assert {student for student, note in notes.items() if not note} == {"right", "windows", "tabs"}
    assert [points[each] for each in ("right", "windows", "tabs")] == [100] * 3
    assert notes["nothing"] == "not handed in: palette.py, arithmetic/arithmetic.py"
    assert "Palette (1).py may be the file: rename it to palette.py" in notes["capital"]
    assert "arithmetic.py.txt may be the file: rename it to arithmetic.py" in notes["capital"]
    assert "homework.ipynb is a notebook" in notes["notebook"]
    assert "palette.py is not UTF-8: byte 0xE9 in line 2; save it as UTF-8" in notes["latin"]
    assert "arithmetic.py is UTF-16: save it as UTF-8" in notes["latin"]
    assert "palette.py is empty" in notes["empty"]
    assert points["empty"] == 70
    assert "SyntaxError" in notes["broken"]
    assert "No module named 'nowhere'" in notes["broken"]
    assert "palette.py: imports os (line 1)" in notes["unusual"]
    assert "arithmetic.py: calls exec (line 5)" in notes["unusual"]
    assert points["unusual"] == 100


@pytest.mark.slow
def test_reports_tell_the_same(told: Told) -> None:
    for student, words in {
        "nothing": "not handed in",
        "capital": "Palette (1).py may be the file",
        "latin": "byte 0xE9 in line 2",
        "unusual": "imports os (line 1)",
    }.items():
        assert told[student][1].count(words) >= 2, student  # in the text, and in Gradescope's


@pytest.mark.slow
def test_reports_have_nothing_of_the_graders_folders(told: Told) -> None:
    for student, (row, report) in told.items():
        for text in (row["note"], report):
            for unwanted in ("/tmp", "minicache reset", "rename it back", "minicache-labs-", "pytest-of-", "Traceback"):
                assert unwanted not in text, f"{student}: {unwanted}"


def test_a_learners_own_missing_file_can_be_put_back(toys: Toys) -> None:
    (toys.workspace.labs / "phase-00-toys" / "palette.py").unlink()
    done = CliRunner().invoke(app, ["grade", "0"])
    assert "rename it back, or `minicache reset 0 --file palette.py`" in " ".join(done.output.split())
