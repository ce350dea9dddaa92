"""Wrong solutions test the grader: plausible mistakes, each a replacement in the reference and caught by its task."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from minicache_course.errors import CourseError
from minicache_course.grading import grade
from minicache_course.results import PhaseResult
from minicache_course.server import PytestServer
from minicache_course.symbols import find_symbol
from minicache_course.table import Entry, Phase, read_toml
from minicache_course.workspace import Workspace, reference_file


@dataclass(frozen=True, slots=True)
class Wrong:
    """One mistake.

    Attributes:
        phase: the phase that it is about.
        module: the module to change.
        symbol: the function, class or method in it that `find` is in, `KVCache.append`; "" for the module's top level.
        find: the text to replace; it must be in the symbol exactly once.
        replace: what stands there instead.
        caught_by: the number of the task whose tests must fail.
        story: what the learner was thinking.
        shows: texts that the first failure told to the learner must contain; none where any failure will do.
    """

    phase: Phase
    module: str
    symbol: str
    find: str
    replace: str
    caught_by: int
    story: str
    shows: tuple[str, ...] = ()

    def source(self) -> str:
        """The reference with the mistake in it.

        Raises:
            CourseError: there is no such symbol, or `find` is not in it, or more than once.
        """
        here = f"{self.phase.folder}/wrong.toml, {self.story!r}"
        lines = reference_file(self.module).read_text(encoding="utf-8").splitlines(keepends=True)
        first, last = 0, len(lines)
        if self.symbol:
            try:
                node = find_symbol(ast.parse("".join(lines)), self.symbol)
            except CourseError as error:
                raise CourseError(f"{here}: in {self.module}, {error}") from error
            decorators = getattr(node, "decorator_list", [])
            first, last = min(each.lineno for each in (node, *decorators)) - 1, node.end_lineno or 0
        text = "".join(lines[first:last])
        if (count := text.count(self.find)) != 1:
            raise CourseError(f"{here}: `find` matches {count} times, not once")
        return "".join((*lines[:first], text.replace(self.find, self.replace), *lines[last:]))


def load_wrong(workspace: Workspace, phase: Phase) -> tuple[Wrong, ...]:
    """The mistakes listed in the phase's `wrong.toml`.

    Raises:
        CourseError: the file cannot be read, or an entry is incomplete or names a module or task that is not there.
    """
    file = workspace.tests(phase) / "wrong.toml"
    root = Entry(read_toml(file), str(file))
    found = []
    for entry in root.entries("wrong"):
        module, _, symbol = entry.text("in").partition(":")
        task = phase.task(entry.integer("caught_by", at_least=1))
        if module not in phase.files:
            raise CourseError(f"{file}: {module} is not a module of phase {phase.number}")
        texts = [entry.text(key, r"(?s).*") for key in ("find", "replace", "story")]
        shows = entry.texts("shows") if "shows" in entry.data else ()
        found.append(Wrong(phase, module, symbol, texts[0], texts[1], task.number, texts[2], shows))
        entry.done()
    root.done()
    return tuple(found)


def grade_wrong(workspace: Workspace, wrong: Wrong, server: PytestServer) -> PhaseResult:
    """Grade the mistake as if a learner had handed it in: only the task that has to catch it.

    The first test that fails ends the run, unless `shows` gives the reported message: that needs the whole task.
    """
    sources, task = {wrong.module: wrong.source()}, wrong.caught_by
    return grade_solution(workspace, wrong.phase, sources, server, task=task, until_failure=not wrong.shows)


def grade_solution(
    workspace: Workspace,
    phase: Phase,
    sources: Mapping[str, str],
    server: PytestServer,
    *,
    task: int | None = None,
    until_failure: bool = False,
    seed: int | None = None,
) -> PhaseResult:
    """Grade a learner's phase whose files are `sources`, by module, and the reference where none is given."""
    with tempfile.TemporaryDirectory(prefix="minicache-labs-") as folder:
        theirs = replace(workspace, labs=Path(folder))
        for module, file in theirs.lab_files(phase).items():
            file.parent.mkdir(parents=True, exist_ok=True)
            text = sources.get(module) or reference_file(module).read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
        return grade(theirs, phase, task=task, server=server, until_failure=until_failure, seed=seed)
