"""What a teacher types: grade-class, grade-submission, autograder, similarity."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from gettext import gettext as _
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from minicache_cli.learn import Seed, Timeout, progress_bar
from minicache_cli.options import asked, with_options
from minicache_course.errors import CourseError
from minicache_course.record import TIMEOUT
from minicache_course.report import print_result, printable, write_gradescope
from minicache_course.table import Phase
from minicache_course.workspace import Workspace, find_workspace
from minicache_teach.gradebook import Gradebook, Row, as_number, read_csv, read_late_days, with_lateness
from minicache_teach.junit import write_class_junit
from minicache_teach.platforms import Filled, fill_canvas, fill_moodle, write_sheet
from minicache_teach.submissions import Submission, find_submissions, one_submission

if TYPE_CHECKING:
    from minicache_teach.classroom import Grade

app = typer.Typer(pretty_exceptions_show_locals=False)
console = Console()

_PANEL = "For teachers and authors"

PhaseOption = Annotated[str, typer.Option("--phase", help="The phase: 1, 01 or dense-cache.")]
Submissions = Annotated[
    Path, typer.Argument(help="Unpacked submissions: a folder per student, or Canvas's or Moodle's download.")
]


@dataclass(frozen=True)
class Grading:
    """Which submissions are graded, how, and where the grades go."""

    csv: Path = asked(Path("grades.csv"), "Write the grades here, after each submission.")
    jobs: int = asked(2, "Submissions graded at the same time.", min=1)
    resume: bool = asked(False, "Resume: grade students who are missing from the CSV or whose files changed.")
    only: list[str] | None = asked(None, "Regrade this student, by name or id; may be repeated.")
    reports: Path | None = asked(None, "Write each student's report into this folder.")
    junit: Path | None = asked(None, "Write JUnit XML here, one suite per student.")
    late: Path | None = asked(None, "A CSV: student,days or student,submitted,due.")
    late_penalty: float = asked(0, "Percent of the points lost per day.", min=0, max=100)
    free_days: int = asked(0, "Late days without penalty.", min=0)
    canvas: Path | None = asked(None, "Canvas's exported gradebook; a filled-in copy is written next to --csv.")
    assignment: str | None = asked(None, "The assignment's title or number in that gradebook.")
    moodle: Path | None = asked(None, "Moodle's grading worksheet; a filled-in copy is written next to --csv.")
    timeout: Timeout = TIMEOUT
    seed: Seed = None


@app.command(rich_help_panel=_PANEL)
@with_options()
def grade_class(folder: Submissions, phase: PhaseOption, how: Grading) -> None:
    """Grade a class into one CSV. This runs the students' code: use an expendable machine."""
    from minicache_teach.classroom import Class

    workspace, graded_phase = _open(phase, folder)
    if not graded_phase.tasks:
        raise CourseError(f"phase {graded_phase.number} ({graded_phase.slug}) is planned: it has no tasks yet")
    if how.reports and how.reports.resolve().is_relative_to(folder.resolve()):
        raise CourseError(f"--reports {how.reports} is inside the submissions folder and would be graded as one")
    book = Gradebook(how.csv, graded_phase)
    if book.rows and not how.resume and not how.only:
        raise CourseError(
            f"{how.csv} already has grades. Use `--resume` to continue, `--only NAME` to regrade a student, "
            "or `--csv` for another file"
        )
    late_days = read_late_days(how.late) if how.late else None
    sheets = _sheets(graded_phase, how)

    def dated(row: Row) -> Row:
        days = (late_days or {}).get(row.student, (late_days or {}).get(row.id, 0))
        return row if late_days is None else with_lateness(row, days, how.late_penalty, how.free_days)

    _warn_if_not_isolated()
    num_done, todo = 0, []
    try:
        submissions, strays = find_submissions(folder, workspace.course, graded_phase)
        todo = _chosen(submissions, book, how.only or [], how.resume)
        book.put_all({name: dated(row) for name, row in book.rows.items()})  # a file that cannot be written stops here
        if strays:
            _warn(f"left out, student unknown: {', '.join(strays[:5])}{' …' if strays[5:] else ''}")
        known = {each for row in book.rows.values() for each in (row.student, row.id)}
        known |= {each for submission in submissions for each in (submission.student, submission.id)}
        if unknown := sorted(set(late_days or {}) - known):
            _warn(
                _("{file} lists students without a submission: {names}").format(file=how.late, names=", ".join(unknown))
            )
        with (
            Class(workspace, graded_phase, jobs=how.jobs, timeout=how.timeout, seed=how.seed) as graded_class,
            progress_bar(Console(stderr=True)) as progress,
        ):
            bar = progress.add_task(_("submissions"), total=len(todo))
            for done in graded_class.grade(todo):
                book.put(dated(done.row(graded_phase)))
                num_done += 1
                progress.advance(bar)
                _tell(done)
                if how.reports:
                    _report(done, how.reports)
    except KeyboardInterrupt:
        goes_on = shlex.join(["minicache", *sys.argv[1:]]) + ("" if how.resume or how.only else " --resume")
        stopped = _("interrupted: {done} of {total} graded and saved in {file}. To resume: {command}")
        _warn(stopped.format(done=num_done, total=len(todo), file=how.csv, command=goes_on))
        raise typer.Exit(130) from None
    if how.junit:
        write_class_junit(list(book.rows.values()), graded_phase, how.junit)
    for (platform, sheet), fill in sheets.items():
        _fill_in(fill(book.rows.values()), sheet, how.csv.with_name(f"{how.csv.stem}-{platform}.csv"))
    if not_graded := sorted(name for name, row in book.rows.items() if not row.is_graded):
        missing = _("not graded: {names}. See the notes in {file}; `--resume` tries again")
        _warn(missing.format(names=", ".join(not_graded), file=how.csv))
    earlier = len(book.rows) - num_done
    told = _("{count} submissions in {file}, {earlier} of them graded earlier")
    told = told if earlier else _("{count} submissions in {file}")
    _say(told.format(count=len(book.rows), file=how.csv, earlier=earlier))


@app.command(rich_help_panel=_PANEL)
def grade_submission(
    folder: Annotated[Path, typer.Argument(help="One student's submission, in any layout.")],
    phase: PhaseOption,
    gradescope: Annotated[Path | None, typer.Option(help="Write Gradescope's results.json here.")] = None,
    timeout: Timeout = TIMEOUT,
    seed: Seed = None,
) -> None:
    """Grade one submission as grade-class does. The exit status is 1 if any task did not pass."""
    from minicache_teach.classroom import Class

    workspace, graded_phase = _open(phase, folder)
    _warn_if_not_isolated()
    submission = one_submission(folder, workspace.course, graded_phase)
    with Class(workspace, graded_phase, jobs=1, timeout=timeout, seed=seed) as graded_class:
        (done,) = graded_class.grade([submission])
    remarks = submission.remarks(graded_phase)
    if gradescope:
        write_gradescope(done.result, gradescope, remarks)
    for note in remarks:
        _warn(note)
    if done.result is None:
        raise CourseError(done.note)
    print_result(done.result, console)
    if not done.result.passed:
        raise typer.Exit(1)


@app.command(rich_help_panel=_PANEL)
def autograder(
    phase: PhaseOption,
    output: Annotated[Path, typer.Option(help="Write the zip here.")] = Path("autograder.zip"),
    seed: Seed = None,
) -> None:
    """Build the zip for Gradescope's autograder."""
    from minicache_teach.autograder import write_autograder

    workspace = find_workspace()
    graded_phase = workspace.course.phase(phase)
    write_autograder(workspace, graded_phase, output, seed)
    told = _("{file}: upload it under Configure Autograder. Set the assignment's points to {points}.")
    _say(told.format(file=output, points=graded_phase.points))


@app.command(rich_help_panel=_PANEL)
def similarity(
    folder: Submissions,
    phase: PhaseOption,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page with the pairs side by side.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write all pairs here, with percentages.")] = None,
) -> None:
    """Compare a class's submissions, without the starter code. No submission is run."""
    from minicache_teach.similarity import compare, fingerprints, write_csv, write_html

    workspace, compared_phase = _open(phase, folder)
    submissions = find_submissions(folder, workspace.course, compared_phase)[0]
    prints, notes = fingerprints(compared_phase, submissions)
    for note in notes:
        _warn(note)
    pairs = compare(prints)
    for pair in pairs[:10]:
        each = zip(pair.students, pair.shares, strict=True)
        _say(" – ".join(f"{student} {100 * share:.0f} %" for student, share in each))
    if html:
        write_html(compared_phase, prints, pairs, html)
    if csv:
        write_csv(pairs, csv)
    written = ", ".join(str(each) for each in (html, csv) if each)
    told = _("{count} pairs in {files}") if written else _("{count} pairs")
    _say(told.format(count=len(pairs), files=written))


@app.command(rich_help_panel=_PANEL)
def check_record(
    records: Annotated[list[Path], typer.Argument(help="What students' `minicache status --export` wrote.")],
    key: Annotated[Path | None, typer.Option(help="The file with the class's key.")] = None,
    labs: Annotated[Path | None, typer.Option(help="The student's labs folder, to compare with one record.")] = None,
) -> None:
    """Check students' records of points. The exit status is 1 if one is not as it was signed."""
    from minicache_course.export import changed_files, checked, read_key

    course, secret, num_bad = find_workspace().course, read_key(key), 0
    if labs and len(records) > 1:
        raise CourseError("--labs is one student's folder: give one record")
    for file in records:
        try:
            record = checked(file.read_text(encoding="utf-8"), secret, course)
        except (OSError, ValueError, CourseError) as error:
            num_bad += 1
            _warn(f"{file}: {error}")
            continue
        versions = {str(each["version"]) for each in record["tasks"]} or {str(record["version"])}
        graded_by = printable(", ".join(sorted(versions)))
        told = _("{file}: {earned}/{points} points, graded by minicache {version}")
        _say(told.format(file=file, earned=record["earned"], points=record["points"], version=graded_by))
        if labs and (changed := changed_files(record, labs)):
            num_bad += 1
            _warn(_("{file}: not the files that were graded: {names}").format(file=file, names=", ".join(changed)))
    if num_bad:
        raise typer.Exit(1)


@app.command(rich_help_panel=_PANEL)
def check_report(
    report: Annotated[Path, typer.Argument(help="The report.json of `minicache bench serve --out`.")],
    labs: Annotated[Path | None, typer.Option(help="The files that must have served; default: labs/.")] = None,
    ttft: Annotated[float, typer.Option(help="Limit of time to first token, 99th percentile, seconds.")] = 10.0,
    tpot: Annotated[float, typer.Option(help="Limit of time per output token, 99th percentile, seconds.")] = 0.5,
) -> None:
    """Check a load test of a learner's server: all answered, in time, by these lab files. Else exit status 1."""
    from minicache_course.load_report import read_report

    served = read_report(report)
    told = _(
        "{ok} of {all} answered, TTFT {ttft:.3g} s, TPOT {tpot:.3g} s (99th percentiles), {own} of the learner's files"
    )
    _say(
        told.format(
            ok=served.num_ok,
            all=served.num_requests,
            ttft=served.ttft,
            tpot=served.tpot,
            own=len(served.lab_files),
        )
    )
    misses = served.misses(find_workspace(labs), ttft, tpot)
    for miss in misses:
        _warn(miss)
    if misses:
        raise typer.Exit(1)


def _open(phase: str, folder: Path) -> tuple[Workspace, Phase]:
    """The course, and its phase of which the folder has submissions."""
    workspace = find_workspace()
    found = workspace.course.phase(phase)
    if not folder.is_dir():
        raise CourseError(f"{folder} is not a folder")
    return workspace, found


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


def _sheets(phase: Phase, how: Grading) -> dict[tuple[str, Path], _Fill]:
    """The platform and its sheet → what fills it in. Each is tried without a grade, before the work.

    Raises:
        CourseError: a sheet is none of that platform's.
    """
    sheets: dict[tuple[str, Path], _Fill] = {}
    if how.canvas:
        gradebook = read_csv(how.canvas)
        sheets["canvas", how.canvas] = lambda rows: fill_canvas(gradebook, rows, phase, how.assignment)
    if how.moodle:
        worksheet = read_csv(how.moodle)
        sheets["moodle", how.moodle] = lambda rows: fill_moodle(worksheet, rows, phase)
    for (_platform, sheet), fill in sheets.items():
        try:
            fill([])
        except CourseError as error:
            raise CourseError(f"{sheet}: {error}") from error
    return sheets


def _fill_in(filled: Filled, original: Path, file: Path) -> None:
    """Write a platform's sheet, and tell what a teacher should know before it is imported."""
    write_sheet(original, filled.sheet, file)
    told = _("{count} grades in {file}, scaled to {points} points") if filled.maximum else _("{count} grades in {file}")
    points = as_number(filled.maximum) if filled.maximum else ""
    _say(told.format(count=filled.num_filled, file=file, points=points))
    if filled.left_out:
        _warn(_("missing from {file}, or ambiguous: {names}").format(file=original, names=", ".join(filled.left_out)))
    if filled.kept:
        kept = _("left unchanged in {file}, excused or not assigned: {names}")
        _warn(kept.format(file=original, names=", ".join(filled.kept)))


def _report(done: Grade, folder: Path) -> None:
    from minicache_teach.classroom import write_report

    try:
        write_report(done, folder)
    except (OSError, CourseError) as error:  # the grade is kept
        _warn(f"{done.submission.student}: no report: {error}")


def _tell(done: Grade) -> None:
    earned = f"{done.result.earned}/{done.result.points}" if done.result else _("not graded")
    message = f"{escape(done.submission.student)}: {earned}  [dim]{escape(done.note)}[/]"
    console.print(message, highlight=False, soft_wrap=True)


def _say(text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _warn(text: str) -> None:
    console.print(f"[yellow]{escape(printable(text))}[/]", highlight=False, soft_wrap=True)
