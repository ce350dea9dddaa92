"""Grades in a CSV that a spreadsheet and a later run read alike, late days, and the platforms' own sheets."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.toys import Toys

from minicache_course.errors import CourseError
from minicache_teach.gradebook import Gradebook, Row, escape, read_csv, read_late_days, unescape, with_lateness
from minicache_teach.platforms import fill_canvas, fill_moodle, write_sheet

NAMES = [
    "Ada Lovelace",
    "Lovelace, Ada",
    'Ada "the first"',
    "two\nlines",
    "carriage\rreturn",
    "👩🏽‍💻 émoji",
    "=HYPERLINK(1)",
    "+1",
    "-1",
    "@sum",
    "\tab",
    "'=quoted",
    "'plain",
    " padded ",
    "",
]


def row(student: str, total: float = 100, *, id: str = "", note: str = "", files: str = "f00") -> Row:
    return Row(student, id, (30, total - 30), total, total, None, note, files)


def test_names_and_notes_survive(toys: Toys, tmp_path: Path) -> None:
    file = tmp_path / "grades.csv"
    written = {name: row(name, id=name, note=f"{name}; {name}") for name in NAMES}
    book = Gradebook(file, toys.phase)
    for each in written.values():
        book.put(each)
    assert Gradebook(file, toys.phase).rows == written


def test_a_spreadsheet_reads_it(toys: Toys, tmp_path: Path) -> None:
    file = tmp_path / "grades.csv"
    Gradebook(file, toys.phase).put_all({name: row(name, note=name) for name in NAMES})
    assert file.read_bytes().startswith(b"\xef\xbb\xbf")
    with file.open(newline="", encoding="utf-8-sig") as stream:
        for line in csv.DictReader(stream):
            for cell in line.values():
                assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))


@pytest.mark.parametrize("text", NAMES)
def test_escaped_text_comes_back(text: str) -> None:
    assert unescape(escape(text)) == text


def test_a_csv_that_excel_saved_with_semicolons_is_read(toys: Toys, tmp_path: Path) -> None:
    file = tmp_path / "grades.csv"
    book = Gradebook(file, toys.phase)
    book.put(row("ada", 80))
    file.write_bytes(file.read_bytes().replace(b",", b";"))
    assert Gradebook(file, toys.phase).rows == {"ada": row("ada", 80)}


def test_a_file_that_cannot_be_written_is_told_and_stays(toys: Toys, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(CourseError, match="cannot be written"):
        Gradebook(tmp_path / "a-file" / "grades.csv", toys.phase).put(row("ada"))
    file = tmp_path / "grades.csv"
    Gradebook(file, toys.phase).put(row("ada"))
    (tmp_path / ".grades.csv.new").mkdir()
    book = Gradebook(file, toys.phase)
    with pytest.raises(CourseError, match="cannot be written"):
        book.put(row("bob"))
    assert list(book.rows) == ["ada"]
    assert list(Gradebook(file, toys.phase).rows) == ["ada"]


@pytest.mark.parametrize("damage", [(b"ada,,30", b"ada,,thirty"), (b",f00", b"")])
def test_a_damaged_row_is_refused_by_its_number(toys: Toys, tmp_path: Path, damage: tuple[bytes, bytes]) -> None:
    file = tmp_path / "grades.csv"
    Gradebook(file, toys.phase).put(row("ada"))
    file.write_bytes(file.read_bytes().replace(*damage))
    with pytest.raises(CourseError, match=r"grades.csv, row 2: "):
        Gradebook(file, toys.phase)


# --- late days -------------------------------------------------------------------------------------------------------


def late_days(tmp_path: Path, text: str) -> dict[str, int]:
    (tmp_path / "late.csv").write_text(text, encoding="utf-8-sig")
    return read_late_days(tmp_path / "late.csv")


def test_days_late_are_read(tmp_path: Path) -> None:
    assert late_days(tmp_path, "student,days\nada,2\nbob,\ncleo,0.5\n") == {"ada": 2, "bob": 0, "cleo": 1}


def test_dates_become_days_each_begun_one_whole(tmp_path: Path) -> None:
    text = """student,submitted,due
early,2026-03-01 12:00,2026-03-01 23:59
in time,2026-03-01 23:59,2026-03-01 23:59
a minute,2026-03-02 00:00,2026-03-01 23:59
two days,2026-03-03T23:59,2026-03-01T23:59
zones,2026-03-02T01:00:00+02:00,2026-03-01T23:00:00+00:00
"""
    assert late_days(tmp_path, text) == {"early": 0, "in time": 0, "a minute": 1, "two days": 2, "zones": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,days\n", "needs the columns"),
        ("student,submitted\n", "needs the columns"),
        ("student,days\nada,two\n", "row 2: could not convert"),
        ("student,days\nada,inf\n", "row 2: "),
        ("student,submitted,due\nada,1 March,2026-03-01\n", "row 2: Invalid isoformat"),
        ("student,submitted,due\nada,2026-03-01T01:00Z,2026-03-01\n", "row 2: can't subtract"),
        ("student,submitted,due\nada,2026-03-01\n", "row 2: 'due'"),
    ],
)
def test_dates_that_cannot_be_read_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CourseError, match=message):
        late_days(tmp_path, text)


def test_each_day_after_the_free_ones_costs(tmp_path: Path) -> None:
    def grade(days: int, percent: float, free_days: int) -> float:
        return with_lateness(row("ada", 85), days, percent, free_days).grade

    assert [grade(days, 10, 1) for days in (0, 1, 2, 3, 20)] == [85, 85, 76.5, 68, 0]
    assert grade(3, 0, 0) == 85


# --- platforms -------------------------------------------------------------------------------------------------------

CANVAS = """Student,ID,SIS User ID,SIS Login ID,Section,Paper (77),Dense cache (78),Final Score,Final Grade (2026)
,,,,,,Manual Posting,,
    Points Possible,,,,,10.00,50.00,(read only),(read only)
"Lovelace, Ada",1234,u12,ada@uni.example,"Monday, early",7.00,,,
"Hopper, Grace",12,u1234,grace,Monday,8.00,41.00,,
"Lee, Hoon",13,,hoon,Monday,,EX,,
"Student, Test",99,,abc,Monday,,,,
"""

MOODLE = """Identifier,"Full name","Email address",Status,Grade,"Maximum Grade","Grade can be changed",Modified,Feedback
"Participant 12345","Ada Lovelace",ada@uni.example,"Submitted for grading - ",,100.00,Yes,"1 March 2026, 11:59 PM",
"Participant 12346","Grace Hopper",grace@uni.example,"No submission - ",,100.00,Yes,-,"well, well"
"""


def sheet(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "sheet.csv"
    file.write_bytes(text.encode("utf-8-sig"))
    return file


def test_canvas_gets_its_gradebook_back_with_one_column_filled(toys: Toys, tmp_path: Path) -> None:
    original = sheet(tmp_path, CANVAS)
    grades = [
        row("lovelaceada", 80, id="1234"),
        row("grace", 100),
        row("leehoon", 100, id="13"),
        row("a stranger", 100, id="7"),
        row("hopeless", 0, id="99", files=""),  # not graded
    ]
    filled = fill_canvas(read_csv(original), grades, toys.phase, "Dense cache")
    write_sheet(original, filled.sheet, tmp_path / "out.csv")
    expected = CANVAS.replace('early",7.00,,', 'early",7.00,40,').replace("8.00,41.00", "8.00,50")
    assert (tmp_path / "out.csv").read_bytes() == expected.encode("utf-8-sig")
    assert (filled.num_filled, filled.maximum) == (2, 50)
    assert (filled.left_out, filled.kept) == (["a stranger"], ["leehoon"])


@pytest.mark.parametrize("assignment", ["Dense cache", "78", "Dense cache (78)"])
def test_an_assignment_is_named_by_title_or_number(toys: Toys, tmp_path: Path, assignment: str) -> None:
    rows = read_csv(sheet(tmp_path, CANVAS))
    filled = fill_canvas(rows, [row("ada", 100, id="1234")], toys.phase, assignment)
    assert filled.sheet[3][6] == "50"


@pytest.mark.parametrize("assignment", [None, "Sparse cache", "Final Grade"])
def test_an_assignment_that_is_unclear_is_refused(toys: Toys, tmp_path: Path, assignment: str | None) -> None:
    with pytest.raises(CourseError, match=r"the gradebook has: Paper \(77\), Dense cache \(78\)"):
        fill_canvas(read_csv(sheet(tmp_path, CANVAS)), [], toys.phase, assignment)


def test_moodle_gets_its_worksheet_back(toys: Toys, tmp_path: Path) -> None:
    original = sheet(tmp_path, MOODLE)
    filled = fill_moodle(read_csv(original), [row("Ada", 85.5, id="12345"), row("Grace Hopper", 40)], toys.phase)
    assert [line[4] for line in filled.sheet] == ["Grade", "85.5", "40"]
    assert (filled.num_filled, filled.maximum, filled.left_out) == (2, None, [])
    before = read_csv(original)
    assert [line[:4] + line[5:] for line in filled.sheet] == [line[:4] + line[5:] for line in before]


def test_moodle_in_spanish_writes_numbers_with_a_comma(toys: Toys, tmp_path: Path) -> None:
    text = 'Identificador,"Nombre completo",Estado,Calificación,"Calificación máxima"\n'
    text += '"Participante 12345",Ada,"Enviado para calificar",,"10,00"\n'
    filled = fill_moodle(read_csv(sheet(tmp_path, text)), [row("Ada", 85, id="12345")], toys.phase)
    assert filled.sheet[1][3] == "8,5"
    assert filled.maximum == 10


def test_a_name_that_two_rows_have_is_left_out(toys: Toys, tmp_path: Path) -> None:
    rows = read_csv(sheet(tmp_path, MOODLE.replace("Grace Hopper", "Ada Lovelace")))
    filled = fill_moodle(rows, [row("ada lovelace")], toys.phase)
    assert (filled.num_filled, filled.left_out) == (0, ["ada lovelace"])


def test_another_sheet_is_refused(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match="not a Canvas gradebook"):
        fill_canvas(read_csv(sheet(tmp_path, MOODLE)), [], toys.phase, None)
    with pytest.raises(CourseError, match="not a Moodle grading worksheet"):
        fill_moodle(read_csv(sheet(tmp_path, CANVAS)), [], toys.phase)
