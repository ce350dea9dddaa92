"""Linear layers whose weights are no parameters: laid out for a CPU's products, or of few bits.

A model that an engine loads gets them in the place of `nn.Linear`. Its weights are held once, and cannot be trained. No
phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol, cast

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
    """Put packed layers in the place of all of a model's linear layers (`pack_layer`)."""
    for name in [name for name, _ in model.named_parameters()]:
        pack_layer(model, name, dtype=dtype)


def pack_layer(model: Transformer, name: str, *, dtype: str | None = None) -> None:
    """Put packed layers in the place of the linear layer that has a parameter, and of those with the same inputs.

    The output layer is int8 where the others have four bits: it decides between tokens, and an embedding that is the
    output layer shares its numbers. An embedding that is not stays as it is: of a table few rows are read.

    Args:
        model: nothing else may hold its weights, or they are held twice.
        name: of the parameter. Where that is no weight of a linear layer, or layers with the same inputs have no memory
            yet, nothing happens.
        dtype: "int8" or "int4", what to round the weights to; None: they stay float32, and if they are not on a CPU
            with numba, nothing happens.

    Raises:
        ValueError: the weights cannot be quantized (`quantize_groups`).
    """
    path = name.rpartition(".")[0]
    layer = model.get_submodule(path)
    head = "int8" if dtype == "int4" else dtype
    if layer is model.embed_tokens and isinstance(layer, nn.Embedding) and model.lm_head is None:
        if (packed := _packed([layer.weight], head)) is not None:
            model.lm_head = PackedLinear(packed[0])
            model.embed_tokens = PackedEmbedding(packed[0])  # type: ignore[assignment]
    elif isinstance(layer, nn.Linear):
        parent, _, attribute = path.rpartition(".")
        owner = model.get_submodule(parent)
        names = next((names for names in _SAME_INPUTS if attribute in names), (attribute,))
        layers = [cast(nn.Linear, owner.get_submodule(each)) for each in names]
        if any(each.weight.is_meta for each in layers):
            return
        packed = _packed([each.weight for each in layers], head if layer is model.lm_head else dtype)
        for each, weights, attribute in zip(layers, packed or [], names, strict=bool(packed)):
            setattr(owner, attribute, PackedLinear(weights, None if each.bias is None else each.bias.detach()))


_SAME_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def _packed(layers: list[Tensor], dtype: str | None) -> Sequence[Weights] | None:
    """The weights of layers with the same inputs, as their device computes with them; None: as they are."""
    first = layers[0]
    if first.device.type == "cpu" and first.dtype == torch.float32 and cpu.is_available():
        from minicache.model.panels import Panels  # imports numba

        return Panels.of(*layers, dtype=dtype).split()
    return None if dtype is None else [_Groups(*quantize_groups(weight, dtype), weight.dtype) for weight in layers]


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
