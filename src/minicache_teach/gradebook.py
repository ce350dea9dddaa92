"""The CSV of a class's grades: a line a student, which a spreadsheet opens and a later run goes on with.

It is rewritten after each submission, to a temporary file that then replaces it. So at any moment, and however the
command ends, the file is complete: every grade so far, sorted.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_course.files import replace_file
from minicache_course.table import Phase

# A spreadsheet computes a cell that begins so. The apostrophe before it makes it text; one that is there is doubled.
_FORMULA = re.compile(r"'*[=+\-@\t\r]")


@dataclass(frozen=True, slots=True)
class Row:
    """One student's line.

    Attributes:
        student: the name, unique in the class.
        id: the platform's number for the student, or "".
        earned: the points of each task.
        total: their sum.
        grade: what is left of it for a submission that was late.
        late_days: days, each begun one whole; None if no dates were given.
        note: what a teacher should know, in a line; "" if all is well.
        files: the fingerprint of what was graded; "" if it could not be graded.
    """

    student: str
    id: str
    earned: tuple[float, ...]
    total: float
    grade: float
    late_days: int | None = None
    note: str = ""
    files: str = ""

    @property
    def is_graded(self) -> bool:
        """Whether there is a result: without one the zeros say nothing."""
        return bool(self.files)


class Gradebook:
    """The rows in a file, and the file.

    Args:
        file: the CSV. It need not exist.
        phase: the phase that it has the grades of.

    Raises:
        CourseError: `file` is there and has something else in it.
    """

    def __init__(self, file: Path, phase: Phase) -> None:
        self._file = file.resolve()  # a link stays one
        self._phase = phase
        self._header = ["student", "id", *(task.id for task in phase.tasks)]
        self._header += ["total", "max", "late_days", "grade", "note", "files"]
        self.rows = {row.student: row for row in self._read()} if self._file.exists() else {}

    def put(self, row: Row) -> None:
        """Write one student's line, in place of the one there may be.

        Raises:
            CourseError: the file cannot be written. The old one stays.
        """
        self.put_all({**self.rows, row.student: row})

    def put_all(self, rows: dict[str, Row]) -> None:
        """Write these lines and no others.

        Raises:
            CourseError: the file cannot be written. The old one stays.
        """
        stream = io.StringIO(newline="")
        writer = csv.writer(stream)
        writer.writerow(self._header)
        for _, row in sorted(rows.items()):
            late_days = "" if row.late_days is None else row.late_days
            numbers = [*map(as_number, row.earned), as_number(row.total), self._phase.points, late_days]
            texts = [escape(row.note), row.files]
            writer.writerow([escape(row.student), escape(row.id), *numbers, as_number(row.grade), *texts])
        replace_file(self._file, stream.getvalue().encode("utf-8-sig"))  # Excel takes a file without the mark for ANSI
        self.rows = rows

    def _read(self) -> list[Row]:
        header, *lines = read_csv(self._file) or [[]]
        if header != self._header:
            raise CourseError(
                f"{self._file} does not have the columns of phase {self._phase.number} ({', '.join(self._header)}): "
                "name another file with --csv"
            )
        rows = []
        for number, line in enumerate(lines, start=2):
            try:
                student, id_, *earned = line[: 2 + len(self._phase.tasks)]
                total, _, late_days, grade, note, files = line[len(earned) + 2 :]
                rows.append(
                    Row(
                        unescape(student),
                        unescape(id_),
                        tuple(map(float, earned)),
                        float(total),
                        float(grade),
                        int(late_days) if late_days else None,
                        unescape(note),
                        files,
                    )
                )
            except ValueError as error:
                raise CourseError(f"{self._file}, row {number}: {error}") from error
        return rows


# --- late days -------------------------------------------------------------------------------------------------------


def read_late_days(file: Path) -> dict[str, int]:
    """Student or id → days late, each begun one whole.

    Args:
        file: a CSV with the columns `student` and `days`; or `student`, `submitted` and `due`, in ISO 8601, such as
            `2026-03-01 23:59`. A student's id may stand for the name.

    Raises:
        CourseError: it has other columns, or an entry is no number or no date.
    """
    header, *lines = read_csv(file) or [[]]
    columns = [name.strip().lower() for name in header]
    if "student" not in columns or not ("days" in columns or {"submitted", "due"} <= set(columns)):
        raise CourseError(f"{file} needs the columns student,days or student,submitted,due; it has {','.join(header)}")
    days = {}
    for number, line in enumerate(lines, start=2):
        entry = {name: text.strip() for name, text in zip(columns, line, strict=False)}
        try:
            if "days" in columns:
                late = float(entry["days"] or 0)
            else:
                submitted, due = (datetime.fromisoformat(entry[name]) for name in ("submitted", "due"))
                late = (submitted - due).total_seconds() / 86_400
            days[unescape(entry["student"])] = max(0, math.ceil(late))
        except (ValueError, OverflowError, KeyError, TypeError) as error:  # TypeError: one has a time zone, one none
            raise CourseError(f"{file}, row {number}: {error}; write a date as 2026-03-01 23:59") from error
    return days


def with_lateness(row: Row, days: int, percent: float, free_days: int) -> Row:
    """The row with its grade: the total less `percent` of it for each day after the free ones, and not below 0."""
    lost = percent / 100 * max(0, days - free_days)
    return replace(row, late_days=days, grade=round(row.total * max(0.0, 1 - lost), 2))


# --- files -----------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """A cell of text that no spreadsheet takes for a formula."""
    return f"'{text}" if _FORMULA.match(text) else text


def unescape(cell: str) -> str:
    """The text that `escape` was given."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def as_number(value: float) -> str:
    """At most two digits behind the point, and no point that nothing follows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def read_csv(file: Path) -> list[list[str]]:
    """The rows of a CSV in UTF-8 that are not empty, whether commas or semicolons separate its cells.

    Raises:
        CourseError: it cannot be read.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
        return [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator(text), strict=True) if row]
    except UnicodeDecodeError as error:
        raise CourseError(f"{file} is not UTF-8: save it as `CSV UTF-8`") from error
    except (OSError, csv.Error) as error:
        raise CourseError(f"{file} cannot be read: {error}") from error


def separator(text: str) -> str:
    """What separates the cells of a CSV: where Excel writes numbers with a comma, it is a semicolon."""
    first = text.partition("\n")[0]
    return ";" if first.count(";") > first.count(",") else ","
