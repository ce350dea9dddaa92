"""A learner's file is loaded as the module that it stands in for, and nothing else changes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.toys import Toys

from minicache_course.errors import CourseError
from minicache_course.finder import LabFinder, import_labs, install, learners_line, uninstall

NAME = "minicache.no_such_module"
OTHER = "minicache.no_such_other"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[LabFinder, Path]]:
    """A finder for a module that the package lacks, and the learner's file."""
    file = tmp_path / "lab.py"
    finder = install({NAME: file})
    yield finder, file
    uninstall(finder)


def test_the_file_is_the_module(lab: tuple[LabFinder, Path]) -> None:
    _, file = lab
    file.write_text("from minicache.errors import MinicacheError\nwho = __name__\n")
    module = importlib.import_module(NAME)
    assert (module.who, module.__file__) == (NAME, str(file))
    assert importlib.import_module("minicache").no_such_module is module  # as after any import of a submodule
    assert importlib.import_module("minicache.errors").MinicacheError is module.MinicacheError


def test_a_changed_file_is_read_again_and_leaves_no_bytecode(lab: tuple[LabFinder, Path]) -> None:
    _, file = lab
    for number in (1, 2):
        file.write_text(f"number = {number}\n")
        assert importlib.import_module(NAME).number == number
        del sys.modules[NAME]
    assert [each.name for each in file.parent.iterdir()] == ["lab.py"]


def test_uninstall_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text("")
    finder = install({NAME: tmp_path / "lab.py"})
    importlib.import_module(NAME)
    uninstall(finder)
    assert NAME not in sys.modules
    assert not hasattr(importlib.import_module("minicache"), "no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)


def test_a_module_that_is_already_there_is_refused() -> None:
    with pytest.raises(CourseError, match=r"minicache\.errors was imported before"):
        install({"minicache.errors": Path("errors.py")})


def test_the_innermost_broken_file_is_blamed(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer.py", tmp_path / "inner.py"
    outer.write_text(f"import {OTHER}\n")
    inner.write_text("value = {}['key']\n")
    finder = install({NAME: outer, OTHER: inner})
    try:
        # With no reference to fall back on, the outer file fails next, and for want of the inner one.
        entered: list[str] = []
        failures = import_labs(finder, {}, entered.append)
        assert isinstance(failures[OTHER], KeyError)
        assert entered == [NAME, NAME]
        assert finder.files == {}
    finally:
        uninstall(finder)


def test_a_line_is_found_in_a_learners_file_only(lab: tuple[LabFinder, Path]) -> None:
    _, file = lab
    file.write_text("def f(g):\n    return g()\n")
    with pytest.raises(ZeroDivisionError) as info:
        importlib.import_module(NAME).f(lambda: 1 / 0)
    line = learners_line(info.value)
    assert str(line).endswith("lab.py:2: return g()")
    with pytest.raises(ZeroDivisionError) as info:
        _ = 1 / 0
    assert learners_line(info.value) is None


MINE = """
from minicache_course.finder import install_finished_labs
labs = install_finished_labs(lambda lab: print("loads", lab.module, lab.missing or "mine"))
print(*(lab.missing or "mine" for lab in labs), sep="; ")
import minicache.arithmetic.arithmetic
print(minicache.arithmetic.arithmetic.__file__)
"""


def test_finished_labs_stand_in_for_every_command(toys: Toys) -> None:
    from minicache_course.grading import grade
    from minicache_course.progress import Progress
    from minicache_course.workspace import reference_file

    def whose() -> list[str]:
        done = subprocess.run([sys.executable, "-c", MINE], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    arithmetic = "minicache.arithmetic.arithmetic"
    reference = str(reference_file(arithmetic))
    unfinished = "not passed yet: task 0.2"
    assert whose() == [f"not passed yet: task 0.1; {unfinished}", f"loads {arithmetic} {unfinished}", reference]
    progress = Progress.load(toys.workspace)
    progress.record(grade(toys.workspace, toys.phase))
    progress.save()
    assert whose() == ["mine; mine", f"loads {arithmetic} mine", str(toys.nbytes)]
    toys.write(nbytes="# edited\n")
    edited = "edited since it passed: minicache grade 0"
    assert whose() == [f"mine; {edited}", f"loads {arithmetic} {edited}", reference]
