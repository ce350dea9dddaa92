"""The kernels for a CPU, in numba: what Triton is on a GPU.

`vectors` has eight numbers at a time, in Triton's vocabulary; `attention` the paged decode kernel; `rows` the small
kernels of a transformer layer; `steps` what a step's metadata becomes before they run; `warming` compiles them all
before a first step. The kernels have no bounds checks: `steps` has them, once a step.

Modules here import numba, which takes a third of a second. This one imports it when it is first asked whether it can.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

NUMBERS: Final = {torch.float32: "float32", torch.int8: "int8", torch.float8_e4m3fn: "uint8"}
"""What caches may hold, and the dtype of the arrays that kernels see: numba has no float8, its codes are integers."""


@cache
def why_unavailable() -> str | None:
    """Why numba compiles nothing here, and what to do about it; None if it does."""
    try:
        from minicache.kernels.cpu import attention  # noqa: F401
    except ModuleNotFoundError:
        return "numba is not installed: pip install 'minicache[cpu]'"
    except ImportError as error:  # for one, a numpy that is newer than this numba knows
        return f"numba cannot be imported ({error}): pip install --upgrade 'minicache[cpu]'"
    except RuntimeError as error:
        return f"numba finds no folder for compiled code ({error}): set NUMBA_CACHE_DIR to one that can be written"
    return None


def is_available() -> bool:
    """Whether numba can compile and keep kernels here: the extra `cpu` is installed, and a folder can be written."""
    return why_unavailable() is None


def array_of(cache: Tensor) -> Any:
    """The memory of a cache as kernels see it, of the same shape."""
    return (cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache.detach()).numpy()


def why_not(*caches: Tensor, dtype: torch.dtype = torch.float32, by_row: bool = False) -> str | None:
    """Why the kernels cannot run on these KV caches `[num_blocks, block_size, H_kv, d]`; None if they can.

    Args:
        caches: of float32, or of one byte a number with scales.
        dtype: of the queries, or of the rows to store.
        by_row: whether each row has a scale.
    """
    for storage in caches:
        if storage.dtype not in NUMBERS or (storage.dtype == torch.float32) == by_row or storage.device.type != "cpu":
            return (
                "the numba kernels compute on a CPU, over float32 or over int8 and float8_e4m3fn with a scale for each "
                f"row; a cache holds {storage.dtype} on {storage.device}"
            )
        if dtype != torch.float32:
            return f"the numba kernels compute with float32; queries or rows are {dtype}"
        if storage.shape[3] % 8 or storage.stride(3) != 1:
            return (
                "the numba kernels load eight numbers that lie side by side: head_dim must be a multiple of 8, and a "
                f"cache's last axis contiguous; it is {storage.shape[3]}, with stride {storage.stride(3)}"
            )
    return why_unavailable()
