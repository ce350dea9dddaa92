"""A learner's functions next to the reference's, once their task has passed: for `minicache compare`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import HtmlDiff
from html import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_course.language import translated
from minicache_course.symbols import find_symbol
from minicache_course.table import Phase, Task
from minicache_course.workspace import Workspace, reference_file

WIDTH = 78
"""Columns of a side in the page; a longer line is broken."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A target of a task, such as `KVCache.append`, in both files: its source without the docstring.

    Below it are the private functions of the file that it calls, and those that they call: each once in a file.
    """

    task: Task
    target: str
    yours: str
    ours: str


def pairs(workspace: Workspace, phase: Phase, tasks: list[Task]) -> list[Pair]:
    """The targets of some tasks of a phase, in their order.

    Raises:
        CourseError: a learner's file cannot be read, or lacks a target.
    """
    found = []
    shown: tuple[set[tuple[str, str]], set[tuple[str, str]]] = set(), set()
    for task in tasks:
        file = workspace.lab_files(phase)[task.module]
        try:
            yours = file.read_text(encoding="utf-8")
            ours = reference_file(task.module).read_text(encoding="utf-8")
            for each in task.targets:
                both = (_with_helpers(source, each, side) for source, side in zip((yours, ours), shown, strict=True))
                found.append(Pair(task, each, *both))
        except (OSError, SyntaxError, UnicodeDecodeError, CourseError) as error:
            raise CourseError(f"{file} cannot be compared: {error}") from error
    return found


def page(pairs: list[Pair], yours: str, ours: str) -> str:
    """All pairs as one HTML page, in which the two sides have these names."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    parts = []
    for task, group in groupby(pairs, attrgetter("task")):
        parts.append(f"<h2>{task.id} {escape(translated(task.title))}</h2><p>{escape(translated(task.why))}</p>")
        for each in group:
            both = each.yours.splitlines(), each.ours.splitlines()
            parts += f"<h3>{escape(each.target)}</h3>", HtmlDiff(wrapcolumn=WIDTH).make_table(*both, yours, ours)
    return (
        '<!DOCTYPE html><html><head><meta charset="utf-8"><title>minicache compare</title>'
        f"<style>{style}</style></head><body>{''.join(parts)}</body></html>"
    )


def _with_helpers(source: str, target: str, shown: set[tuple[str, str]]) -> str:
    """A definition, and the private functions that it calls, but for those in `shown`, to which they are added."""
    tree = ast.parse(source)
    node, owner = find_symbol(tree, target), target.rpartition(".")[0]
    parts = [_code(source, node)]
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            name = each.id
        elif isinstance(each, ast.Attribute) and owner:
            name = f"{owner}.{each.attr}"
        else:
            continue
        if name.rpartition(".")[2].startswith("_") and (source, name) not in shown and _is_function(tree, name):
            shown.add((source, name))
            parts.append(_with_helpers(source, name, shown))
    return "\n\n".join(parts)


def _is_function(tree: ast.Module, name: str) -> bool:
    try:
        return isinstance(find_symbol(tree, name), ast.FunctionDef | ast.AsyncFunctionDef)
    except CourseError:
        return False


def _code(source: str, node: ast.stmt) -> str:
    """A definition as it stands in a source, without its docstring."""
    decorators = getattr(node, "decorator_list", [])
    first = min(each.lineno for each in (node, *decorators))
    lines = source.splitlines()[first - 1 : node.end_lineno]
    body = getattr(node, "body", [])
    if body and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
        del lines[body[0].lineno - first : body[0].end_lineno - first + 1]
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[indent:] for line in lines)
