"""Tensors as the checks see them, by torch's own functions: those of `TensorBase` cannot be replaced.

A learner's file may return a subclass of `Tensor`, put a function of its own into `torch` or `torch.Tensor`, or leave a
mode behind that every operation passes through. None of these has a part in what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import TensorBase as _TensorBase
from torch.utils._python_dispatch import _disable_current_modes

TensorBase: Any = _TensorBase
Tensor = torch.Tensor
TYPES = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that a check accepts; the second is for the checks one of the first."""

_without_functions = torch._C.DisableTorchFunction
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_UINT8 = torch.uint8


@contextmanager
def alone() -> Iterator[None]:
    """Without any mode or `__torch_function__`."""
    with ExitStack() as stack:
        stack.enter_context(_without_functions())
        if _num_modes():
            stack.enter_context(_disable_current_modes())
        yield


def shape_of(tensor: Any) -> list[int]:
    """The shape."""
    return list(TensorBase.size(tensor))


def dtype_of(tensor: Any) -> torch.dtype:
    """The dtype."""
    dtype: torch.dtype = TensorBase.dtype.__get__(tensor)
    return dtype


def device_of(tensor: Any) -> torch.device:
    """The device."""
    device: torch.device = TensorBase.device.__get__(tensor)
    return device


def numbers_of(tensor: Any) -> Any:
    """The numbers, in nested lists."""
    return TensorBase.tolist(tensor)


def bytes_of(tensor: Any) -> Any:
    """A copy of the tensor's bytes, in a uint8 tensor: different NaNs, and −0 and 0, differ."""
    flat = TensorBase.clone(TensorBase.detach(tensor), memory_format=torch.contiguous_format)
    return TensorBase.view(TensorBase.view(flat, -1), _UINT8)


def same_bytes(one: Any, other: Any) -> bool:
    """Whether two results of `bytes_of` are the same."""
    return bool(TensorBase.equal(one, other))


class Comparison:
    """Two tensors of the same shape, number by number.

    Args:
        got: a tensor.
        expected: another one.
        rtol: relative to `expected`.
        atol: absolute.

    Attributes:
        count: numbers that differ.
        index: where the first of them is.
        first: the number of `got` there.
        right: the number of `expected` there.
        largest: the largest error of those that differ; NaN if one of them is.
    """

    def __init__(self, got: Any, expected: Any, rtol: float, atol: float) -> None:
        of = TensorBase
        one, other = (of.double(of.cpu(of.detach(each))) for each in (got, expected))
        error = of.abs(of.sub(one, other))
        # A NaN, which compares false with everything, must count as a difference; equal infinities do not.
        # An infinity that is expected allows nothing else, though a part of it is infinite too.
        near = of.le(error, of.add(of.mul(of.abs(other), rtol), atol))
        near = of.logical_and(near, of.isfinite(other))
        wrong = of.logical_not(of.logical_or(near, of.eq(one, other)))
        self.count = int(of.item(of.sum(wrong)))
        if not self.count:
            return
        place = of.__getitem__(of.nonzero(wrong), 0)
        self.index: list[int] = of.tolist(place)
        self.first, self.right = (of.item(of.__getitem__(each, tuple(self.index))) for each in (one, other))
        self.largest: float = of.item(of.max(of.masked_select(error, wrong)))
