"""What a policy's file may import and name, and how it is run. Pure standard library.

A policy that wants to know the future or the time has to get at something that it was not given: through an import, a
built-in function, or an attribute of Python's own. So the file is read first, and what is not on a list is refused with
its line. What gets past the list is found by what it does (`minicache_course.arena.score`).
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, Final

from minicache_course.arena.loop import POLICY_FILE, Policy, PolicyRefusedError, PolicyStopped, refused_for
from minicache_course.language import said

MODULES: Final = frozenset({
    "__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools", "heapq",
    "itertools", "math", "typing", "minicache.errors", "minicache.request", "minicache_course.arena",
    "minicache.memory", "minicache.memory.blocks", "minicache.memory.eviction", "minicache.memory.prefix",
    "minicache.scheduler", "minicache.scheduler.base", "minicache.scheduler.output", "minicache.scheduler.queue",
    "minicache.scheduler.static", "minicache.scheduler.continuous", "minicache.scheduler.paged",
    "minicache.scheduler.fair", "minicache.scheduler.prefix_caching", "minicache.scheduler.sharing",
    "minicache.scheduler.chunked", "minicache.scheduler.vllm_options", "minicache.scheduler.vllm_priority",
    "minicache.fleet", "minicache.fleet.router", "minicache.fleet.views", "minicache.fleet.autoscaling",
    "minicache.fleet.affinity", "minicache.fleet.power_of_two",
})  # fmt: skip
"""What may be imported."""

BUILTINS: Final = frozenset({
    "abs", "all", "any", "bool", "classmethod", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "int",
    "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "pow", "property",
    "range", "repr", "reversed", "round", "set", "slice", "sorted", "staticmethod", "str", "sum", "super", "tuple",
    "zip", "False", "None", "True", "NotImplemented", "ArithmeticError", "AssertionError", "AttributeError",
    "Exception", "IndexError", "KeyError", "LookupError", "NotImplementedError", "RuntimeError", "StopIteration",
    "TypeError", "ValueError", "ZeroDivisionError",
})  # fmt: skip
"""Python's own names that may be used. `id` and `hash` are not the same in every process."""

ATTRIBUTES: Final = frozenset({
    "ag_code", "ag_frame", "cell_contents", "cr_code", "cr_frame", "f_back", "f_builtins", "f_code", "f_globals",
    "f_locals", "format", "format_map", "gi_code", "gi_frame", "gi_yieldfrom", "tb_frame", "tb_next", "with_traceback",
})  # fmt: skip
"""Attributes through which a program looks at itself: refused. So are those with two underscores."""

NAMES: Final = {
    "abc": {"ABC", "abstractmethod"},
    "dataclasses": {"dataclass", "field", "replace"},
    "enum": {"Enum", "IntEnum", "auto"},
    "functools": {"cache", "cached_property", "cmp_to_key", "lru_cache", "partial", "reduce", "total_ordering"},
    "typing": {
        "Any", "ClassVar", "Final", "Generic", "Literal", "NamedTuple", "Protocol", "Self", "TypeAlias", "TypedDict",
        "TypeVar", "Unpack", "TYPE_CHECKING",
    },
}  # fmt: skip
"""Of some modules, the names that may be used: others get at attributes by a text, or evaluate it."""

DUNDERS: Final = frozenset({"__init__", "__post_init__"})
"""What may be called with two underscores: of `super()`."""


def load(text: str, *, name: str = "create") -> Any:
    """Check a policy's file, run it, and give what it defines.

    Args:
        text: of the file.
        name: what it must define: a function.

    Raises:
        PolicyRefusedError: it is no Python, uses what is not allowed, raises, or does not define the function.
    """
    tree = parse(text)
    module = ModuleType("minicache_policy")
    module.__dict__["__builtins__"] = _builtins()
    sys.modules[module.__name__] = module  # dataclasses looks its classes' module up
    try:
        exec(compile(tree, POLICY_FILE, "exec"), module.__dict__)
    except Exception as error:
        raise refused_for(error) from error
    found = module.__dict__.get(name)
    if not isinstance(found, FunctionType):
        raise PolicyRefusedError("create", said("define a function {name}(arena)", name=name))
    return found


def parse(text: str) -> ast.Module:
    """Read a policy's file, and check it without running it.

    Raises:
        PolicyRefusedError: it is no Python, or uses what is not allowed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line, what = getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or str(error)
        raise PolicyRefusedError("syntax", said("line {line}: {what}", line=line, what=what), line) from error
    check(tree)
    return tree


def load_policy(text: str) -> Policy:
    """As `load`, of a scheduler's file."""
    policy: Policy = load(text)
    return policy


def check(tree: ast.Module) -> None:
    """Raise unless a file keeps to what is allowed.

    Raises:
        PolicyRefusedError: a line does not; the message names it, and what it uses.
    """
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                _import(each.name, node.lineno)
                modules[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            _import(module, node.lineno)
            for each in node.names:
                if _is_module(module, each.name, node.lineno):
                    modules[each.asname or each.name] = f"{module}.{each.name}"
    bound, bases = _bound(tree), {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _attribute(node.attr, node.lineno)
        elif isinstance(node, ast.MatchClass):
            for attribute in node.kwd_attrs:
                _attribute(attribute, node.lineno)
        elif isinstance(node, ast.Name) and (
            node.id.startswith("__") or (node.id not in bound and node.id not in BUILTINS)
        ):
            _refuse("name", node.lineno, node.id)
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            _refuse("name", node.lineno, "except:")  # would catch what stops it
        if isinstance(node, ast.expr) and _module(node, modules) and id(node) not in bases:
            _refuse("import", node.lineno, ast.unparse(node))  # a module is used as `module.name` only


def _module(node: ast.expr, modules: dict[str, str]) -> str | None:
    """The module that an expression is; None if it is none. Refused if it is a name that a module does not offer."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (module := _module(node.value, modules)):
        return f"{module}.{node.attr}" if _is_module(module, node.attr, node.lineno) else None
    return None


def _attribute(name: str, line: int) -> None:
    if (name.startswith("__") and name not in DUNDERS) or name in ATTRIBUTES:
        _refuse("attribute", line, f".{name}")


def _refuse(rule: str, line: int, what: str) -> None:
    message = said("line {line}: {what} is not allowed in a policy", line=line, what=what)
    raise PolicyRefusedError(rule, message, line)


def _import(name: str, line: int) -> None:
    if name not in MODULES:
        _refuse("import", line, name)


def _is_module(module: str, name: str, line: int) -> bool:
    """Whether a name of an allowed module is an allowed module itself; refused if it is another, private or unknown."""
    whole = f"{module}.{name}"
    if whole in MODULES:
        return True
    found = getattr(import_module(module), name, None)
    if name.startswith("_") and module != "__future__":
        _refuse("import", line, whole)
    if found is None or name not in NAMES.get(module, {name}) or isinstance(found, ModuleType):
        _refuse("import", line, whole)
    return False


def _bound(tree: ast.AST) -> set[str]:
    """Every name that the file gives a meaning anywhere."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
    return names


def _builtins() -> dict[str, Any]:
    """What a policy finds of Python's own: the names above, and no more at run time either."""
    found = {name: getattr(builtins, name) for name in BUILTINS if hasattr(builtins, name)}
    return found | {"sum": _sum, "__build_class__": builtins.__build_class__, "__import__": _imported}


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    """The sum from left to right. Python's own rounds floats in another way from version 3.12 on."""
    for value in values:
        start = start + value
    return start


def _imported(name: str, *arguments: Any, **options: Any) -> Any:
    if name not in MODULES:
        raise ImportError(name)
    return __import__(name, *arguments, **options)


@contextmanager
def unchanged() -> Iterator[None]:
    """While it lasts, no class and no table of ours may be changed; what was changed is put back.

    Raises:
        PolicyRefusedError: at the end, if one was, whatever else the policy was refused for.
    """
    before = {each: dict(vars(each)) for each in _classes()}
    tables = [(name, table, dict(table)) for name, table in _tables()]
    changed: list[str] = []
    refused: PolicyRefusedError | None = None
    try:
        yield
    except PolicyRefusedError as error:
        refused = error
    except PolicyStopped as stopped:
        refused = stopped.refused
    finally:
        for name, table, was in tables:
            if table != was:
                changed.append(name)
                table.clear()
                table.update(was)
        for each, members in before.items():
            now = dict(vars(each))
            for name in now.keys() | members.keys():
                if now.get(name) is members.get(name):
                    continue
                if name in members:
                    setattr(each, name, members[name])
                else:
                    delattr(each, name)
                if not name.startswith(("__", "_abc")):
                    changed.append(f"{each.__name__}.{name}")
    if changed:
        raise PolicyRefusedError("tampering", said("the policy changed {what}", what=min(changed))) from refused
    if refused is not None:
        raise refused


def _tables() -> Iterator[tuple[str, dict[Any, Any]]]:
    """The dictionaries that are constants of the modules that a run uses, by their names."""
    for module in _modules():
        for name, each in vars(module).items():
            if isinstance(each, dict) and name.isupper():
                yield name, each


def _classes() -> set[type]:
    """Those of the modules that a run uses."""
    found = (each for module in _modules() for each in vars(module).values() if isinstance(each, type))
    return {each for each in found if each.__module__.startswith("minicache")}


def _modules() -> list[ModuleType]:
    ours = ("minicache.scheduler", "minicache.memory", "minicache.request", "minicache.simulator", "minicache.fleet")
    return [module for name, module in list(sys.modules.items()) if name.startswith((*ours, "minicache_course.arena"))]
