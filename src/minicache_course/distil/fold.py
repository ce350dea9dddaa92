"""What never has another value in the one file is written in, and what then has no use goes.

A parameter that every call passes alike, an option of the package that this engine does not have, a local constant: of
an `if` on one of them, one branch is left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeVar

import libcst as cst

from minicache_course.distil.sources import Definition, bindings, is_text, members

Node = TypeVar("Node", bound=cst.CSTNode)
_WIDTH: Final = 120
_EMPTY: Final = cst.SimpleStatementSuite([cst.Expr(cst.Ellipsis())])
_OF_THE_COURSE: Final = re.compile(r"phase \d|Not addcmul_")
_EXPRESSIONS: Final = cst.Attribute | cst.Name | cst.Comparison | cst.BinaryOperation | cst.Call


def code_of(node: cst.CSTNode) -> str:
    """A node as source."""
    return cst.Module([]).code_for_node(node)


def fold(node: Node, values: Mapping[str, cst.BaseExpression], idle: Set[str] = frozenset()) -> Node:
    """Write values in for expressions, and simplify what they decide.

    Args:
        node: of a definition.
        values: source of an expression → what it always is; where it is assigned, it stays.
        idle: sources of functions whose calls do nothing, and of arguments that need not be passed.
    """
    changed = node.visit(_Folder(values, idle))
    assert isinstance(changed, type(node))
    return changed


def _with_args(before: cst.Call, call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
    """A call with fewer arguments: on one line, unless there was a comma behind the last one."""
    if not args or len(args) == len(before.args):
        return call.with_changes(args=args)
    last = before.args[-1]
    if last.comma is not cst.MaybeSentinel.DEFAULT:
        return call.with_changes(args=[*args[:-1], args[-1].with_changes(comma=last.comma)])
    none = cst.SimpleWhitespace("")
    flat = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=none) for each in args]
    return call.with_changes(args=flat, whitespace_before_args=none)


def truth_of(node: cst.CSTNode) -> bool | None:
    """Whether a literal is true; None of what is none."""
    if isinstance(node, cst.Name):
        return {"True": True, "False": False, "None": False}.get(node.value)
    if isinstance(node, cst.Integer | cst.SimpleString):
        return bool(node.evaluated_value)
    return False if isinstance(node, cst.Tuple | cst.List) and not node.elements else None


class _Folder(cst.CSTTransformer):
    def __init__(self, values: Mapping[str, cst.BaseExpression], idle: Set[str], *, is_local: bool = False) -> None:
        super().__init__()
        self._values = values
        self._idle = idle
        self._is_local = is_local  # within one function, whose constants are the values

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        """Write a value in, after the parts are simplified."""
        left = super().on_leave(original_node, updated_node)
        if isinstance(left, _EXPRESSIONS) and (value := self._values.get(code_of(left))) is not None:
            return value
        return left

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return False

    def leave_AnnAssign(self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign) -> cst.AnnAssign:
        return updated_node.with_changes(target=original_node.target)

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.AugAssign:
        return updated_node.with_changes(target=original_node.target)

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Param(self, original_node: cst.Param, updated_node: cst.Param) -> cst.Param:
        """A default None goes with a type that no longer has it."""
        kept, annotation = updated_node.with_changes(name=original_node.name), updated_node.annotation
        is_none = kept.default is not None and code_of(kept.default) == "None"
        if is_none and original_node.annotation is not None and annotation is not None:
            before, after = (code_of(each.annotation) for each in (original_node.annotation, annotation))
            return kept.with_changes(default=None, equal=cst.MaybeSentinel.DEFAULT) if before != after else kept
        return kept

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg | cst.RemovalSentinel:
        plain = updated_node.with_changes(keyword=original_node.keyword, comma=cst.MaybeSentinel.DEFAULT)
        if code_of(plain).replace(" ", "") in self._idle:
            return cst.RemoveFromParent()
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        """`cast(T, x)` is x."""
        args = updated_node.args
        if isinstance(updated_node.func, cst.Name) and updated_node.func.value == "cast" and len(args) == 2:
            return args[1].value
        return _with_args(original_node, updated_node, args)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        """Drop a call that does nothing."""
        line = updated_node.body[0]
        called = line.value.func if isinstance(line, cst.Expr) and isinstance(line.value, cst.Call) else None
        is_idle = called is not None and code_of(called) in self._idle
        return cst.RemoveFromParent() if is_idle else updated_node

    def leave_UnaryOperation(
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        truth = truth_of(updated_node.expression)
        is_known = isinstance(updated_node.operator, cst.Not) and truth is not None
        return cst.Name(str(not truth)) if is_known else updated_node

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        """`None is None`."""
        left, target = updated_node.left, updated_node.comparisons[0]
        is_plain = len(updated_node.comparisons) == 1 and isinstance(target.operator, cst.Is | cst.IsNot)
        if is_plain and truth_of(left) is not None and code_of(target.comparator) == "None":
            return cst.Name(str((code_of(left) == "None") == isinstance(target.operator, cst.Is)))
        return updated_node

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        left, right = truth_of(updated_node.left), truth_of(updated_node.right)
        decides = isinstance(updated_node.operator, cst.Or)  # `True or x`, `False and x`
        if left is not None:
            return updated_node.left if left is decides else updated_node.right
        if right is not None:
            return updated_node.right if right is decides else updated_node.left
        return updated_node

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        truth = truth_of(updated_node.test)
        return updated_node if truth is None else updated_node.body if truth else updated_node.orelse

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> object:  # type: ignore[override]
        """One branch, if it is known which; an `elif` stays."""
        truth, orelse = truth_of(updated_node.test), updated_node.orelse
        if truth is None or isinstance(orelse, cst.If):
            return updated_node
        branch = updated_node.body if truth else orelse.body if orelse is not None else None
        if branch is None:
            return cst.RemoveFromParent()
        return cst.FlattenSentinel(list(branch.body))

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Nothing comes after a return."""
        for place, each in enumerate(updated_node.body):
            if isinstance(each, cst.SimpleStatementLine) and isinstance(each.body[0], cst.Return | cst.Raise):
                return updated_node.with_changes(body=updated_node.body[: place + 1])
        return updated_node

    def leave_FormattedStringExpression(
        self, original_node: cst.FormattedStringExpression, updated_node: cst.FormattedStringExpression
    ) -> cst.FormattedStringExpression | cst.RemovalSentinel:
        is_empty = isinstance(updated_node.expression, cst.SimpleString) and not truth_of(updated_node.expression)
        return cst.RemoveFromParent() if is_empty else updated_node

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.FormattedString | cst.SimpleString:
        """Without anything formatted it is a plain string."""
        parts, code = updated_node.parts, code_of(updated_node)
        is_plain = all(isinstance(each, cst.FormattedStringText) for each in parts) and "{" not in code
        return (
            cst.SimpleString(code.removeprefix("f"))
            if is_plain and len(original_node.parts) > len(parts)
            else updated_node
        )

    def leave_EmptyLine(
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine | cst.RemovalSentinel:
        """A comment on the course is for its readers."""
        text = updated_node.comment.value if updated_node.comment else ""
        return cst.RemoveFromParent() if _OF_THE_COURSE.search(text) else updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Write local constants in."""
        if self._is_local:
            return updated_node
        updated_node.visit(found := _Constants())
        counts = bindings(updated_node)
        constants = {name: each for name, each in found.constants.items() if counts[name] == 1}
        if not constants:
            return updated_node
        changed = updated_node.visit(_Folder(constants, self._idle, is_local=True))
        assert isinstance(changed, cst.FunctionDef)
        return changed


class _Constants(cst.CSTVisitor):
    """The names that are assigned None, True or False."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, cst.BaseExpression] = {}

    def visit_Assign(self, node: cst.Assign) -> None:
        target = node.targets[0].target
        if isinstance(target, cst.Name) and len(node.targets) == 1 and code_of(node.value) in ("None", "True", "False"):
            self.constants[target.value] = node.value


@dataclass
class _Calls(cst.CSTVisitor):
    """All calls by the name of what is called, the names that are there otherwise, and what is read of objects.

    Attributes:
        names: names that are there, and not called.
        read: names of attributes that are read, and not called.
    """

    calls: dict[str, list[cst.Call]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def visit_Call(self, node: cst.Call) -> bool:
        func = node.func
        name = func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""
        assert isinstance(name, str)
        self.calls.setdefault(name, []).append(node)
        if isinstance(func, cst.Attribute):
            func.value.visit(self)
        elif not isinstance(func, cst.Name):
            func.visit(self)
        for arg in node.args:
            arg.value.visit(self)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if code_of(node.value) != "params":
            self.read.add(node.attr.value)
        node.value.visit(self)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        if isinstance(node.target, cst.Attribute):
            node.target.value.visit(self)
        return not isinstance(node.target, cst.Attribute)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> bool:
        if node.value is not None:
            node.value.visit(self)
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        for part in (*node.decorators, node.params, node.body):
            part.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        if node.default is not None:
            node.default.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


def _functions(definitions: Iterable[Definition]) -> Iterator[tuple[str, cst.FunctionDef, bool, str]]:
    """Functions and methods: the name that calls them, the code, whether there is a `self`, the class."""
    for definition in definitions:
        if isinstance(definition.node, cst.FunctionDef):
            yield definition.name, definition.node, False, ""
        elif isinstance(definition.node, cst.ClassDef):
            for member in members(definition.node):
                if isinstance(member, cst.FunctionDef):
                    name = member.name.value
                    called = definition.node.name.value if name == "__init__" else name
                    yield called, member, True, definition.node.name.value


def drop_parameters(definitions: Collection[Definition], public: Set[str]) -> None:
    """Write in the parameters that every call passes alike, and drop those that a function does not use.

    Args:
        definitions: all of the file; they are changed.
        public: functions and classes whose parameters are a reader's to pass.
    """
    while drops := _drops(definitions, public):
        for definition in definitions:
            for number, node in enumerate(definition.nodes):
                changed = node.visit(_WithoutParameters(drops))
                assert isinstance(changed, cst.BaseStatement)
                definition.nodes[number] = changed


@dataclass
class _Drop:
    """Parameters that a function no longer has.

    Attributes:
        function: its code.
        places: of each, by its name, which of the positional arguments it is; −1 for none.
        values: what those are that are written in.
    """

    function: cst.FunctionDef
    places: dict[str, int] = field(default_factory=dict)
    values: dict[str, cst.BaseExpression] = field(default_factory=dict)


def _drops(definitions: Collection[Definition], public: Set[str]) -> dict[str, _Drop]:
    """By the name that calls it, each function of which a parameter may go."""
    found = _Calls()
    for definition in definitions:
        for node in definition.nodes:
            node.visit(found)
    functions = list(_functions(definitions))
    names = Counter(name for name, *_ in functions)
    drops: dict[str, _Drop] = {}
    for name, node, is_method, owner in functions:
        is_hidden = name.startswith("__") or name == "forward" or owner in public or name in public
        others = found.read if is_method and name != owner else found.names - {owner}
        if is_hidden or names[name] > 1 or name in others or not found.calls.get(name):
            continue
        calls = [*found.calls[name], *(found.calls.get("__init__", []) if name == owner else [])]
        node.body.visit(used := _Calls())
        plain = node.params.params[is_method:]
        for place, param in enumerate((*plain, *node.params.kwonly_params)):
            place = place if place < len(plain) else -1
            passed = [_given(call, param, place) for call in calls]
            given = {"?" if each is None else code_of(each) for each in passed}
            value = next(iter(given))
            is_constant = len(given) == 1 and (value in ("None", "True", "False", "()") or value[0] in "\"'")
            if is_constant or (name != owner and param.name.value not in used.names | used.calls.keys()):
                drop = drops.setdefault(name, _Drop(node))
                drop.places[param.name.value] = place
                if is_constant:
                    drop.values[param.name.value] = cst.parse_expression(value)
    return drops


def _given(call: cst.Call, param: cst.Param, place: int) -> cst.BaseExpression | None:
    """What a call passes for a parameter, or the default; None if that is not to be seen."""
    plain = [arg for arg in call.args if arg.keyword is None]
    for arg in call.args:
        if arg.star or (arg.keyword is not None and arg.keyword.value == param.name.value):
            return None if arg.star else arg.value
    return plain[place].value if 0 <= place < len(plain) else param.default


class _WithoutParameters(cst.CSTTransformer):
    def __init__(self, drops: Mapping[str, _Drop]) -> None:
        super().__init__()
        self._drops = drops
        self._of = {id(drop.function): drop for drop in drops.values()}

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if (drop := self._of.get(id(original_node))) is None:
            return updated_node
        params = updated_node.params
        plain = [each for each in params.params if each.name.value not in drop.places]
        named = [each for each in params.kwonly_params if each.name.value not in drop.places]
        star = params.star_arg if named or not params.kwonly_params else cst.MaybeSentinel.DEFAULT
        without = params.with_changes(params=plain, kwonly_params=named, star_arg=star)
        body = fold(updated_node.body, drop.values) if drop.values else updated_node.body
        return _signed(updated_node.with_changes(body=body), without)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        func = updated_node.func
        called = func.attr if isinstance(func, cst.Attribute) else func
        drop = self._drops.get(called.value) if isinstance(called, cst.Name) else None
        if drop is None:
            return updated_node
        gone = drop.places.values()
        args = [
            each
            for place, each in enumerate(updated_node.args)
            if (place not in gone if each.keyword is None else each.keyword.value not in drop.places)
        ]
        return _with_args(original_node, updated_node, args)


def _signed(function: cst.FunctionDef, params: cst.Parameters) -> cst.FunctionDef:
    """A function with other parameters: on one line, or on a line of their own, or one to a line."""
    lines = {"comma": cst.MaybeSentinel.DEFAULT, "whitespace_after_param": cst.SimpleWhitespace("")}
    plain, named = ([each.with_changes(**lines) for each in side] for side in (params.params, params.kwonly_params))
    flat = params.with_changes(params=plain, kwonly_params=named)
    if named:
        flat = flat.with_changes(star_arg=cst.ParamStar())
    indent = 4 * bool(plain and plain[0].name.value == "self")
    short = function.with_changes(params=flat, whitespace_before_params=cst.SimpleWhitespace(""))
    header = code_of(short.with_changes(leading_lines=[], lines_after_decorators=[], decorators=[], body=_EMPTY))
    if indent + len(header.removesuffix(" ...\n").strip()) <= _WIDTH:
        return short
    comma: cst.Comma | cst.MaybeSentinel = cst.MaybeSentinel.DEFAULT
    inner = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))
    if indent + 4 + len(code_of(flat)) > _WIDTH:
        comma = cst.Comma()
        between = cst.Comma(whitespace_after=inner)
        plain = [each.with_changes(comma=between) for each in plain]
        named = [each.with_changes(comma=between) for each in named]
        flat = flat.with_changes(star_arg=cst.ParamStar(between) if named else cst.MaybeSentinel.DEFAULT)
    side = named or plain
    after = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(""))
    side[-1] = side[-1].with_changes(comma=comma, whitespace_after_param=after)
    flat = flat.with_changes(params=plain, kwonly_params=named)
    return function.with_changes(params=flat, whitespace_before_params=inner)


def inline_lists(definitions: Collection[Definition]) -> None:
    """Write private methods in that only make a list of what they are given: their checks are gone."""
    functions = [(name, node) for name, node, is_method, _ in _functions(definitions) if is_method]
    for name, node in functions:
        params = node.params.params
        if not name.startswith("_") or name.startswith("__") or len(params) != 2 or len(functions) < 2:
            continue
        code = "".join(code_of(each) for each in node.body.body if not is_text(each))
        value, lines = params[1].name.value, [line.strip() for line in code.splitlines()]
        is_list = lines in ([f"{value} = list({value})", f"return {value}"], [f"return list({value})"])
        if is_list and [each for each, _ in functions].count(name) == 1:
            for definition in definitions:
                for number, each in enumerate(definition.nodes):
                    changed = each.visit(_Called(name, cst.Name("list")))
                    assert isinstance(changed, cst.BaseStatement)
                    definition.nodes[number] = changed


class _Called(cst.CSTTransformer):
    """Calls something else in the place of a method of `self`."""

    def __init__(self, name: str, instead: cst.BaseExpression) -> None:
        super().__init__()
        self._code = f"self.{name}"
        self._instead = instead

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        return self._instead if code_of(original_node) == self._code else updated_node


class Renamed(cst.CSTTransformer):
    """Gives methods other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        """Where it is defined."""
        name = updated_node.name.value
        return updated_node.with_changes(name=cst.Name(self._names.get(name, name)))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        """Where it is called."""
        name = updated_node.attr.value
        return updated_node.with_changes(attr=cst.Name(self._names.get(name, name)))


def drop_fields(definitions: Collection[Definition], optional: Mapping[str, Set[str]]) -> None:
    """Drop attributes that nothing reads: what only a constructor assigns, and these of a class.

    Args:
        definitions: all of the file; they are changed.
        optional: class → fields, or parameters of its objects. What is read of `params` is another class's.
    """
    found, stored = _Calls(), _Stores()
    for definition in definitions:
        for node in definition.nodes:
            node.visit(found)
            node.visit(stored)
    methods = {name for name, _, is_method, _ in _functions(definitions) if is_method}
    read = found.read | (found.calls.keys() - methods)
    gone = {name: names - read for name, names in optional.items()}
    for definition in definitions:
        if isinstance(definition.node, cst.ClassDef) and not definition.node.decorators:
            name = definition.node.name.value
            gone[name] = gone.get(name, set()) | (stored.made.get(name, set()) - stored.changed - read)
    for definition in definitions:
        for number, node in enumerate(definition.nodes):
            changed = node.visit(_WithoutFields(gone, optional))
            assert isinstance(changed, cst.BaseStatement)
            definition.nodes[number] = changed


class _Stores(cst.CSTVisitor):
    """Attributes that are assigned: class → those of `self` in its constructor; and all that others assign."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, set[str]] = {}
        self.changed: set[str] = set()
        self._where = ["", ""]

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._where[0] = node.name.value

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._where[0] = ""

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._where[1] = node.name.value

    def _store(self, target: cst.CSTNode) -> None:
        if isinstance(target, cst.Tuple):
            for element in target.elements:
                self._store(element.value)
        elif isinstance(target, cst.Attribute):
            if self._where[1] == "__init__" and code_of(target.value) == "self":
                self.made.setdefault(self._where[0], set()).add(target.attr.value)
            else:
                self.changed.add(target.attr.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._store(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._store(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._store(node.target)


class _WithoutFields(cst.CSTTransformer):
    """Drops fields: where they are declared and assigned, and where a constructor is passed one."""

    def __init__(self, gone: Mapping[str, Set[str]], passed: Mapping[str, Set[str]]) -> None:
        super().__init__()
        self._gone = gone
        self._passed = {name: gone[name] & names for name, names in passed.items()}
        self._class = ""

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._class = node.name.value

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self._class = ""
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        line, names = updated_node.body[0], self._gone.get(self._class, frozenset())
        target: cst.BaseExpression | None = None
        if isinstance(line, cst.AnnAssign):
            target = line.target
        elif isinstance(line, cst.Assign) and len(line.targets) == 1:
            target = line.targets[0].target
        if isinstance(target, cst.Attribute) and code_of(target.value) == "self":
            return cst.RemoveFromParent() if target.attr.value in names else updated_node
        is_field = isinstance(line, cst.AnnAssign) and isinstance(target, cst.Name) and target.value in names
        return cst.RemoveFromParent() if is_field else updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if original_node.name.value != "__init__" or not (names := self._passed.get(self._class, frozenset())):
            return updated_node
        named = [each for each in updated_node.params.kwonly_params if each.name.value not in names]
        return updated_node.with_changes(params=updated_node.params.with_changes(kwonly_params=named))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        names = self._passed.get(code_of(updated_node.func).rpartition(".")[2], frozenset())
        if not names:
            return updated_node
        args = [each for each in updated_node.args if each.keyword is None or each.keyword.value not in names]
        return _with_args(original_node, updated_node, args)
