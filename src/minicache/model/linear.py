"""Linear layers whose weights are no parameters: laid out for a CPU's products, or of few bits.

A model that an engine loads gets them in the place of `nn.Linear`. Its weights are held once, and cannot be trained. No
phase builds this module.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minicache.kernels import cpu, linear
from minicache.kernels.group_quantize import GROUP, GroupQuantized, dequantize_groups, quantize_groups
from minicache.model.minigpt import Transformer


class Weights(Protocol):
    """The weight `[out, in]` of a linear layer, in whatever form."""

    @property
    def shape(self) -> tuple[int, int]:
        """`[out, in]`."""

    def linear(self, hidden: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`, in the dtype of `hidden`."""

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of some outputs: `[…, in]` for ids `[…]`."""


class PackedLinear(nn.Module):
    """An `nn.Linear` that cannot be trained.

    Args:
        weights: its weight.
        bias: `[out]`, or None.

    Attributes:
        weights, bias: as given.
    """

    def __init__(self, weights: Weights, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.bias = bias

    @property
    def num_packed(self) -> int:
        """How many numbers its weight and bias have."""
        return prod(self.weights.shape) + (0 if self.bias is None else self.bias.numel())

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, in]` → `[…, out]`."""
        out = self.weights.linear(hidden)
        return out if self.bias is None else out.add_(self.bias)


class PackedEmbedding(nn.Module):
    """An `nn.Embedding` that shares its numbers with the output layer.

    Args:
        weights: the output layer's.

    Attributes:
        weights: as given.
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, token_ids: Tensor) -> Tensor:
        """`[…]` → `[…, hidden_size]`."""
        return self.weights.rows(token_ids)


def pack(model: Transformer, dtype: str | None = None) -> None:
    """Put packed layers in the place of a model's linear layers, one after the other.

    The output layer is int8 where the others have four bits: it decides between tokens, and an embedding that is the
    output layer shares its numbers.

    Args:
        model: with dtype None, in float32 on the CPU. Nothing else may hold its weights, or they are held twice.
        dtype: "int8" or "int4", what to round the weights to; None: they stay float32.

    Raises:
        ValueError: a layer cannot be quantized (`quantize_groups`).
    """
    head = "int8" if dtype == "int4" else dtype
    if model.lm_head is None:
        weights = _packed(model.embed_tokens.weight, head)
        model.lm_head = PackedLinear(weights)
        model.embed_tokens = PackedEmbedding(weights)  # type: ignore[assignment]
    elif isinstance(model.lm_head, nn.Linear):
        model.lm_head = PackedLinear(_packed(model.lm_head.weight, head))
    for parent in list(model.layers.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                bias = None if layer.bias is None else layer.bias.detach()
                setattr(parent, name, PackedLinear(_packed(layer.weight, dtype), bias))


def _packed(weight: Tensor, dtype: str | None) -> Weights:
    """A weight in the form that its device computes with."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and cpu.is_available():
        from minicache.model.panels import Panels  # imports numba

        return Panels.of(weight, dtype)
    assert dtype is not None, "only a CPU with numba has a form of its own for float32"
    return _Groups(*quantize_groups(weight, dtype), weight.dtype)


class _Groups(NamedTuple):
    """`GroupQuantized`, and the dtype to compute in."""

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """As `Weights`."""
        return len(self.scale), self.scale.shape[1] * GROUP

    def linear(self, hidden: Tensor) -> Tensor:
        """As `Weights`."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return linear(rows, GroupQuantized(*self[:3])).view(*hidden.shape[:-1], len(self.scale))

    def rows(self, ids: Tensor) -> Tensor:
        """As `Weights`."""
        minimum = None if self.minimum is None else self.minimum[ids].flatten(0, -2)
        parts = GroupQuantized(self.numbers[ids].flatten(0, -2), self.scale[ids].flatten(0, -2), minimum)
        return dequantize_groups(parts).to(self.dtype).view(*ids.shape, -1)
