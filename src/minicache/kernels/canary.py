"""The canary: a small kernel that shows whether Triton's interpreter computes correctly, for `runtime.canary`.

A separate file, because importing it imports Triton. No phase builds this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LENGTH, _TILE = 5, 8


@triton.jit
def canary_kernel(x_ptr, wide_ptr, copy_ptr, dot_ptr, sum_ptr, length, num_rounds, TILE: tl.constexpr):
    """One program: copy, widen, square and sum a tile of `TILE` numbers, the first `length` of them real."""
    lane = tl.arange(0, TILE)
    x = tl.load(x_ptr + lane, mask=lane < length, other=2.0)
    tl.store(copy_ptr + lane, x)
    wide = x.to(tl.float32)
    tl.store(wide_ptr + lane, wide)
    square = wide[:, None] + lane[None, :].to(tl.float32)
    tl.store(dot_ptr + lane[:, None] * TILE + lane[None, :], tl.dot(square, square, input_precision="ieee"))
    total = tl.zeros([TILE], dtype=tl.float32)
    for round in range(0, num_rounds):
        total += wide * round
    tl.store(sum_ptr, tl.sum(total, axis=0))


def sing() -> str:
    """Run the kernel and return which of its results are wrong, or "".

    The input is followed by NaN, which reveals an ignored mask.
    """
    x = torch.full((_TILE,), float("nan"), dtype=torch.bfloat16)
    x[:_LENGTH] = torch.tensor([0.5, -1.25, 3.0, 100.0, -0.015625])
    filled = torch.where(torch.arange(_TILE) < _LENGTH, x, 2.0)
    wide, copy, total = torch.zeros(_TILE), torch.zeros(_TILE, dtype=torch.bfloat16), torch.zeros(1)
    product = torch.zeros(_TILE, _TILE)
    try:
        canary_kernel[(1,)](x, wide, copy, product, total, _LENGTH, 4, TILE=_TILE)
    except Exception as error:  # whatever the error, this interpreter cannot be used
        return f"it raised {type(error).__name__}: {error}"
    square = filled.float()[:, None] + torch.arange(_TILE)
    expected: dict[str, tuple[Tensor, Tensor]] = {
        "a masked bfloat16 load and store": (copy.float(), filled.float()),
        "bfloat16 to float32": (wide, filled.float()),
        "tl.dot": (product, square @ square),
        "tl.sum in a loop of run-time length": (total, filled.float().sum()[None] * 6),
    }
    return ", ".join(what for what, (got, right) in expected.items() if not torch.allclose(got, right))
