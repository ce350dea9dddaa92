"""Schedulers from changed sources: `minicache.scheduler` and the incidents again, with other code for some modules.

Both whole packages are imported again, so each class stands on the changed ones, and the one that is imported already
stays what it is: two panes may run the same scheduler, one with changes and one without.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import minicache
import minicache_course
from scripts.browser.playground.schedulers import INCIDENTS, PACKAGE


class SourceFinder(MetaPathFinder, Loader):
    """Answers for the modules in `sources`, and loads them from there.

    Attributes:
        sources: module name → its code.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The changed module, or None for Python to look further."""
        if name not in self.sources:
            return None
        spec = ModuleSpec(name, self, origin=file_of(name))
        spec.has_location = True  # messages say the file
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code; tracebacks show its lines."""
        source, file = self.sources[module.__name__], file_of(module.__name__)
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), module.__dict__)


def file_of(module: str) -> str:
    """What tracebacks call the file of a changed module."""
    return f"{module.rpartition('.')[2]}.py"


@contextmanager
def importing(sources: Mapping[str, str]) -> Iterator[Callable[[str], ModuleType]]:
    """A function that gives modules of the packages by name, as `importlib.import_module`, the changed ones changed.

    Args:
        sources: module name → its code. Without any, the modules are those that everyone gets.

    Raises:
        Exception: from the function that is given, whatever the code raises when it is imported.
    """
    if not sources:
        yield importlib.import_module
        return
    finder, usual = SourceFinder(sources), _taken_out()
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module
    finally:
        sys.meta_path.remove(finder)
        _taken_out()
        sys.modules.update(usual)
        minicache.__dict__["scheduler"] = usual[PACKAGE]
        if INCIDENTS in usual:
            minicache_course.__dict__["incidents"] = usual[INCIDENTS]


def _taken_out() -> dict[str, ModuleType]:
    """The modules of the packages that are imported, which Python then forgets."""
    names = [name for name in sys.modules if f"{name}.".startswith((f"{PACKAGE}.", f"{INCIDENTS}."))]
    return {name: sys.modules.pop(name) for name in names}


def place_of(error: BaseException, modules: Iterable[str]) -> tuple[str, int | None] | None:
    """The deepest place in changed modules that `error` passed through: module and line; None if there is none.

    A module that lacks what another one imports from it is a place without a line.
    """
    changed = {file_of(module): module for module in modules}
    if isinstance(error, SyntaxError) and error.filename in changed:
        return changed[error.filename], error.lineno
    places = [(frame.f_code.co_filename, lineno) for frame, lineno in traceback.walk_tb(error.__traceback__)]
    for file, lineno in reversed(places):
        if file in changed:
            return changed[file], lineno
    if isinstance(error, ImportError) and error.name and file_of(error.name) in changed:
        return error.name, None
    return None


def source_of(module: str) -> str:
    """The code of a module as the package has it."""
    return inspect.getsource(importlib.import_module(module))
