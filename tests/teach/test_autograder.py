"""Gradescope's zip, unpacked and run as Gradescope does it; only the installation of packages is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.toys import COLOR, NBYTES, Toys

from minicache_course.errors import CourseError
from minicache_course.install import course_files
from minicache_course.workspace import open_workspace
from minicache_teach.autograder import requirements, write_autograder


@pytest.fixture
def autograder(toys: Toys, tmp_path: Path) -> Path:
    """`/autograder` as Gradescope makes it from the zip. A link to this Python stands for what setup.sh installs."""
    write_autograder(toys.workspace, toys.phase, tmp_path / "autograder.zip", seed=7)
    root = tmp_path / "autograder"
    for folder in ("source", "submission", "results", "venv/bin"):
        (root / folder).mkdir(parents=True)
    subprocess.run(["unzip", "-q", tmp_path / "autograder.zip", "-d", root / "source"], check=True)
    (root / "run_autograder").write_bytes((root / "source" / "run_autograder").read_bytes())
    (root / "run_autograder").chmod((root / "source" / "run_autograder").stat().st_mode)
    (root / "venv" / "bin" / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH="{root}/source/package" exec "{sys.executable}" "$@"\n'
    )
    (root / "venv" / "bin" / "python").chmod(0o755)
    return root


def run(root: Path, **files: str) -> dict[str, Any]:
    """What Gradescope reads after a submission of `files`."""
    for place, text in files.items():
        file = root / "submission" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "MINICACHE_ROOT"}
    command = [root / "run_autograder"]
    subprocess.run(command, cwd=root, env={**environment, "AUTOGRADER_ROOT": str(root)}, check=True)
    return dict(json.loads((root / "results" / "results.json").read_text()))


def test_the_zip_is_ready_to_upload(toys: Toys, tmp_path: Path) -> None:
    write_autograder(toys.workspace, toys.phase, tmp_path / "a.zip")
    write_autograder(toys.workspace, toys.phase, tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        modes = {member.filename: member.external_attr >> 16 for member in archive.infolist()}
        for script in ("setup.sh", "run_autograder"):
            assert modes[script] == 0o755
            assert subprocess.run(["bash", "-n"], input=archive.read(script), check=True).returncode == 0
        required = set(archive.read("requirements.txt").decode().split())
        pinned = dict(line.split("==") for line in archive.read("constraints.txt").decode().split())
    assert {"pytest", "hypothesis", "torch", "typer"} <= required <= set(pinned)
    assert not {"jupyterlab", "numba", "triton"} & required


def test_only_the_kernels_zip_asks_for_triton() -> None:
    workspace = open_workspace(Path(__file__).parents[2])
    asks = {phase.number for phase in workspace.course if "triton" in requirements(phase)}
    assert asks == ({4} if sys.platform == "linux" else set())


@pytest.mark.slow
def test_the_zip_has_what_a_learners_folder_has(tmp_path: Path) -> None:
    workspace = open_workspace(Path(__file__).parents[2])
    write_autograder(workspace, workspace.course.phase(9), tmp_path / "a.zip")
    names = set(zipfile.ZipFile(tmp_path / "a.zip").namelist())
    learners = {name for name in course_files() if not name.startswith(("labs/phase-", "labs/starters", "notebooks/"))}
    assert {name.removeprefix("course/") for name in names if name.startswith("course/")} == learners
    assert "package/minicache/model/minigpt.safetensors" in names
    assert not [name for name in names if "__pycache__" in name or "course/files/" in name]


def test_a_phase_without_tests_is_refused(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="phase 1 has no tests"):
        write_autograder(toys.workspace, toys.workspace.course.phase(1), tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["", "labs/phase-00-toys/", "attention-lab-ada/labs/phase-00-toys/", "phase-00-toys/"]
)
def test_every_layout_is_graded(autograder: Path, folder: str) -> None:
    results = run(autograder, **{f"{folder}palette.py": COLOR, f"{folder}arithmetic/arithmetic.py": NBYTES})
    assert results["score"] == 100
    assert [(test["number"], test["score"], test["max_score"]) for test in results["tests"]] == [
        ("0.1", 30, 30),
        ("0.2", 70, 70),
    ]


@pytest.mark.slow
def test_the_student_is_told_what_is_missing(autograder: Path) -> None:
    results = run(autograder, **{"palette.py": COLOR, "old/palette.py": ""})
    assert results["score"] == 30
    assert "not handed in: arithmetic/arithmetic.py" in results["output"]
    assert "palette.py was used, not old/palette.py" in results["output"]


@pytest.mark.slow
def test_there_is_a_result_whatever_happens(autograder: Path) -> None:
    (autograder / "source" / "course" / "labs" / "course.toml").write_text("broken")
    assert run(autograder, **{"palette.py": COLOR})["score"] == 0
