"""Grades into the sheets of Canvas and Moodle: the platform's own export in, the same sheet with the grades out.

Everything but the cells of one column stays as it was exported, so the platform accepts the sheet. A student is
found by the id that the platform put into the names of the downloaded files, else by a name that one row alone has.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_course.files import replace_file
from minicache_course.table import Phase
from minicache_teach.gradebook import Row, as_number, separator

# Canvas (instructure/canvas-lms, lib/gradebook_exporter.rb). Instead of points a cell may say EX, for excused, or N/A,
# for an assignment that the student does not have.
_CANVAS_NAMES = ("Student", "ID", "SIS User ID", "SIS Login ID", "Integration ID")
_CANVAS_ASSIGNMENT = re.compile(r"(?P<title>.+) \((?P<id>\d+)\)")
_KEPT = ("EX", "N/A")

# Moodle's grading worksheet (mod/assign/gradingtable.php), in the downloading user's language: English or Spanish.
_MOODLE_ID = ("Identifier", "Identificador")
_MOODLE_GRADE = ("Grade", "Calificación")
_MOODLE_MAXIMUM = ("Maximum Grade", "Maximum grade", "Calificación máxima")


@dataclass(frozen=True, slots=True)
class Filled:
    """A sheet with grades.

    Attributes:
        sheet: its rows.
        num_filled: students who got a grade.
        left_out: graded students whom the sheet does not have, or has more than once.
        kept: students whose cell says that they have no grade, as Canvas's EX does.
        maximum: what the platform gives at most, if it is not what the phase is worth: the grades were scaled.
    """

    sheet: list[list[str]]
    num_filled: int
    left_out: list[str]
    kept: list[str]
    maximum: float | None


def fill_canvas(sheet: list[list[str]], rows: Iterable[Row], phase: Phase, assignment: str | None) -> Filled:
    """Fill in the column of an assignment.

    Args:
        sheet: the rows of the gradebook, as `read_csv` gives them.
        rows: the grades. Those that could not be graded are left out.
        phase: what they are of.
        assignment: the assignment's title or number; None if the sheet has one only.

    Raises:
        CourseError: this is no gradebook, or it does not have that one assignment.
    """
    header = [name.strip() for name in sheet[0]] if sheet else []
    points = [number for number, row in enumerate(sheet[:4]) if row[0].strip() == "Points Possible"]
    if "ID" not in header or not points:
        raise CourseError("this is not a Canvas gradebook: in the Gradebook, Export, Export Entire Gradebook")
    possible = sheet[points[0]]
    columns = {
        column: match
        for column, name in enumerate(header)
        if (match := _CANVAS_ASSIGNMENT.fullmatch(name)) and _number(_cell(possible, column)) is not None
    }
    wanted = [
        column for column, match in columns.items() if assignment in (None, match["title"], match["id"], header[column])
    ]
    if len(wanted) != 1:
        there = ", ".join(header[column] for column in columns) or "none"
        raise CourseError(f"choose the assignment with --assignment; the gradebook has: {there}")
    identifying = [header.index("ID")]
    naming = [column for column, name in enumerate(header) if name in _CANVAS_NAMES]
    maximum = _cell(possible, wanted[0])
    first = points[0] + 1
    return _fill(sheet, rows, phase, first, identifying, naming, wanted[0], lambda row: maximum)


def fill_moodle(sheet: list[list[str]], rows: Iterable[Row], phase: Phase) -> Filled:
    """Fill in the column `Grade` of a grading worksheet.

    Args:
        sheet: the rows of the worksheet, as `read_csv` gives them.
        rows: the grades. Those that could not be graded are left out.
        phase: what they are of.

    Raises:
        CourseError: this is no grading worksheet in English or Spanish.
    """
    header = [name.strip() for name in sheet[0]] if sheet else []
    identifying = [column for column, name in enumerate(header) if name in _MOODLE_ID]
    grades = [column for column, name in enumerate(header) if name in _MOODLE_GRADE]
    maxima = [column for column, name in enumerate(header) if name in _MOODLE_MAXIMUM]
    if not identifying or not grades or not maxima:
        raise CourseError(
            "this is not a Moodle grading worksheet: turn on `Offline grading worksheet` in the assignment's settings, "
            "then View all submissions, Download grading worksheet, with Moodle in English or Spanish"
        )
    naming = list(range(grades[0]))
    return _fill(sheet, rows, phase, 1, identifying, naming, grades[0], lambda row: _cell(row, maxima[0]))


def write_sheet(original: Path, sheet: list[list[str]], file: Path) -> None:
    """Write a sheet in the format of the one that it was read from: the same mark, separator and line ends.

    Raises:
        CourseError: it cannot be written.
    """
    content = original.read_bytes()
    marked, text = content.startswith(b"\xef\xbb\xbf"), content.decode("utf-8-sig")
    stream = io.StringIO(newline="")
    ends = "\r\n" if "\r\n" in text else "\n"
    csv.writer(stream, delimiter=separator(text), lineterminator=ends).writerows(sheet)
    replace_file(file, stream.getvalue().encode("utf-8-sig" if marked else "utf-8"))


def _fill(
    sheet: list[list[str]],
    rows: Iterable[Row],
    phase: Phase,
    first: int,
    identifying: list[int],
    naming: list[int],
    column: int,
    maximum_of: Callable[[list[str]], str],
) -> Filled:
    """Fill in `column` from row `first` on."""
    filled = [list(row) for row in sheet]
    by_id, by_name = _index(sheet, first, identifying, _ids), _index(sheet, first, naming, _names)
    left_out, kept, scaled_to = [], [], None
    num_filled = 0
    for row in rows:
        if not row.is_graded:
            continue
        number = by_id.get(row.id) if row.id else by_name.get(row.student.casefold())
        if number is None:
            left_out.append(row.student)
            continue
        line = filled[number]
        if _cell(line, column).strip() in _KEPT:
            kept.append(row.student)
            continue
        text = maximum_of(line)
        maximum = _number(text) or phase.points
        scaled_to = maximum if maximum != phase.points else scaled_to
        grade = as_number(row.grade * maximum / phase.points)
        line += [""] * (column + 1 - len(line))
        line[column] = grade.replace(".", ",") if "," in text else grade
        num_filled += 1
    return Filled(filled, num_filled, left_out, kept, scaled_to)


def _index(
    sheet: list[list[str]], first: int, columns: list[int], keys: Callable[[str], Iterator[str]]
) -> dict[str, int]:
    """Key → the number of the one row that has it in one of `columns`."""
    found: dict[str, set[int]] = {}
    for number, row in enumerate(sheet[first:], start=first):
        for column in columns:
            for key in keys(_cell(row, column).strip()):
                found.setdefault(key, set()).add(number)
    return {key: numbers.pop() for key, numbers in found.items() if key and len(numbers) == 1}


def _ids(cell: str) -> Iterator[str]:
    """`1234`; of Moodle's `Participant 12345` the number."""
    yield cell
    if number := re.fullmatch(r"\D+(\d+)", cell):
        yield number[1]


def _names(cell: str) -> Iterator[str]:
    """The names in a cell: "Lovelace, Ada" is "ada lovelace" too, and "ada@example.org" is "ada"."""
    name = cell.casefold()
    yield name
    last, comma, given = name.partition(", ")
    if comma:
        yield f"{given} {last}"
    local, at, _ = name.partition("@")
    if at:
        yield local


def _cell(row: list[str], column: int) -> str:
    return row[column] if column < len(row) else ""


def _number(text: str) -> float | None:
    """A number, with a point or a comma; None if it is none."""
    try:
        return float(text.strip().replace(",", "."))
    except ValueError:
        return None
