"""A learner's folder, made from what the package carries and brought up to date with it: `minicache init`, `update`.

Starters are generated, as in a clone. The table, the tests of the phases and the notebooks come from the package's
`minicache_course/files/`, or from the clone that the package runs from. What was written is remembered with
fingerprints in `.minicache/files.json`, so an update can tell a file that the learner edited from one that the course
wrote.

Files in labs/ and notebooks/ are the learner's: once edited, one is never written again. All others are the course's:
an update replaces them, and keeps a copy of one that was edited.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath

from minicache import __version__
from minicache_course.errors import CourseError
from minicache_course.files import replace_file
from minicache_course.language import said
from minicache_course.moved import moved_path, with_new_names
from minicache_course.progress import Progress
from minicache_course.starters import starter
from minicache_course.table import load_course
from minicache_course.workspace import (
    CHECKOUT,
    INSTALLED,
    RECORD,
    TABLE,
    fingerprint,
    label,
    open_workspace,
    read_record,
)

CARRIED = (
    TABLE,
    "labs/arena/*.py",
    "tests/conftest.py",
    "tests/phase-*/*.py",
    "tests/phase-06-preemption/right_paged.py.gz",
    "tests/phase-12-production-defaults/recorded_tables.json.gz",
    "tests/scheduler/golden/unusual.json.gz",  # what vLLM schedules: phase 9 compares with it
    "tests/scheduler/golden/async_short.json.gz",  # and asynchronously: phase 12
    "notebooks/phase-*.ipynb",
)
"""What a folder gets as it is, from the root of a clone or of the package's `minicache_course/files/`."""

PYTEST_INI = """\
[pytest]
testpaths = tests
addopts = --import-mode=importlib --strict-markers --strict-config
timeout = 120
filterwarnings = error::pytest.PytestUnhandledThreadExceptionWarning
"""
"""How pytest runs the tests of the phases: as in a clone."""

_STAGING = ".minicache-init"
_LEARNERS = ("labs", "notebooks")
_RECORD = f"labs/{RECORD}"


def source_folder() -> Path:
    """Where the package has its course: `minicache_course/files/` in a wheel, the root of a clone otherwise."""
    carried = Path(__file__).with_name("files")
    return carried if carried.is_dir() else CHECKOUT


def course_files() -> dict[str, bytes]:
    """Every file of a learner's folder, new: its path → its content.

    Raises:
        CourseError: the package carries no course.
    """
    source = source_folder()
    if not (source / TABLE).is_file():
        raise CourseError("this installation contains no course: install a wheel of minicache, or clone the repository")
    found = {file.relative_to(source).as_posix(): file for pattern in CARRIED for file in sorted(source.glob(pattern))}
    files = {name: file.read_bytes() for name, file in found.items()} | {"pytest.ini": PYTEST_INI.encode()}
    record = []
    for phase in load_course(source / TABLE).reading_by_command():
        for module in phase.files:
            text = starter(phase, module).encode()
            files[f"labs/{label(phase, module)}"] = text
            record.append(f"{_sha256(text)}  {label(phase, module)}\n")
    return files | {_RECORD: "".join(record).encode()}


def init(folder: Path) -> None:
    """Make `folder` a course of this version: labs, tests and notebooks.

    Everything is written into a folder inside it first and then moved, so `folder` has a whole course or none.

    Raises:
        CourseError: `folder` is not empty, is no folder, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise CourseError(f"{folder} is a file: name a new folder, such as `minicache init my-course`")
    if (folder / INSTALLED).is_file():
        raise CourseError(f"{folder} already has the course: run `minicache update` in it")
    there = sorted(each.name for each in folder.iterdir() if each.name != _STAGING) if folder.is_dir() else []
    if there:
        names = ", ".join(there[:3]) + (" …" if there[3:] else "")
        raise CourseError(f"{folder} is not empty ({names}): name a new folder, such as `minicache init my-course`")
    files = course_files()
    staging = folder / _STAGING
    try:
        if staging.exists():
            shutil.rmtree(staging)  # of an `init` that was killed
        for name, content in files.items():
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).write_bytes(content)
        (staging / INSTALLED).parent.mkdir()
        (staging / INSTALLED).write_text(_written(files), encoding="utf-8")
        for entry in sorted(staging.iterdir(), reverse=True):  # .minicache last
            entry.rename(folder / entry.name)
        staging.rmdir()
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # unless it has something
        raise CourseError(f"{folder} could not be created: {error}") from error


@dataclass(frozen=True, slots=True)
class Change:
    """What an update did about one file.

    Attributes:
        file: its path in the folder.
        what: what was done, in words.
        beside: the new version placed next to an edited file, or None.
    """

    file: str
    what: str
    beside: str | None = None


def update(root: Path) -> list[Change]:
    """Bring this version's files into a folder that `init` made. Files that the learner edited stay.

    All new files are written under temporary names before the first is renamed. If it is interrupted, run it again:
    files that are in place count as done.

    Returns:
        What was done, in the order of the paths; nothing for files that are as they should be.

    Raises:
        CourseError: `init` did not make `root`, or a file cannot be written. Then no file has changed.
    """
    old: dict[str, str] = read_record(root).get("files", {})
    if not old:
        raise CourseError(
            f"`minicache init` did not create {root}, so an update cannot tell your changes apart: in a clone, use "
            "`git pull`; elsewhere create a new folder and copy your labs/ into it"
        )
    new = course_files()
    changes = _carry_over(root, old)
    writes: dict[str, bytes] = {}
    stale, copies = [], []
    for name in sorted(old | new):
        now, wanted = fingerprint(root / name), _sha256(new[name]) if name in new else ""
        edited = now not in ("", old.get(name, ""))
        if now == wanted or (edited and wanted == old.get(name)):
            continue  # the new one is in place; or the learner has edited it, and the course has not
        if not edited:
            if name in new:
                writes[name] = new[name]
                changes.append(Change(name, "replaced: you had not edited it" if now else said("new")))
            else:
                stale.append(name)
                changes.append(Change(name, "removed: no longer part of the course, and not edited by you"))
        elif name.split("/")[0] in _LEARNERS and name not in (TABLE, _RECORD):
            beside = _beside(name) if name in new else None
            if beside:
                writes[beside] = new[name]
            what = "the new version is next to it" if beside else "the course no longer has this file"
            changes.append(Change(name, f"kept with your changes; {what}", beside))
        else:
            copies.append(name)
            if name in new:
                writes[name] = new[name]
            else:
                stale.append(name)
            changes.append(Change(name, "restored to this version" if name in new else said("removed")))
    kept = _keep(root, copies)
    _write(root, writes, stale, record=_written(new))
    return [
        Change(each.file, f"{each.what}; your edited copy is {kept}/{each.file}") if each.file in copies else each
        for each in changes
        if each.file != _RECORD  # which says nothing to a reader
    ]


def _carry_over(root: Path, old: Mapping[str, str]) -> list[Change]:
    """Move edited files whose modules have moved, rename what they import, and keep what they have passed."""
    changes, carried = [], {}
    names = (name for name in old if name.split("/")[0] in _LEARNERS and name not in (TABLE, _RECORD))
    for name in sorted(names):
        before = fingerprint(root / name)
        if before in ("", old[name]):
            continue
        text, target = (root / name).read_bytes().decode("utf-8", errors="surrogateescape"), moved_path(name)
        renamed = with_new_names(text)
        if (target, renamed) == (name, text) or (target != name and (root / target).exists()):
            continue
        kept = _keep(root, [name])
        replace_file(root / target, renamed.encode("utf-8", errors="surrogateescape"))
        if target != name:
            (root / name).unlink()
            with contextlib.suppress(OSError):
                (root / name).parent.rmdir()  # unless it has something
        what = f"moved here from {name}" if target != name else "kept with your changes"
        changes.append(Change(target, f"{what}, its imports brought up to date; as it was: {kept}/{name}"))
        carried[before] = fingerprint(root / target)
    if carried:
        progress = Progress.load(open_workspace(root))
        for task, record in progress.tasks.items():
            progress.tasks[task] = replace(record, sha256=carried.get(record.sha256, record.sha256))
        progress.save()
    return changes


def _written(files: Mapping[str, bytes]) -> str:
    """The text of `files.json`."""
    fingerprints = {name: _sha256(content) for name, content in sorted(files.items())}
    return json.dumps({"version": __version__, "files": fingerprints}, indent=1) + "\n"


def _beside(name: str) -> str:
    """`labs/…/dense.py` → `labs/…/dense.new.py`."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}.new{path.suffix}"))


def _keep(root: Path, names: list[str]) -> str:
    """Copy these files into a new folder under `.minicache/backups`; the folder, from the root."""
    folder = f".minicache/backups/update-{datetime.now():%Y%m%d-%H%M%S-%f}"
    try:
        for name in names:
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, root / folder / name)
    except OSError as error:
        raise CourseError(f"{name} could not be copied to {folder} ({error}), so nothing was updated") from error
    return folder


def _write(root: Path, contents: Mapping[str, bytes], stale: list[str], record: str) -> None:
    """Write each file under a temporary name, then rename all, remove the `stale` ones, and write the record last."""
    staged = {root / name: (root / name).with_name(f".{PurePosixPath(name).name}.update") for name in contents}
    record_beside = root / f"{INSTALLED}.update"
    try:
        for (file, beside), content in zip(staged.items(), contents.values(), strict=True):
            if file.is_dir():
                raise IsADirectoryError(f"{file} is a folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(content)
        record_beside.write_text(record, encoding="utf-8")
    except OSError as error:
        for beside in [*staged.values(), record_beside]:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
        raise CourseError(f"nothing was updated: {error}") from error
    for file, beside in staged.items():
        os.replace(beside, file)
    for name in stale:
        (root / name).unlink()
    os.replace(record_beside, root / INSTALLED)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
