"""`minicache status --export`, and `check-record` on the teacher's side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.toys import COLOR, Toys
from typer.testing import CliRunner

from minicache import __version__
from minicache.errors import MinicacheError
from minicache_cli import app
from minicache_course.workspace import fingerprint


def run(*arguments: str, status: int = 0) -> str:
    """The output of `minicache arguments`."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    if isinstance(result.exception, MinicacheError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def graded(toys: Toys) -> Toys:
    """One task passed and one failed, with a seed."""
    toys.write(nbytes="def dtype_nbytes(dtype):\n    return 2\n")
    run("grade", "0", "--seed", "7", status=1)
    return toys


def test_a_record_has_points_versions_seeds_and_fingerprints(graded: Toys, tmp_path: Path) -> None:
    file = tmp_path / "ada.json"
    assert f"{file}: 65 of 100 points" in run("status", "--export", str(file))
    record = json.loads(file.read_text())
    assert (record["version"], record["earned"], record["points"]) == (__version__, 65, 100)
    first, second = record["tasks"]
    assert first["graded_at"][:2] == "20"
    assert {name: value for name, value in first.items() if name != "graded_at"} == {
        "task": "0.1",
        "outcome": "passed",
        "earned": 30,
        "points": 30,
        "version": __version__,
        "seed": 7,
        "file": "phase-00-toys/palette.py",
        "sha256": fingerprint(graded.color),
    }
    assert (second["outcome"], second["earned"]) == ("failed", 35)
    assert run("check-record", str(file)) == f"{file}: 65/100 points, graded by minicache {__version__}\n"


def test_without_a_grade_there_is_a_record_too(toys: Toys, tmp_path: Path) -> None:
    file = tmp_path / "new.json"
    run("status", "--export", str(file))
    assert "0/100 points" in run("check-record", str(file))


def changed(record: dict[str, Any], change: str) -> None:
    if change == "points":
        record["tasks"][1]["earned"], record["earned"] = 70, 100
    elif change == "seed":
        record["tasks"][0]["seed"] = 8
    elif change == "signature":
        record["signature"]["value"] = "0" * 64
    else:
        record["tasks"] = 3


@pytest.mark.parametrize("change", ["points", "seed", "signature", "tasks"])
@pytest.mark.parametrize("secret", [True, False])
def test_a_record_that_was_edited_is_refused(graded: Toys, tmp_path: Path, change: str, secret: bool) -> None:
    (tmp_path / "key").write_text("the class of 2026\n")
    option = ["--key", str(tmp_path / "key")] if secret else []
    file = tmp_path / "ada.json"
    run("status", "--export", str(file), *option)
    run("check-record", str(file), *option)
    record = json.loads(file.read_text())
    changed(record, change)
    file.write_text(json.dumps(record))
    said = run("check-record", str(file), *option, status=1)
    assert ("this is no record" if change == "tasks" else "the signature does not fit") in said


def test_a_key_is_needed_for_what_was_signed_with_one_and_another_does_not_do(graded: Toys, tmp_path: Path) -> None:
    keyed, plain = tmp_path / "keyed.json", tmp_path / "plain.json"
    (tmp_path / "key").write_text("one")
    (tmp_path / "other").write_text("two")
    run("status", "--export", str(keyed), "--key", str(tmp_path / "key"))
    run("status", "--export", str(plain))
    assert "signed with a class's key" in run("check-record", str(keyed), status=1)
    assert "does not fit" in run("check-record", str(keyed), "--key", str(tmp_path / "other"), status=1)
    said = run("check-record", str(keyed), str(plain), "--key", str(tmp_path / "key"), status=1)
    assert f"{keyed}: 65/100" in said
    assert f"{plain}: the record was signed without a key" in said


def test_points_that_the_course_does_not_give_are_refused_whoever_signed(graded: Toys, tmp_path: Path) -> None:
    from minicache_course.export import signed

    file = tmp_path / "ada.json"
    run("status", "--export", str(file))
    record = json.loads(file.read_text())
    del record["signature"]
    record["tasks"][0]["earned"], record["earned"] = 40, 75
    file.write_text(signed(record, b""))
    assert "its points are not those of this course: 0.1" in run("check-record", str(file), status=1)


def test_the_files_are_compared_with_those_that_were_graded(graded: Toys, tmp_path: Path) -> None:
    file, labs = tmp_path / "ada.json", str(graded.workspace.labs)
    run("status", "--export", str(file))
    run("check-record", str(file), "--labs", labs)
    graded.color.write_text(COLOR + "# since\n")
    said = run("check-record", str(file), "--labs", labs, status=1)
    assert f"{file}: not the files that were graded: phase-00-toys/palette.py" in said
    with pytest.raises(MinicacheError, match="give one record"):
        run("check-record", str(file), str(file), "--labs", labs)


def test_a_key_without_a_record_and_an_empty_key_are_refused(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(MinicacheError, match="give both"):
        run("status", "--key", str(tmp_path / "empty"))
    with pytest.raises(MinicacheError, match="is empty"):
        run("status", "--export", str(tmp_path / "x.json"), "--key", str(tmp_path / "empty"))
    assert not (tmp_path / "x.json").exists()
