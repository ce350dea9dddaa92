"""MiniGPT as a Hugging Face folder, which production engines load as a Llama. No phase builds this.

MiniGPT has Llama's layers under Llama's names; only the file's prefix and its config.json are missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from minicache.model.checkpoint import load_minigpt
from minicache.model.folder import WEIGHTS


def export_minigpt(folder: str | Path) -> Path:
    """Write MiniGPT into a folder: config.json and weights in float32, 3 MB. It contains no tokenizer.

    Args:
        folder: created if it does not exist; files of these names are replaced.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = load_minigpt()
    shape = model.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_seq_len,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = {f"model.{name}": tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder
