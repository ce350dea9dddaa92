"""Starters: the reference module with the bodies of its tasks taken out.

A starter is generated, never written by hand. What a task asks for keeps signature and docstring, and its body becomes
`raise NotImplementedError("phase 1, task 2: …; read docs/…")`. Everything else that is public stays. Private functions,
methods and constants go, unless what stays uses them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath

import libcst as cst

from minicache.course.table import Phase, Task
from minicache.course.workspace import Workspace, fingerprint, reference_file
from minicache.errors import CourseError

RECORD = "starters.sha256"
"""In labs/: the fingerprints of the starters as generated, in the format of `sha256sum`."""


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
    return (
        f"# Phase {phase.number}, {phase.slug}: your file. It stands in for {module}.\n"
        f"# Write what raises NotImplementedError. `minicache grade {phase.number}` grades it, "
        f"`minicache hint {phase.number}.K` helps with task K.\n"
    )


def strip(source: str, tasks: Iterable[Task]) -> str:
    """`source` with the targets of `tasks` taken out, and every private name that nothing left refers to.

    Raises:
        CourseError: a target is not in `source`, or has no docstring.
    """
    messages = {
        target: f"phase {task.phase}, task {task.number}: {task.title}; read {task.page}"
        for task in tasks
        for target in task.targets
    }
    taker = _TakeOut(messages)
    tree = cst.parse_module(source).visit(taker)
    if missing := sorted(set(messages) - taker.found):
        raise CourseError(f"the reference does not define {', '.join(missing)}")
    return _without_unused_private(tree).code


class _TakeOut(cst.CSTTransformer):
    """Replaces the bodies of the functions in `messages`, by qualified name, by a raise."""

    def __init__(self, messages: dict[str, str]) -> None:
        super().__init__()
        self.messages = messages
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
        if name not in self.messages:
            return updated_node
        self.found.add(name)
        body = updated_node.body
        kept = body.body[:1] if isinstance(body, cst.IndentedBlock) and _is_docstring(body.body[0]) else ()
        if not kept and original_node.name.value != "__init__":  # which its class documents
            raise CourseError(f"{name} has no docstring: a learner could not write it")
        quoted = json.dumps(self.messages[name], ensure_ascii=False)
        raising = cst.parse_statement(f"raise NotImplementedError(\n    {quoted}\n)")
        return updated_node.with_changes(body=cst.IndentedBlock([*kept, raising]))


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
    """The private name that a statement defines, or None. `__dunder__` names are Python's, not private."""
    name = None
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        name = statement.name.value
    elif isinstance(statement, cst.SimpleStatementLine):
        line = statement.body[0]
        target = line.target if isinstance(line, cst.AnnAssign) else None
        if isinstance(line, cst.Assign) and len(line.targets) == 1:
            target = line.targets[0].target
        name = target.value if isinstance(target, cst.Name) else None
    return name if name and name.startswith("_") and not name.endswith("__") else None


def _is_docstring(statement: object) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine) or not isinstance(statement.body[0], cst.Expr):
        return False
    return isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)


# Files


def drifted(workspace: Workspace) -> list[str]:
    """What in labs/ is not as it would be generated now, in words: a line a file."""
    found = []
    recorded = _recorded(workspace)
    for phase in workspace.course:
        for module, file in workspace.lab_files(phase).items():
            text = starter(phase, module)
            if recorded.get(_label(phase, module)) != _sha256(text):
                found.append(f"{module} has changed since `minicache course starters` was last run")
            elif not file.is_file() or file.read_text(encoding="utf-8") != text:
                found.append(f"{file} was edited: `minicache reset {phase.number}` restores it and keeps a copy")
    return found


def is_edited(workspace: Workspace, phase: Phase, module: str) -> bool:
    """Whether the learner's file is there and is no longer the starter that came with the course."""
    file = workspace.lab_files(phase)[module]
    return file.is_file() and _recorded(workspace).get(_label(phase, module)) != fingerprint(file)


def write_all(workspace: Workspace) -> dict[Path, Path | None]:
    """Write the starters of every phase, and their fingerprints.

    Returns:
        File → the copy that was kept because it had been edited, or None.
    """
    written: dict[Path, Path | None] = {}
    record = []
    for phase in workspace.course:
        written |= restore(workspace, phase)
        record += [f"{_sha256(starter(phase, module))}  {_label(phase, module)}\n" for module in phase.files]
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


def _label(phase: Phase, module: str) -> str:
    return str(PurePosixPath(phase.folder) / phase.files[module])


def _recorded(workspace: Workspace) -> dict[str, str]:
    """The fingerprints in `labs/starters.sha256`: file → sha256."""
    record = workspace.root / "labs" / RECORD
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    return {label: digest for digest, _, label in (line.partition("  ") for line in lines)}
