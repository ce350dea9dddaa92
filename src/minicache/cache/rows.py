"""What caches share: the checks of the rows that they are given and of the order of the layers, and their memory.

You wrote these checks once, in phase 1, inside `KVCache`. The caches of later phases import them from here. No phase
builds this module.
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT: Final = 64  # bytes: a line of a CPU's cache


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """As `torch.zeros`. On the CPU, memory is taken page by page when it is first written.

    So a cache that is sized for many requests costs what it holds, and nothing at the start.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = prod(shape) * dtype.itemsize
    pages = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -pages.ctypes.data % _ALIGNMENT
    return torch.from_numpy(pages[start : start + nbytes]).view(dtype).view(shape)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless keys and values can be stored in `dtype`: a floating-point `torch.dtype`."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float16; got {dtype!r}")


def check_layer(layer: int, num_layers: int) -> None:
    """Raise IndexError unless `layer` is one of 0 … num_layers − 1. Negative ones do not count from the end."""
    if not 0 <= layer < num_layers:
        raise IndexError(f"no layer {layer}: this cache has layers 0 … {num_layers - 1}")


def check_rows(
    k: Tensor, v: Tensor, batch_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless `k` and `v` are rows that a cache of these sizes can store.

    Args:
        k: keys, should be `[batch_size, num_kv_heads, T, head_dim]` with T ≥ 1.
        v: values, the same shape.
        batch_size: B.
        num_kv_heads: H_kv.
        head_dim: d.
        dtype: what the cache stores.
        device: where it stores it.

    Raises:
        TypeError: `k` or `v` is not a tensor, or has another dtype.
        ValueError: another shape or device, T = 0, or T differs between `k` and `v`.
    """
    for name, rows in (("k", k), ("v", v)):
        if not isinstance(rows, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(rows).__name__}")
        fits = rows.ndim == 4 and rows.shape == (batch_size, num_kv_heads, k.shape[2], head_dim)
        if not fits or rows.shape[2] == 0:
            raise ValueError(
                f"{name} must be [{batch_size}, {num_kv_heads}, T ≥ 1, {head_dim}], "
                f"with one T for k and v; got {list(rows.shape)}"
            )
        if rows.dtype != dtype:
            raise TypeError(f"{name} is {rows.dtype}, the cache stores {dtype}: convert it first")
        if rows.device != device:
            raise ValueError(f"{name} is on {rows.device}, the cache on {device}: move it first")


class LayerTurns:
    """The order of layers: a forward pass goes through layer 0, 1, … num_layers − 1, with the same T in each.

    Args:
        num_layers: attention layers, ≥ 1.

    Attributes:
        num_new: T of the pass under way, or of the previous one.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.num_new = 0
        self._next = 0

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass is under way: some layers have their rows and others do not."""
        return self._next > 0

    def check(self, layer: int, num_new: int) -> None:
        """Raise ValueError unless `layer` is next and T is that of this pass's earlier layers."""
        if layer != self._next:
            raise ValueError(f"layers out of order: layer {self._next} is next, not layer {layer}")
        if self._next and num_new != self.num_new:
            raise ValueError(
                f"layers disagree: the earlier layers got {self.num_new} tokens, layer {layer} got {num_new}"
            )

    def advance(self, num_new: int) -> bool:
        """Record that the next layer has its T rows. True if it was the last: the pass is over."""
        self.num_new = num_new
        self._next = (self._next + 1) % self.num_layers
        return self._next == 0

    def is_ahead(self, layer: int) -> bool:
        """Whether `layer` already has the new rows of the pass under way."""
        return layer < self._next

    def reset(self) -> None:
        """Discard an unfinished pass: layer 0 is next."""
        self._next = 0
