"""A package's public names, imported when they are first asked for (PEP 562).

`import minicache` must bring in neither torch nor numpy, and a package must not import the modules next to the one that
was asked for: a learner's file may stand in for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazily(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A module-level `__getattr__` that finds each public name in the submodule that defines it, and its `__dir__`.

    Args:
        package: the package's `__name__`.
        modules: submodule → the names that it defines, separated by spaces.
    """
    found_in = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in found_in:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{found_in[name]}"), name)

    def __dir__() -> list[str]:  # noqa: N807
        return sorted(found_in)

    return __getattr__, __dir__
