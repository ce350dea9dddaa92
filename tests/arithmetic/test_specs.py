"""The published numbers: parameters counted again on models built without their weights, and nonsense refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig, Qwen3Config

from minicache.arithmetic import specs
from minicache.arithmetic.specs import Accelerator, Transformer
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT, MiniGPTConfig


def shape(model: Transformer) -> dict[str, int]:
    """What transformers calls the fields of a `Transformer`."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


PUBLISHED = {
    "OPT-13B": (
        specs.OPT_13B,
        lambda s: OPTConfig(
            **{name: s[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")},
            word_embed_proj_dim=s["hidden_size"],
            ffn_dim=20_480,
            vocab_size=50_272,
        ),
    ),
    "Llama-3-8B": (specs.LLAMA_3_8B, lambda s: LlamaConfig(**s, intermediate_size=14_336, vocab_size=128_256)),
    "Llama-3-70B": (specs.LLAMA_3_70B, lambda s: LlamaConfig(**s, intermediate_size=28_672, vocab_size=128_256)),
    "Qwen3-8B": (specs.QWEN3_8B, lambda s: Qwen3Config(**s, intermediate_size=12_288, vocab_size=151_936)),
    "Qwen3-32B": (specs.QWEN3_32B, lambda s: Qwen3Config(**s, intermediate_size=25_600, vocab_size=151_936)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_built_model(name: str) -> None:
    spec, configure = PUBLISHED[name]
    config: PretrainedConfig = configure(shape(spec))
    with torch.device("meta"):  # shapes only: no memory, no download
        model = AutoModelForCausalLM.from_config(config)
    assert count(model) == spec.num_parameters


def test_minigpt_is_the_shipped_model() -> None:
    config = MiniGPTConfig(vocab_size=Tokenizer().vocab_size)
    with torch.device("meta"):
        model = MiniGPT(config)
    spec = specs.MINIGPT
    assert count(model) == spec.num_parameters
    fields = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
    assert [getattr(config, field) for field in fields] == [getattr(spec, field) for field in fields]


GOOD: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "num_parameters": 100,
    "kv_latent_dim": 6,
}


@pytest.mark.parametrize("field", GOOD)
def test_a_transformer_has_whole_positive_sizes(field: str) -> None:
    Transformer(**GOOD)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=field):
            Transformer(**{**GOOD, field: wrong})
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError, match=field):
            Transformer(**{**GOOD, field: wrong})


def test_query_heads_share_kv_heads_evenly() -> None:
    with pytest.raises(ValueError, match="multiple"):
        Transformer(**{**GOOD, "num_heads": 5})
    with pytest.raises(ValueError, match="multiple"):
        Transformer(**{**GOOD, "num_kv_heads": 8})


@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth", "peak_flops"])
def test_an_accelerator_has_positive_numbers(field: str) -> None:
    good: dict[str, Any] = {"name": "any", "memory_bytes": 1, "bandwidth": 2.0, "peak_flops": 3}
    Accelerator(**good)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=field):
            Accelerator(**{**good, field: wrong})
    with pytest.raises(TypeError, match=field):
        Accelerator(**{**good, field: "1"})


@pytest.mark.parametrize("field", ["bandwidth", "peak_flops"])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_rates_are_finite(field: str, wrong: float) -> None:
    good: dict[str, Any] = {"name": "any", "memory_bytes": 1, "bandwidth": 2.0, "peak_flops": 3.0}
    with pytest.raises(ValueError, match=field):
        Accelerator(**{**good, field: wrong})
