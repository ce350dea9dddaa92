"""A phase's result, told: to a person in the terminal, to a CI server as JUnit XML, to Gradescope as results.json."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as Xml

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from minicache.course.finder import show
from minicache.course.results import Outcome, PhaseResult, TaskResult, TestResult, pointers
from minicache.course.table import Course, Task

STYLES = {
    Outcome.PASSED: "green",
    Outcome.CRASHED: "red",
    Outcome.STALLED: "red",
    Outcome.FAILED: "red",
    Outcome.NOT_WRITTEN: "yellow",
    Outcome.NOT_GRADED: "yellow",
}
"""How each outcome is coloured in the terminal; the word always stands beside the colour."""

_MAX_LISTED = 10  # of a task's tests that did not pass, below the first


def print_result(result: PhaseResult, console: Console) -> None:
    """Whose code was graded, the points of each task, and for each task that did not pass, what to do first."""
    phase = result.phase
    console.print(f"[bold]Phase {phase.number}, {phase.title}.[/] Graded: your files.")
    width = max(map(len, result.files))
    for module, file in result.files.items():
        broken = module in result.problems
        note = "  [red]cannot be imported: its tasks fail, the reference serves the others[/]" if broken else ""
        console.print(f"  {module:<{width}} {show(file)}{note}", soft_wrap=True, highlight=False)
    table = Table("task", "", "file")
    for heading in ("tests", "points"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for graded in result.tasks:
        task = graded.task
        outcome = f"needs {graded.needs} first" if graded.needs else str(graded.outcome)
        if task.module in result.problems:
            outcome = "cannot be imported"
        table.add_row(
            task.id,
            task.title,
            task.file.name,
            f"{graded.num_passed}/{graded.num_tests}",
            f"{graded.earned}/{task.points}",
            Text(outcome, style=STYLES[graded.outcome]),
        )
    console.print(table)
    for module, problem in result.problems.items():
        tasks = [graded.task for graded in result.tasks if graded.task.module == module]
        text = Text("\n".join([problem, *map(pointers, tasks[:1])]))
        console.print(Panel(text, title="cannot be used", title_align="left", border_style="red"))
    told = [graded for graded in result.tasks if _is_told(graded) and graded.task.module not in result.problems]
    for graded in told:
        console.print(_problem(graded, result.goes_on_with(graded), in_full=graded is told[0]))
    if len(told) > 1:
        console.print(f"Begin with task {told[0].task.id}: what is wrong there may fail the tasks after it.")
    idle = [graded.first_problem for graded in result.tasks if graded.outcome is Outcome.NOT_GRADED]
    for reason in dict.fromkeys(test.message.removeprefix("skipped: ") for test in idle if test):
        console.print(Text(f"Not graded: {reason}"), soft_wrap=True)
    unfinished = [graded for graded in result.tasks if graded.outcome is Outcome.NOT_WRITTEN]
    if unfinished:
        task = result.goes_on_with(unfinished[0])
        console.print(f"Next: [bold]task {task.id}, {task.title}[/]. Read {task.page}", soft_wrap=True)
    console.print(f"[bold]{result.earned} of {result.points} points[/]")


def print_way_on(result: PhaseResult, course: Course, console: Console) -> None:
    """Where a learner goes on when everything has passed: to the next task; or to the notebook and the next phase."""
    phase = result.phase
    if not result.passed:
        return
    if len(result.tasks) < len(phase.tasks):
        later = next((task for task in phase.tasks if task.number > result.tasks[-1].task.number), None)
        command = f"minicache grade {phase.number}" + (f" --task {later.number}" if later else "")
        todo = f"task {later.id}, {later.title}[/]. Read {later.page}, then" if later else "the whole phase[/]:"
        lines = [f"Next: [bold]{todo} `{command}`"]
    else:
        lines = [f"Phase {phase.number} is finished. Its experiments: jupyter lab notebooks/{phase.folder}.ipynb"]
        if following := [each for each in course if each.tasks and each.number > phase.number]:
            to = following[0]
            lines.append(f"Next: [bold]phase {to.number}, {to.title}[/]. Read {to.page}")
            lines.append(f"Its tasks: `minicache grade {to.number}`")
        else:
            lines.append("It is the last phase. The engine on your own files: `minicache serve --mine`")
            lines.append("What is left in the others: `minicache status`")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def _is_told(graded: TaskResult) -> bool:
    """Whether there is more to say of a task than the table does: it has failed, or is written in part."""
    begun = graded.outcome is Outcome.NOT_WRITTEN and graded.num_passed > 0
    return begun or graded.outcome is Outcome.FAILED or graded.outcome.is_lost


def _problem(graded: TaskResult, goes_on_with: Task, *, in_full: bool) -> Panel:
    """The most telling failure of a task, where to read on, and, in full, a line for each of the other failures."""
    test = graded.first_problem
    message: list[Text | Table] = _hanging(test.message if test else "no tests were collected, so nothing was graded")
    if test and test.printed.strip():
        message.append(Text(f"your code printed:\n{test.printed.rstrip()}", style="dim"))
    message += _hanging(pointers(goes_on_with))
    others = graded.other_problems
    if others and not in_full:
        message += [Text(), Text(f"{len(others)} more did not pass", style="dim")]
    elif others:
        groups: dict[tuple[Outcome, str], list[TestResult]] = {}
        for other in others:
            groups.setdefault((other.outcome, _check(other)), []).append(other)
        lines = Table.grid()
        lines.add_column(min_width=12, no_wrap=True)
        for (outcome, check), tests in list(groups.items())[:_MAX_LISTED]:
            title = tests[0].title if len(tests) == 1 else f"×{len(tests)}  {check}"
            lines.add_row(Text(str(outcome)), Text(title))
        message += [Text(), lines]
        left: Counter[str] = Counter()
        for (outcome, _), tests in list(groups.items())[_MAX_LISTED:]:
            left[str(outcome)] += len(tests)
        if left:
            message.append(Text("… and " + ", ".join(f"{count} more {outcome}" for outcome, count in left.items())))
    if graded.outcome.is_lost:
        message.append(Text("The rest of this task's tests were not run.", style="dim"))
    title = f"{graded.task.id} {graded.task.title}"
    return Panel(Group(*message), title=title, title_align="left", border_style=STYLES[graded.outcome])


def _hanging(message: str) -> list[Text | Table]:
    """A message whose lines begin with a label of ten characters: what wraps stays behind the label."""
    parts: list[Text | Table] = []
    for line in message.splitlines():
        label, text = line[:10], line[10:]
        if not label.endswith("  ") or not text:
            parts.append(Text(line))
            continue
        row = Table.grid()
        row.add_column(width=10, no_wrap=True)
        row.add_row(Text(label), Text(text))
        parts.append(row)
    return parts


def _check(test: TestResult) -> str:
    """A test's title without its parameters: what it has in common with those that check the same."""
    return test.title.removesuffix(f" [{test.id.partition('[')[2]}")


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
            case = Xml.SubElement(suite, "testcase", classname=_xml(graded.task.id), name=_xml(test.id))
            if test.outcome is Outcome.NOT_GRADED:
                Xml.SubElement(case, "skipped", message=_xml(test.message))
            elif test.outcome is not Outcome.PASSED:
                Xml.SubElement(case, "failure", message=_xml(test.title)).text = _xml(test.message)
            if test.printed:
                Xml.SubElement(case, "system-out").text = _xml(test.printed)
        if not graded.tests:
            case = Xml.SubElement(suite, "testcase", classname=graded.task.id, name="tests are there")
            Xml.SubElement(case, "failure", message="no tests were collected")
    Xml.indent(root)
    Xml.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


def write_gradescope(result: PhaseResult, file: Path) -> None:
    """Write Gradescope's `results.json`: a test for each task, with its points."""
    tests = [
        {
            "number": graded.task.id,
            "name": graded.task.title,
            "score": graded.earned,
            "max_score": graded.task.points,
            "status": "passed" if graded.outcome is Outcome.PASSED else "failed",
            "output": f"{graded.outcome}: {graded.num_passed} of {graded.num_tests} tests passed"
            + (f"\n\n{problem.message}\n{pointers(result.goes_on_with(graded))}" if problem else ""),
        }
        for graded, problem in ((graded, graded.first_problem) for graded in result.tasks)
    ]
    output = "\n".join(result.problems.values()) or f"Phase {result.phase.number}, {result.phase.title}"
    data = {"score": result.earned, "output": output, "visibility": "visible", "tests": tests}
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _xml(text: str) -> str:
    """`text` without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
