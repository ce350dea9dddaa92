"""A model of 16 bits packed to int8 or int4: it computes with the rounded weights, and forgets the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from minicache.kernels.group_quantize import dequantize_groups, quantize_groups
from minicache.model import load_minigpt
from minicache.model.linear import PackedLinear, pack


def rounded(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    return dequantize_groups(quantize_groups(weight, dtype)).to(weight.dtype)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@torch.inference_mode()
def test_a_packed_model_computes_with_the_rounded_weights(dtype: str) -> None:
    """The output layer, which is the embedding too, has int8 in both."""
    model = copy.deepcopy(load_minigpt()).to(torch.bfloat16)
    expected = copy.deepcopy(model)
    for layer in expected.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(rounded(layer.weight, dtype))
    expected.embed_tokens.weight.copy_(rounded(expected.embed_tokens.weight, "int8"))
    pack(model, dtype)
    assert not [layer for layer in model.layers.modules() if isinstance(layer, nn.Linear)]
    tokens = torch.randint(0, model.config.vocab_size, (2, 20))
    torch.testing.assert_close(model(tokens), expected(tokens), rtol=0.2, atol=0.2)


def test_no_rows() -> None:
    model = copy.deepcopy(load_minigpt()).to(torch.bfloat16)
    pack(model, "int8")
    layer = next(layer for layer in model.layers.modules() if isinstance(layer, PackedLinear))
    num_outputs, num_inputs = layer.weights.shape
    assert layer(torch.empty(0, 3, num_inputs, dtype=torch.bfloat16)).shape == (0, 3, num_outputs)
