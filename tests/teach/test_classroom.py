"""A class: whatever one submission does, the others are graded, and all of them are in the CSV."""

from __future__ import annotations

import csv
import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from tests.toys import COLOR, NBYTES, Toys
from typer.testing import CliRunner

from minicache.errors import MinicacheError
from minicache_cli.commands import app
from minicache_course.errors import CourseError
from minicache_course.results import Outcome, PhaseResult, TestResult, by_task
from minicache_course.table import Phase
from minicache_course.workspace import Workspace
from minicache_teach.classroom import Class, folder_name
from minicache_teach.gradebook import Gradebook, Row
from minicache_teach.submissions import Submission, find_submissions

# Anyone who runs tests in the background may have SIGINT ignored, and so would the command.
CODE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from minicache_cli import main; main()"
COMMAND = [sys.executable, "-c", CODE, "grade-class"]
SLEEPY = "import time\ndef color(role, scheme='light'):\n    time.sleep(60)\n"


def hand_in(folder: Path, **students: dict[str, str]) -> Path:
    """Write `folder/student/path` for each path of each student."""
    for student, files in students.items():
        for place, text in files.items():
            file = folder / student / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four submissions, each laid out in another way."""
    lab = "labs/phase-00-toys"
    return hand_in(
        tmp_path / "class",
        ada={f"{lab}/palette.py": COLOR, f"{lab}/arithmetic/arithmetic.py": NBYTES},
        bob={
            "phase-00-toys/palette.py": COLOR,
            "phase-00-toys/arithmetic/arithmetic.py": "def dtype_nbytes(dtype)\n",
        },
        cleo={"palette.py": COLOR, "notes.txt": "I ran out of time."},
        dan={"palette.py": SLEEPY, "arithmetic/arithmetic.py": NBYTES},
    )


def run(folder: Path, file: Path, *options: str, status: int = 0) -> str:
    """The output of `minicache grade-class`, whose words are joined by single blanks."""
    arguments = ["grade-class", str(folder), "--phase", "0", "--csv", str(file), *options]
    result = CliRunner(env={"COLUMNS": "120", "TERM": "xterm"}).invoke(app, arguments)
    if isinstance(result.exception, MinicacheError):
        raise result.exception
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def rows(file: Path) -> dict[str, dict[str, str]]:
    """Student → line of a CSV."""
    with file.open(newline="", encoding="utf-8-sig") as stream:
        return {row.pop("student"): row for row in csv.DictReader(stream)}


def found(folder: Path, toys: Toys) -> list[Submission]:
    return find_submissions(folder, toys.workspace.course, toys.phase)[0]


def graded_before(folder: Path, toys: Toys, **students: tuple[int, str]) -> Path:
    """A CSV of students' totals, and of what their files were."""
    file = folder / "grades.csv"
    book = Gradebook(file, toys.phase)
    book.put_all(
        {name: Row(name, "", (total, 0), total, total, files=files) for name, (total, files) in students.items()}
    )
    return file


def all_passed(phase: Phase) -> PhaseResult:
    tests = {task.id: [TestResult(f"{task.id} works", "It works.", Outcome.PASSED)] for task in phase.tasks}
    return PhaseResult(phase, by_task(phase.tasks, tests, {}), {}, {})


def test_a_class(toys: Toys, folder: Path, tmp_path: Path) -> None:
    file, reports = tmp_path / "grades.csv", tmp_path / "reports"
    output = run(folder, file, "--timeout", "1", "--reports", str(reports), "--junit", str(tmp_path / "class.xml"))
    assert "ada: 100/100" in output
    assert "4 submissions in" in output
    read = rows(file)
    assert list(read) == ["ada", "bob", "cleo", "dan"]
    columns = ("0.1", "0.2", "total", "max", "grade", "late_days")
    assert {student: tuple(row[name] for name in columns) for student, row in read.items()} == {
        "ada": ("30", "70", "100", "100", "100", ""),
        "bob": ("30", "0", "30", "100", "30", ""),
        "cleo": ("30", "0", "30", "100", "30", ""),
        "dan": ("0", "70", "70", "100", "70", ""),
    }
    assert read["ada"]["note"] == ""
    assert "arithmetic/arithmetic.py:1 def dtype_nbytes(dtype)" in read["bob"]["note"]
    assert read["cleo"]["note"] == "not handed in: arithmetic/arithmetic.py"
    assert "0.1: endless wait?" in read["dan"]["note"]

    assert "SyntaxError" in (reports / "bob" / "report.txt").read_text()
    assert json.loads((reports / "dan" / "results.json").read_text())["score"] == 70
    suites = {suite.get("name"): suite for suite in Xml.parse(tmp_path / "class.xml").getroot()}
    assert {name: (suite.get("tests"), suite.get("failures")) for name, suite in suites.items()} == {
        "ada": ("2", "0"),
        "bob": ("2", "1"),
        "cleo": ("2", "1"),
        "dan": ("2", "1"),
    }


def test_grades_that_are_there_are_not_written_over(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR})
    file = graded_before(tmp_path, toys, ada=(30, ""))
    before = file.read_bytes()
    with pytest.raises(CourseError, match="already has grades"):
        run(folder, file)
    assert file.read_bytes() == before


def test_reports_are_not_written_among_the_submissions(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR})
    with pytest.raises(CourseError, match="is inside the submissions folder"):
        run(folder, tmp_path / "grades.csv", "--reports", str(folder / "reports"))


def test_late_days_and_sheets(toys: Toys, tmp_path: Path) -> None:
    files = {"palette.py": COLOR, "arithmetic/arithmetic.py": NBYTES}
    folder = hand_in(tmp_path / "class", **{"Ada Lovelace_7_assignsubmission_file_": files, "bob": files})
    (tmp_path / "late.csv").write_text("student,days\n7,3\nzoe,1\n")
    sheet = "Identifier,Full name,Grade,Maximum Grade\nParticipant 7,Ada Lovelace,,10.00\nParticipant 8,Bob,,10.00\n"
    (tmp_path / "sheet.csv").write_text(sheet)
    file = tmp_path / "grades.csv"
    options = ["--late", str(tmp_path / "late.csv"), "--late-penalty", "10", "--free-days", "1"]
    output = run(folder, file, *options, "--moodle", str(tmp_path / "sheet.csv"))
    graded = {student: (row["total"], row["late_days"], row["grade"]) for student, row in rows(file).items()}
    assert graded == {"Ada Lovelace": ("100", "3", "80"), "bob": ("100", "0", "100")}
    assert "lists students without a submission: zoe" in output
    assert "2 grades in" in output
    assert "scaled to 10 points" in output
    filled = (tmp_path / "grades-moodle.csv").read_text()
    assert filled == sheet.replace("Lovelace,,", "Lovelace,8,").replace("Bob,,", "Bob,10,")

    file.write_bytes(file.read_bytes().replace(b"100,100,0,100", b"100,100,0,95"))  # by hand
    run(folder, file, "--resume", "--moodle", str(tmp_path / "sheet.csv"))
    assert "Bob,9.5," in (tmp_path / "grades-moodle.csv").read_text()


def test_a_sheet_that_is_none_stops_before_the_work(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR})
    (tmp_path / "sheet.csv").write_text("a,b\n")
    with pytest.raises(CourseError, match=r"sheet\.csv: this is not a Canvas gradebook"):
        run(folder, tmp_path / "grades.csv", "--canvas", str(tmp_path / "sheet.csv"))
    assert not (tmp_path / "grades.csv").exists()


def test_another_csv_is_not_written_over(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR})
    file = tmp_path / "grades.csv"
    file.write_text("name,mark\nada,7\n")
    with pytest.raises(CourseError, match="does not have the columns of phase 0"):
        run(folder, file, "--resume")
    assert file.read_text() == "name,mark\nada,7\n"


def test_a_run_goes_on_with_those_who_are_new_or_changed(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR}, bob={"palette.py": COLOR})
    ada = next(each for each in found(folder, toys) if each.student == "ada")
    hand_in(folder, cleo={"palette.py": COLOR})
    file = graded_before(tmp_path, toys, ada=(29, ada.digest()), bob=(0, "another file"), gone=(7, "one"))
    output = run(folder, file, "--resume")
    assert "ada:" not in output
    assert "4 submissions in" in output
    totals = {student: row["total"] for student, row in rows(file).items()}
    assert totals == {"ada": "29", "bob": "30", "cleo": "30", "gone": "7"}


def test_one_student_is_graded_again(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR}, bob={"palette.py": COLOR})
    file = graded_before(tmp_path, toys, ada=(29, "f00"), bob=(0, "f00"))
    with pytest.raises(CourseError, match="--only zoe: no submissions have that name: ada, bob"):
        run(folder, file, "--only", "zoe")
    run(folder, file, "--only", "bob")
    assert {student: row["total"] for student, row in rows(file).items()} == {"ada": "29", "bob": "30"}


def test_a_submission_that_cannot_be_graded_is_tried_again_alone(
    toys: Toys, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded: list[str] = []

    def grade(workspace: Workspace, phase: Phase, **_: object) -> PhaseResult:
        text = workspace.lab_files(phase)["minicache.palette"].read_text()
        graded.append("reference" if "PALETTE" in text else "dan" if text == SLEEPY else "others")
        if graded.count("others") == 1 or graded[-1] == "dan":
            raise CourseError("killed")
        return all_passed(phase)

    monkeypatch.setattr("minicache_teach.classroom.grade", grade)
    file = tmp_path / "grades.csv"
    output = run(folder, file, "--jobs", "1")
    assert graded == ["reference", *["others"] * 3, "dan", "others", "dan"]
    read = rows(file)
    assert {student: (row["total"], row["files"] != "") for student, row in read.items()} == {
        "ada": ("100", True),
        "bob": ("100", True),
        "cleo": ("100", True),
        "dan": ("0", False),
    }
    assert "not graded: killed" in read["dan"]["note"]
    assert "not graded: dan." in output


def test_a_course_whose_reference_does_not_pass_grades_nobody(toys: Toys, tmp_path: Path) -> None:
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR})
    (toys.tests / "conftest.py").write_text("syntax error\n")
    with pytest.raises(CourseError, match="conftest"):
        run(folder, tmp_path / "grades.csv")


def test_one_that_kills_the_process_above_costs_only_its_own_points(toys: Toys, tmp_path: Path) -> None:
    killer = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + COLOR
    folder = hand_in(
        tmp_path / "class", ada={"palette.py": COLOR}, kim={"palette.py": killer}, lee={"palette.py": COLOR}
    )
    file = tmp_path / "grades.csv"
    run(folder, file)
    assert {student: row["total"] for student, row in rows(file).items()} == {"ada": "30", "kim": "0", "lee": "30"}
    assert rows(file)["kim"]["note"]


def test_without_isolation_one_runs_at_a_time_and_the_teacher_is_told(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("classroom", "sandbox"):
        monkeypatch.setattr(f"minicache_teach.{module}.why_unavailable", lambda: "no bubblewrap")
    folder = hand_in(tmp_path / "class", **{name: {"palette.py": COLOR} for name in ("ada", "bob", "cleo")})
    file = tmp_path / "grades.csv"
    output = run(folder, file, "--jobs", "3")
    assert "submissions are not isolated here: no bubblewrap. They run one at a time" in output
    assert {student: row["total"] for student, row in rows(file).items()} == {"ada": "30", "bob": "30", "cleo": "30"}


def test_what_a_submission_says_can_always_be_written(toys: Toys, tmp_path: Path) -> None:
    rude = 'raise ValueError("\\ud800 \\x1b[31m \\x00 " + "long" * 10_000)\n'
    folder = hand_in(tmp_path / "class", ada={"palette.py": rude})
    file = tmp_path / "grades.csv"
    run(folder, file, "--reports", str(tmp_path / "reports"), "--junit", str(tmp_path / "class.xml"))
    note = rows(file)["ada"]["note"]
    assert "ValueError" in note
    assert len(note) < 1200
    assert "\x1b" not in note
    Xml.parse(tmp_path / "class.xml")
    json.loads((tmp_path / "reports" / "ada" / "results.json").read_text())


def test_nobody_keeps_a_result_that_is_written(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache_teach.classroom.grade", lambda workspace, phase, **_: all_passed(phase))
    folder = hand_in(tmp_path / "class", **{f"student {number}": {"palette.py": COLOR} for number in range(20)})
    with Class(toys.workspace, toys.phase, jobs=2, timeout=10) as graded_class:
        for num_graded, grade in enumerate(graded_class.grade(found(folder, toys)), start=1):
            assert grade.result
            if num_graded % 5:
                continue
            kept = sum(type(each) is PhaseResult for each in gc.get_objects())
            assert kept <= 5, num_graded  # this one, the one before, and those that are graded already
    assert num_graded == 20


def test_a_students_name_is_one_folder_name() -> None:
    assert [folder_name(name) for name in ("..", "a/../b", "ada")] == ["_..", "a_.._b", "ada"]


# --- interrupted -----------------------------------------------------------------------------------------------------


def start(folder: Path, file: Path, *options: str) -> subprocess.Popen[str]:
    """The real command, in a process group of its own."""
    command = [*COMMAND, str(folder), "--phase", "0", "--csv", str(file), "--jobs", "1", *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for(condition: object, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """The processes whose environment has `text`: what a command has started, however far from it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in environment and entry.name != str(os.getpid()):
                found.append(int(entry.name))
    return found


def commands_below(pid: int) -> list[str]:
    """The command lines of all processes that a process has started, and that those have."""
    parent, found = parents(), []
    pids = {pid}
    while pids := {child for child, its in parent.items() if its in pids}:
        for each in pids:
            with suppress(OSError):
                found.append(Path(f"/proc/{each}/cmdline").read_text())
    return found


def parents() -> dict[int, int]:
    """Each process's parent."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    return found


@pytest.fixture
def interrupted(toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, str]:
    """A class whose second submission sleeps for a minute, the CSV, and a mark in the environment of what grades it."""
    folder = hand_in(tmp_path / "class", ada={"palette.py": COLOR}, bob={"palette.py": SLEEPY}, cleo={"palette.py": ""})
    mark = f"mark-of-{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv("CLASS_MARK", mark)
    return folder, tmp_path / "grades.csv", mark


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_keeps_what_is_done(interrupted: tuple[Path, Path, str], ending: signal.Signals) -> None:
    folder, file, mark = interrupted
    command = start(folder, file, "--timeout", "60")
    wait_for(lambda: file.exists() and "ada" in rows(file))
    # Killed while it makes a sandbox, bubblewrap 0.8 leaves a process that waits for the one killed: bob runs by now.
    bob = "\0".join((sys.executable, "-P", "-m", "minicache_course.run"))
    wait_for(lambda: any(each.startswith(bob) for each in commands_below(command.pid)))
    asked = time.monotonic()
    command.send_signal(ending)
    if ending is signal.SIGINT:
        time.sleep(0.05)
        command.send_signal(ending)  # pressed twice, in a hurry
    output, _ = command.communicate(timeout=20)
    assert time.monotonic() - asked < 10  # not the minute that bob sleeps
    assert {student: row["total"] for student, row in rows(file).items()} == {"ada": "30"}
    assert not list(file.parent.glob(".grades.csv*"))
    if ending is signal.SIGINT:
        assert command.returncode == 130
        assert "Traceback" not in output
        assert "interrupted: 1 of 3 graded" in " ".join(output.split())
        wait_for(lambda: not processes_with(mark))
        return
    wait_for(lambda: not processes_with(mark))
    hand_in(folder, bob={"palette.py": COLOR})
    output = run(folder, file, "--resume")
    assert "ada:" not in output
    assert {student: row["total"] for student, row in rows(file).items()} == {"ada": "30", "bob": "30", "cleo": "0"}


# --- large -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_large_class_in_bounded_memory(toys: Toys, tmp_path: Path) -> None:
    talkative = COLOR + "print('x' * 5_000_000)\n"  # 250 MB in all
    students = {f"student-{number:03d}": {"palette.py": talkative} for number in range(50)}
    folder = hand_in(tmp_path / "class", **students)
    code = """if True:
        from minicache_cli import main
        try:
            main()
        finally:
            # Not getrusage's, which has the peak of the process that started this one in it.
            print("KiB", open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
        """
    command = [sys.executable, "-c", code, "grade-class", str(folder), "--phase", "0", "--csv", "g.csv", "--jobs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(rows(tmp_path / "g.csv")) == 50
    assert {row["total"] for row in rows(tmp_path / "g.csv").values()} == {"30"}
    assert int(done.stdout.split("KiB")[-1]) < 150_000
