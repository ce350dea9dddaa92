"""What notices a submission that makes tests pass: tests that must fail, and the grader's functions, remembered.

A submission runs in one process with its tests, so it can replace the grader. Before a result is reported, the grader's
modules are compared with their state before any learner's file was loaded, and those that come later (the
reference's other modules, the tests) with what they were when they were loaded; so is what finds modules; pytest's
hooks must not be a submission's; and among the tests of each task is a control, a test that fails unless something lets
every test pass.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any
from zipimport import zipimporter

import pytest

from minicache_course.finder import LabFinder
from minicache_course.journal import Event
from minicache_course.table import Task
from minicache_course.workspace import PACKAGES

_OURS = tuple(f"{name}." for name in PACKAGES)
_JUDGES: tuple[str, ...] = (*_OURS, "_pytest.", "pytest.", "hypothesis.", "pluggy.")
_JUDGES += ("builtins.", "json.", "os.", "math.", "operator.", "random.", "itertools.", "statistics.")
_JUDGES += ("ast.", "dataclasses.", "functools.", "importlib.", "inspect.", "io.", "pathlib.", "re.")  # load the tests
_HOOKS = (*_JUDGES, "pytest_timeout.", "_hypothesis_pytestplugin.", "tests.", "conftest.")  # have hooks of pytest's

_ORACLES = ("torch", "torch.nn.functional", "torch.linalg", "torch.testing")  # what a test computes its answer with
_IN_C = ("torch", "random")  # whose classes inherit from some in C, where a method is replaced by one that hides it

_find_spec = PathFinder.find_spec  # bound here, before a submission may replace it

_PYTESTS = ("_getini_unknown_type",)  # pytest replaces it itself, after this


class Remembered(MetaPathFinder):
    """The functions and classes of the modules that judge, as they are now; of the package's, as they are when loaded.

    Args:
        theirs: the modules that a learner's file stands in for.

    Attributes:
        add: remembers another module, as it is now.
        replaced: the name of what is another now, or "".
    """

    def __init__(self, theirs: Collection[str]) -> None:
        held: list[tuple[Any, str, str, object]] = []
        known: set[str] = set()  # modules of the package
        finders, path_hooks = (*sys.meta_path, self), list(sys.path_hooks)
        codes: list[tuple[str, FunctionType, object]] = []
        classes: list[tuple[str, type, int]] = []

        def add(module: ModuleType) -> None:
            known.add(module.__name__)
            for each in _held(module):
                if isinstance(each[3], ModuleType) and each[3].__name__ in theirs:
                    continue
                held.append(each)
                name, value = each[2:]
                if isinstance(value, FunctionType) and value.__module__ not in theirs:
                    codes.append((name, value, value.__code__))
                elif isinstance(value, type) and value.__module__ == module.__name__ in _IN_C:
                    classes.append((name, value, _num_hiding(value)))

        def replaced() -> str:
            is_same = [*map(id, sys.path_hooks)] == [*map(id, path_hooks)]
            if not is_same or any(map(_is_odd_finder, sys.path_importer_cache.values())):
                return "sys.path_hooks"
            for finder in sys.meta_path:
                if finder is PathFinder:
                    break
                is_labs = type(finder) is LabFinder and finder.files.keys() <= set(theirs)
                if not (is_labs or any(finder is each for each in finders)) or _hides_methods(finder):
                    return "sys.meta_path"
            for name in list(sys.modules):
                if name.startswith(_OURS) and name not in known and name not in theirs:
                    return name
            for namespace, key, name, value in held:
                if namespace.get(key) is not value:
                    return name
            for name, function, code in codes:
                if function.__code__ is not code:
                    return name
            for name, value, num_hiding in classes:
                if _num_hiding(value) != num_hiding:
                    return name
            return ""

        self.add = add
        self.replaced: Callable[[], str] = replaced
        self._theirs = theirs
        for name, module in list(sys.modules.items()):
            judges = f"{name}.".startswith(_JUDGES) or name in _ORACLES
            if judges and isinstance(module, ModuleType) and name not in theirs:
                add(module)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A module of the package that is not a learner's, remembered once it is loaded."""
        if not name.startswith(_OURS) or name in self._theirs:
            return None
        spec = _find_spec(name, path, target)
        if spec and spec.loader:
            load, add = spec.loader.exec_module, self.add

            def exec_module(module: ModuleType) -> None:
                load(module)
                add(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def foreign_hook(plugins: pytest.PytestPluginManager, theirs: Collection[str]) -> str:
    """The name of a hook of pytest's that a submission implements; "" if there is none.

    Args:
        plugins: pytest's.
        theirs: the modules that a learner's file stands in for.
    """
    for hook in list(vars(plugins.hook).values()):
        for each in hook.get_hookimpls():
            namespace = getattr(getattr(each.function, "__func__", each.function), "__globals__", {})
            name = str(namespace.get("__name__"))
            module = sys.modules.get(name)
            is_known = f"{name}.".startswith(_HOOKS) and name not in theirs
            if not is_known or not module or vars(module) is not namespace:
                return str(hook.name)
    return ""


def _is_odd_finder(finder: object) -> bool:
    """Whether a finder of a folder's modules is none of Python's."""
    return finder is not None and (type(finder) not in (FileFinder, zipimporter) or _hides_methods(finder))


def _hides_methods(finder: object) -> bool:
    """Whether an object has a function in place of one of its class."""
    return any(callable(getattr(type(finder), name, None)) for name in getattr(finder, "__dict__", ()))


def _num_hiding(value: type) -> int:
    """How many attributes of a class hide one that it inherits."""
    return sum(any(name in vars(base) for base in value.__mro__[1:-1]) for name in list(vars(value)))


def _held(module: ModuleType) -> Iterator[tuple[Any, str, str, object]]:
    """Namespace, key, name and value of a module, of each function, class and module in it, and of each method."""
    name = module.__name__
    if sys.modules.get(name) is module:
        yield sys.modules, name, name, module
    for key, value in list(vars(module).items()):
        if not callable(value) and not isinstance(value, ModuleType):
            continue
        yield vars(module), key, f"{name}.{key}", value
        if isinstance(value, type) and value.__module__ == name:
            yield from (
                (vars(value), each, f"{name}.{key}.{each}", held)
                for each, held in list(vars(value).items())
                if isinstance(held, FunctionType | MethodType | classmethod | staticmethod | property)
                and each not in _PYTESTS
            )


def remember_tests(remembered: Remembered, folder: Path) -> None:
    """The tests below a folder, now that they are loaded, and none of them has run."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and (getattr(module, "__file__", None) or "").startswith(str(folder)):
            remembered.add(module)


def add_controls(
    items: list[pytest.Item], tasks: Mapping[pytest.Item, Task | None], tell: Callable[[Event], None]
) -> None:
    """Put a test that must fail somewhere into the first half of each task's tests."""
    theirs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if task := tasks[item]:
            theirs.setdefault(task.id, []).append(item)
    for task_id, those in theirs.items():
        control = control_among(those)
        tell(Event("control", control.nodeid, task_id))
        items.insert(items.index(those[random.SystemRandom().randrange(len(those) // 2 + 1)]), control)


def control_among(items: list[pytest.Item]) -> pytest.Item:
    """A test that must fail, named as one of these that are functions, for the same file."""
    chance = random.SystemRandom()
    model = chance.choice(items)
    assert model.parent
    number = chance.randrange(10, 1000)
    name = f"{model.name.partition('[')[0]}[{number}-{chance.choice(items).name[-3:-1]}]"
    judged = chance.choice(_CONTROLS)

    def control() -> None:
        judged(number)

    return pytest.Function.from_parent(model.parent, name=name, callobj=control)


def _a_value(number: int) -> None:
    from minicache_course import checks

    checks.that("the number of blocks", number).gives(number + 1)


def _a_call(number: int) -> None:
    from minicache_course import checks

    checks.call(divmod, number, 2).gives((number, 2))


def _an_error(number: int) -> None:
    from minicache_course import checks

    checks.call(divmod, number, 2).raises(ValueError)


def _an_assertion(number: int) -> None:
    assert number < 0, "the number of blocks"


def _a_failure(number: int) -> None:
    pytest.fail(f"{number} blocks are left", pytrace=False)


def _a_crash(number: int) -> None:
    raise ValueError(f"no block {number}")


def _an_example(number: int) -> None:
    import hypothesis
    from hypothesis import strategies

    @hypothesis.settings(max_examples=3, database=None, derandomize=True)
    @hypothesis.given(strategies.integers(0, number))
    def check(drawn: int) -> None:
        assert drawn > number

    check()


_CONTROLS = (_a_value, _a_call, _an_error, _an_assertion, _a_failure, _a_crash, _an_example)
