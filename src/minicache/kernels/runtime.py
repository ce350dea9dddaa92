"""Where Triton can run: whether it is installed, there is a GPU, its interpreter is on, and it computes correctly.

Without a GPU, Triton runs kernels on the CPU in its interpreter, one program after the other. This is decided when
`triton` is imported: parts of `triton.language` are kernels themselves (`tl.sum`, `tl.zeros`), built for the GPU or the
interpreter at import. So `TRITON_INTERPRET=1` has to be set before that, and this module imports Triton only when it is
needed. No phase builds this module.
"""

from __future__ import annotations

import functools
import os
import sys
from importlib.metadata import version

import torch

from minicache.errors import KernelUnavailableError

INTERPRET = "TRITON_INTERPRET"
"""The environment variable that enables the interpreter."""


def has_gpu() -> bool:
    """Whether there is a CUDA device. Does not initialise CUDA, so the process can still fork."""
    return torch.cuda.device_count() > 0


def interpret_without_gpu() -> None:
    """Enable the interpreter if there is no GPU: for tests, grading, notebooks and `minicache python`.

    Call it before anything imports Triton. A library must not decide this for its user's process, so only those four
    call it.
    """
    if "triton" not in sys.modules and not has_gpu():
        os.environ.setdefault(INTERPRET, "1")


def usual_device() -> torch.device:
    """Where Triton's kernels run on this machine: the GPU, or the CPU if there is none."""
    return torch.device("cuda" if has_gpu() else "cpu")


def require_triton(device: torch.device) -> None:
    """Raise unless Triton can run a kernel on tensors on `device`.

    Under the interpreter the canary runs first, once per process.

    Raises:
        KernelUnavailableError: there is no Triton, or it cannot run there; the message gives the remedy.
    """
    _import_triton()
    if device.type not in ("cuda", "cpu"):
        raise KernelUnavailableError(
            f"Triton runs on CUDA devices, and in its interpreter on CPUs; these tensors are on {device}"
        )
    if interpreting():
        canary()
    elif device.type == "cpu":
        raise KernelUnavailableError(
            "on CPU tensors Triton runs only in its interpreter, which is not enabled: "
            f"set {INTERPRET}=1 before the first import of triton, or leave out backend="
        )


def interpreting() -> bool:
    """Whether Triton was imported with its interpreter on.

    Raises:
        KernelUnavailableError: the environment variable has changed since: kernels and `triton.language` would
            disagree.
    """
    if "triton" not in sys.modules:
        return os.environ.get(INTERPRET, "").lower() in ("1", "true", "yes", "on", "y")
    import triton
    from triton.runtime.jit import JITFunction

    built_interpreted = not isinstance(triton.language.sum, JITFunction)
    if built_interpreted != bool(triton.knobs.runtime.interpret):
        change = "was unset" if built_interpreted else "was set"
        raise KernelUnavailableError(
            f"{INTERPRET} {change} after triton was imported, too late to take effect: set it before the process "
            f"starts, as in `{INTERPRET}=1 python …`, or in a notebook's first cell after a restart"
        )
    return built_interpreted


def canary() -> None:
    """Run one small kernel and compare: an interpreter that computes wrongly is refused before it is used.

    Covers what the course's kernels depend on: a masked load with `other`, bfloat16 copied and widened, float32
    `tl.dot`, `tl.sum`, a loop with a run-time length. The result is cached for the process.

    Raises:
        KernelUnavailableError: a result is wrong, or the interpreter raised.
    """
    if wrong := _canary():
        raise KernelUnavailableError(
            f"the interpreter of Triton {version('triton')} computes wrongly here ({wrong}): "
            'install the version that the course was tested with, pip install -c constraints.txt "triton"'
        )


@functools.cache
def _canary() -> str:
    """What the interpreter computes wrongly, or ""."""
    from minicache.kernels import canary

    return canary.sing()


def _import_triton() -> None:
    """Import Triton, or raise with instructions."""
    try:
        import triton  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "triton":
            raise KernelUnavailableError(f"Triton is installed but cannot be imported: {error}") from error
        remedy = "pip install 'minicache-course[triton]'"
        if sys.platform != "linux":
            remedy = f"it exists for Linux only, and this is {sys.platform}: use WSL, a container or a hosted notebook"
        text = f"Triton is not installed: {remedy}. Everything but phase 4's kernels runs without it"
        raise KernelUnavailableError(text) from None
