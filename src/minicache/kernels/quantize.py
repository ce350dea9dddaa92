"""Keys and values in one byte a number: int8 or fp8, with a scale. No phase builds this module.

Quantizing happens on the host, in PyTorch, before rows are stored: a cast to fp8 inside a kernel truncates instead of
rounding, and does not saturate, under Triton's interpreter. The attention kernels multiply the cache's numbers by the
scale while they read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number that each dtype is used for. int8 leaves −128 out, so that the range is symmetric."""


def scales(rows: Tensor, dtype: torch.dtype, *, per_head: bool = False) -> Tensor:
    """The scale at which the largest of `rows` becomes the largest number of `dtype`.

    Args:
        rows: keys or values `[…, H_kv, d]`, floating point.
        dtype: torch.int8 or torch.float8_e4m3fn.
        per_head: a scale for each of the H_kv heads instead of one for all.

    Returns:
        fp32 `[H_kv]`; without `per_head` the same number H_kv times. 1 where all rows are zero. It is what
        `minicache.kernels` takes as `k_scale` and `v_scale`.

    Raises:
        ValueError: another dtype, or `rows` has fewer than two dimensions.
    """
    _check(rows, dtype)
    largest = rows.detach().float().abs().transpose(0, -2).flatten(1).amax(dim=1)
    if not per_head:
        largest = largest.amax().expand_as(largest)
    return torch.where(largest > 0, largest / LARGEST[dtype], 1.0)


def quantize(rows: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Divide `rows` by their scale and round to the nearest number of `dtype`; what is too large becomes the largest.

    Args:
        rows: keys or values `[…, H_kv, d]`, floating point.
        scale: a positive float, or `[H_kv]`.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        The shape of `rows`, in `dtype`: multiplied by `scale` it is `rows` again, up to rounding and saturation.

    Raises:
        ValueError: another dtype, or `rows` has fewer than two dimensions.
    """
    _check(rows, dtype)
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=rows.device).reshape(-1, 1)
    numbers = (rows.detach().float() / divisor).clamp(-LARGEST[dtype], LARGEST[dtype])
    # A cast to an integer cuts off; a cast to fp8 rounds to the nearest.
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def _check(rows: Tensor, dtype: torch.dtype) -> None:
    if dtype not in LARGEST:
        raise ValueError(f"quantize to torch.int8 or torch.float8_e4m3fn; got {dtype}")
    if rows.ndim < 2:
        raise ValueError(f"rows must be [..., H_kv, d]; got {list(rows.shape)}")
