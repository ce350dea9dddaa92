"""A learner's record: points, versions and seeds of all tasks, in a file that a teacher can check.

What the signature proves depends on who has the key. Without a key it is a hash: it shows a slip of an editor, and a
record that was changed on purpose has a new one. With a key it shows that a holder of the key has written the
record. Neither shows that the points were earned: for that, the files are graded again, and the record has their
fingerprints.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from minicache import __version__
from minicache_course.errors import CourseError
from minicache_course.progress import Progress
from minicache_course.table import Course
from minicache_course.workspace import Workspace, fingerprint


def record_of(workspace: Workspace, progress: Progress) -> dict[str, Any]:
    """The record of all tasks that were graded, unsigned.

    Returns:
        `version`: of minicache, now; `earned` and `points` of all tasks together; `tasks`: of each graded one, in the
        order of the course, its `task` id, `outcome`, `earned`, `points`, `graded_at`, the `version` and `seed` that
        graded it, the `file` in labs/, and the `sha256` of the file as it was graded.
    """
    tasks = [
        {
            "task": task.id,
            "outcome": str(graded.outcome),
            "earned": graded.earned,
            "points": task.points,
            "graded_at": graded.graded_at,
            "version": graded.version,
            "seed": graded.seed,
            "file": file.relative_to(workspace.labs).as_posix(),
            "sha256": graded.sha256,
        }
        for phase in workspace.course
        for task in phase.tasks
        if (graded := progress.tasks.get(task.id)) and (file := workspace.lab_files(phase)[task.module])
    ]
    points = sum(task.points for phase in workspace.course for task in phase.tasks)
    earned = sum(progress.tasks[str(each["task"])].earned for each in tasks)
    return {"version": __version__, "earned": earned, "points": points, "tasks": tasks}


def signed(record: Mapping[str, Any], key: bytes) -> str:
    """A record as JSON, with its signature: HMAC-SHA256 with the class's key, or SHA-256 if the key is empty."""
    kind = "hmac-sha256" if key else "sha256"
    signature = {"kind": kind, "value": _value(record, key)}
    return json.dumps({**record, "signature": signature}, indent=2) + "\n"


def checked(text: str, key: bytes, course: Course) -> dict[str, Any]:
    """Check a signed record.

    Args:
        text: as `signed` gives it.
        key: the class's; empty: only what has no key either is accepted.
        course: whose points it may have.

    Returns:
        The record, without its signature.

    Raises:
        CourseError: it is no record, was signed otherwise or changed since, or has points that the course does not
            give.
    """
    try:
        record = json.loads(text)
        signature = record.pop("signature")
        kind, value = signature["kind"], str(signature["value"])
        earned = {str(each["task"]): int(each["earned"]) for each in record["tasks"]}
        total = int(record["earned"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CourseError("this is no record of `minicache status --export`") from error
    if kind != ("hmac-sha256" if key else "sha256"):
        how = "with a class's key: name it with --key" if not key else "without a key"
        raise CourseError(f"the record was signed {how}")
    if not hmac.compare_digest(value.encode(), _value(record, key).encode()):
        raise CourseError("the signature does not fit: the record was changed, or signed with another key")
    points = {task.id: task.points for phase in course for task in phase.tasks}
    wrong = [task for task, each in earned.items() if not 0 <= each <= points.get(task, -1)]
    if wrong or len(earned) != len(record["tasks"]) or total != sum(earned.values()):
        raise CourseError(f"its points are not those of this course: {', '.join(wrong) or 'the sum'}")
    return dict(record)


def read_key(file: Path | None) -> bytes:
    """The class's key in a file; empty without one.

    Raises:
        CourseError: the file cannot be read, or is empty.
    """
    if file is None:
        return b""
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise CourseError(f"the key cannot be read: {error}") from error
    if not key:
        raise CourseError(f"{file} is empty: write the class's key into it")
    return key


def changed_files(record: Mapping[str, Any], labs: Path) -> list[str]:
    """The files of a labs folder that are not as they were graded, by a record."""
    graded = {(str(each["file"]), str(each["sha256"])) for each in record["tasks"]}
    return sorted({file for file, digest in graded if fingerprint(labs / file) != digest})


def _value(record: Mapping[str, Any], key: bytes) -> str:
    content = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return hmac.new(key, content, sha256).hexdigest() if key else sha256(content).hexdigest()
