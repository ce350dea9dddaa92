# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.group_quantize.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""Weights in a byte or in four bits per number, with a scale for each group of inputs: in PyTorch. Phase 4 builds it.

A decode step reads every weight for each token that it computes, so its time is that of reading them: weights of half
the bytes take half the time. One scale for a whole matrix would be that of its largest number, and most numbers are far
smaller; so GROUP inputs of each output have a scale of their own. These are the layouts of GGUF's Q8_0 (int8) and Q4_1
(int4), so what such a file holds is held here without a further rounding.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

GROUP: Final = 32
"""Consecutive inputs of an output that share a scale."""


class GroupQuantized(NamedTuple):
    """A weight `[out, in]` of few bits.

    Attributes:
        numbers: int8 `[out, in]`; or of four bits uint8 `[out, in / 2]`, of each group sixteen bytes: byte i has number
            i in its low half and number i + 16 in its high half.
        scale: of each group, `[out, in / GROUP]` float16.
        minimum: what is added to scale · number, likewise; None for int8, which is symmetric.
    """

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None


def quantize_groups(weight: Tensor, dtype: str) -> GroupQuantized:
    """Round a weight to int8 or to four bits, group by group.

    A group is GROUP consecutive inputs of one output. In int8 its scale is the largest |weight| / 127, its numbers are
    weight / scale, −127 … 127. In int4 its minimum is its smallest weight, its scale (largest − smallest) / 15, its
    numbers are (weight − minimum) / scale, 0 … 15. Numbers are rounded to nearest, half to even, with the scale and the
    minimum as float16 keeps them; those may take a number out of its range, so it is clamped. Where the scale is 0 in
    float16, the numbers are 0.

    Args:
        weight: `[out, in]`, floating point, perhaps a parameter; in is a multiple of GROUP. It is not changed.
        dtype: "int8" or "int4".

    Raises:
        ValueError: dtype is neither, or weight is no `[out, in]` with in a multiple of GROUP: the message names the
            dtype or the shape. Or a number is not finite, or a scale or minimum is out of float16's range.
    """
    raise NotImplementedError(
        "phase 4, task 10: Weights in groups; read docs/en/phase-04-triton-kernels/lab/07-weights-of-few-bits.md"
    )


def dequantize_groups(weight: GroupQuantized) -> Tensor:
    """The weight `[out, in]` that was rounded, in float32: numbers times scale, plus the minimum if there is one."""
    raise NotImplementedError(
        "phase 4, task 10: Weights in groups; read docs/en/phase-04-triton-kernels/lab/07-weights-of-few-bits.md"
    )
