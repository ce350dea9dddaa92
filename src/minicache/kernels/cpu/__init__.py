"""The CPU kernels, in numba: the counterpart of Triton on a GPU.

`vectors` operates on eight numbers at a time, in Triton's vocabulary; `attention` has the paged decode kernel; `rows`
the small kernels of a transformer layer; `products` its linear layers, and `prompts` attention made of such products;
`steps` prepares and checks a step's metadata for them, once per step, because the kernels have no bounds checks;
`warming` compiles them all before the first step.

These modules import numba, which takes a third of a second. This one imports it on first use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

NUMBERS: Final = {torch.float32: "float32", torch.int8: "int8", torch.float8_e4m3fn: "uint8"}
"""Cache dtypes, and the dtypes of the arrays that kernels see: numba has no float8, so its codes are integers."""


@cache
def why_unavailable() -> str | None:
    """Why numba cannot compile here, and what to do about it; None if it can."""
    try:
        from minicache.kernels.cpu import attention  # noqa: F401
    except ModuleNotFoundError:
        return "numba is not installed: pip install numba"
    except ImportError as error:  # for example, a numpy too new for this numba
        return f"numba cannot be imported ({error}): pip install --upgrade numba"
    except RuntimeError as error:
        return f"numba finds no folder for compiled code ({error}): set NUMBA_CACHE_DIR to one that can be written"
    return None


def is_available() -> bool:
    """Whether numba can compile and cache kernels: numba is installed, and a folder is writable."""
    return why_unavailable() is None


def array_of(cache: Tensor) -> Any:
    """The memory of a cache as kernels see it, of the same shape."""
    return (cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache.detach()).numpy()


def why_not(*caches: Tensor, dtype: torch.dtype = torch.float32, by_row: bool = False) -> str | None:
    """Why the kernels cannot run on these KV caches `[num_blocks, block_size, H_kv, d]`; None if they can.

    Args:
        caches: float32, or one byte per number with scales.
        dtype: of the queries, or of the rows to store.
        by_row: whether each row has a scale.
    """
    for storage in caches:
        if storage.dtype not in NUMBERS or (storage.dtype == torch.float32) == by_row or storage.device.type != "cpu":
            return (
                "the numba kernels run on a CPU, over float32, or over int8 or float8_e4m3fn with a scale per "
                f"row; a cache holds {storage.dtype} on {storage.device}"
            )
        if dtype != torch.float32:
            return f"the numba kernels take float32 queries and rows; these are {dtype}"
        if storage.shape[3] % 8 or storage.stride(3) != 1:
            return (
                "the numba kernels load eight contiguous numbers: head_dim must be a multiple of 8, and a "
                f"cache's last axis contiguous; it is {storage.shape[3]}, with stride {storage.stride(3)}"
            )
    return why_unavailable()
