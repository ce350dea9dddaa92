"""F-strings as templates: f"{len(ids)} of {total} differ" is "{ids} of {total} differ", which a catalogue can have.

The course and its tests tell in f-strings. Where the reader's language is not English, each is compiled as
`said("{ids} of {total} differ", ids=f"{len(ids)}", total=f"{total}")`: modules of the course by `MarkingLoader`, tests
by pytest's own loader. `scripts/catalogues.py` finds the same templates.
"""

from __future__ import annotations

import ast
import importlib
import sys
from functools import partial
from importlib.machinery import FileFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from minicache_course.language import in_use, said

_SAID = "@said"  # no name of a module's own
_FUTURE = "from __future__ import annotations"


def template_of(node: ast.JoinedStr) -> tuple[str, dict[str, ast.FormattedValue]]:
    """An f-string's template, and for each of its places what stands there."""
    template, places = "", dict[str, ast.FormattedValue]()
    for part in node.values:
        if isinstance(part, ast.FormattedValue):
            name, number = _name_of(part.value), 1
            place = name
            while ast.dump(places.setdefault(place, part)) != ast.dump(part):
                number += 1
                place = f"{name}{number}"
            template += f"{{{place}}}"
        else:
            template += part.value.replace("{", "{{").replace("}", "}}")  # type: ignore[attr-defined]
    return template, places


def _name_of(value: ast.expr) -> str:
    """A short name for what is put into a string."""
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call(args=[inner, *_]) | ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name_of(inner)
    return "what"


class _Marker(ast.NodeTransformer):
    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """The call that makes the same text, and notes what it is made from."""
        template, places = template_of(node)
        values = [ast.keyword(name, ast.JoinedStr([part])) for name, part in places.items()]
        for part in places.values():
            part.value = self.visit(part.value)
        call = ast.Call(ast.Name(_SAID, ast.Load()), [ast.Constant(template)], values)
        return ast.fix_missing_locations(ast.copy_location(call, node))


def mark(module: ast.Module) -> ast.Module:
    """Have a module, which is not compiled yet, note what its f-strings are made from."""
    _Marker().visit(module)
    is_head = [isinstance(each, ast.Expr) or ast.unparse(each) == _FUTURE for each in module.body]
    imported = ast.ImportFrom(said.__module__, [ast.alias(said.__name__, _SAID)], 0)
    module.body.insert([*is_head, False].index(False), imported)
    return ast.fix_missing_locations(module)


class MarkingLoader(SourceFileLoader):
    """Loads a module that is marked; its bytecode is kept under a name of its own."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The module's code, new or from its file."""
        bootstrap: Any = importlib._bootstrap_external
        usual = bootstrap.cache_from_source
        bootstrap.cache_from_source = partial(usual, optimization="said")
        try:
            return super().get_code(fullname)
        finally:
            bootstrap.cache_from_source = usual

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]
        """Compile the module."""
        return super().source_to_code(mark(ast.parse(data)), path, **options)


def install() -> None:
    """Have the modules of the course that are loaded from now on marked."""
    for package in ("minicache_course", "minicache_teach"):
        folder = str(Path(__file__).parents[1] / package)
        sys.path_importer_cache[folder] = FileFinder(folder, (MarkingLoader, [".py"]))


def load(file: Path) -> ModuleType:
    """A module made from a file that tests share. It is not in `sys.modules`."""
    loader = (SourceFileLoader if in_use() == "en" else MarkingLoader)(file.stem, str(file))
    spec = spec_from_loader(file.stem, loader)
    assert spec
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
