"""GGUF files, written with the library's own writer: from a Hugging Face folder, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer


def write_gguf(
    folder: Path, path: Path, *, kind: str = "F32", tokenizer: bool = False, extra: Any = None, **fields: Any
) -> Path:
    """Write a folder's model as a GGUF file; and its weights, as they are after quantising, back into the folder.

    Args:
        folder: of a float32 model in one file.
        path: of the file.
        kind: of the matrices; norms and biases are F32.
        tokenizer: whether to write the folder's tokenizer too.
        extra: more tensors, by name.
        fields: of the architecture, "." as "__"; to write another value, or None to leave one out.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "llama" if config["model_type"] == "mistral" else config["model_type"])
    names = {  # what a converter writes
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if config.get("head_dim"):
        names |= {f"attention.{of}_length": config["head_dim"] for of in ("key", "value")}
    for name, value in {**names, **{name.replace("__", "."): value for name, value in fields.items()}}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](f"{writer.arch}.{name}", value)
    if tokenizer:
        _add_tokenizer(writer, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        writer.add_tensor(*_stored(writer, config, name, tensor, kind))
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return path


def _stored(writer: GGUFWriter, config: dict[str, Any], name: str, tensor: torch.Tensor, kind: str) -> tuple[Any, ...]:
    """A tensor's name, numbers and type in the file. In the folder it becomes what the file's numbers stand for."""
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[writer.arch]
    stored_name = gguf.get_tensor_name_map(arch, config["num_hidden_layers"]).get_name(name, (".weight", ".bias"))
    chosen = Kind[kind] if tensor.ndim == 2 else Kind.F32
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    permuted = writer.arch == "llama" and heads is not None
    numbers = tensor.clone()
    if permuted:  # as convert_hf_to_gguf.py has it
        numbers = numbers.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    data = quantised(numbers.numpy(), chosen)
    back = torch.from_numpy(np.array(quants.dequantize(data, chosen)))
    if permuted:
        back = back.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    tensor.copy_(back)
    return stored_name, data, None, chosen


def quantised(numbers: np.ndarray, kind: Kind) -> np.ndarray:
    """Numbers as blocks of a kind; of those that the library cannot make, blocks with random contents."""
    if kind in (Kind.F16, Kind.F32):
        return numbers.astype(np.float16 if kind is Kind.F16 else np.float32)
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return quants.quantize(numbers, kind)
    random = np.random.default_rng(0)
    shape = quants.quant_shape_to_byte_shape(numbers.shape, kind)
    blocks = random.integers(0, 256, shape, dtype=np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    scales = slice(0, 4) if kind is Kind.Q4_K else slice(-2, None)  # halves, which are not to be inf or nan
    half = random.uniform(0.0001, 0.001, (len(blocks), (scales.stop or 0) - scales.start >> 1)).astype(np.float16)
    blocks[:, scales] = half.view(np.uint8)
    return blocks.reshape(shape)


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads(made.to_str())["model"]
    add_tokenizer(writer, made, model["merges"])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def add_tokenizer(
    writer: GGUFWriter, made: Tokenizer, merges: list[list[str]], pre: str | None = "smollm", *, add_bos: bool = True
) -> None:
    """Write a byte-level tokenizer; its special tokens are control tokens, other added ones the user's."""
    added = {token_id: 3 if token.special else 4 for token_id, token in made.get_added_tokens_decoder().items()}
    tokens = [made.id_to_token(token_id) for token_id in range(made.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token_id, 1) for token_id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for name, add in (("<s>", writer.add_bos_token_id), ("</s>", writer.add_eos_token_id)):
        if name in tokens:
            add(tokens.index(name))
    writer.add_add_bos_token(add_bos)
