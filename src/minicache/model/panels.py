"""Weights of linear layers in the order in which a CPU's products read them, in float32 or quantized.

No phase builds this module, and importing it imports numba.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from minicache.kernels.cpu.products import PANEL, product
from minicache.kernels.cpu.warming import require_ready
from minicache.kernels.group_quantize import GROUP, quantize_groups

PART_NBYTES: Final = 4 * 2**20
"""The least work that a thread is woken for, as bytes of weights to read: four multiply-adds take as long as a byte."""


@dataclass(frozen=True)
class Panels:
    """Weights of linear layers with the same inputs, in panels (`minicache.kernels.cpu.products`).

    Attributes:
        numbers: `[panels, in, PANEL]` float32 or int8; or uint8 `[panels, in, PANEL / 2]`.
        scale: of each group, `[panels, in / GROUP, PANEL]` float16; None for float32.
        minimum: likewise, for four bits; else None.
        sizes: the outputs of each layer. A layer's first panel is its own.
    """

    numbers: Tensor
    scale: Tensor | None
    minimum: Tensor | None
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, dtype: str | None = None) -> Panels:
        """Pack a weight `[out, in]`; dtype None keeps it in float32.

        Raises:
            ValueError: it cannot be quantized (`quantize_groups`).
        """
        size = len(weight)
        if dtype is None:
            return cls(_in_panels(weight.detach().float()), None, None, (size,))
        numbers, scale, minimum = quantize_groups(weight, dtype)
        if minimum is None:
            return cls(_in_panels(numbers), _in_panels(scale), None, (size,))
        pairs = numbers.view(*scale.shape, GROUP // 2)
        codes = _in_panels(torch.cat([pairs & 15, pairs >> 4], dim=-1).flatten(1))
        numbers = codes[..., : PANEL // 2] | codes[..., PANEL // 2 :] << 4
        return cls(numbers, _in_panels(scale), _in_panels(minimum), (size,))

    @classmethod
    def join(cls, parts: Sequence[Panels]) -> Panels:
        """The panels of several layers with the same inputs, one after the other."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            torch.cat([part.numbers for part in parts]),
            None if first.scale is None else torch.cat([part.scale for part in parts if part.scale is not None]),
            None if first.minimum is None else torch.cat([part.minimum for part in parts if part.minimum is not None]),
            tuple(size for part in parts for size in part.sizes),
        )

    def split(self) -> list[Panels]:
        """The layers' own: views."""
        counts = [_num_panels(size) for size in self.sizes]
        parts = [
            [None] * len(counts) if tensor is None else torch.split(tensor, counts)
            for tensor in (self.numbers, self.scale, self.minimum)
        ]
        return [Panels(*each, (size,)) for *each, size in zip(*parts, self.sizes, strict=True)]  # type: ignore[call-arg]

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`, out being the outputs of all layers."""
        return sum(self.sizes), self.numbers.shape[1]

    def linear(self, hidden: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`, float32."""
        require_ready(torch.float32)
        rows = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
        out = torch.empty(len(rows), self.shape[0], dtype=torch.float32, device="cpu")
        self.times(rows, out)
        return out.view(*hidden.shape[:-1], -1)

    def times(self, rows: Tensor, out: Tensor) -> None:
        """Multiply rows `[N, in]` by the weights, into out `[N, out]`; both float32 and contiguous.

        On several threads, as many as PyTorch's, if there is work for them.
        """
        work = max(self._nbytes, len(rows) * self.numbers.numel() // 4)
        num_parts = min(torch.get_num_threads(), work // PART_NBYTES, len(self.numbers))
        if num_parts < 2:
            product(rows.numpy(), *self._arrays, out.numpy(), 0, len(self.numbers))
            return
        bounds = [len(self.numbers) * part // num_parts for part in range(num_parts + 1)]
        x, to = rows.numpy(), out.numpy()
        threads, ranges = _threads(num_parts), pairwise(bounds)
        for part in [threads.submit(product, *(x, *self._arrays, to, first, last)) for first, last in ranges]:
            part.result()

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some outputs of the one layer, in float32: `[…, in]` for ids `[…]`."""
        panel, lane = ids // PANEL, ids % PANEL
        if self.scale is None:
            return self.numbers[panel, :, lane]
        scale = self.scale[panel, :, lane].float().repeat_interleave(GROUP, -1)
        if self.minimum is None:
            return self.numbers[panel, :, lane].float() * scale
        half = PANEL // 2
        codes = self.numbers[panel, :, lane % half] >> (4 * (lane // half))[..., None] & 15
        return codes.float() * scale + self.minimum[panel, :, lane].float().repeat_interleave(GROUP, -1)

    @property
    def _nbytes(self) -> int:
        return self.numbers.nbytes

    @cached_property
    def _arrays(self) -> tuple[Any, ...]:
        """What `product` takes between its inputs and outputs."""
        numbers, scale, minimum = self.numbers.numpy(), *map(_codes, (self.scale, self.minimum))
        starts = np.cumsum([0, *self.sizes])
        columns = [
            (start + at, min(PANEL, size - at))
            for start, size in zip(starts, self.sizes, strict=False)
            for at in range(0, size, PANEL)
        ]
        return numbers, scale, minimum, np.array(columns, np.int64)


def _in_panels(weight: Tensor) -> Tensor:
    """`[out, n]` → `[panels, n, PANEL]`, contiguous; zeros fill the last panel."""
    size, depth = weight.shape
    panels = weight.new_zeros(_num_panels(size), depth, PANEL)
    whole = size // PANEL
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, depth).transpose(1, 2)
    if size % PANEL:
        panels[-1, :, : size % PANEL] = weight[whole * PANEL :].t()
    return panels


def _num_panels(size: int) -> int:
    return -(-size // PANEL)


def _codes(halves: Tensor | None) -> Any:
    """float16 as numba sees it."""
    return None if halves is None else halves.view(torch.uint16).numpy()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="products")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has the object, and none of its threads
