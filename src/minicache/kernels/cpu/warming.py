"""Compiling before the first step: every kernel, made or loaded from the disk."""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from threading import Lock
from typing import Any

import torch
from numba import jit
from numba.core.sigutils import normalize_signature

from minicache.errors import KernelUnavailableError
from minicache.kernels.cpu import NUMBERS

_LOCK = Lock()
_READY: set[torch.dtype] = set()


def warm_up(
    progress: Callable[[int, int], None] = lambda done, total: None, *, dtype: torch.dtype = torch.float32
) -> None:
    """Compile every kernel, or load what an earlier process has compiled: seconds the first time, half of one after.

    Each is compiled once for all models, as sizes are arguments and not constants; those that read or write a cache are
    compiled once for each dtype of caches. Numba keeps the code in the `__pycache__` beside the kernel's module; where
    that cannot be written, in the user's cache folder; and in NUMBA_CACHE_DIR if that is set. Processes that compile a
    kernel at the same time each write all of it, and one's file replaces the other's.

    Args:
        progress: called with how many kernels are ready, and how many there are, from (0, n) to (n, n).
        dtype: of the caches, of `NUMBERS`.

    Raises:
        KernelUnavailableError: compiled code cannot be read, for a file is damaged, or not be written, for the disk is
            full.
    """
    from minicache.kernels.cpu import attention, rows

    signatures = {**rows.signatures(NUMBERS[dtype]), **attention.signatures(NUMBERS[dtype])}
    progress(0, len(signatures))
    with _LOCK:
        for done, (kernel, signature) in enumerate(signatures.items(), 1):
            _compile(kernel, signature)
            progress(done, len(signatures))
        _READY.add(dtype)


def require_ready(dtype: torch.dtype) -> None:
    """Compile or load the kernels for caches of a dtype, unless that has been done."""
    if dtype not in _READY:
        warm_up(dtype=dtype)


def _compile(kernel: Any, signature: str) -> None:
    if normalize_signature(signature)[0] in kernel.overloads:
        return
    # Compiled beside the kernel: while one may be compiled for more, a step of another engine would compile it anew.
    compiler = jit(cache=True, **kernel.targetoptions)(kernel.py_func)
    try:
        compiler.compile(signature)
    except (OSError, EOFError, UnpicklingError) as error:
        raise KernelUnavailableError(
            f"compiled code cannot be read or written in {kernel.stats.cache_path} ({error!r}): delete this folder, or "
            "set NUMBA_CACHE_DIR to another"
        ) from error
    (compiled,) = compiler.overloads.values()
    kernel.add_overload(compiled)
    kernel.disable_compile()  # else another layout of an array would compile another kernel, in a step
