"""How a model gets the weights that a file holds: built without memory, then given its tensors one after the other.

No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minicache.errors import CheckpointError

_Module = TypeVar("_Module", bound=nn.Module)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are made in this context have parameters with a shape and no memory (PyTorch's device "meta").

    As `torch.device("meta")`, but without `torch._dynamo`, which takes a second and 145 MiB: some functions import it
    when they are called for that device. So no initial weights are drawn here, and small tables that begin with an
    `arange` are computed, on the CPU.
    """
    with torch.device("meta"), _NoDynamo():
        yield


class _NoDynamo(TorchFunctionMode):
    """Replaces the functions that import `torch._dynamo`, in the constructors of this package's models."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, unless it initialises weights."""
        kwargs = kwargs or {}
        if func is torch.arange:
            return func(*args, **{"device": "cpu", **kwargs})
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)


Settle = Callable[[Any, str], object]
"""Called with a model and a parameter's name when that has its tensor: may put another module in its module's place."""


def assemble(model: _Module, tensors: Iterable[tuple[str, Tensor]], settle: Settle | None = None) -> _Module:
    """Give a model its weights.

    Args:
        model: made in `without_memory`.
        tensors: of each parameter the name and what it is to hold; the tensor is not copied. Each is asked for when the
            one before has its place, so what makes them need not hold two.
        settle: called after each, before the next is asked for.

    Returns:
        The model, in evaluation mode.
    """
    for name, tensor in tensors:
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, nn.Parameter(tensor))
        del tensor
        if settle is not None:
            settle(model, name)
    return model.eval()


def check_tensors(
    where: Path, shapes: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], source: str
) -> None:
    """Raise unless a file or folder has the tensors that its model asks for, and no others.

    Args:
        where: the file or folder.
        shapes: of the tensors that it has, by their names there.
        wanted: of those that the model asks for.
        source: what says so, "config.json" for instance.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has another shape.
    """
    for problem, names in (("lacks", wanted.keys() - shapes.keys()), ("also has", shapes.keys() - wanted.keys())):
        if names:
            first = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
            raise CheckpointError(
                f"{where} {problem} {len(names)} tensor{'s' if len(names) > 1 else ''}, by what {source} says of the "
                f"model: {first}"
            )
    for name, shape in wanted.items():
        if tuple(shapes[name]) != tuple(shape):
            raise CheckpointError(f"{where}: {name} is {list(shapes[name])}, by {source} it is {list(shape)}")
