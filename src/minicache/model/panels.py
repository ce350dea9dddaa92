"""Weights of linear layers in the order in which a CPU's products read them, in float32 or quantized.

No phase builds this module, and importing it imports numba.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minicache.kernels.cpu.products import PANEL, product
from minicache.kernels.cpu.warming import require_ready
from minicache.kernels.group_quantize import GROUP, GroupQuantized, quantize_groups

PART_NBYTES: Final = 4 * 2**20
"""The least work that a thread is woken for, as bytes of weights to read: four multiply-adds take as long as a byte."""
PART_ROWS: Final = 64 * PANEL
"""Outputs that are packed at a time."""


@dataclass(frozen=True)
class Panels:
    """Weights of linear layers with the same inputs, in panels (`minicache.kernels.cpu.products`).

    Attributes:
        numbers: `[panels, in, PANEL]` float32 or int8; or uint8 `[panels, in, PANEL / 2]`.
        scale: of each group, `[panels, in / GROUP, PANEL]` float16; None for float32.
        minimum: likewise, for four bits; else None.
        sizes: the outputs of each layer. A layer's first panel is its own.
        joined: of one of several layers, the panels of all; else None.
    """

    numbers: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    sizes: tuple[int, ...]
    joined: Panels | None = None

    @classmethod
    def of(cls, *weights: Tensor, dtype: str | None = None) -> Panels:
        """Pack the weights `[out, in]` of layers with the same inputs; dtype None keeps them in float32.

        Raises:
            ValueError: they cannot be quantized (`quantize_groups`).
        """
        sizes, depth = tuple(map(len, weights)), weights[0].shape[1]
        num_panels = sum(map(_num_panels, sizes))
        kind, lanes = _KINDS[dtype]
        numbers = _zeros((num_panels, depth, lanes), kind)
        scale, minimum = (
            torch.zeros(num_panels, depth // GROUP, PANEL, dtype=torch.float16, device="cpu") if is_there else None
            for is_there in (dtype is not None, dtype == "int4")
        )
        first = 0
        for weight in weights:
            for part in torch.split(weight.detach(), PART_ROWS):  # rounding needs several copies
                if dtype is None:
                    _fill(numbers, first, part)
                else:
                    _fill_quantized(numbers, scale, minimum, first, quantize_groups(part, dtype))
                first += _num_panels(len(part))
        return cls(numbers, scale, minimum, sizes)

    def split(self) -> list[Panels]:
        """The layers' own: views, each of which knows these as `joined`."""
        counts = [_num_panels(size) for size in self.sizes]
        parts = [
            [None] * len(counts) if tensor is None else torch.split(tensor, counts)
            for tensor in (self.numbers, self.scale, self.minimum)
        ]
        return [
            Panels(numbers, scale, minimum, (size,), self)
            for numbers, scale, minimum, size in zip(*parts, self.sizes, strict=True)
        ]

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`, out being the outputs of all layers."""
        return sum(self.sizes), self.numbers.shape[1]

    def linear(self, hidden: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`, float32.

        Raises:
            ValueError: they are not such rows.
        """
        if hidden.shape[-1] != self.shape[1] or hidden.dtype != torch.float32:  # would be read past the end
            raise ValueError(f"rows must be float32 […, {self.shape[1]}]; got {hidden.dtype} {list(hidden.shape)}")
        require_ready(torch.float32)
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty(len(rows), self.shape[0], dtype=torch.float32, device="cpu")
        self.times(rows.numpy(), out.numpy())
        return out.view(*hidden.shape[:-1], self.shape[0])

    def times(self, rows: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Multiply rows `[N, in]` by the weights, into out `[N, out]`; both contiguous.

        On several threads, as many as PyTorch's, if there is work for them.
        """
        count, numbers_per_row, nbytes, arrays = self._prepared
        work = max(nbytes, rows.shape[0] * numbers_per_row)
        num_parts = 1 if work < 2 * PART_NBYTES else min(torch.get_num_threads(), work // PART_NBYTES, count)
        if num_parts == 1:
            product(rows, *arrays, out, 0, count)
            return
        bounds = [count * part // num_parts for part in range(num_parts + 1)]
        threads, ranges = _threads(num_parts), pairwise(bounds)
        for part in [threads.submit(product, *(rows, *arrays, out, first, last)) for first, last in ranges]:
            part.result()

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some outputs of the one layer, in float32: `[…, in]` for ids `[…]`.

        Raises:
            IndexError: there is no such output.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.shape[0]:
            raise IndexError(f"index out of range 0 … {self.shape[0] - 1}: {ids.tolist()}")
        panel, lane = ids // PANEL, ids % PANEL
        if self.scale is None:
            return self.numbers[panel, :, lane]
        scale = self.scale[panel, :, lane].float().repeat_interleave(GROUP, -1)
        if self.minimum is None:
            return self.numbers[panel, :, lane].float() * scale
        half = PANEL // 2
        codes = self.numbers[panel, :, lane % half] >> (4 * (lane // half))[..., None] & 15
        return codes.float() * scale + self.minimum[panel, :, lane].float().repeat_interleave(GROUP, -1)

    @cached_property
    def _prepared(self) -> tuple[int, int, int, tuple[Any, ...]]:
        """How many panels; what a row adds to the work, and what reading is; what `product` takes in the middle."""
        numbers, scale, minimum = self.numbers.numpy(), *map(_codes, (self.scale, self.minimum))
        starts = np.cumsum([0, *self.sizes])
        columns = [
            (start + at, min(PANEL, size - at))
            for start, size in zip(starts, self.sizes, strict=False)
            for at in range(0, size, PANEL)
        ]
        arrays = numbers, scale, minimum, np.array(columns, np.int64)
        return len(numbers), self.shape[0] * self.shape[1] // 4, numbers.nbytes, arrays


_KINDS = {None: (torch.float32, PANEL), "int8": (torch.int8, PANEL), "int4": (torch.uint8, PANEL // 2)}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """As `torch.zeros`, in large pages where the system has them: weights are read from end to end."""
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _fill(panels: Tensor, first: int, weight: Tensor) -> None:
    """Write a weight `[out, n]` to panels `[…, n, PANEL]` from the first on."""
    whole, rest = divmod(len(weight), PANEL)
    panels[first : first + whole] = weight[: whole * PANEL].view(whole, PANEL, weight.shape[1]).transpose(1, 2)
    if rest:
        panels[first + whole, :, :rest] = weight[whole * PANEL :].t()


def _fill_quantized(
    panels: Tensor, scale: Tensor | None, minimum: Tensor | None, first: int, weight: GroupQuantized
) -> None:
    """The same of quantized weights."""
    assert scale is not None
    _fill(scale, first, weight.scale)
    if minimum is None or weight.minimum is None:
        _fill(panels, first, weight.numbers)
        return
    _fill(minimum, first, weight.minimum)
    pairs = weight.numbers.view(len(weight.numbers), -1, GROUP // 2)
    codes = torch.cat([pairs & 15, pairs >> 4], dim=-1).flatten(1)
    each = codes.new_zeros(_num_panels(len(codes)), codes.shape[1], PANEL)
    _fill(each, 0, codes)
    panels[first : first + len(each)] = each[..., : PANEL // 2] | each[..., PANEL // 2 :] << 4


def _num_panels(size: int) -> int:
    return -(-size // PANEL)


def _codes(halves: Tensor | None) -> Any:
    """float16 as numba sees it."""
    return None if halves is None else halves.view(torch.uint16).numpy()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="products")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has the object, and none of its threads
