"""What the course needs from a machine: each thing is there, or here is what to do."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

import minicache
from minicache.errors import KernelUnavailableError
from minicache_course.errors import CourseError
from minicache_course.language import remember, said, translations
from minicache_course.workspace import CHECKOUT, TABLE, Workspace, find_workspace

_IN_A_CLONE = (CHECKOUT / TABLE).is_file()
_INSTALL = 'pip install -c constraints.txt -e ".[course]"' if _IN_A_CLONE else 'pip install "minicache-course[course]"'
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
    trying = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import try_out; try_out()"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")
    torch = _tried(trying, "torch", _INSTALL)
    yield torch if find_spec("torch") else _package("torch", _INSTALL)
    yield _tried(trying, "numba", "without it the engine is several times slower on a CPU", required=False)
    yield _tried(trying, "triton", "phase 4 is not graded; everything else works", required=False)
    trying.wait()
    for name in ("numpy", "pytest", "hypothesis", "libcst", "watchfiles"):
        yield _package(name, _INSTALL)
    plugins = {entry.value for entry in entry_points(group="pytest11")}
    active = "minicache_course.plugin" in plugins
    yield Finding("pytest plugin", active, said("active") if active else "not found by pytest", f"{_INSTALL} again")
    if _IN_A_CLONE:
        browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
        needed = "needed only by the site's tests: install chromium"
        yield Finding(said("browser"), browser is not None, browser or "no chromium", needed, required=False)
    name = said("course")
    try:
        workspace = find_workspace()
    except CourseError as error:
        yield Finding(name, False, str(error), "change into your course, or create one: minicache init my-course")
        return
    old = workspace.version not in ("", minicache.__version__)
    yield Finding(name, not old, str(workspace.root), f"made by minicache {workspace.version}: minicache update")
    yield _labs(workspace)
    yield _state(workspace.state)


def _package(name: str, remedy: str) -> Finding:
    """Is a package there?"""
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed", remedy)


def try_out() -> None:
    """Use torch, numba and Triton, and print a line of JSON for each: whether it works, and what was found.

    In a process of its own: importing Triton settles where it runs, and what does not fit the machine may crash.
    """
    for use in (_use_torch, _use_numba, _use_triton):
        try:
            told = (True, use())
        except KernelUnavailableError as error:
            told = (False, str(error))
        except (ImportError, OSError, RuntimeError) as error:
            told = (False, f"does not work: {error}")
        print(json.dumps([*told, translations(told[1])]), flush=True)


def _use_torch() -> str:
    import torch

    torch.ones(2, 2).sum()  # a torch that does not fit the machine imports, and fails here
    if torch.version.cuda is None:
        kind = "CPU build: sufficient for the course"
    elif torch.cuda.is_available():
        kind = "CUDA build, with a GPU"
    else:
        kind = "CUDA build without a GPU: the CPU build is 4 GB smaller, see docs/en/setup.md"
    return f"{torch.__version__} ({kind})"


def _use_numba() -> str:
    from minicache.kernels import cpu

    if reason := cpu.why_unavailable():
        raise KernelUnavailableError(reason)
    return f"{version('numba')} (the engine's kernels on a CPU)"


def _use_triton() -> str:
    from minicache.kernels import runtime

    runtime.interpret_without_gpu()
    runtime.require_triton(runtime.usual_device())
    place = "interpreter, canary passed" if runtime.interpreting() else "on the GPU"
    return f"{version('triton')} ({place}; only phase 4 needs it)"


def _tried(trying: subprocess.Popen[str], name: str, remedy: str, *, required: bool = True) -> Finding:
    """The next line of `try_out`."""
    assert trying.stdout
    ok, detail, shown = json.loads(trying.stdout.readline() or '[false, "the process that tried it crashed", {}]')
    remember(shown)
    return Finding(name, ok, detail, remedy, required)


def _labs(workspace: Workspace) -> Finding:
    for phase in workspace.course:
        for module, file in workspace.lab_files(phase).items():
            if not file.is_file():
                remedy = f"rename it back, or {phase.restoring(module)}"
                return Finding("your files", False, f"{file.relative_to(workspace.root)} is missing", remedy)
    return Finding("your files", True, str(workspace.labs))


def _state(folder: Path) -> Finding:
    """Can progress be saved? Tried in the folder, or in the one that it would be made in."""
    place = folder if folder.is_dir() else folder.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return Finding(said("progress"), True, str(folder))
    except OSError as error:
        return Finding(said("progress"), False, f"{place}: {error.strerror}", "make the folder writable")
