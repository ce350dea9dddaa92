"""The definitions of modules, as they are in their files, and which other definitions each of them uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from minicache_course.errors import CourseError

Member = cst.BaseStatement | cst.BaseSmallStatement


@dataclass
class Definition:
    """A class, function or constant of a module.

    Attributes:
        module: where it is from.
        name: its name there.
        nodes: its statement; and the text behind it, if it is a constant with one.
    """

    module: str
    name: str
    nodes: list[cst.BaseStatement]

    @property
    def node(self) -> cst.BaseStatement:
        """Its statement."""
        return self.nodes[0]


@dataclass
class Source:
    """A module that is read.

    Attributes:
        module: its name.
        file: the file.
        definitions: name → definition, in the order of the file.
        imports: name in the module → where it is from: (module, name there); "" for the module itself.
    """

    module: str
    file: Path
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_source(module: str, file: Path) -> Source:
    """Read a module's file.

    Raises:
        CourseError: it is no Python.
    """
    source = Source(module, file)
    try:
        tree = cst.parse_module(file.read_text(encoding="utf-8"))
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise CourseError(f"{file} cannot be read as Python") from error
    _collect(source, tree.visit(_InnerImports(source)).body)
    return source


def is_ours(module: str) -> bool:
    """Whether a module is the package's."""
    return module.split(".")[0] in ("minicache", "minicache_course")


class _InnerImports(cst.CSTTransformer):
    """Takes imports of the package out of functions, and notes them as if they were at the module's top."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self._depth = 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._depth += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self._depth -= 1
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        line = original_node.body[0]
        if not self._depth or not isinstance(line, cst.ImportFrom):
            return updated_node
        found = imports_of(line)
        if not any(is_ours(module) for module, _ in found.values()):
            return updated_node
        self._source.imports |= found
        return cst.RemoveFromParent()


def _collect(source: Source, body: Collection[cst.BaseStatement]) -> None:
    last: Definition | None = None
    for node in body:
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            _collect(source, [each for each in node.body.body if isinstance(each, cst.BaseStatement)])
        elif isinstance(node, cst.If):  # the last lines of a script
            last = source.definitions["__main__"] = Definition(source.module, "__main__", [node])
        elif isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Import | cst.ImportFrom):
            source.imports |= imports_of(node.body[0])
        elif last is not None and is_text(node):
            last.nodes.append(node)
            last = None
        else:
            last = None
            for name in defined_names(node):
                last = source.definitions[name] = Definition(source.module, name, [node])


def imports_of(line: cst.Import | cst.ImportFrom) -> dict[str, tuple[str, str]]:
    """What an import defines: name → (module, name there)."""
    if isinstance(line.names, cst.ImportStar):
        return {}
    found = {}
    for alias in line.names:
        name = alias.evaluated_name
        if isinstance(line, cst.ImportFrom):
            assert line.module is not None, "this package has absolute imports only"
            found[alias.evaluated_alias or name] = (cst.Module([]).code_for_node(line.module), name)
        else:  # `import a.b` defines a; `import a.b as c` defines c
            found[alias.evaluated_alias or name.split(".")[0]] = (name, "")
    return found


def defined_names(node: cst.CSTNode) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, cst.ClassDef | cst.FunctionDef):
        return [node.name.value]
    if not isinstance(node, cst.SimpleStatementLine):
        return []
    line = node.body[0]
    targets: list[cst.BaseExpression] = []
    if isinstance(line, cst.Assign):
        targets = [each.target for each in line.targets]
    elif isinstance(line, cst.AnnAssign):
        targets = [line.target]
    return [target.value for target in targets if isinstance(target, cst.Name)]


def is_text(node: cst.CSTNode) -> bool:
    """Whether a statement is a text, a docstring for instance."""
    if not isinstance(node, cst.SimpleStatementLine) or not isinstance(node.body[0], cst.Expr):
        return False
    return isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)


def members(node: cst.ClassDef) -> list[Member]:
    """The statements of a class."""
    return list(node.body.body)


@dataclass
class Uses(cst.CSTVisitor):
    """The names that a piece of code takes from outside, and all attributes that it names.

    Attributes:
        names: not those that are local to it.
        attributes: of whatever.
        chains: (name, attribute) of each attribute of a name.
    """

    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    chains: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        """Note it; the name in front is visited."""
        self.attributes.add(node.attr.value)
        if isinstance(node.value, cst.Name):
            self.chains.add((node.value.value, node.attr.value))
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        """A keyword is no name."""
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        """Its annotation and default only."""
        for part in (node.annotation, node.default):
            if part is not None:
                part.visit(self)
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        """What is local to a function is not taken from outside."""
        inner = Uses()
        for part in (*node.decorators, node.params, node.body, *([node.returns] if node.returns else [])):
            part.visit(inner)
        mine = locals_of(node)
        self.names |= inner.names - mine
        self.attributes |= inner.attributes
        self.chains |= {chain for chain in inner.chains if chain[0] not in mine}
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        """Not its own name."""
        for part in (*node.decorators, *node.bases, node.body):
            part.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        """Note it."""
        self.names.add(node.value)


def uses(nodes: Collection[cst.CSTNode]) -> Uses:
    """What pieces of code use."""
    found = Uses()
    for node in nodes:
        node.visit(found)
    return found


class _Locals(cst.CSTVisitor):
    """How often a function binds each name: its parameters, and all that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def visit_Param(self, node: cst.Param) -> None:
        self.counts[node.name.value] += 1

    def _bind(self, target: cst.BaseExpression) -> None:
        if isinstance(target, cst.Name):
            self.counts[target.value] += 1
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self._bind(element.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._bind(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._bind(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._bind(node.target)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._bind(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._bind(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._bind(node.target)

    def visit_AsName(self, node: cst.AsName) -> None:
        if isinstance(node.name, cst.Name | cst.Tuple | cst.List):
            self._bind(node.name)


def locals_of(node: cst.FunctionDef) -> set[str]:
    """The names that are local to a function."""
    return set(bindings(node))


def bindings(node: cst.FunctionDef) -> Counter[str]:
    """How often each name that is local to a function is bound in it."""
    node.visit(found := _Locals())
    return found.counts


def functions_of(source: Source) -> Iterator[tuple[str, cst.FunctionDef, bool]]:
    """The functions and methods of a module: name, code, whether it is a method."""
    for definition in source.definitions.values():
        node = definition.node
        if isinstance(node, cst.FunctionDef):
            yield node.name.value, node, False
        elif isinstance(node, cst.ClassDef):
            for member in members(node):
                if isinstance(member, cst.FunctionDef):
                    yield member.name.value, member, True
