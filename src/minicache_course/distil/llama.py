"""Written by hand for `minicache distil`: what stands around a learner's files in the one file, below the engine.

A Llama of the blocks of `minicache.model.minigpt`, and its loader. Nothing imports this module: it is read.
"""

# mypy: ignore-errors
# It is checked as part of the file that it becomes: a class here stands in for another of the package.

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from minicache.cache.paged import RaggedStep
from minicache.errors import UnsupportedModelError
from minicache.model.decoder import Llama3Scaling, RMSNorm
from minicache.model.minigpt import Attention, Block, FeedForward, rotary_frequencies, turns


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a `Llama`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    end_token_ids: tuple[int, ...]


class Llama(nn.Module):
    """A Llama with the parameter names of `transformers`, without their "model."."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.layers = nn.ModuleList(
            Block(
                RMSNorm(size, eps),
                Attention(config, index),
                RMSNorm(size, eps),
                FeedForward(size, config.intermediate_size),
            )
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(size, config.vocab_size, bias=False)
        with torch.device("cpu"):  # the rest may be made without memory, before its weights are read
            frequencies = rotary_frequencies(config.rope_theta, config.head_dim)
            self.frequencies = frequencies if config.rope_scaling is None else config.rope_scaling.scale(frequencies)

    def forward(self, token_ids: Tensor, cache: RaggedStep, rows: Tensor) -> Tensor:
        """Compute a step's tokens `[1, N]`, and the logits `[B, vocab]` of the tokens at `rows`."""
        positions, dtype = cache.positions(token_ids.shape[1]), self.norm.weight.dtype
        # One axis for the heads, after the tokens: [N, 1, d] broadcasts against [1, N, H, d].
        angles = turns(positions, self.frequencies.to(positions.device))
        rotation = tuple(each.to(dtype).unsqueeze(-2) for each in angles)
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation, cache)
        last = self.norm(hidden)[0, rows]
        return F.linear(last, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(last)


def llama_config(config: dict[str, Any], generation: dict[str, Any]) -> LlamaConfig:
    """Read a config.json, of a newer or an older `transformers`, and the end tokens of generation_config.json."""
    rope = {"rope_type": "default", **(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    kind = config.get("architectures")
    if kind != ["LlamaForCausalLM"] or rope["rope_type"] not in ("default", "llama3"):
        raise UnsupportedModelError(f"not a Llama: {kind}, rope_type {rope['rope_type']}")
    if config.get("attention_bias") or config.get("mlp_bias") or config.get("quantization_config"):
        raise UnsupportedModelError("a Llama with biases or quantized weights is not computed here")
    num_heads, ends = config["num_attention_heads"], generation.get("eos_token_id", config.get("eos_token_id"))
    scaling = None
    if rope["rope_type"] == "llama3":
        original = rope["original_max_position_embeddings"]
        scaling = Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original)
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        max_seq_len=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        rope_scaling=scaling,
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        end_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
    )


def load_llama(folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Llama:
    """Load a Hugging Face folder; without a dtype, in the one that it was stored in."""
    if not Path(folder, "config.json").is_file():
        raise UnsupportedModelError(f"{folder} has no config.json: name the folder of a Llama from Hugging Face")
    texts = {name: Path(folder, f"{name}.json") for name in ("config", "generation_config")}
    values = {name: json.loads(file.read_text()) if file.is_file() else {} for name, file in texts.items()}
    config = llama_config(values["config"], values["generation_config"])
    with torch.device("meta"):
        model = Llama(config)
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt", device=str(device)) as stored:
            for name in sorted(stored.keys()):
                is_copy = name == "lm_head.weight" and config.tie_word_embeddings
                if not is_copy and not name.endswith("rotary_emb.inv_freq"):
                    weights[name.removeprefix("model.")] = stored.get_tensor(name).to(dtype)
    model.load_state_dict(weights, assign=True)
    return model.eval()
