"""Where Triton runs, and what is said where it does not. Each case in a process of its own: an import decides it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from minicache.errors import KernelUnavailableError
from minicache.kernels import runtime

HIDE_TRITON = "import sys; sys.modules['triton'] = None\n"
REQUIRE = """
import torch
from minicache.errors import KernelUnavailableError
from minicache.kernels import runtime
try:
    runtime.require_triton(torch.device("cpu"))
    print("runs", runtime.interpreting())
except KernelUnavailableError as error:
    print(error)
"""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
without_gpu = pytest.mark.skipif(runtime.has_gpu(), reason="there is a GPU")


Said = Callable[..., str]


@pytest.fixture
def said(tmp_path: Path) -> Said:
    """What code prints in a new process, TRITON_INTERPRET being as given. It is forked from one that has only torch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    output = tmp_path / "output"

    def said(code: str, interpret: str = "") -> str:
        given = f"os.environ[{runtime.INTERPRET!r}] = {interpret!r}\n" if interpret else ""
        start = (
            f"import os, sys\nsys.stdout = open({str(output)!r}, 'w')\nos.environ.pop({runtime.INTERPRET!r}, None)\n"
        )
        process = context.Process(target=exec, args=(start + given + code, {}))
        process.start()
        process.join()
        assert process.exitcode == 0
        return output.read_text().strip()

    return said


@pytest.mark.slow
@needs_triton
def test_the_interpreter_runs_where_it_was_asked_for(said: Said) -> None:
    assert said(REQUIRE, interpret="1") == "runs True"


@needs_triton
@without_gpu
def test_without_gpu_it_can_be_asked_for_in_time(said: Said) -> None:
    code = "from minicache.kernels import runtime; runtime.interpret_without_gpu()"
    assert said(code + REQUIRE) == "runs True"


@needs_triton
def test_nobody_asked_for_the_interpreter(said: Said) -> None:
    message = said(REQUIRE)
    assert "set TRITON_INTERPRET=1 before the first import of triton" in message
    assert "leave out backend=" in message


@needs_triton
@pytest.mark.parametrize(
    ("before", "after", "change"),
    [("", "os.environ['TRITON_INTERPRET'] = '1'", "set"), ("1", "del os.environ['TRITON_INTERPRET']", "unset")],
)
def test_too_late(said: Said, before: str, after: str, change: str) -> None:
    message = said(f"import os, triton; {after}\n" + REQUIRE, interpret=before)
    assert f"TRITON_INTERPRET was {change} after triton was imported" in message
    assert "before the process starts" in message


def test_no_triton_on_linux(said: Said) -> None:
    message = said(HIDE_TRITON + "sys.platform = 'linux'\n" + REQUIRE)
    assert message.startswith("Triton is not installed: pip install 'minicache-course[triton]'")
    assert "phase 4" in message


def test_no_triton_elsewhere(said: Said) -> None:
    message = said(HIDE_TRITON + "import torch; sys.platform = 'darwin'\n" + REQUIRE)
    assert "Linux only, and this is darwin" in message


def test_the_kernels_package_brings_no_triton(said: Said) -> None:
    code = "import sys, minicache.kernels, minicache.kernels.runtime; print('triton' in sys.modules)"
    assert said(code) == "False"


@pytest.mark.slow
def test_everything_but_the_kernels_runs_without_triton(said: Said) -> None:
    code = """
import torch
from minicache.kernels import gather_kv, store_kv
cache = torch.zeros(3, 4, 2, 8)
k = torch.randn(5, 2, 8)
store_kv(k, k, cache, cache.clone(), torch.arange(4, 9))
print(torch.equal(gather_kv(cache, torch.tensor([1, 2]), 5), k))
"""
    assert said(HIDE_TRITON + code) == "True"


def test_other_devices_are_refused() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with pytest.raises(KernelUnavailableError, match="these tensors are on meta"):
        runtime.require_triton(torch.device("meta"))


def test_the_canary_sings(interpreter: None) -> None:
    runtime.canary()
    runtime.require_triton(runtime.usual_device())


def test_an_interpreter_that_computes_wrongly_is_refused(said: Said, interpreter: None) -> None:
    wrong = """
from triton.runtime.interpreter import InterpreterBuilder
import numpy as np
InterpreterBuilder.create_fadd = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.subtract)
"""
    message = said(wrong + REQUIRE, interpret="1")
    assert "computes wrongly here (tl.dot, tl.sum in a loop of run-time length)" in message
    assert "pip install -c constraints.txt" in message


def test_an_interpreter_that_raises_is_refused(said: Said, interpreter: None) -> None:
    wrong = """
from triton.runtime.interpreter import InterpreterBuilder
del InterpreterBuilder.create_dot
"""
    assert "it raised InterpreterError" in said(wrong + REQUIRE, interpret="1")
