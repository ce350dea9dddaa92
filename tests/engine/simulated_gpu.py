"""A GPU made of host memory: it computes, and notices what a real one would have to wait for.

`OnGPU` is a tensor that says it is on "cuda". What it is computed into is one, too. Whatever would copy its numbers to
the host, or ask the host for more than a call, raises, except for those copies that are counted. Kernels are launched
in PyTorch: what a kernel reads, the host has not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minicache.kernels import configs, launch, oracle, plain, runtime

CUDA = torch.device("cuda", 0)

WAITS = {
    *("item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "equal", "allclose", "__array__"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
}
"""What a tensor can do only after everything before it is computed."""

READS = {"tolist"}
"""Of those, what is counted and not refused."""

FILLS = {"empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like", "ones_like", "full_like", "rand"}
"""What makes a tensor on the device without a copy."""


class WaitedError(AssertionError):
    """A call that a GPU would have to wait for, or that copies what no one asked for."""


@dataclass
class Traffic:
    """What went between host and device."""

    copies: int = 0
    reads: int = 0


TRAFFIC = Traffic()


class OnGPU(Tensor):
    """See the module."""

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in READS:
            TRAFFIC.reads += 1
            return on_host(args[0]).tolist()
        if name in WAITS or (name == "to" and "cpu" in map(str, args[1:])):
            raise WaitedError(f"{name} waits for the device")
        if name in ("__getitem__", "__setitem__"):
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(index, list) or (isinstance(index, Tensor) and index.dtype == torch.bool):
                    raise WaitedError(f"an index that waits for the device: {index!r}")
        others = [each for each in flat(args) if isinstance(each, Tensor) and not isinstance(each, OnGPU)]
        if any(each.ndim for each in others):
            if name != "copy_" or not (kwargs.get("non_blocking") or args[2:]):
                raise WaitedError(f"{name} of a tensor on the host and one on the device")
            TRAFFIC.copies += 1
        return super().__torch_function__(func, types, args, kwargs)


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from flat(value)
        else:
            yield value


def on_host(tensor: Any) -> Any:
    """The tensor itself, as one of the host."""
    return tensor.as_subclass(Tensor) if isinstance(tensor, OnGPU) else tensor


class Factories(TorchFunctionMode):
    """Makes tensors on the device where one is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "to" and CUDA.type in (str(each).partition(":")[0] for each in args[1:]):
            if isinstance(args[0], OnGPU):
                return args[0]
            if not kwargs.get("non_blocking"):
                raise WaitedError("a copy to the device that waits")
            TRAFFIC.copies += 1
            return args[0].clone().as_subclass(OnGPU)
        if torch.device(kwargs.get("device") or "cpu").type == CUDA.type:
            if name not in FILLS:
                raise WaitedError(f"{name} copies to the device, and waits")
            return func(*args, **(kwargs | {"device": "cpu"})).as_subclass(OnGPU)
        return func(*args, **kwargs)


def moved(model: nn.Module) -> nn.Module:
    """The model on the device, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.detach().as_subclass(OnGPU), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.as_subclass(OnGPU)
    return model


def launched(kernel: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A function of PyTorch as a kernel of the device."""

    def launch(*args: Any, num_splits: int | None = None, **options: Any) -> Tensor | None:
        for each in flat((args, options.values())):
            if isinstance(each, Tensor) and each.ndim and not isinstance(each, OnGPU):
                raise WaitedError("a kernel got a tensor of the host")
        out = kernel(*map(on_host, args), **{name: on_host(value) for name, value in options.items()})
        return out if out is None else out.as_subclass(OnGPU)

    return launch


@contextmanager
def simulated_gpu(patch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """While it lasts, "cuda" is the device of this module."""
    kernels_of_triton = (
        pytest.importorskip("minicache.kernels.decode"),
        pytest.importorskip("minicache.kernels.prefill"),
    )
    from minicache.kernels import split_kv, store

    decode, prefill = kernels_of_triton
    patch.setattr(runtime, "require_triton", lambda *about: None)
    patch.setattr(configs, "architecture", lambda device: configs.INTERPRETER)
    patch.setattr(launch, "num_processors", lambda device: 4)
    patch.setattr(store, "store_kv", launched(plain.store_kv))
    patch.setattr(decode, "paged_decode_attention", launched(oracle.attention))
    patch.setattr(split_kv, "paged_decode_attention", launched(oracle.attention))
    patch.setattr(prefill, "paged_prefill_attention", launched(oracle.attention))
    TRAFFIC.copies = TRAFFIC.reads = 0
    with Factories():
        yield TRAFFIC
