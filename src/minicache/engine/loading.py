"""From a model's name to a model: found, loaded or downloaded, in the dtype that its device computes in.

No phase builds this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from minicache.engine.kv import Model
from minicache.engine.stopping import Tokenizer
from minicache.errors import CheckpointError
from minicache.grammar import Tokenizer as MiniGPTTokenizer
from minicache.model import Decoder, MiniGPT, load_minigpt
from minicache.model.folder import folder_config, folder_dtype, load_folder
from minicache.model.gguf import gguf_config, load_gguf
from minicache.model.gguf_file import GGUFFile, is_gguf
from minicache.model.hub import download, is_hub_name
from minicache.model.linear import pack, pack_layer
from minicache.model.shelf import SHELF, find_on_shelf
from minicache.model.tokenizer import folder_tokenizer, gguf_tokenizer
from minicache.parallel.sharding import require_divisible

logger = logging.getLogger("minicache")

_Module = TypeVar("_Module", bound=nn.Module)


_Given = TypeVar("_Given")


def find_model(model: str | Path | _Given) -> Path | _Given:
    """Find the model that an engine was asked for.

    Args:
        model: a short name ("minigpt", "smollm2": `minicache.model.shelf`), the path of a checkpoint, a GGUF file or a
            Hugging Face folder, a hub name, or a model. A local path goes before a hub name.

    Returns:
        The path of the file or folder, which may not exist; a model as it was given.

    Raises:
        PullError: a short name, and the model is not here yet.
        CheckpointError: a name that is none of these.
        HubError: a hub name, and the model is neither here already nor can it be downloaded.
        MissingExtraError: a hub name, and `huggingface_hub` is not installed.
    """
    if not isinstance(model, str | Path):
        return model
    if isinstance(model, str) and model in SHELF:
        return find_on_shelf(model)
    path = Path(model)
    if isinstance(model, str) and not path.exists():
        if is_hub_name(model):
            return download(model)
        if path.name == model and not path.suffix:
            raise CheckpointError(f"there is no checkpoint at {model}, and no model of that name: {', '.join(SHELF)}")
    return path


def load_tokenizer(model: Path | object) -> Tokenizer | None:
    """The tokenizer of the model that `find_model` has found: MiniGPT's, the folder's, the file's, or None.

    Raises:
        CheckpointError: the folder or the file has one that cannot be read.
        MissingExtraError: it has one, and `transformers` is not installed.
    """
    if not isinstance(model, Path):
        return None
    if model.is_dir():
        return folder_tokenizer(model)
    return gguf_tokenizer(model) if is_gguf(model) else MiniGPTTokenizer()


def load_model(
    model: str | Path | Model,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    *,
    weight_dtype: str | None = None,
    tensor_parallel_size: int = 1,
) -> Model:
    """The model that an engine was asked for.

    Args:
        model: as for `find_model`.
        dtype: what to hold its weights in; None: float32 on a CPU, where the kernels compute in it, with a warning if a
            folder holds 16 bits; and on a GPU bfloat16, or float16 if that is an older one (`half_on_gpu`).
        device: where to hold them; None: the CPU.
        weight_dtype: "int8" or "int4", what the weights of linear layers are rounded to as they are read; None: they
            are not (`minicache.model.linear`).
        tensor_parallel_size: over how many processes the model is to be divided; checked before weights are read. If
            more than one, it is loaded on the CPU.

    Returns:
        The given model; or the one that was loaded, its weights packed for the CPU's products.

    Raises:
        CheckpointError: there is no such checkpoint, file or folder, or it cannot be read; also what `find_model`
            raises.
        TypeError: the model is none of these, or the dtype is no `torch.dtype`.
        ValueError: there is no such device here; a dtype or device is given with a model that has others; or the model
            cannot be divided so, or quantized.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, torch.float16 for instance; got {dtype!r}")
    if weight_dtype not in (None, "int8", "int4"):
        raise ValueError(f'weight_dtype must be "int8" or "int4", or be left out; got {weight_dtype!r}')
    if weight_dtype and tensor_parallel_size > 1:
        raise ValueError(
            "weights of few bits are not divided among ranks: leave out weight_dtype or tensor_parallel_size"
        )
    device = device if tensor_parallel_size == 1 else None
    if device is not None:
        _require_device(device)
    model = find_model(model)
    if isinstance(model, Path):
        if tensor_parallel_size > 1:
            _require_divisible(model, tensor_parallel_size)
        # Whatever the caller's mode: the model may be trained later.
        with torch.inference_mode(False), _one_thread():
            return _load(model, dtype, torch.device(device or "cpu"), weight_dtype, tensor_parallel_size)
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


def _load(path: Path, dtype: torch.dtype | None, device: torch.device, weight_dtype: str | None, size: int) -> Model:
    """As `load_model`, of a path."""
    if weight_dtype and dtype is None and device.type == "cuda":
        dtype = half_of_gpu(device)  # known before the first weight is rounded
    settle = partial(pack_layer, dtype=weight_dtype) if size == 1 else None
    loaded: MiniGPT | Decoder
    if path.is_dir():
        loaded = load_folder(path, dtype=dtype or _default_dtype(path, device), device=device, settle=settle)
    elif is_gguf(path):
        loaded = load_gguf(path, dtype=dtype, device=device, settle=settle)
    else:
        loaded = load_minigpt(path, dtype=dtype or torch.float32, device=device)
        if weight_dtype:
            pack(loaded, weight_dtype)
    return loaded if dtype else half_on_gpu(loaded)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have PyTorch compute on one thread. Tensors are read one after the other, and take a second on one; more threads
    wait for each other at each, and on a machine that is busy that takes minutes.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def _require_divisible(path: Path, size: int) -> None:
    """Refuse a number of processes that a model cannot be divided among."""
    if path.is_dir():
        require_divisible(folder_config(path), size)
    elif is_gguf(path):
        require_divisible(gguf_config(GGUFFile(path)), size)


def _require_device(device: torch.device | str) -> None:
    """Refuse a device that PyTorch does not know, or does not find on this machine."""
    try:
        torch.empty(0, device=device)
    except (TypeError, RuntimeError, AssertionError) as error:  # the last from a PyTorch that was built without CUDA
        raise ValueError(f'no device {device!r} here, give "cpu" or leave it out: {error}') from error


def _default_dtype(folder: Path, device: torch.device | str) -> torch.dtype | None:
    """What to hold a folder's weights in if no dtype is asked for: on a CPU float32, said if it is not the folder's."""
    if torch.device(device).type != "cpu":
        return None
    held = folder_dtype(folder)
    if held != torch.float32:
        name = str(held).removeprefix("torch.")
        logger.warning(
            "%s holds %s: loaded as float32, which the CPU kernels compute in, in twice the memory. "
            "To keep it, without the kernels, give dtype=torch.%s (--dtype %s)",
            folder,
            name,
            name,
            name,
        )
    return torch.float32


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
