"""A small course of its own: two modules of the package without torch, one task and two tests each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from minicache_course.table import Phase
from minicache_course.workspace import Workspace, open_workspace

TABLE = """
[[phase]]
number = 0
slug = "toys"
title = "Toys"
builds = "two functions"
theory = "none"

[[phase.task]]
number = 1
title = "Colours"
module = "minicache.palette"
targets = ["color"]
points = 30
page = "docs/en/toys.md"
hints = ["look at the palette", "PALETTE[role].shade(scheme)"]

[[phase.task]]
number = 2
title = "Bytes"
module = "minicache.arithmetic.arithmetic"
targets = ["dtype_nbytes"]
points = 70
page = "docs/en/toys.md"
hints = ["count", "a dict", "{'float16': 2}"]

[[phase]]
number = 1
slug = "later"
title = "Later"
builds = "nothing yet"
theory = "none"
"""

TEST_TASK_1 = '''
from minicache_course.checks import call
from minicache.palette import color

def test_prompt():
    """A prompt token is yellow."""
    call(color, "prompt").gives("#F0C808")

def test_end():
    """An ended sequence is red."""
    call(color, "end", "dark").gives("#FF7A33")
'''

TEST_TASK_2 = '''
import pytest
from minicache.arithmetic.arithmetic import dtype_nbytes
from minicache_course.checks import call

def test_float16():
    """A float16 takes two bytes."""
    call(dtype_nbytes, "float16").gives(2)

def test_unknown():
    """An unknown dtype is refused."""
    call(dtype_nbytes, "float7").raises(ValueError, saying="float7")
'''

COLOR = 'def color(role, scheme="light"):\n    return {"prompt": "#F0C808", "end": "#FF7A33"}[role]\n'
NBYTES = """def dtype_nbytes(dtype):
    if dtype != "float16":
        raise ValueError(f"unknown dtype {dtype}")
    return 2
"""


@dataclass
class Toys:
    """The small course, and its files."""

    workspace: Workspace
    phase: Phase
    color: Path
    nbytes: Path
    tests: Path

    def write(self, color: str = COLOR, nbytes: str = NBYTES) -> None:
        """Write the learner's files; both are right by default."""
        self.color.parent.mkdir(parents=True, exist_ok=True)
        self.color.write_text(color, encoding="utf-8")
        self.nbytes.parent.mkdir(parents=True, exist_ok=True)
        self.nbytes.write_text(nbytes, encoding="utf-8")


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[Path]:
    """Resident servers that tests start listen here, and end with it. Its path is short: a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="mc-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def make_course(root: Path) -> Workspace:
    """A course of one phase of two tasks in a new folder, its lab files not written."""
    tests = root / "tests" / "phase-00-toys"
    tests.mkdir(parents=True)
    (root / "labs").mkdir()
    (root / "labs" / "course.toml").write_text(TABLE, encoding="utf-8")
    (tests / "test_task_1_colours.py").write_text(TEST_TASK_1, encoding="utf-8")
    (tests / "test_task_2_bytes.py").write_text(TEST_TASK_2, encoding="utf-8")
    return open_workspace(root)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toys:
    """A course in a new folder, both tasks solved."""
    root = tmp_path / "course"
    workspace = make_course(root)
    monkeypatch.setenv("MINICACHE_ROOT", str(root))
    monkeypatch.chdir(root)
    labs, tests = root / "labs" / "phase-00-toys", root / "tests" / "phase-00-toys"
    made = Toys(workspace, workspace.course.phase(0), labs / "palette.py", labs / "arithmetic" / "arithmetic.py", tests)
    made.write()
    return made
