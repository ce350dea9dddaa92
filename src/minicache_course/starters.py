"""Starters: the reference module with the bodies of its tasks taken out.

A starter is generated, never written by hand. What a task asks for keeps signature and docstring, and its body becomes
`raise NotImplementedError("phase 1, task 2: …; read docs/…")`; or, where the task names one (`starts_from`), the body
of another function: a bug to mend. Everything else that is public stays. Private functions, methods and constants go,
unless what stays uses them.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import libcst as cst

from minicache_course import predictions
from minicache_course.errors import CourseError
from minicache_course.table import Phase, Task
from minicache_course.workspace import (
    RECORD,
    Workspace,
    is_edited,
    label,
    recorded,
    reference_file,
)

_NO_COMMA = cst.MaybeSentinel.DEFAULT


def starter(phase: Phase, module: str, *, solved: Collection[int] = ()) -> str:
    """The starter of one of the phase's modules.

    Args:
        phase: the phase.
        module: one of its modules.
        solved: the tasks whose bodies stay, as if a learner had done them.

    Raises:
        CourseError: the reference has no such module or target, or a target has no docstring.
    """
    file = reference_file(module)
    if not file.is_file():
        raise CourseError(f"phase {phase.number}: {module} has no reference: {file} is not there")
    open_tasks = [task for task in phase.tasks if task.module == module and task.number not in solved]
    return header(phase, module) + strip(file.read_text(encoding="utf-8"), open_tasks)


def header(phase: Phase, module: str) -> str:
    """The comment that a learner's file begins with."""
    mend = any(task.starts_from for task in phase.tasks if task.module == module)
    todo = "Write what raises NotImplementedError" + (", and mend what is marked as a bug." if mend else ".")
    what = f"Phase {phase.number}, {phase.slug}: your file. It stands in for {module}."
    how = f"{todo} `minicache grade {phase.number}` grades it, `minicache hint {phase.number}.K` helps with task K."
    asked = "".join(predictions.questions(task) for task in phase.tasks if task.module == module)
    return "".join(f"{line}\n" for line in [f"# {what}", *_comment(how)]) + asked


def _comment(text: str, indent: int = 0) -> list[str]:
    """`text` as lines of a comment that are at most 120 wide once they are indented."""
    return textwrap.wrap(text, 120 - indent, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def strip(source: str, tasks: Iterable[Task]) -> str:
    """`source` with the targets of `tasks` taken out, and every private name that nothing left refers to.

    Raises:
        CourseError: a target is not in `source`, or has no docstring; or a body to start from is not there.
    """
    bodies: dict[str, list[cst.BaseStatement]] = {}
    imports: dict[str, str] = {}
    for task in tasks:
        message = f"phase {task.phase}, task {task.number}: {task.title}; read {task.page}"
        bodies |= {target: [_raising(message)] for target in task.targets}
        for target, where in task.starts_from:
            bodies[target], needed = _body_of(where, message)
            imports |= needed
    taker = _TakeOut(bodies)
    tree = cst.parse_module(source).visit(taker)
    if missing := sorted(set(bodies) - taker.found):
        raise CourseError(f"the reference does not define {', '.join(missing)}")
    return _without_unused_private(_with_imports(tree, imports)).code


def _raising(message: str) -> cst.BaseStatement:
    """The body of a function that is to be written."""
    statement = cst.parse_statement(f"raise NotImplementedError(\n    {json.dumps(message, ensure_ascii=False)}\n)")
    assert isinstance(statement, cst.SimpleStatementLine)
    return statement


def _body_of(where: str, message: str) -> tuple[list[cst.BaseStatement], dict[str, str]]:
    """A body to mend, and the lines that import the names which it uses: name → line.

    Args:
        where: `module:Class.method`.
        message: which task asks for it; becomes a comment.

    Raises:
        CourseError: there is no such function.
    """
    module, _, name = where.partition(":")
    file = reference_file(module)
    tree = cst.parse_module(file.read_text(encoding="utf-8") if file.is_file() else "")
    found: cst.CSTNode | None = tree
    for part in name.split("."):
        body = found.body.body if isinstance(found, cst.ClassDef) else tree.body
        found = next((each for each in body if _defined_name(each) == part), None)
    if not isinstance(found, cst.FunctionDef) or not isinstance(found.body, cst.IndentedBlock):
        raise CourseError(f"{where}: there is no such function to start from")
    statements = list(found.body.body[_is_docstring(found.body.body[0]) :])
    lines = _comment(f"{message}. This is the bug: mend it.", indent=4 * name.count(".") + 4)
    comment = [cst.EmptyLine(comment=cst.Comment(line)) for line in lines]
    first = statements[0]
    statements[0] = first.with_changes(leading_lines=[*comment, *first.leading_lines])  # type: ignore[attr-defined]
    found.visit(reader := _Names(skip=()))
    defined = [defined for statement in tree.body if (defined := _defined_name(statement))]
    imports = _imports(tree) | {each: f"from {module} import {each}" for each in defined}
    return statements, {name: line for name, line in imports.items() if name in reader.names}


def _imports(tree: cst.Module) -> dict[str, str]:
    """What a module imports at its top by `from … import …`: name → a line that imports it alone."""
    return {
        alias.evaluated_alias or alias.evaluated_name: (
            f"from {tree.code_for_node(line.module)} import {tree.code_for_node(alias.with_changes(comma=_NO_COMMA))}"
        )
        for statement in tree.body
        if isinstance(statement, cst.SimpleStatementLine)
        for line in statement.body
        if isinstance(line, cst.ImportFrom) and line.module and not isinstance(line.names, cst.ImportStar)
        for alias in line.names
    }


def _with_imports(tree: cst.Module, imports: dict[str, str]) -> cst.Module:
    """`tree` with those lines of `imports` whose names it neither imports nor defines, behind its last import."""
    there = {*_imports(tree), *map(_defined_name, tree.body)}
    lines = [cst.parse_statement(line) for name, line in imports.items() if name not in there]
    last = max((at for at, each in enumerate(tree.body) if _is_import(each)), default=-1)
    return tree.with_changes(body=[*tree.body[: last + 1], *lines, *tree.body[last + 1 :]])


class _TakeOut(cst.CSTTransformer):
    """Replaces the bodies of functions, by qualified name, by other statements. Docstrings stay."""

    def __init__(self, bodies: dict[str, list[cst.BaseStatement]]) -> None:
        super().__init__()
        self.bodies = bodies
        self.found: set[str] = set()
        self.scope: list[str] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self.scope.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:  # noqa: N802
        self.scope.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self.scope.append(node.name.value)

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        name = ".".join(self.scope)
        self.scope.pop()
        if name not in self.bodies:
            return updated_node
        self.found.add(name)
        body = updated_node.body
        kept = body.body[:1] if isinstance(body, cst.IndentedBlock) and _is_docstring(body.body[0]) else ()
        if not kept and original_node.name.value != "__init__":  # which its class documents
            raise CourseError(f"{name} has no docstring: a learner could not write it")
        return updated_node.with_changes(body=cst.IndentedBlock([*kept, *self.bodies[name]]))


def _without_unused_private(tree: cst.Module) -> cst.Module:
    """Drop the private functions, methods and constants that nothing left uses."""
    private = {statement: name for statement in _statements(tree) if (name := _private_name(statement))}
    reader = _Names(skip=private)
    tree.visit(reader)
    kept: set[cst.CSTNode] = set()
    # What a kept private function uses is kept too, and so on until nothing more is.
    while more := {each for each, name in private.items() if name in reader.names and each not in kept}:
        kept |= more
        for statement in more:
            statement.visit(reader_of_body := _Names(skip=()))
            reader.names |= reader_of_body.names
    result = tree.visit(_Drop(set(private) - kept))
    assert isinstance(result, cst.Module)
    return result


class _Names(cst.CSTVisitor):
    """Collects every identifier outside the statements in `skip`."""

    def __init__(self, skip: Collection[cst.CSTNode]) -> None:
        super().__init__()
        self.skip = skip
        self.names: set[str] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name):
            self.names.add(node.value)
        return node not in self.skip


class _Drop(cst.CSTTransformer):
    """Removes statements, and the docstring that follows a constant."""

    def __init__(self, unwanted: Collection[cst.CSTNode]) -> None:
        super().__init__()
        self.unwanted = unwanted

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        if isinstance(original_node, cst.Module | cst.IndentedBlock):
            kept = []
            before = None
            for old, new in zip(original_node.body, updated_node.body, strict=True):  # type: ignore[attr-defined]
                dropped_before = before in self.unwanted and not isinstance(before, cst.FunctionDef | cst.ClassDef)
                if old not in self.unwanted and not (dropped_before and _is_docstring(old)):
                    kept.append(new)
                before = old
            return updated_node.with_changes(body=kept)
        return updated_node


def _statements(tree: cst.Module) -> list[cst.CSTNode]:
    """The statements of the module and of its classes."""
    found: list[cst.CSTNode] = list(tree.body)
    for statement in tree.body:
        if isinstance(statement, cst.ClassDef):
            found.extend(statement.body.body)
    return found


def _private_name(statement: cst.CSTNode) -> str | None:
    """The private name that a statement defines, or None. `__init__` and its like are Python's, not private."""
    name = _defined_name(statement)
    return name if name and name.startswith("_") and not name.endswith("__") else None


def _defined_name(statement: cst.CSTNode) -> str | None:
    """The name of the function, class or constant that a statement defines, or None."""
    name = None
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        name = statement.name.value
    elif isinstance(statement, cst.SimpleStatementLine):
        line = statement.body[0]
        target = line.target if isinstance(line, cst.AnnAssign) else None
        if isinstance(line, cst.Assign) and len(line.targets) == 1:
            target = line.targets[0].target
        name = target.value if isinstance(target, cst.Name) else None
    return name


def _is_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Import | cst.ImportFrom)


def _is_docstring(statement: object) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)


# Files


def drifted(workspace: Workspace) -> list[str]:
    """What in labs/ is not as it would be generated now, in words: a line a file."""
    found = []
    known = recorded(workspace)
    for phase in workspace.course:
        for module, file in workspace.lab_files(phase).items():
            text = starter(phase, module)
            if known.get(label(phase, module)) != _sha256(text):
                found.append(f"{module} has changed since `minicache course starters` was last run")
            elif not file.is_file() or file.read_text(encoding="utf-8") != text:
                found.append(f"{file} was edited: `minicache reset {phase.number}` restores it and keeps a copy")
    return found


def write_all(workspace: Workspace) -> dict[Path, Path | None]:
    """Write the starters of every phase, and their fingerprints.

    Returns:
        File → the copy that was kept because it had been edited, or None.
    """
    written: dict[Path, Path | None] = {}
    record = []
    for phase in workspace.course:
        written |= restore(workspace, phase)
        record += [f"{_sha256(starter(phase, module))}  {label(phase, module)}\n" for module in phase.files]
    (workspace.labs / RECORD).write_text("".join(record), encoding="utf-8")
    return written


def restore(workspace: Workspace, phase: Phase, modules: Collection[str] | None = None) -> dict[Path, Path | None]:
    """Put starters back where the learner's files are not (or no longer) like them.

    Nothing is overwritten before a copy of it lies, read back and compared, under `.minicache/backups`.

    Args:
        workspace: the course.
        phase: the phase.
        modules: some of its modules; all of them by default.

    Returns:
        File written → the copy of what was there, or None where there was nothing of the learner's.

    Raises:
        CourseError: a copy could not be made. Then no file was changed.
    """
    files = workspace.lab_files(phase)
    texts = {module: starter(phase, module) for module in (files if modules is None else modules)}
    changed = [
        module
        for module, text in texts.items()
        if not files[module].is_file() or files[module].read_bytes() != text.encode()
    ]
    edited = [module for module in changed if is_edited(workspace, phase, module)]
    copies = _keep_copies([files[module] for module in edited], workspace.state / "backups" / phase.slug)
    for module in changed:
        files[module].parent.mkdir(parents=True, exist_ok=True)
        files[module].write_text(texts[module], encoding="utf-8")
    return {files[module]: copies.get(files[module]) for module in changed}


def _keep_copies(files: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Copy `files` into a new folder named for this moment, and compare each copy with its original."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    copies = {file: folder / stamp / file.name for file in files}
    for file, copy in copies.items():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            content = file.read_bytes()
            copy.write_bytes(content)
            if copy.read_bytes() != content:
                raise OSError("the copy differs from the original")
        except OSError as error:
            raise CourseError(f"{file} could not be copied to {copy} ({error}), so nothing was reset") from error
    return copies


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
