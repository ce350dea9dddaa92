"""What `minicache.kernels` refuses, for all backends alike, in messages that name the argument.

No check reads the values of a GPU's tensor: it would wait for the device. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minicache.errors import require_count

if TYPE_CHECKING:
    from minicache.kernels.group_quantize import GroupQuantized

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ONE_BYTE = (torch.int8, torch.float8_e4m3fn)
"""Cache dtypes that may differ from the queries': quantized numbers, which a scale converts to keys and values."""


def tensor(
    name: str, value: object, device: torch.device, shape: Sequence[int | str], dtypes: Sequence[torch.dtype]
) -> None:
    """Raise unless `value` is a tensor on the cache's `device`, of one of these dtypes and of this shape.

    A size in `shape` that may be any number is a name, for the message.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a {_names(dtypes)} tensor; got {type(value).__name__}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, other arguments on {device}: move it first")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_names(dtypes)}; got {_names([value.dtype])}")
    if value.shape != shape and (value.ndim != len(shape) or any(map(_differ, shape, value.shape))):
        raise ValueError(f"{name} must be [{', '.join(map(str, shape))}]; got {list(value.shape)}")


def _differ(wanted: int | str, size: int) -> bool:
    return wanted != size and not isinstance(wanted, str)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def in_range(name: str, values: Tensor, low: int, end: int) -> None:
    """Raise IndexError unless every value of a CPU tensor is in low … end − 1."""
    wrong = values[(values < low) | (values >= end)]
    if wrong.numel():
        raise IndexError(f"no {name} {int(wrong[0])}: this cache has {name}s 0 … {end - 1}")


def caches(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless these are caches `[num_blocks, block_size, H_kv, d]`, of one shape and dtype."""
    device = k_cache.device if isinstance(k_cache, Tensor) else torch.device("cpu")
    tensor("k_cache", k_cache, device, ("num_blocks", "block_size", "H_kv", "d"), FLOATS + ONE_BYTE)
    tensor("v_cache", v_cache, device, k_cache.shape, (k_cache.dtype,))
    if not k_cache.numel():
        raise ValueError(f"a cache needs blocks, slots, heads and numbers; k_cache is {list(k_cache.shape)}")


def queries(q: Tensor, k_cache: Tensor) -> None:
    """Raise unless `q` is `[N, H, d]` with heads and numbers that can attend to the cache."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    tensor("q", q, k_cache.device, ("N", "H", head_dim), FLOATS if k_cache.dtype in ONE_BYTE else (k_cache.dtype,))
    if q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(f"q must have a multiple of {num_kv_heads} heads; got {q.shape[1]}")


def step(k_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> None:
    """Raise unless these are a step's tables and lengths; on a CPU, check the lengths too."""
    tensor("block_tables", block_tables, k_cache.device, ("B", "max_blocks"), INTEGERS)
    num_seqs, max_blocks = block_tables.shape
    tensor("context_lens", context_lens, k_cache.device, (num_seqs,), INTEGERS)
    if not num_seqs:
        raise ValueError("a step has one sequence or more; block_tables has none")
    room = max_blocks * k_cache.shape[1]
    if context_lens.device.type == "cpu":
        for bound in map(int, context_lens.aminmax()):
            if not 0 <= bound <= room:
                raise ValueError(f"a context_len must be 0 … {room}, what {max_blocks} blocks hold; got {bound}")


def query_start_loc(starts: Tensor, context_lens: Tensor, num_queries: int) -> None:
    """Raise unless the queries can be the newest tokens of each sequence; checks the values on a CPU only."""
    tensor("query_start_loc", starts, context_lens.device, (context_lens.shape[0] + 1,), INTEGERS)
    if starts.device.type != "cpu":
        return
    values = starts.tolist()
    if values[0] != 0 or values[-1] != num_queries or values != sorted(values):
        raise ValueError(f"query_start_loc must rise from 0 to {num_queries}; got {values}")
    for sequence, (start, end, num_tokens) in enumerate(zip(values, values[1:], context_lens.tolist(), strict=False)):
        if num_tokens < end - start:
            raise ValueError(f"sequence {sequence} has {num_tokens} tokens, fewer than its {end - start} queries")


def blocks_in_use(k_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> None:
    """Raise IndexError unless every block in use exists: the interpreter would read outside the cache, and crash."""
    num_blocks = -(-context_lens // k_cache.shape[1])
    in_use = torch.arange(block_tables.shape[1]) < num_blocks[:, None]
    in_range("block", block_tables[in_use], 0, k_cache.shape[0])


def row_scales(k_cache: Tensor, k_scale: object, v_scale: object) -> None:
    """Raise unless both are scales per row, and the cache is quantized."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        tensor(name, scale, k_cache.device, k_cache.shape[:3], (torch.float32,))
        if k_cache.dtype not in ONE_BYTE:
            raise TypeError(f"{name}: row scales need an int8 or float8_e4m3fn cache; this one holds {k_cache.dtype}")
        if isinstance(scale, Tensor) and not scale.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {scale.stride()}")


def head_scale(name: str, scale: float | Tensor, k_cache: Tensor) -> None:
    """Raise unless this is a number, a tensor of one number, or `[H_kv]`."""
    if isinstance(scale, Tensor):
        one = scale.ndim <= 1 and scale.numel() == 1
        tensor(name, scale, k_cache.device, scale.shape if one else (k_cache.shape[2],), FLOATS)
    else:
        number(name, scale)


def group_quantized(hidden: Tensor, weight: GroupQuantized) -> None:
    """Raise unless rows `[N, in]` can be multiplied by this weight `[out, in]`."""
    from minicache.kernels.group_quantize import GROUP

    device = hidden.device if isinstance(hidden, Tensor) else torch.device("cpu")
    tensor("weight.scale", weight.scale, device, ("out", "groups"), (torch.float16,))
    num_outputs, num_groups = weight.scale.shape
    numbers, per_group = (torch.int8, GROUP) if weight.minimum is None else (torch.uint8, GROUP // 2)
    tensor("weight.numbers", weight.numbers, device, (num_outputs, num_groups * per_group), (numbers,))
    if weight.minimum is not None:
        tensor("weight.minimum", weight.minimum, device, weight.scale.shape, (torch.float16,))
    if not all(each is None or each.is_contiguous() for each in weight):
        raise ValueError("a quantized weight must be contiguous")
    if not weight.scale.numel():
        raise ValueError(f"a weight needs outputs and inputs; it has {num_outputs} outputs and {num_groups} groups")
    tensor("hidden", hidden, device, ("N", num_groups * GROUP), FLOATS[:3])


def number(name: str, value: object) -> None:
    """Raise unless `value` is a number."""
    if not isinstance(value, float | int):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")


def window(sliding_window: int | None) -> None:
    """Raise unless this is a whole number of at least 1, or None."""
    if sliding_window is not None:
        require_count("sliding_window", sliding_window)
