"""Where things are: the course's root, the learner's files, the tests that grade them, the saved progress."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import minicache
from minicache_course.errors import CourseError
from minicache_course.table import Course, Phase, load_course

TABLE = "labs/course.toml"
"""The table, from the course's root; a folder that has it is one."""
INSTALLED = ".minicache/files.json"
"""What `minicache init` and `update` wrote into a folder, with fingerprints; a clone has no such file."""

RECORD = "starters.sha256"
"""In labs/: the fingerprints of the starters as generated, in the format of `sha256sum`."""

PACKAGES = ("minicache", "minicache_course", "minicache_teach", "minicache_cli")
"""All that is installed together."""

SOURCES = Path(minicache.__file__).parents[1]
"""The folder with the packages: src/ in a clone, else site-packages."""

CHECKOUT = SOURCES.resolve().parent
"""The clone that the packages run from, if they do."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folders of one copy of the course.

    Attributes:
        root: the folder that has `labs/course.toml`.
        labs: the learner's files, one folder a phase; `root / "labs"` unless another person's are graded.
        course: the table.
    """

    root: Path
    labs: Path
    course: Course

    @property
    def state(self) -> Path:
        """The folder of saved progress and of the copies that `reset` keeps. It need not exist."""
        return self.root / ".minicache"

    @property
    def version(self) -> str:
        """The version of minicache that `init` or `update` wrote the folder's files with; "" in a clone.

        Raises:
            CourseError: the record of what they wrote is damaged.
        """
        return str(read_record(self.root).get("version", ""))

    def tests(self, phase: Phase) -> Path:
        """The folder of the tests that grade `phase`."""
        return self.root / "tests" / phase.folder

    def lab_files(self, phase: Phase) -> dict[str, Path]:
        """Module → the learner's file, for every module of `phase`."""
        return {module: self.labs / phase.folder / file for module, file in phase.files.items()}


def open_workspace(root: Path, labs: Path | None = None) -> Workspace:
    """The course in the folder `root`, with its own `labs` or with those given.

    Raises:
        CourseError: `labs` is no folder, or the table cannot be read or has an error.
    """
    labs = labs.absolute() if labs else root / "labs"
    if not labs.is_dir():
        raise CourseError(f"{labs} is not a folder")
    course = load_course(root / TABLE)
    return Workspace(root, labs, course.reading_by_command() if (root / INSTALLED).is_file() else course)


def find_workspace(labs: Path | None = None) -> Workspace:
    """The course around the working directory, with its own `labs` or with those given.

    Looks at `$MINICACHE_ROOT`, then upwards from the working directory, then at the checkout that the package was
    installed from.

    Raises:
        CourseError: there is no course, or it cannot be opened.
    """
    given = os.environ.get("MINICACHE_ROOT")
    candidates = [Path(given).absolute()] if given else [Path.cwd(), *Path.cwd().parents, CHECKOUT]
    for root in candidates:
        if (root / TABLE).is_file():
            return open_workspace(root, labs)
    where = f"MINICACHE_ROOT={given} has" if given else "there is"
    raise CourseError(
        f"{where} no {TABLE}: change into your course's folder, or create one with `minicache init my-course`"
    )


def is_elsewhere(workspace: Workspace) -> bool:
    """Whether the working directory is outside the course, and `$MINICACHE_ROOT` does not name it."""
    return not os.environ.get("MINICACHE_ROOT") and workspace.root not in (Path.cwd(), *Path.cwd().parents)


def read_record(root: Path) -> dict[str, Any]:
    """What `init` or `update` wrote into `root` last: `version`, and `files`, path → SHA-256. Empty in a clone.

    Raises:
        CourseError: the record is damaged.
    """
    file = root / INSTALLED
    if not file.is_file():
        return {}
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        return {"version": read["version"], "files": dict(read["files"])}
    except (ValueError, TypeError, KeyError) as error:
        raise CourseError(
            f"{file} is damaged: create a new folder with `minicache init` and copy your labs/ into it"
        ) from error


def fingerprint(file: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it; "" if there is no such file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def phase_imports(phase: Phase, package: str) -> bool:
    """Whether the reference of the phase imports `package`, told without importing it."""
    files = map(reference_file, phase.files)
    return any(f"import {package}" in file.read_text(encoding="utf-8") for file in files if file.is_file())


def needs_torch(phase: Phase) -> bool:
    """Whether the phase builds something above the floors that are pure Python."""
    return any(module.split(".")[1] in ("cache", "kernels", "engine") for module in phase.files)


def reference_file(module: str) -> Path:
    """The file of a module of the packages, found without importing it."""
    return SOURCES.joinpath(*module.split(".")).with_suffix(".py")


def label(phase: Phase, module: str) -> str:
    """The learner's file of a module, from labs/: `phase-01-dense-cache/cache/dense.py`."""
    return str(PurePosixPath(phase.folder) / phase.files[module])


def recorded(workspace: Workspace) -> dict[str, str]:
    """The fingerprints in `labs/starters.sha256`: file → sha256."""
    record = workspace.root / "labs" / RECORD
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    return {label: digest for digest, _, label in (line.partition("  ") for line in lines)}


def is_edited(workspace: Workspace, phase: Phase, module: str) -> bool:
    """Whether the learner's file is there and is no longer the starter that came with the course."""
    file = workspace.lab_files(phase)[module]
    return file.is_file() and recorded(workspace).get(label(phase, module)) != fingerprint(file)
