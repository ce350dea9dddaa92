"""What a teacher types: grade-class, grade-submission, autograder, similarity."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from minicache_cli.learn import Seed, Timeout, progress_bar
from minicache_course.errors import CourseError
from minicache_course.record import TIMEOUT
from minicache_course.report import print_result, printable, write_gradescope
from minicache_course.table import Phase
from minicache_course.workspace import find_workspace
from minicache_teach.gradebook import Gradebook, Row, as_number, read_csv, read_late_days, with_lateness
from minicache_teach.junit import write_class_junit
from minicache_teach.platforms import Filled, fill_canvas, fill_moodle, write_sheet
from minicache_teach.submissions import Submission, find_submissions, one_submission

if TYPE_CHECKING:
    from minicache_teach.classroom import Grade

app = typer.Typer(pretty_exceptions_show_locals=False)
console = Console()

_PANEL = "For teachers and authors"


@app.command(rich_help_panel=_PANEL)
def grade_class(
    folder: Annotated[
        Path, typer.Argument(help="Unpacked submissions: a folder per student, or Canvas's or Moodle's download.")
    ],
    phase: Annotated[str, typer.Option(help="The phase: 1, 01 or dense-cache.")],
    csv: Annotated[Path, typer.Option(help="Write the grades here, after each submission.")] = Path("grades.csv"),
    jobs: Annotated[int, typer.Option(min=1, help="Submissions graded at the same time.")] = 2,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume: grade students who are missing from the CSV or whose files changed."),
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Regrade this student, by name or id; may be repeated.")
    ] = None,
    reports: Annotated[Path | None, typer.Option(help="Write each student's report into this folder.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here, one suite per student.")] = None,
    late: Annotated[Path | None, typer.Option(help="A CSV: student,days or student,submitted,due.")] = None,
    late_penalty: Annotated[float, typer.Option(min=0, max=100, help="Percent of the points lost per day.")] = 0,
    free_days: Annotated[int, typer.Option(min=0, help="Late days without penalty.")] = 0,
    canvas: Annotated[
        Path | None, typer.Option(help="Canvas's exported gradebook; a filled-in copy is written next to --csv.")
    ] = None,
    assignment: Annotated[str | None, typer.Option(help="The assignment's title or number in that gradebook.")] = None,
    moodle: Annotated[
        Path | None, typer.Option(help="Moodle's grading worksheet; a filled-in copy is written next to --csv.")
    ] = None,
    timeout: Timeout = TIMEOUT,
    seed: Seed = None,
) -> None:
    """Grade a class into one CSV. This runs the students' code: use an expendable machine."""
    from minicache_teach.classroom import Class

    workspace = find_workspace()
    graded_phase = workspace.course.phase(phase)
    if not graded_phase.tasks:
        raise CourseError(f"phase {graded_phase.number} ({graded_phase.slug}) is planned: it has no tasks yet")
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder")
    if reports and reports.resolve().is_relative_to(folder.resolve()):
        raise CourseError(f"--reports {reports} is inside the submissions folder and would be graded as one")
    book = Gradebook(csv, graded_phase)
    if book.rows and not resume and not only:
        raise CourseError(
            f"{csv} already has grades. Use `--resume` to continue, `--only NAME` to regrade a student, "
            "or `--csv` for another file"
        )
    late_days = read_late_days(late) if late else None
    sheets = _sheets(graded_phase, canvas, assignment, moodle)

    def dated(row: Row) -> Row:
        days = (late_days or {}).get(row.student, (late_days or {}).get(row.id, 0))
        return row if late_days is None else with_lateness(row, days, late_penalty, free_days)

    _warn_if_not_isolated()
    num_done, todo = 0, []
    try:
        submissions, strays = find_submissions(folder, workspace.course, graded_phase)
        todo = _chosen(submissions, book, only or [], resume)
        book.put_all({name: dated(row) for name, row in book.rows.items()})  # a file that cannot be written stops here
        if strays:
            _warn(f"left out, student unknown: {', '.join(strays[:5])}{' …' if strays[5:] else ''}")
        known = {each for row in book.rows.values() for each in (row.student, row.id)}
        known |= {each for submission in submissions for each in (submission.student, submission.id)}
        if unknown := sorted(set(late_days or {}) - known):
            _warn(f"{late} lists students without a submission: {', '.join(unknown)}")
        with (
            Class(workspace, graded_phase, jobs=jobs, timeout=timeout, seed=seed) as graded_class,
            progress_bar(Console(stderr=True)) as progress,
        ):
            bar = progress.add_task("submissions", total=len(todo))
            for done in graded_class.grade(todo):
                book.put(dated(done.row(graded_phase)))
                num_done += 1
                progress.advance(bar)
                _tell(done)
                if reports:
                    _report(done, reports)
    except KeyboardInterrupt:
        goes_on = shlex.join(["minicache", *sys.argv[1:]]) + ("" if resume or only else " --resume")
        _warn(f"interrupted: {num_done} of {len(todo)} graded and saved in {csv}. To resume: {goes_on}")
        raise typer.Exit(130) from None
    if junit:
        write_class_junit(list(book.rows.values()), graded_phase, junit)
    for (platform, sheet), fill in sheets.items():
        _fill_in(fill(book.rows.values()), sheet, csv.with_name(f"{csv.stem}-{platform}.csv"))
    if not_graded := sorted(name for name, row in book.rows.items() if not row.is_graded):
        _warn(f"not graded: {', '.join(not_graded)}. See the notes in {csv}; `--resume` tries again")
    kept = f", {len(book.rows) - num_done} of them graded earlier" if len(book.rows) > num_done else ""
    console.print(f"{len(book.rows)} submissions in {escape(str(csv))}{kept}", soft_wrap=True, highlight=False)


@app.command(rich_help_panel=_PANEL)
def grade_submission(
    folder: Annotated[Path, typer.Argument(help="One student's submission, in any layout.")],
    phase: Annotated[str, typer.Option(help="The phase: 1, 01 or dense-cache.")],
    gradescope: Annotated[Path | None, typer.Option(help="Write Gradescope's results.json here.")] = None,
    timeout: Timeout = TIMEOUT,
    seed: Seed = None,
) -> None:
    """Grade one submission as grade-class does. The exit status is 1 if any task did not pass."""
    from minicache_teach.classroom import Class

    workspace = find_workspace()
    graded_phase = workspace.course.phase(phase)
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder")
    _warn_if_not_isolated()
    submission = one_submission(folder, workspace.course, graded_phase)
    with Class(workspace, graded_phase, jobs=1, timeout=timeout, seed=seed) as graded_class:
        (done,) = graded_class.grade([submission])
    told = submission.remarks(graded_phase)
    if gradescope:
        write_gradescope(done.result, gradescope, told)
    for note in told:
        _warn(note)
    if done.result is None:
        raise CourseError(done.note)
    print_result(done.result, console)
    if not done.result.passed:
        raise typer.Exit(1)


@app.command(rich_help_panel=_PANEL)
def autograder(
    phase: Annotated[str, typer.Option(help="The phase: 1, 01 or dense-cache.")],
    output: Annotated[Path, typer.Option(help="Write the zip here.")] = Path("autograder.zip"),
    seed: Seed = None,
) -> None:
    """Build the zip for Gradescope's autograder."""
    from minicache_teach.autograder import write_autograder

    workspace = find_workspace()
    graded_phase = workspace.course.phase(phase)
    write_autograder(workspace, graded_phase, output, seed)
    points = f"Set the assignment's points to {graded_phase.points}."
    console.print(f"{output}: upload it under Configure Autograder. {points}", soft_wrap=True, highlight=False)


@app.command(rich_help_panel=_PANEL)
def similarity(
    folder: Annotated[
        Path, typer.Argument(help="Unpacked submissions: a folder per student, or Canvas's or Moodle's download.")
    ],
    phase: Annotated[str, typer.Option(help="The phase: 1, 01 or dense-cache.")],
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the pairs side by side.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all pairs here, with percentages.")] = None,
) -> None:
    """Compare a class's submissions, without the starter code. No submission is run."""
    from minicache_teach.similarity import compare, fingerprints, write_csv, write_html

    workspace = find_workspace()
    compared_phase = workspace.course.phase(phase)
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder")
    submissions, _ = find_submissions(folder, workspace.course, compared_phase)
    prints, notes = fingerprints(compared_phase, submissions)
    for note in notes:
        _warn(note)
    pairs = compare(prints)
    for pair in pairs[:10]:
        told = " – ".join(
            f"{student} {100 * share:.0f} %" for student, share in zip(pair.students, pair.shares, strict=True)
        )
        console.print(escape(told), highlight=False, soft_wrap=True)
    if html:
        write_html(compared_phase, prints, pairs, html)
    if csv:
        write_csv(pairs, csv)
    written = " and ".join(str(each) for each in (html, csv) if each)
    told = f"{len(pairs)} pairs" + (f" in {written}" if written else "")
    console.print(escape(told), highlight=False, soft_wrap=True)


def _warn_if_not_isolated() -> None:
    from minicache_teach.sandbox import why_unavailable

    if why := why_unavailable():
        _warn(f"submissions are not isolated here: {why}. They run one at a time, with your permissions")


def _chosen(submissions: list[Submission], book: Gradebook, only: list[str], resume: bool) -> list[Submission]:
    """Those to grade.

    Raises:
        CourseError: there is none of a name in `only`, or more than one.
    """
    if only:
        chosen = []
        for name in only:
            found = [each for each in submissions if name in (each.student, each.id)]
            if len(found) != 1:
                there = ", ".join(each.student for each in (found or submissions)[:10])
                raise CourseError(f"--only {name}: {len(found) or 'no'} submissions have that name: {there}")
            chosen += [each for each in found if each not in chosen]
        return chosen
    if resume:
        rows = book.rows
        return [each for each in submissions if each.student not in rows or rows[each.student].files != each.digest()]
    return submissions


_Fill = Callable[[Iterable[Row]], Filled]


def _sheets(
    phase: Phase, canvas: Path | None, assignment: str | None, moodle: Path | None
) -> dict[tuple[str, Path], _Fill]:
    """The platform and its sheet → what fills it in. Each is tried without a grade, before the work.

    Raises:
        CourseError: a sheet is none of that platform's.
    """
    sheets: dict[tuple[str, Path], _Fill] = {}
    if canvas:
        gradebook = read_csv(canvas)
        sheets["canvas", canvas] = lambda rows: fill_canvas(gradebook, rows, phase, assignment)
    if moodle:
        worksheet = read_csv(moodle)
        sheets["moodle", moodle] = lambda rows: fill_moodle(worksheet, rows, phase)
    for (_, sheet), fill in sheets.items():
        try:
            fill([])
        except CourseError as error:
            raise CourseError(f"{sheet}: {error}") from error
    return sheets


def _fill_in(filled: Filled, original: Path, file: Path) -> None:
    """Write a platform's sheet, and tell what a teacher should know before it is imported."""
    write_sheet(original, filled.sheet, file)
    scaled = f", scaled to {as_number(filled.maximum)} points" if filled.maximum else ""
    console.print(f"{filled.num_filled} grades in {escape(str(file))}{scaled}", soft_wrap=True, highlight=False)
    if filled.left_out:
        _warn(f"missing from {original}, or ambiguous: {', '.join(filled.left_out)}")
    if filled.kept:
        _warn(f"left unchanged in {original}, excused or not assigned: {', '.join(filled.kept)}")


def _report(done: Grade, folder: Path) -> None:
    from minicache_teach.classroom import write_report

    try:
        write_report(done, folder)
    except (OSError, CourseError) as error:  # the grade is kept
        _warn(f"{done.submission.student}: no report: {error}")


def _tell(done: Grade) -> None:
    earned = f"{done.result.earned}/{done.result.points}" if done.result else "not graded"
    console.print(
        f"{escape(done.submission.student)}: {earned}  [dim]{escape(done.note)}[/]", highlight=False, soft_wrap=True
    )


def _warn(text: str) -> None:
    console.print(f"[yellow]{escape(printable(text))}[/]", highlight=False, soft_wrap=True)
