"""What is handed on, made in a copy of the repository whose labs are solved, has nothing of the learner's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOLVED = b"written_by_a_learner"
FOLDERS = ("src", "scripts", "labs", "tests", "notebooks")

MAKE = """if True:
    import sys
    from pathlib import Path
    from minicache_course.install import course_files
    from minicache_course.workspace import open_workspace
    from minicache_teach.autograder import write_autograder
    from scripts.browser import build, course

    root, out = Path.cwd(), Path(sys.argv[1])
    write = lambda name, files: (out / name).write_bytes(build.archive(files))
    write("minicache.zip", course.package_files(course.PURE))
    write("grading.zip", course.grading_files())
    sheets = ((phase.folder, course.sheet(phase, tasks, "en")) for phase, tasks in course.pure_tasks().items())
    write("sheets.zip", sheets)
    write("init.zip", course_files().items())
    workspace = open_workspace(root)
    write_autograder(workspace, workspace.course.phase(1), out / "autograder.zip")
    """
"""All archives but the wheel. No page of the site is made from labs/."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_solved_lab_is_in_no_archive(tmp_path: Path) -> None:
    clone, made = tmp_path / "clone", tmp_path / "made"
    made.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-docs", ".gitignore"):
        shutil.copy(ROOT / file, clone)
    labs = list(clone.glob("labs/phase-*/**/*.py"))
    for file in labs:
        file.write_bytes(SOLVED)
    assert labs

    environment = {**os.environ, "PYTHONPATH": f"{clone / 'src'}:{clone}"}
    environment.pop("MINICACHE_ROOT", None)
    subprocess.run([sys.executable, "-c", MAKE, made], cwd=clone, env=environment, check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, "."]
    subprocess.run(wheel, cwd=clone, check=True)

    archives = sorted(made.iterdir())
    assert len(archives) == 6
    for archive in map(zipfile.ZipFile, archives):
        with archive:
            found = [name for name in archive.namelist() if SOLVED in archive.read(name)]
        assert not found, f"{archive.filename}: {found}"
