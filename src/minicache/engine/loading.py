"""From a model's name to a model: found, loaded or downloaded, in the dtype that its device computes in.

No phase builds this module.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from minicache.engine.kv import Model
from minicache.engine.stopping import Tokenizer
from minicache.grammar import Tokenizer as MiniGPTTokenizer
from minicache.model import Decoder, MiniGPT, load_minigpt
from minicache.model.checkpoint import SHIPPED, SHIPPED_DRAFT
from minicache.model.folder import load_folder
from minicache.model.hub import download, is_hub_name
from minicache.model.linear import pack, pack_layer
from minicache.model.tokenizer import folder_tokenizer

logger = logging.getLogger("minicache")

_Module = TypeVar("_Module", bound=nn.Module)


_Given = TypeVar("_Given")


def find_model(model: str | Path | _Given) -> Path | _Given:
    """Find the model that an engine was asked for.

    Args:
        model: "minigpt", "minigpt-draft", the path of a checkpoint or of a Hugging Face folder, a hub name, or a
            model. A local path goes before a hub name.

    Returns:
        The path of the file or folder, which may not exist; a model as it was given.

    Raises:
        HubError: a hub name, and the model is neither here already nor can it be downloaded.
        MissingExtraError: a hub name, and `huggingface_hub` is not installed.
    """
    if not isinstance(model, str | Path):
        return model
    if model in ("minigpt", "minigpt-draft"):
        return SHIPPED if model == "minigpt" else SHIPPED_DRAFT
    if isinstance(model, str) and is_hub_name(model) and not Path(model).exists():
        return download(model)
    return Path(model)


def load_tokenizer(model: Path | object) -> Tokenizer | None:
    """The tokenizer of the model that `find_model` has found: MiniGPT's, the folder's, or None.

    Raises:
        CheckpointError: the folder has one that cannot be read.
        MissingExtraError: it has one, and `transformers` is not installed.
    """
    if not isinstance(model, Path):
        return None
    return folder_tokenizer(model) if model.is_dir() else MiniGPTTokenizer()


def load_model(
    model: str | Path | Model,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    *,
    weight_dtype: str | None = None,
    num_ranks: int = 1,
) -> Model:
    """The model that an engine was asked for.

    Args:
        model: as for `find_model`.
        dtype: what to hold its weights in; None: float32 for a checkpoint, what the folder says for a folder. But 16
            bits become float32, with a warning, on a CPU that has no instructions for them and would be many times
            slower; and on a GPU float32 becomes bfloat16, or float16 if that is an older one (`half_on_gpu`).
        device: where to hold them; None: the CPU.
        weight_dtype: "int8" or "int4", what the weights of linear layers are rounded to as they are read; None: they
            are not (`minicache.model.linear`).
        num_ranks: over how many processes it will be divided. If more than one, it is loaded on the CPU.

    Returns:
        The given model; or the one that was loaded, its weights packed for the CPU's products.

    Raises:
        CheckpointError: there is no such checkpoint or folder, or it cannot be read; also what `find_model` raises.
        TypeError: the model is none of these, or the dtype is no `torch.dtype`.
        ValueError: there is no such device here; a dtype or device is given with a model that has others; or the
            weights cannot be quantized, or not with these options.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, torch.float16 for instance; got {dtype!r}")
    if weight_dtype not in (None, "int8", "int4"):
        raise ValueError(f'weight_dtype must be "int8" or "int4", or be left out; got {weight_dtype!r}')
    if weight_dtype and num_ranks > 1:
        raise ValueError(
            "weights of few bits are not divided among ranks: leave out weight_dtype or tensor_parallel_size"
        )
    device = device if num_ranks == 1 else None
    if device is not None:
        _require_device(device)
    model = find_model(model)
    if isinstance(model, Path):
        with torch.inference_mode(False):  # whatever the caller's mode: the model may be trained later
            return _load(model, dtype, torch.device(device or "cpu"), weight_dtype, num_ranks)
    if not (hasattr(model, "config") and hasattr(model, "parameters")):
        raise TypeError(f'model must be "minigpt", a path, a hub name, or a model with a config; got {model!r}')
    weights = next(iter(model.parameters()))
    if dtype not in (None, weights.dtype) or (device is not None and torch.device(device).type != weights.device.type):
        raise ValueError(
            f"the model's weights are {weights.dtype} on {weights.device}: for another dtype or device convert the "
            f"model itself, model.to(…), and leave dtype and device out"
        )
    if weight_dtype:
        raise ValueError("weight_dtype rounds weights as they are loaded: give the model's name or path, not a model")
    return model


def _load(
    path: Path, dtype: torch.dtype | None, device: torch.device, weight_dtype: str | None, num_ranks: int
) -> Model:
    """As `load_model`, of a checkpoint's or a folder's path."""
    if weight_dtype and dtype is None:  # known before the first weight is rounded
        dtype = half_of_gpu(device) if device.type == "cuda" else torch.float32
    settle = partial(pack_layer, dtype=weight_dtype) if num_ranks == 1 else None
    loaded: MiniGPT | Decoder
    if path.is_dir():
        loaded = load_folder(path, dtype=dtype, device=device, settle=settle)
        return _widened(loaded if dtype else half_on_gpu(loaded), path, dtype)
    loaded = load_minigpt(path, dtype=dtype or torch.float32, device=device)
    loaded = loaded if dtype else half_on_gpu(loaded)
    if weight_dtype:
        pack(loaded, weight_dtype)
    return loaded


def _require_device(device: torch.device | str) -> None:
    """Refuse a device that PyTorch does not know, or does not find on this machine."""
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:  # the last from a PyTorch that was built without CUDA
        raise ValueError(f'no device {device!r} here, give "cpu" or leave it out: {error}') from error


def _widened(model: Decoder, folder: Path, dtype: torch.dtype | None) -> Decoder:
    """The model, converted to float32 if no dtype was asked for and this CPU has no instructions for its own."""
    weights = next(iter(model.parameters()))
    if dtype is not None or weights.device.type != "cpu" or computes_in(weights.dtype):
        return model
    name = str(weights.dtype).removeprefix("torch.")
    logger.warning(
        "%s holds %s, in which this CPU does not compute: loaded as float32, in twice the memory. "
        "To keep it, slow as it is, give dtype=torch.%s",
        folder,
        name,
        name,
    )
    return model.float()


def half_on_gpu(model: _Module) -> _Module:
    """Convert a model on a CUDA device, in place, to the 16 bits that its matrix units take; not one on the CPU.

    float32 becomes bfloat16, which has its range. A GPU before compute capability 8.0 has no bfloat16: there it, too,
    becomes float16.

    Returns:
        The model itself.
    """
    weights = next(iter(model.parameters()))
    if weights.device.type != "cuda":
        return model
    half = half_of_gpu(weights.device)
    return model if half == torch.bfloat16 and weights.dtype == torch.float16 else model.to(half)


def half_of_gpu(device: torch.device) -> torch.dtype:
    """The 16 bits that a CUDA device's matrix units take: bfloat16, before compute capability 8.0 float16."""
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for a floating-point dtype. Without them PyTorch converts every number."""
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    # Older releases of PyTorch cannot tell; then float32 is the safe answer.
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return kind is None or any(has and kind in name for name, has in capabilities.items())
