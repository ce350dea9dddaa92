"""A class's grades as JUnit XML, for a CI server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree as Xml

from minicache_course.files import replace_file
from minicache_course.report import xml_text
from minicache_course.table import Phase
from minicache_teach.gradebook import Row, as_number


def write_class_junit(rows: Iterable[Row], phase: Phase, file: Path) -> None:
    """Write a class's JUnit XML: a suite for each student, a case for each task, which fails if points are missing."""
    root = Xml.Element("testsuites", name=phase.folder)
    for row in rows:
        missing = [earned < task.points for task, earned in zip(phase.tasks, row.earned, strict=True)]
        suite = Xml.SubElement(
            root,
            "testsuite",
            name=xml_text(row.student),
            tests=str(len(missing)),
            failures=str(sum(missing) if row.is_graded else 0),
            errors=str(0 if row.is_graded else len(missing)),
        )
        properties = Xml.SubElement(suite, "properties")
        for name, value in (("id", row.id), ("earned", as_number(row.total)), ("points", str(phase.points))):
            Xml.SubElement(properties, "property", name=name, value=xml_text(value))
        for task, earned, fails in zip(phase.tasks, row.earned, missing, strict=True):
            case = Xml.SubElement(suite, "testcase", classname=task.id, name=f"{task.id} {task.title}")
            if not row.is_graded:
                Xml.SubElement(case, "error", message="not graded")
            elif fails:
                Xml.SubElement(case, "failure", message=f"{as_number(earned)} of {task.points} points")
        if row.note:
            Xml.SubElement(suite, "system-out").text = xml_text(row.note)
    Xml.indent(root)
    replace_file(file, Xml.tostring(root, encoding="utf-8", xml_declaration=True))
