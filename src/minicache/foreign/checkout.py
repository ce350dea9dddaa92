"""A checkout of another engine: which adapter knows it, and its modules, imported without installing it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

from minicache.errors import CheckoutError
from minicache.foreign.adapter import Adapter

ENGINES = {"nano-vllm": "NanoVllm", "mini-sglang": "MiniSglang"}
"""The engines that there is an adapter for, and its class."""


def find_adapter(checkout: Path, engine: str | None = None) -> Adapter:
    """An adapter for a checkout, with the engine's modules imported.

    Args:
        checkout: the folder with the engine's source.
        engine: one of `ENGINES`, or the path of a file that has one subclass of `Adapter`; None: as the checkout's
            files tell.

    Raises:
        CheckoutError: it is no such checkout, or its modules cannot be imported; or the file has no adapter.
    """
    if not checkout.is_dir():
        raise CheckoutError(f"{checkout} is no folder: give the folder that `git clone` has made")
    if engine is not None and engine.endswith(".py"):
        return _adapter_in(Path(engine))(checkout)
    if engine is not None and engine not in ENGINES:
        raise CheckoutError(f"no engine {engine!r}: take {', '.join(ENGINES)}, or the path of an adapter, a .py file")
    for name in ENGINES if engine is None else (engine,):
        adapter = _built_in(name)
        if (checkout / adapter.marker).is_file():
            return adapter(checkout)
    known = " or ".join(f"{_built_in(name).marker} ({name})" for name in ([engine] if engine else ENGINES))
    raise CheckoutError(f"{checkout} has no {known}: give another folder, or --engine your_adapter.py")


def load(
    root: Path,
    modules: Iterable[str],
    *,
    bare: Iterable[str] = (),
    instead: Mapping[str, ModuleType | None] | None = None,
) -> list[ModuleType]:
    """Import modules from a checkout, in place of those of the checkout that was loaded before.

    Args:
        root: the folder that has the package.
        modules: their full names, of one package. It stays in `sys.modules`: some engines import while they run.
        bare: packages of which `__init__` is not run, because it would import the whole engine.
        instead: module → what is imported in its place: for modules that a scheduler names and does not need. None
            stands for an object that has every attribute. Those of other packages are put back afterwards.

    Raises:
        CheckoutError: one of them cannot be imported. The error is the cause.
    """
    names = list(modules)
    package = names[0].split(".")[0]
    for name in [each for each in sys.modules if each.split(".")[0] == package]:
        del sys.modules[name]
    before = {name: sys.modules.get(name) for name in instead or {} if name.split(".")[0] != package}
    for name in bare:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    for name, module in (instead or {}).items():
        sys.modules[name] = MagicMock(name=name) if module is None else module
    sys.path.insert(0, str(root))
    try:
        return [import_module(name) for name in names]
    except Exception as error:
        raise CheckoutError(f"{root}: {names[0]} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(root))
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _built_in(name: str) -> type[Adapter]:
    adapter: type[Adapter] = getattr(import_module(f"minicache.foreign.{name.replace('-', '_')}"), ENGINES[name])
    return adapter


def _adapter_in(file: Path) -> type[Adapter]:
    """The one subclass of `Adapter` that a file defines.

    Raises:
        CheckoutError: there is no such file, it cannot be imported, or it defines none, or several.
    """
    spec = spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise CheckoutError(f"there is no {file}: --engine takes the path of a .py file with an adapter")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckoutError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Adapter) and each.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise CheckoutError(f"{file} defines {len(found)} subclasses of minicache.foreign.Adapter: define one")
    return found[0]
