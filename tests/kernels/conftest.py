"""Kernels on the GPU if there is one, else in Triton's interpreter; without Triton there is nothing to test."""

from __future__ import annotations

import pytest
import torch

from minicache.errors import KernelUnavailableError
from minicache.kernels import runtime

runtime.interpret_without_gpu()  # before a test's module imports Triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU and its interpreter."""
    try:
        runtime.require_triton(runtime.usual_device())
    except KernelUnavailableError as error:
        pytest.skip(str(error))
    return runtime.usual_device()


@pytest.fixture
def interpreter(device: torch.device) -> None:
    """Skip on a GPU: there is nothing to trace there."""
    if not runtime.interpreting():
        pytest.skip("the tracer watches the interpreter, and this is a GPU")
