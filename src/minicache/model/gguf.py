"""A model in a GGUF file, as llama.cpp has them: one file with shape, weights, tokenizer and chat template.

As with folders (`minicache.model.folder`), what is not computed here is refused by name. Weights are dequantised as
they are read. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from minicache.errors import CheckpointError, UnsupportedModelError
from minicache.model.assembling import Settle, assemble, check_tensors, without_memory
from minicache.model.decoder import Decoder, DecoderConfig, FactorScaling, LinearScaling
from minicache.model.fields import Fields, one_of
from minicache.model.gguf_file import GGUFFile, StoredTensor

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""The models that are computed, by what a GGUF file calls their architecture. Mistral's is "llama" too."""

_STORED_NAMES: Final = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""What the modules of a `Decoder` are called in a file, where a layer is "blk.N"."""

_ROPE_FACTORS: Final = "rope_freqs.weight"  # Llama 3's scaling, as one divisor for each frequency

_KNOWN: Final = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
"""What an architecture's fields may say. Another field may change what is computed, so it is refused."""


def load_gguf(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    settle: Settle | None = None,
) -> Decoder:
    """Load a model from a GGUF file, ready for inference.

    Names and shapes of all tensors are checked before the first is read, and each is dequantised as it is read, a part
    at a time: at no time are there two copies of the weights.

    Args:
        path: of the file.
        dtype: what to hold the weights in; None: float32.
        device: where to hold them.
        settle: as for `minicache.model.assembling.assemble`.

    Returns:
        The model in evaluation mode.

    Raises:
        UnsupportedModelError: it asks for what is not computed here, or has tensors of a type that is not read
            (`minicache.model.gguf_file.TYPES`).
        CheckpointError: the file is missing or broken, or its tensors are not those of its fields.
        MissingExtraError: the library `gguf` is not installed.
    """
    file = GGUFFile(Path(path))
    config = gguf_config(file)
    with without_memory():
        model = Decoder(config)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
    names = {_stored_name(name): name for name, _ in model.named_parameters()}
    wanted = {_stored_name(name): parameter.shape for name, parameter in model.named_parameters()}
    check_tensors(file.path, {name: tensor.shape for name, tensor in tensors.items()}, wanted, "its header")
    in_order = [(names[name], tensor) for name, tensor in tensors.items()]
    return assemble(model, _read_tensors(file, in_order, config, dtype or torch.float32, device), settle)


def gguf_config(file: GGUFFile) -> DecoderConfig:
    """The shape of a file's model.

    Raises:
        UnsupportedModelError: it asks for what is not computed here; the message says which field.
        CheckpointError: a field has a value that no model can have, or is missing.
    """
    architecture = file.fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        fields = Fields(file.fields, f"{file.path}: ")
        raise fields.unsupported("general.architecture", architecture, one_of(ARCHITECTURES))
    fields = _fields_of(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path} lacks 1 tensor, which every model has: token_embd.weight")
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens, and embeddings for {embedding.shape[0]}")
    # Only a model that is made has shapes to check, and one of lying sizes would not fit into memory.
    most = max(max(tensor.shape) for tensor in file.tensors.values())
    num_heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length", most=most)
    head_dim = fields.count("attention.key_length", max(1, hidden_size // num_heads), most=most)
    fields.require("attention.value_length", head_dim, default=head_dim)
    fields.require("rope.dimension_count", head_dim, default=head_dim)
    try:
        return DecoderConfig(
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=fields.count("feed_forward_length"),
            num_layers=fields.count("block_count", most=len(file.tensors)),
            num_heads=num_heads,
            num_kv_heads=fields.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_seq_len=fields.count("context_length"),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10_000.0),
            rope_scaling=_rope_scaling(file, fields, head_dim),
            # A file says by its tensors what a config.json has fields for.
            attention_bias="blk.0.attn_q.bias" in file.tensors or architecture == "qwen2",
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_up.bias" in file.tensors,
            qk_norm=architecture == "qwen3",
            tie_word_embeddings="output.weight" not in file.tensors,
            end_token_ids=gguf_end_token_ids(file),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file.path}: no model can have this shape: {error}") from error


def gguf_end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The tokens with which a file's model ends its text.

    Raises:
        CheckpointError: as `gguf_token_ids`.
    """
    return gguf_token_ids(file, "eos", "eot")


def gguf_token_ids(file: GGUFFile, *names: str) -> tuple[int, ...]:
    """The tokens that a file has for some purposes, "bos" for instance, without repetition.

    Raises:
        CheckpointError: one is not in the file's vocabulary.
    """
    fields, ids = Fields(file.fields, f"{file.path}: "), []
    for name in (f"tokenizer.ggml.{name}_token_id" for name in names):
        if fields.has(name):
            ids.append(fields.get(name))
            num_tokens = len(fields.sequence("tokenizer.ggml.tokens", str))
            if type(ids[-1]) is not int or not 0 <= ids[-1] < num_tokens:
                raise CheckpointError(f"{file.path}: {name} must be one of {num_tokens} tokens; it is {ids[-1]!r}")
    return tuple(dict.fromkeys(ids))


def _fields_of(file: GGUFFile, architecture: str) -> Fields:
    """The fields of a file's architecture, if all of them are known."""
    prefix = f"{architecture}."
    values: Mapping[str, Any] = {
        name.removeprefix(prefix): value for name, value in file.fields.items() if name.startswith(prefix)
    }
    for name, value in values.items():
        if name not in _KNOWN and value != 0:  # no experts, for instance
            raise UnsupportedModelError(
                f"{file.path}: it has the field {prefix}{name}, {value!r}, which is not supported"
            )
    return Fields(values, f"{file.path}: {prefix}")


def _rope_scaling(file: GGUFFile, fields: Fields, head_dim: int) -> LinearScaling | FactorScaling | None:
    """How a file's rotary positions are stretched."""
    kind = fields.get("rope.scaling.type", "none")
    factors = file.tensors.get(_ROPE_FACTORS)
    if kind == "linear" and factors is None:
        return LinearScaling(fields.number("rope.scaling.factor"))
    if kind != "none":
        raise fields.unsupported("rope.scaling.type", kind, f"none, linear, or the tensor {_ROPE_FACTORS}")
    if factors is None:
        return None
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} is {list(factors.shape)}; it must be {[head_dim // 2]}")
    divisors = file.read(factors)
    if not (divisors > 0).all():
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS} must be positive; it is {divisors.tolist()}")
    return FactorScaling(tuple(divisors.tolist()))


def _stored_name(name: str) -> str:
    """What a parameter of `Decoder` is called in a file."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_STORED_NAMES[module]}.{kind}"
    _, index, part = module.split(".", 2)
    return f"blk.{index}.{_STORED_NAMES[part]}.{kind}"


def _read_tensors(
    file: GGUFFile,
    tensors: list[tuple[str, StoredTensor]],
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors by their parameters' names, one after the other, dequantised."""
    num_heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    by_neighbours = file.fields["general.architecture"] == "llama"
    for name, stored in tensors:
        tensor = file.read(stored, dtype=dtype, device=device)
        heads = num_heads.get(name.split(".")[-2])
        yield name, _by_halves(tensor, heads) if by_neighbours and heads else tensor


def _by_halves(weight: Tensor, num_heads: int) -> Tensor:
    """The rows of queries or keys in the order of published weights.

    A llama file has them in the order in which rotary positions turn neighbours, 0 with 1, and not by halves, 0 with
    d/2 (`minicache.model.minigpt.turns`).
    """
    neighbours = weight.view(num_heads, -1, 2, *weight.shape[1:])  # [H, d/2, 2, …]
    return neighbours.transpose(1, 2).reshape(weight.shape)
