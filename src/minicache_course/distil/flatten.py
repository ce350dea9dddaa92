"""Stages as one class: each method once, with what it overrides written in where it was called.

`super().m(…)` is replaced by the body of the overridden method where that reads the same: as a statement, if the body
returns nothing early; behind `return`; or in an assignment, if the body ends with its only return. Elsewhere the
overridden method stays, under a name made of its method and its stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from minicache_course.distil.sources import Definition, defined_names, is_text, locals_of


@dataclass
class _Flattener:
    """The classes of a line, the first one first."""

    stages: Sequence[Definition]
    methods: list[dict[str, cst.FunctionDef]] = field(default_factory=list)
    kept: dict[str, cst.FunctionDef] = field(default_factory=dict)  # overridden ones, under new names

    def overridden(self, name: str, stage: int) -> tuple[int, cst.FunctionDef] | None:
        """The method that `super().name` means in a stage: its own stage, and the code."""
        for earlier in range(stage - 1, -1, -1):
            if name in self.methods[earlier]:
                return earlier, self.methods[earlier][name]
        return None

    def resolved(self, name: str, stage: int) -> cst.FunctionDef:
        """A method of a stage without any `super()` of the line."""
        method = self.methods[stage][name]
        changed = method.visit(_Inliner(self, stage, method))
        assert isinstance(changed, cst.FunctionDef)
        return changed

    def keep(self, name: str, stage: int) -> str:
        """Keep an overridden method under another name, which is returned."""
        label = self.stages[stage].module.rpartition(".")[2]
        new = f"_{label}_{name.strip('_')}"
        if new not in self.kept:
            self.kept[new] = self.resolved(name, stage).with_changes(name=cst.Name(new))
        return new


def flatten(stages: Sequence[Definition]) -> Definition:
    """One class out of a line of classes, each of which extends the one before; it has the last one's name.

    Of a class attribute, the last value counts; of a docstring of a method, the first that does not begin with "As".
    """
    line = _Flattener(stages)
    attributes: dict[str, cst.SimpleStatementLine] = {}
    order: list[str] = []
    for definition in stages:
        node = definition.node
        assert isinstance(node, cst.ClassDef)
        line.methods.append({})
        for member in node.body.body:
            if isinstance(member, cst.FunctionDef):
                name = member.name.value
                line.methods[-1][name] = member
                if name not in order:
                    order.append(name)
            elif isinstance(member, cst.SimpleStatementLine) and not is_text(member):
                for name in defined_names(member):
                    attributes[name] = member
    body: list[cst.BaseStatement] = list(attributes.values())
    order.sort(key=lambda name: name != "__init__")  # to the front, the others as they are
    for name in order:
        stage = max(index for index, methods in enumerate(line.methods) if name in methods)
        method = line.resolved(name, stage)
        if is_text(method.body.body[0]):
            texts = [its[name].body.body[0] for its in reversed(line.methods) if name in its]
            written = [each for each in texts if is_text(each)]
            plain = [each for each in written if not _is_as(each)]
            method = _with_body(method, [(plain or written)[0], *method.body.body[1:]])
        body += [*(each for new, each in line.kept.items() if new.endswith(f"_{name.strip('_')}")), method]
    first, last = stages[0].node, stages[-1].node
    assert isinstance(first, cst.ClassDef)
    assert isinstance(last, cst.ClassDef)
    text = [last.body.body[0]] if is_text(last.body.body[0]) else []
    bases = [base for base in first.bases if not (isinstance(base.value, cst.Name) and base.value.value == "ABC")]
    parentheses = {} if bases else {"lpar": cst.MaybeSentinel.DEFAULT, "rpar": cst.MaybeSentinel.DEFAULT}
    block = last.body.with_changes(body=[*text, *body])
    flat = last.with_changes(bases=bases, body=block, **parentheses)
    return Definition(stages[-1].module, stages[-1].name, [flat])


def _is_as(node: cst.CSTNode) -> bool:
    """Whether a docstring refers to the method that its method overrides."""
    assert isinstance(node, cst.SimpleStatementLine)
    assert isinstance(node.body[0], cst.Expr)
    value = node.body[0].value
    assert isinstance(value, cst.SimpleString | cst.ConcatenatedString)
    return str(value.evaluated_value).startswith("As ")


def _with_body(method: cst.FunctionDef, body: Sequence[cst.CSTNode]) -> cst.FunctionDef:
    return method.with_changes(body=method.body.with_changes(body=body))


def _super_call(node: cst.CSTNode | None) -> tuple[str, cst.Call] | None:
    """The name of the method that an expression `super().m(…)` calls, and the call."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        owner = node.func.value
        if isinstance(owner, cst.Call) and isinstance(owner.func, cst.Name) and owner.func.value == "super":
            return node.func.attr.value, node
    return None


class _Inliner(cst.CSTTransformer):
    """Replaces the calls of `super()` in one method of a stage."""

    def __init__(self, line: _Flattener, stage: int, method: cst.FunctionDef) -> None:
        super().__init__()
        self._line = line
        self._stage = stage
        self._mine = locals_of(method)
        self._last = method.body.body[-1]
        self._params: list[cst.Param] = []
        self._replaced: dict[cst.SimpleStatementLine, list[cst.BaseStatement]] = {}

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        """Write the overridden body in, if the call is a statement, or all of a return or an assignment."""
        if (body := self._instead(node)) is None:
            return True
        first, *rest = body
        lines = [*node.leading_lines, *first.leading_lines]  # type: ignore[attr-defined]
        self._replaced[node] = [first.with_changes(leading_lines=lines), *rest]
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        """Put what `visit_SimpleStatementLine` has found in its place."""
        return cst.FlattenSentinel(self._replaced[original_node]) if original_node in self._replaced else updated_node

    def _instead(self, node: cst.SimpleStatementLine) -> list[cst.BaseStatement] | None:
        """What can stand in the place of a statement with a call of `super()`."""
        line = node.body[0]
        value = line.value if isinstance(line, cst.Expr | cst.Return | cst.Assign) else None
        found = _super_call(value)
        if found is None or (target := self._line.overridden(found[0], self._stage)) is None:
            return None
        (name, call), (stage, theirs) = found, target
        if name == "__init__" and any(arg.star == "**" for arg in call.args):
            own = self._line.resolved(name, stage)
            self._params = list(own.params.kwonly_params)
            return _statements(own)
        if not _passes_on(call, theirs):
            return None
        body = _statements(self._line.resolved(name, stage))
        returns = _returns(body)
        if isinstance(line, cst.Return):
            return body
        if isinstance(line, cst.Expr):
            is_last = node is self._last and all(each.value is None for each in returns)
            return None if (returns and not is_last) or self._clashes(theirs) else body
        assert isinstance(line, cst.Assign)
        last = body[-1]
        if len(returns) != 1 or not isinstance(last, cst.SimpleStatementLine) or self._clashes(theirs, line):
            return None
        if not isinstance(last.body[0], cst.Return) or last.body[0].value is None:
            return None
        return [*body[:-1], last.with_changes(body=[line.with_changes(value=last.body[0].value)])]

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Call the overridden method by its new name."""
        found = _super_call(original_node)
        if found is None or (target := self._line.overridden(found[0], self._stage)) is None:
            return updated_node
        new = self._line.keep(found[0], target[0])
        return updated_node.with_changes(func=cst.Attribute(cst.Name("self"), cst.Name(new)))

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Give a constructor the parameters of those that it overrides, instead of `**options`."""
        if not self._params:
            return updated_node
        params = updated_node.params
        return updated_node.with_changes(params=_merged(params, self._params))

    def _clashes(self, theirs: cst.FunctionDef, line: cst.Assign | None = None) -> bool:
        """Whether the two methods have a local variable in common, besides parameters and what is assigned here."""
        shared = self._mine & locals_of(theirs)
        shared -= {param.name.value for param in theirs.params.params}
        return bool(shared - (set(defined_names(cst.SimpleStatementLine([line]))) if line else set()))


def _statements(method: cst.FunctionDef) -> list[cst.BaseStatement]:
    """The body of a method without its docstring."""
    return [each for each in method.body.body if isinstance(each, cst.BaseStatement) and not is_text(each)]


def _passes_on(call: cst.Call, theirs: cst.FunctionDef) -> bool:
    """Whether each argument of a call is named like the parameter that it is for."""
    names = [param.name.value for param in theirs.params.params[1:]]
    given = [arg.value.value if isinstance(arg.value, cst.Name) and not arg.keyword else "" for arg in call.args]
    return given == names


class _Returns(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[cst.Return] = []

    def visit_Return(self, node: cst.Return) -> None:
        self.found.append(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False


def _returns(body: Sequence[cst.BaseStatement]) -> list[cst.Return]:
    """The return statements of a body."""
    visitor = _Returns()
    for statement in body:
        statement.visit(visitor)
    return visitor.found


def _merged(params: cst.Parameters, inherited: Sequence[cst.Param]) -> cst.Parameters:
    """Parameters, with those of an overridden constructor in front, and without `**options`."""
    code = cst.Module([]).code_for_node
    plain = [code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT)).strip() for each in params.params]
    own = [each for each in params.kwonly_params if each.name.value not in {its.name.value for its in inherited}]
    names = [code(each.with_changes(comma=cst.MaybeSentinel.DEFAULT)).strip() for each in (*inherited, *own)]
    text = "".join(f"        {each},\n" for each in [*plain, "*", *names])
    function = cst.parse_module(f"class _:\n    def f(\n{text}    ) -> None: ...\n").body[0]
    assert isinstance(function, cst.ClassDef)
    made = function.body.body[0]
    assert isinstance(made, cst.FunctionDef)
    return made.params
