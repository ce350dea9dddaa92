"""Phase 4 where there is no Triton: nothing is graded, nothing fails. And how errors of kernels show."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from minicache_course.checks import call, is_not_written
from minicache_course.doctor import examine
from minicache_course.grading import grade
from minicache_course.report import print_result
from minicache_course.results import Outcome
from minicache_course.workspace import open_workspace

ROOT = Path(__file__).parents[2]
NOT_WRITTEN = "phase 4, task 1: Store; read docs/en/phase-04-triton-kernels/lab/00-store-and-gather.md"


@pytest.fixture
def no_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process that is started can import Triton or numba."""
    hide = "import sys\nsys.modules |= dict.fromkeys(('triton', 'numba'))\n"
    (tmp_path / "sitecustomize.py").write_text(hide, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.slow
def test_phase_4_is_not_graded_and_the_reason_is_told(no_compilers: None) -> None:
    workspace = open_workspace(ROOT)
    result = grade(workspace, workspace.course.phase(4), task=1)
    (task,) = result.tasks
    assert result.problems == {}
    assert {test.outcome for test in task.tests} == {Outcome.NOT_GRADED}
    assert "Triton is not installed" in task.tests[0].message
    stream = io.StringIO()
    print_result(result, Console(file=stream, width=200))
    asked = "Not graded: Triton is not installed: pip install 'minicache-course[triton]'"
    assert stream.getvalue().count(asked) == (sys.platform == "linux")


@pytest.mark.slow
def test_the_reference_is_not_graded_either_and_other_phases_are(no_compilers: None) -> None:
    tests = ["tests/phase-04-triton-kernels/test_task_2_gather.py", "tests/phase-01-dense-cache/test_task_5_reset.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout
    assert "passed" in done.stdout
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_the_doctor_says_how_to_get_them(no_compilers: None) -> None:
    findings = {found.name: found for found in examine()}
    assert findings["torch"].ok
    for name, detail, remedy in (
        ("triton", "Triton is not installed: pip install 'minicache-course[triton]'", "phase 4"),
        ("numba", "numba is not installed: pip install numba", "slower on a CPU"),
    ):
        assert not findings[name].ok
        assert not findings[name].required
        assert findings[name].detail.startswith(detail)
        assert remedy in findings[name].remedy


def tritons(name: str, module: str) -> type[Exception]:
    """An error class that looks like one of Triton's."""
    return type(name, (Exception,), {"__module__": module})


def test_an_unwritten_kernel_is_not_written_through_what_the_interpreter_wraps() -> None:
    wrapper = tritons("InterpreterError", "triton.runtime.errors")

    def launch() -> None:
        try:
            try:
                raise NotImplementedError(NOT_WRITTEN)
            except NotImplementedError as error:
                raise wrapper(repr(error)) from error
        except wrapper as error:
            raise wrapper(repr(error)) from error

    with pytest.raises(wrapper) as error:
        call(launch)
    assert is_not_written(error.value)


def test_an_unwritten_kernel_is_not_written_for_the_compiler_either() -> None:
    compiler = tritons("CompilationError", "triton.compiler.errors")
    inner, outer = compiler("unsupported AST node type: Raise"), compiler("at 2:8")
    inner.node = ast.parse(f"raise NotImplementedError({NOT_WRITTEN!r})").body[0]  # type: ignore[attr-defined]
    outer.__cause__ = inner
    assert is_not_written(outer)
    inner.node = ast.parse("raise ValueError('no')").body[0]  # type: ignore[attr-defined]
    assert not is_not_written(outer)


def test_a_kernels_error_is_told_without_its_wrapping() -> None:
    wrapper = tritons("InterpreterError", "triton.runtime.errors")

    def launch() -> None:
        try:
            raise IndexError("row 7")
        except IndexError as error:
            raise wrapper(repr(error)) from error

    outcome = call(launch)
    outcome.raises(IndexError, saying="row 7")
    assert isinstance(outcome.error, IndexError)
