"""What a reader of one file does without: all but the first sentence of a docstring, and checks of misuse.

A check of misuse raises a built-in error, `ValueError` for instance, for what no correct caller passes. What can happen
to a correct caller raises a `MinicacheError`, and stays.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Set
from typing import Final, TypeVar

import libcst as cst

from minicache_course.distil.sources import Source, functions_of, is_text
from minicache_course.distil.tidy import UnusedLocals

_MISUSE: Final = {"ValueError", "TypeError", "IndexError", "KeyError"}
_CHECKS: Final = {"require_count", "require_positive", "hash"}  # a key that cannot be hashed
_CHECKING_METHODS: Final = {"check", "_check_constraint"}  # a structure's own check() is for tests; no constraints here
_SENTENCE = re.compile(r"[.:?!](?=\s+[\[`\"(*A-Z0-9])(?<!al\.)(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)")
_ASIDE = re.compile(r" \(phase \d+[^)]*\)|,? as (the )?`BlockTable[^`]*`[^.,;:]*|; raises [^.]*")
"""Parts of a sentence on what is not in the file."""
_WIDTH: Final = 120
_Statement = TypeVar("_Statement", bound=cst.BaseStatement)


def first_sentence(text: str, indent: int) -> str:
    """The first sentence of a docstring, as source: quoted, and wrapped below `indent` columns."""
    paragraph = _ASIDE.sub("", " ".join(text.strip().split("\n\n")[0].split()))
    end = next((match.end() for match in _SENTENCE.finditer(paragraph) if match[0] != ":"), len(paragraph))
    sentence = paragraph[:end].rstrip(":")
    sentence += "" if sentence.endswith((".", "?", "!")) else "."
    if indent + len(sentence) + 6 <= _WIDTH:
        return f'"""{sentence}"""'
    width = min(_WIDTH, len(sentence)) - indent  # two lines at least
    lines = textwrap.wrap(sentence, width, initial_indent='"""', break_on_hyphens=False)
    return f"\n{' ' * indent}".join([*lines, '"""'])


def shortened(node: cst.SimpleStatementLine, indent: int) -> cst.SimpleStatementLine:
    """A docstring, cut after its first sentence."""
    line = node.body[0]
    assert isinstance(line, cst.Expr)
    assert isinstance(line.value, cst.SimpleString | cst.ConcatenatedString)
    text = line.value.evaluated_value
    assert isinstance(text, str)
    return node.with_changes(body=[cst.Expr(cst.SimpleString(first_sentence(text, indent)))])


def stripped(sources: Iterable[Source]) -> None:
    """Take the checks of misuse out of all functions, and the functions that check nothing else out of the sources."""
    sources = list(sources)
    functions, methods = set(_CHECKS), set(_CHECKING_METHODS)
    definitions = [definition for source in sources for definition in source.definitions.values()]
    is_settled = False
    while not is_settled:
        for definition in definitions:
            definition.nodes[0] = without_checks(definition.node, functions, methods)
        idle: dict[tuple[str, bool], bool] = {}  # (name, is a method) → whether all of them do nothing
        for source in sources:
            for name, node, is_method in functions_of(source):
                idle[name, is_method] = idle.get((name, is_method), True) and _is_idle(node)
        is_settled = True
        for (name, is_method), each in idle.items():
            known = methods if is_method else functions
            # Of methods only private ones: others may be a list's or a dictionary's too.
            if each and name not in known and (name.startswith("_") or not is_method):
                known.add(name)
                is_settled = False
    for source in sources:
        for name, definition in list(source.definitions.items()):
            its = definition.node
            if isinstance(its, cst.FunctionDef) and name in functions:
                del source.definitions[name]
            elif isinstance(its, cst.ClassDef):
                body = [
                    each
                    for each in its.body.body
                    if not (isinstance(each, cst.FunctionDef) and each.name.value in methods)
                ]
                definition.nodes[0] = its.with_changes(body=its.body.with_changes(body=body))


def without_checks(node: _Statement, functions: Set[str] = frozenset(), methods: Set[str] = frozenset()) -> _Statement:
    """A definition without checks of misuse, and without what these were the only use of.

    Args:
        node: of a function, a class or anything else.
        functions: the names of functions that do nothing but check.
        methods: likewise, of methods.
    """
    while True:
        changed = node.visit(_Checks(functions, methods)).visit(UnusedLocals())  # type: ignore[union-attr]
        assert isinstance(changed, type(node))
        if changed.deep_equals(node):
            return changed
        node = changed


def _passes(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Pass)


def _is_idle(node: cst.FunctionDef) -> bool:
    """Whether a function has become empty; or is named as a check, and refuses nothing any more."""
    if _passes(node.body.body[-1]):
        return True
    node.visit(outcomes := _Outcomes())
    return node.name.value.lstrip("_").startswith(("check_", "require_")) and not outcomes.found


class _Outcomes(cst.CSTVisitor):
    """Whether a function raises or returns anything."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def visit_Raise(self, node: cst.Raise) -> None:
        self.found = True

    def visit_Return(self, node: cst.Return) -> None:
        self.found |= node.value is not None

    def visit_Call(self, node: cst.Call) -> None:
        # A method that is only called for what it refuses.
        self.found |= isinstance(node.func, cst.Attribute) and node.func.attr.value.startswith("check_")


class _Checks(cst.CSTTransformer):
    """Takes out checks of misuse: raises under an `if`, and calls of functions that do nothing but check."""

    def __init__(self, functions: Set[str], methods: Set[str]) -> None:
        super().__init__()
        self._functions = functions
        self._methods = methods
        self._elifs: set[cst.If] = set()

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop assertions, and calls of checks."""
        line = updated_node.body[0]
        if isinstance(line, cst.Assert):
            return cst.RemoveFromParent()
        if isinstance(line, cst.Expr) and isinstance(line.value, cst.Call):
            called = line.value.func
            if isinstance(called, cst.Name) and called.value in self._functions:
                return cst.RemoveFromParent()
            if isinstance(called, cst.Attribute) and called.attr.value in (self._methods | self._functions):
                return cst.RemoveFromParent()
        return updated_node

    def visit_If(self, node: cst.If) -> None:
        """Note which are the `elif` of another."""
        if isinstance(node.orelse, cst.If):
            self._elifs.add(node.orelse)

    def leave_If(  # type: ignore[override]
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.If | cst.Else | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseStatement]:
        """Drop it if all that it does is to refuse misuse; what it does otherwise, it always does then."""
        body, otherwise = updated_node.body, updated_node.orelse
        if not isinstance(body, cst.IndentedBlock) or (body.body and not _raises_misuse(body)):
            return updated_node
        if otherwise is None:
            return cst.RemoveFromParent()
        if isinstance(otherwise, cst.If) or original_node in self._elifs:
            return otherwise
        rest = [each for each in otherwise.body.body if isinstance(each, cst.BaseStatement) and not _passes(each)]
        return cst.FlattenSentinel(rest) if rest else cst.RemoveFromParent()

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For | cst.RemovalSentinel:
        """Drop it if nothing is left of it."""
        return updated_node if updated_node.body.body else cst.RemoveFromParent()

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Mark a function that has become empty."""
        before, after = (
            [each for each in node.body.body if not is_text(each)] for node in (original_node, updated_node)
        )
        if before and not after:
            passing = cst.SimpleStatementLine([cst.Pass()])
            block = updated_node.body.with_changes(body=[*updated_node.body.body, passing])
            return updated_node.with_changes(body=block)
        return updated_node


def _raises_misuse(body: cst.IndentedBlock) -> bool:
    """Whether a block ends by raising a built-in error, and only prepares the message before."""
    *before, last = body.body
    if not isinstance(last, cst.SimpleStatementLine) or not isinstance(last.body[0], cst.Raise):
        return False
    raised = last.body[0].exc
    if not isinstance(raised, cst.Call) or not isinstance(raised.func, cst.Name) or raised.func.value not in _MISUSE:
        return False
    return all(isinstance(each, cst.SimpleStatementLine) and isinstance(each.body[0], cst.Assign) for each in before)
