"""A phase's result, told: to a person in the terminal, to a CI server as JUnit XML, to Gradescope as results.json."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from gettext import gettext as _
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from minicache_course.account import Line, account
from minicache_course.files import replace_file
from minicache_course.language import joined, said, translated
from minicache_course.results import Outcome, PhaseResult, pointers
from minicache_course.table import Course

STYLES = {
    Outcome.PASSED: "green",
    Outcome.CRASHED: "red",
    Outcome.STALLED: "red",
    Outcome.FAILED: "red",
    Outcome.NOT_WRITTEN: "yellow",
    Outcome.NOT_GRADED: "yellow",
}
"""How each outcome is coloured in the terminal; the word is always shown, too."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def print_result(result: PhaseResult, console: Console) -> None:
    """Whose code was graded, the points of each task, and for each task that did not pass, what to do first."""
    told = account(result)
    console.print(_text(told.head))
    width = max(len(file.module) for file in told.files)
    for file in told.files:
        line = Text(f"  {file.module:<{width}} {file.path}")
        console.print(line.append(f"  {file.note}" if file.note else "", "red"), soft_wrap=True)
    table = Table(_("task"), "", _("file"))
    for heading in (_("tests"), _("points")):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in told.rows:
        counts = (f"{row.num_passed}/{row.num_tests}", f"{row.earned}/{row.points}")
        table.add_row(row.id, row.title, row.file, *counts, Text(row.told, style=STYLES[row.outcome]))
    console.print(table)
    for problem in told.problems:
        lines = Group(*map(_hanging, problem.lines))
        console.print(Panel(lines, title=problem.title, title_align="left", border_style=STYLES[problem.outcome]))
    for last in told.end:
        console.print(_text(last), soft_wrap=True)


def _hanging(line: Line) -> Text | Table:
    """A line whose text wraps behind its label."""
    if not line.label:
        return _text(line)
    row = Table.grid()
    row.add_column(width=len(line.label), no_wrap=True)
    row.add_row(Text(line.label), _text(line))
    return row


def _text(line: Line) -> Text:
    text = Text(line.text, style="dim" if line.faint else "")
    begin = line.text.find(line.strong)
    text.stylize("bold", begin, begin + len(line.strong))
    return text


def print_way_on(result: PhaseResult, course: Course, console: Console) -> None:
    """Where a learner goes on when everything has passed: to the next task; or to the notebook and the next phase."""
    phase = result.phase
    if not result.passed:
        return
    if len(result.tasks) < len(phase.tasks):
        later = next((task for task in phase.tasks if task.number > result.tasks[-1].task.number), None)
        command = f"minicache grade {later.id if later else phase.number}"
        if later:
            name = _("task {id}, {title}").format(id=later.id, title=translated(later.title))
            then = _("{read}, then {command}")
            lines = [then.format(read=_next(name, later.page), command=f"`{command}`")]
        else:
            lines = [_("Next: [bold]the whole phase[/]: {command}").format(command=f"`{command}`")]
    else:
        notebook = f"jupyter lab notebooks/{phase.folder}.ipynb"
        finished = _("Phase {number} is finished. Its experiments: {command}")
        lines = [finished.format(number=phase.number, command=notebook)]
        lines.append(_("Your code next to ours: {command}").format(command=f"`minicache compare {phase.number}`"))
        if following := [each for each in course if each.tasks and each.number > phase.number]:
            to = following[0]
            name = _("phase {number}, {title}").format(number=to.number, title=translated(to.title))
            lines.append(_next(name, to.page))
            lines.append(_("Its tasks: {command}").format(command=f"`minicache grade {to.number}`"))
        else:
            serving = _("This was the last phase. Run the engine on your files: {command}")
            lines.append(serving.format(command="`minicache serve --mine`"))
            lines.append(_("Remaining tasks of other phases: {command}").format(command="`minicache status`"))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _next(what: str, page: str) -> str:
    """What comes next, and where to read of it."""
    return _("Next: {what}. Read {page}").format(what=f"[bold]{what}[/]", page=translated(page))


def printable(text: str) -> str:
    """The text without what a terminal would take for commands, and what is no text at all."""
    return _UNPRINTABLE.sub("�", text)


def write_junit(result: PhaseResult, file: Path) -> None:
    """Write JUnit XML: a suite for each task, with its points as properties, a case for each test."""
    root = Xml.Element("testsuites", name=result.phase.folder)
    for graded in result.tasks:
        outcomes = [test.outcome for test in graded.tests]
        num_skipped = outcomes.count(Outcome.NOT_GRADED)
        num_failed = len(outcomes) - num_skipped - graded.num_passed
        suite = Xml.SubElement(
            root,
            "testsuite",
            name=f"{graded.task.id} {graded.task.title}",
            tests=str(max(len(outcomes), 1)),
            failures=str(num_failed if outcomes else 1),
            skipped=str(num_skipped),
        )
        properties = Xml.SubElement(suite, "properties")
        for name, value in (("earned", graded.earned), ("points", graded.task.points)):
            Xml.SubElement(properties, "property", name=name, value=str(value))
        for test in graded.tests:
            case = Xml.SubElement(suite, "testcase", classname=xml_text(graded.task.id), name=xml_text(test.id))
            if test.outcome is Outcome.NOT_GRADED:
                Xml.SubElement(case, "skipped", message=xml_text(test.message))
            elif test.outcome is not Outcome.PASSED:
                Xml.SubElement(case, "failure", message=xml_text(test.title)).text = xml_text(test.message)
            if test.printed:
                Xml.SubElement(case, "system-out").text = xml_text(test.printed)
        if not graded.tests:
            case = Xml.SubElement(suite, "testcase", classname=graded.task.id, name="tests are there")
            Xml.SubElement(case, "failure", message="no tests were collected")
    Xml.indent(root)
    Xml.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def write_gradescope(result: PhaseResult | None, file: Path, notes: Sequence[str] = ()) -> None:
    """Write Gradescope's `results.json`: a test for each task, with its points.

    Args:
        result: the grading, or None if it could not be done.
        file: where to write it.
        notes: what to tell the student in addition.
    """
    if result is None:
        told = ["This submission could not be graded: submit again; if it fails again, ask your teacher.", *notes]
        _write_json({"score": 0, "output": translated(joined("\n", told)), "visibility": "visible"}, file)
        return
    tests = []
    for graded in result.tasks:
        lines = [f"{said(graded.outcome)}: {graded.num_passed} of {graded.num_tests} tests passed"]
        if problem := graded.first_problem:
            lines += ["", problem.message, pointers(result.goes_on_with(graded))]
        test = {
            "number": graded.task.id,
            "name": translated(graded.task.title),
            "score": graded.earned,
            "max_score": graded.task.points,
            "status": "passed" if graded.outcome is Outcome.PASSED else "failed",
            "output": translated(joined("\n", lines)),
        }
        tests.append(test)
    told = [*notes, *result.problems.values()] or [f"Phase {result.phase.number}, {result.phase.title}"]
    output = translated(joined("\n", told))
    _write_json({"score": result.earned, "output": output, "visibility": "visible", "tests": tests}, file)


def _write_json(data: dict[str, object], file: Path) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    replace_file(file, text.encode("utf-8", errors="replace"))  # half a surrogate pair in a message is no UTF-8


def xml_text(text: str) -> str:
    """`text` without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
