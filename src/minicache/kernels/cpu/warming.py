"""Compiling before the first step: every kernel is compiled, or loaded from disk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
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
    """Compile every kernel, or load what an earlier process compiled: seconds the first time, then half a second.

    Each is compiled once for all models, because sizes are arguments and not constants; those that read or write a
    cache are compiled once per cache dtype, and the product once for each way to hold weights. Numba keeps the code in
    the `__pycache__` next to the kernel's module; if that is not writable, in the user's cache folder; and in
    NUMBA_CACHE_DIR if that is set. Processes that compile a kernel at the same time each write a complete file, and one
    replaces the other.

    Args:
        progress: called with the numbers of compiled kernels and of all kernels, from (0, n) to (n, n).
        dtype: of the caches, of `NUMBERS`.

    Raises:
        KernelUnavailableError: compiled code cannot be read (a damaged file) or written (a full disk).
    """
    from minicache.kernels.cpu import attention, products, prompts, rows

    by_cache = (module.signatures(NUMBERS[dtype]).items() for module in (rows, attention, prompts))
    versions = list(chain(*by_cache))
    versions += [(products.product, signature) for signature in products.SIGNATURES]
    progress(0, len(versions))
    with _LOCK:
        for done, (kernel, signature) in enumerate(versions, 1):
            _compile(kernel, signature)
            progress(done, len(versions))
        _READY.add(dtype)


def require_ready(dtype: torch.dtype) -> None:
    """Compile or load the kernels for a cache dtype, once per process."""
    if dtype not in _READY:
        warm_up(dtype=dtype)


def _compile(kernel: Any, signature: str) -> None:
    if normalize_signature(signature)[0] in kernel.overloads:
        return
    # Compiled in a copy: while a kernel accepts new types, a concurrent step of another engine would compile it again.
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
    kernel.disable_compile()  # otherwise an array of another layout would compile a new version in a step
