"""What the course needs from a machine: each thing is there, or here is what to do."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from minicache.course.workspace import Workspace, find_workspace
from minicache.errors import CourseError

_INSTALL = 'pip install -c constraints.txt -e ".[course]"'
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        ok: whether it is as it should be.
        detail: what was found.
        remedy: what to do if not.
        required: whether the course can go on without it.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


def examine() -> Iterator[Finding]:
    """Look at everything, the base first."""
    # In a process of its own: importing Triton settles where it runs. Meanwhile this one imports torch too.
    trying = subprocess.Popen(
        [sys.executable, "-c", _TRY_TRITON], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    yield _package("torch", _INSTALL, _use_torch)
    for name in ("numpy", "pytest", "hypothesis", "libcst", "watchfiles"):
        yield _package(name, _INSTALL)
    plugins = {entry.value for entry in entry_points(group="pytest11")}
    active = "minicache.course.plugin" in plugins
    yield Finding("pytest plugin", active, "active" if active else "not found by pytest", f"{_INSTALL} again")
    yield _triton(trying)
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    needed = "only the tests of the site need it: install chromium"
    yield Finding("browser", browser is not None, browser or "no chromium", needed, required=False)
    try:
        workspace = find_workspace()
    except CourseError as error:
        yield Finding("course", False, str(error), "git clone the course, and work inside it")
        return
    yield Finding("course", True, str(workspace.root))
    yield _labs(workspace)
    yield _state(workspace.state)


def _package(name: str, remedy: str, use: Callable[[], str] | None = None) -> Finding:
    """Is a package there, and, where it is worth trying, does it work?"""
    try:
        if find_spec(name) is None:
            raise PackageNotFoundError(name)
        return Finding(name, True, use() if use else version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed", remedy)
    except (ImportError, OSError, RuntimeError) as error:
        return Finding(name, False, f"does not work: {error}", remedy)


def _use_torch() -> str:
    import torch

    torch.ones(2, 2).sum()  # a torch that does not fit the machine imports, and fails here
    device = "with a GPU" if torch.cuda.is_available() else "CPU only: all that the course needs"
    return f"{torch.__version__} ({device})"


_TRY_TRITON = """
from minicache.errors import KernelUnavailableError
from minicache.kernels import runtime

runtime.interpret_without_gpu()
try:
    print(runtime.describe())
except KernelUnavailableError as error:
    raise SystemExit(str(error))
"""


def _triton(trying: subprocess.Popen[str]) -> Finding:
    """Which Triton there is, and whether it computes."""
    printed, errors = trying.communicate()
    told = (printed if trying.returncode == 0 else errors).strip().splitlines() or ["no answer"]
    return Finding(
        "triton", trying.returncode == 0, told[-1], "phase 4 will not be graded; all else works", required=False
    )


def _labs(workspace: Workspace) -> Finding:
    for phase in workspace.course:
        for module, file in workspace.lab_files(phase).items():
            if not file.is_file():
                remedy = f"rename it back, or {phase.restoring(module)}"
                return Finding("your files", False, f"{file.relative_to(workspace.root)} is not there", remedy)
    return Finding("your files", True, str(workspace.labs))


def _state(folder: Path) -> Finding:
    """Can progress be saved? Tried in the folder, or in the one that it would be made in."""
    place = folder if folder.is_dir() else folder.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return Finding("progress", True, str(folder))
    except OSError as error:
        return Finding("progress", False, f"{place}: {error.strerror}", "make the folder writable")
