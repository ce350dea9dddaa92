"""MiniGPT on disk: one safetensors file that knows its own shape and vocabulary."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minicache.errors import CheckpointError
from minicache.grammar import Tokenizer
from minicache.model.config import MiniGPTConfig
from minicache.model.minigpt import MiniGPT
from minicache.model.shelf import find_on_shelf

FORMAT = "minigpt-1"
SHIPPED = find_on_shelf("minigpt")
SHIPPED_DRAFT = find_on_shelf("minigpt-draft")
"""A smaller model of the same vocabulary, to speculate with."""


def save_minigpt(model: MiniGPT, path: str | Path) -> None:
    """Write a model's weights, config and vocabulary fingerprint to a safetensors file.

    The file is written next to `path` first and then moved there, so an old checkpoint is never half overwritten.

    Args:
        model: any MiniGPT.
        path: where to; the folder has to exist.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    about = {"config": asdict(model.config), "vocabulary": Tokenizer().fingerprint}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    draft = path.with_name(path.name + ".part")
    try:
        # One key only: safetensors writes several in random order, and equal weights should give equal files.
        save_file(tensors, draft, {FORMAT: json.dumps(about)})
        draft.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error


def load_minigpt(
    path: str | Path | None = None, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MiniGPT:
    """Load a MiniGPT, ready for inference.

    Safetensors hold numbers and text only: unlike a pickle, loading one cannot run code.

    Args:
        path: a file that `save_minigpt` wrote; None takes the checkpoint that ships with the package.
        dtype: what to hold the weights in.
        device: where to hold them.

    Returns:
        The model in evaluation mode.

    Raises:
        CheckpointError: the file is missing or unreadable, is no MiniGPT checkpoint, or was made for another
            vocabulary; or its tensors do not fit its config.
    """
    path = SHIPPED if path is None else Path(path)
    metadata, tensors = _read(path)
    if FORMAT not in metadata:
        raise CheckpointError(f"{path} is no MiniGPT checkpoint: its metadata lacks {FORMAT!r}")
    try:
        about = json.loads(metadata[FORMAT])
        vocabulary, config = about["vocabulary"], about["config"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: what it says about itself cannot be read: {error}") from error
    fingerprint = Tokenizer().fingerprint
    if vocabulary != fingerprint:
        raise CheckpointError(
            f"{path} was made for another vocabulary ({vocabulary}, not {fingerprint}): "
            "train a new one with `minicache train`"
        )
    try:
        shape = MiniGPTConfig(**config)
        if shape.num_layers > len(tensors):
            raise ValueError(f"{shape.num_layers:,} layers, and {len(tensors)} tensors")
        model = MiniGPT(shape)
        model.load_state_dict(tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the config and the tensors do not fit together: {error}") from error
    return model.to(device=device, dtype=dtype).eval()


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
