"""A look at what a submission imports and calls, without running it: notes for the teacher, and no verdict.

A lab needs torch and its own package. A file that imports `os`, replaces a function of `torch` or reaches for
`__globals__` may be after the grader, and a table of hundreds of numbers may be the answers. What the reference or the
starter of the same file does is never noted. Code that knows this list can evade it: the isolation of submissions
does not depend on it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

# ruff: noqa: SIM905 - lists of words are read more easily as text
MODULES = frozenset(
    "_ctypes _io _pytest _thread atexit builtins code codeop ctypes dis faulthandler ftplib gc http hypothesis "
    "importlib inspect io linecache marshal mmap multiprocessing os pathlib pickle pkgutil pluggy posix pty pytest "
    "requests resource runpy select shelve shutil signal site socket sqlite3 ssl subprocess sys tempfile threading "
    "trace unittest urllib xmlrpc zipimport".split()
)
"""What no lab needs, by its first name; the reference of a phase may use some of them."""

PACKAGES = ("minicache_cli", "minicache_course", "minicache_teach")
"""What is the grader's, but for what phase 7 builds on."""

_MATERIAL = "minicache_course.incidents"

_CALLS = frozenset("__import__ breakpoint compile delattr eval exec exit globals locals open quit vars".split())
_ATTRIBUTES = frozenset(
    "__base__ __bases__ __builtins__ __closure__ __code__ __getattribute__ __globals__ __import__ __loader__ __mro__ "
    "__spec__ __subclasses__ __traceback__ _getframe ag_frame cr_frame f_back f_builtins f_globals f_locals gi_frame "
    "import_module system tb_frame tb_next CodeType FunctionType".split()
)
_DEFINITIONS = frozenset(
    "__class__ __del__ __eq__ __getattribute__ __instancecheck__ __subclasscheck__ __torch_dispatch__ "
    "__torch_function__".split()
)
_MAX_CONSTANTS = 100  # in one list, tuple, set or dict
_MAX_NBYTES = 2**17  # of a file that is read: the course's own are under 50 kB, and Python may take minutes for 1 MB
_MAX_LINES = 3  # of one kind that are listed


def scan(source: bytes, *known: bytes) -> list[str]:
    """What is unusual in a file, such as `imports os (line 3)`.

    Args:
        source: the file's content.
        known: other files; what one of them does is not unusual.

    Returns:
        A note for each kind, in the order of their first lines; none if the file is no Python: its import tells that.
        Of a file of more than 128 KiB the note says only that.
    """
    if len(source) > _MAX_NBYTES:
        return [f"has {len(source):,} bytes, too many to look for unusual imports and calls"]
    try:
        found = _found(source)
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        return []
    usual = {what for each in known for what in _kinds(each)}
    return [f"{what} ({_lines(sorted(set(lines)))})" for what, lines in found.items() if what not in usual]


@cache
def _kinds(source: bytes) -> frozenset[str]:
    return frozenset(_found(source))


def _lines(lines: list[int]) -> str:
    listed = ", ".join(map(str, lines[:_MAX_LINES])) + (" …" if lines[_MAX_LINES:] else "")
    return f"line{'s' if len(lines) > 1 else ''} {listed}"


def _found(source: bytes) -> dict[str, list[int]]:
    """What a file does of what is looked for → the lines, the first first."""
    tree = ast.parse(source)
    imported = {name for node in ast.walk(tree) for name in _bound(node)}
    pairs = sorted((node.lineno, what) for node in ast.walk(tree) for what in _of(node, imported))  # type: ignore[attr-defined]
    found: dict[str, list[int]] = {}
    for line, what in pairs:
        found.setdefault(what, []).append(line)
    return found


def _of(node: ast.AST, imported: set[str]) -> Iterator[str]:
    """What one node does of what is looked for."""
    match node:
        case ast.Import(names=names):
            yield from (f"imports {each.name}" for each in names if _is_suspicious(each.name))
        case ast.ImportFrom(module=module, level=level) if level > 1:
            yield f"imports {'.' * level}{module or ''}"
        case ast.ImportFrom(module=module, names=names, level=level):
            package = ".".join(filter(None, ["minicache" if level else "", module]))
            if _is_suspicious(package):
                yield f"imports {package}"
            else:
                wholes = [f"{package}.{each.name}" for each in names]
                yield from (f"imports {each}" for each in wholes if _is_suspicious(each) or _last(each) in _ATTRIBUTES)
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr" | "__import__" as name), args=[*args]):
            if any(_is_built(each) for each in args[:2]):
                yield f"{name} with a computed name"
            if name in _CALLS:
                yield f"calls {name}"
            if name == "setattr" and args and _root(args[0]) in imported:
                yield f"sets attributes of {_dotted(args[0])}"
        case ast.Name(id=name) if name in _CALLS or name == "__builtins__":
            yield f"calls {name}" if name in _CALLS else f"uses {name}"
        case ast.Attribute(ctx=ast.Store() | ast.Del()) if _root(node) in imported:
            yield f"sets {_dotted(node)}"
        case ast.Attribute(attr="__class__", ctx=ast.Store()):
            yield "sets __class__"
        case ast.Attribute(attr=name) if name in _ATTRIBUTES:
            yield f"uses {name}"
        case ast.FunctionDef(name=name) if name in _DEFINITIONS:
            yield f"defines {name}"
        case ast.Assign(targets=[ast.Name(id=name)]) if name in _DEFINITIONS:
            yield f"defines {name}"
        case ast.Constant(value=str(text)) if text in _ATTRIBUTES or text in _CALLS or text.startswith(PACKAGES):
            yield f"has the string {text!r}"
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            if (count := sum(isinstance(each, ast.Constant) for each in ast.iter_child_nodes(node))) >= _MAX_CONSTANTS:
                yield f"has a table of {count} constants"


def _bound(node: ast.AST) -> list[str]:
    """The names that an import binds: modules, classes and functions of others."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [each.asname or each.name.partition(".")[0] for each in node.names]
    return []


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_suspicious(module: str) -> bool:
    first = module.partition(".")[0]
    return first in MODULES or (first in PACKAGES and not f"{module}.".startswith(f"{_MATERIAL}."))


def _is_built(node: ast.expr) -> bool:
    """Whether a name is put together from parts: `"__" + "dict__"`, `"".join(…)`, `f"{a}"`, `text[::-1]`."""
    return isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call | ast.Subscript)


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with, "" if it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "…", *reversed(parts[-4:])])
