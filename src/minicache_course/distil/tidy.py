"""What has no use once checks and unused functions are gone: locals, bookkeeping, calls without an effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Set

import libcst as cst

from minicache_course.distil.sources import is_text, locals_of


class _Loads(cst.CSTVisitor):
    """How often each name is there, without the places where it is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def visit_Name(self, node: cst.Name) -> None:
        self.names[node.value] += 1

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        if isinstance(node.target, cst.Tuple):
            for element in node.target.elements:
                if not isinstance(element.value, cst.Name):
                    element.visit(self)
        return not isinstance(node.target, cst.Name | cst.Tuple)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False


class UnusedLocals(cst.CSTTransformer):
    """Drops assignments to local names that nothing reads, if what is assigned has no effect."""

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Until nothing changes: one may have been read by another."""
        while True:
            updated_node.visit(loads := _Loads())
            unused = {name for name in locals_of(updated_node) - _parameters(updated_node) if not loads.names[name]}
            if not unused:
                return updated_node
            changed = updated_node.visit(_WithoutAssignments(unused))
            assert isinstance(changed, cst.FunctionDef)
            if changed.deep_equals(updated_node):
                return changed
            updated_node = changed


def _parameters(node: cst.FunctionDef) -> set[str]:
    return {each.name.value for each in (*node.params.params, *node.params.kwonly_params)}


class _WithoutAssignments(cst.CSTTransformer):
    def __init__(self, unused: Set[str]) -> None:
        super().__init__()
        self._unused = unused

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        line = updated_node.body[0]
        if not isinstance(line, cst.Assign) or len(line.targets) != 1:
            return updated_node
        target, value = line.targets[0].target, line.value
        if isinstance(target, cst.Name):
            gone = target.value in self._unused and _is_pure(value)
            return cst.RemoveFromParent() if gone else updated_node
        if not isinstance(target, cst.Tuple):
            return updated_node
        if not isinstance(value, cst.Tuple):
            names = {its.value.value for its in target.elements if isinstance(its.value, cst.Name)}
            gone = len(names) == len(target.elements) and names <= self._unused and _is_pure(value)
            return cst.RemoveFromParent() if gone else updated_node
        pairs = [
            (its, given)
            for its, given in zip(target.elements, value.elements, strict=True)
            if not (isinstance(its.value, cst.Name) and its.value.value in self._unused and _is_pure(given.value))
        ]
        if len(pairs) == len(target.elements):
            return updated_node
        if not pairs:
            return cst.RemoveFromParent()
        left, right = ([each.value for each in side] for side in zip(*pairs, strict=True))
        if len(pairs) == 1:
            changed = line.with_changes(targets=[cst.AssignTarget(left[0])], value=right[0])
        else:
            sides = ([cst.Element(each) for each in side] for side in (left, right))
            first, second = (cst.Tuple(side, lpar=[], rpar=[]) for side in sides)
            changed = line.with_changes(targets=[cst.AssignTarget(first)], value=second)
        return updated_node.with_changes(body=[changed])


_PURE_CALLS = {"len", "list", "tuple", "set", "dict", "int", "isinstance", "reversed", "type", "map"}


class _Effects(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def visit_Call(self, node: cst.Call) -> None:
        is_pure = isinstance(node.func, cst.Name) and node.func.value in _PURE_CALLS
        is_view = isinstance(node.func, cst.Attribute) and node.func.attr.value in (
            "items",
            "keys",
            "values",
            "aminmax",
        )
        self.found |= not (is_pure or is_view)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self.found = True

    def visit_Await(self, node: cst.Await) -> None:
        self.found = True


def _is_pure(value: cst.CSTNode) -> bool:
    """Whether an expression calls nothing but what has no effect."""
    value.visit(effects := _Effects())
    return not effects.found


def getters(methods: Collection[tuple[str, cst.FunctionDef]]) -> set[str]:
    """The names of methods that only ever return something, and change nothing."""
    found: dict[str, bool] = {}
    for name, node in methods:
        body = [each for each in node.body.body if not is_text(each)]
        line = body[0].body[0] if len(body) == 1 and isinstance(body[0], cst.SimpleStatementLine) else None
        does_nothing = not body or _is_stub(line)  # of a protocol
        only = isinstance(line, cst.Return) and line.value is not None and _is_pure(line.value)
        found[name] = found.get(name, True) and (only or does_nothing)
    return {name for name, all_of_them in found.items() if all_of_them}


def _is_stub(line: cst.CSTNode | None) -> bool:
    return isinstance(line, cst.Expr) and isinstance(line.value, cst.Ellipsis)


class WithoutEffect(cst.CSTTransformer):
    """Drops statements that only call one of these methods of `self`."""

    def __init__(self, methods: Set[str]) -> None:
        super().__init__()
        self._methods = methods

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop it, or not."""
        line = updated_node.body[0]
        called = line.value.func if isinstance(line, cst.Expr) and isinstance(line.value, cst.Call) else None
        if isinstance(called, cst.Attribute) and isinstance(called.value, cst.Name) and called.value.value == "self":
            return cst.RemoveFromParent() if called.attr.value in self._methods else updated_node
        return updated_node


class _Attributes(cst.CSTVisitor):
    """Private attributes of `self`: in which statements they are assigned, and where they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str | None, set[str]] = {}  # the private attribute being assigned, or None → what is read
        self._target: str | None = None

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        self._target = assigned_private(node)
        line = node.body[0]
        if self._target is None:
            return True
        assert isinstance(line, cst.Assign | cst.AnnAssign)
        self.read.setdefault(self._target, set())
        if line.value is not None:
            line.value.visit(self)
        self._target = None
        return False

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if node.attr.value.startswith("_") and not node.attr.value.startswith("__"):
            self.read.setdefault(self._target, set()).add(node.attr.value)


def assigned_private(node: cst.CSTNode) -> str | None:
    """The attribute of a statement `self._name = …`, else None."""
    line = node.body[0] if isinstance(node, cst.SimpleStatementLine) else None
    target: cst.BaseExpression | None = None
    if isinstance(line, cst.Assign) and len(line.targets) == 1:
        target = line.targets[0].target
    elif isinstance(line, cst.AnnAssign):
        target = line.target
    if isinstance(target, cst.Attribute) and isinstance(target.value, cst.Name) and target.value.value == "self":
        name = target.attr.value
        return name if name.startswith("_") and not name.startswith("__") else None
    return None


def unread_attributes(nodes: Collection[cst.CSTNode]) -> set[str]:
    """Private attributes that are read only to assign others that are not read either."""
    attributes = _Attributes()
    for node in nodes:
        node.visit(attributes)
    read = attributes.read.pop(None, set())
    while True:
        more = {name for target, names in attributes.read.items() if target in read for name in names}
        if more <= read:
            return {target for target in attributes.read if target} - read
        read |= more


class WithoutAttributes(cst.CSTTransformer):
    """Drops the assignments to private attributes that nothing reads."""

    def __init__(self, unread: Set[str]) -> None:
        super().__init__()
        self._unread = unread

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop it, or not."""
        return cst.RemoveFromParent() if assigned_private(updated_node) in self._unread else updated_node
