"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from minicache_course.errors import CourseError


def replace_file(file: Path, content: bytes) -> None:
    """Write a temporary file next to `file`, then rename it.

    Raises:
        CourseError: it cannot be written. The old file stays.
    """
    beside = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # or a power cut could leave the name with nothing behind it
        os.replace(beside, file)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise CourseError(f"{file} cannot be written: {error.strerror or error}") from error
