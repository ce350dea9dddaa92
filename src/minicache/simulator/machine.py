"""What serves in simulated time: how fast it is, and how much memory it has. Pure standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from minicache.arithmetic import cache_capacity_tokens, specs, weight_bytes
from minicache.errors import require_count
from minicache.simulator.costs import RooflineCost, StepCost, kv_token_bytes

MEMORY_SHARE: Final = 0.9
"""The part of an accelerator's memory that weights and cache may take, vLLM's default: the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What serves.

    Attributes:
        name: for people.
        cost: how long a step takes.
        num_blocks: blocks of its cache.
        token_nbytes: bytes of a token in it.
    """

    name: str
    cost: StepCost
    num_blocks: int
    token_nbytes: int


def published_machine(
    model: str,
    accelerator: str,
    *,
    num_blocks: int | None = None,
    block_size: int = 16,
    kv_cache_dtype: str | None = None,
) -> Machine:
    """A published model on a published accelerator.

    Args:
        model: by its name in `minicache.arithmetic.specs`, in small letters and with hyphens: "llama-3-8b".
        accelerator: likewise: "a100-40gb".
        num_blocks: blocks of the cache, ≥ 1; None: what the weights leave of `MEMORY_SHARE` of the memory.
        block_size: tokens of a block, ≥ 1.
        kv_cache_dtype: "int8" or "fp8_e4m3"; None: 16 bits, as the weights.

    Raises:
        TypeError: a number is not an int.
        ValueError: there is no such model or accelerator, or the weights leave no memory; or a number is out of its
            bounds.
    """
    transformer = _spec(model, specs.Transformer)
    device = _spec(accelerator, specs.Accelerator)
    require_count("block_size", block_size)
    token_nbytes = kv_token_bytes(transformer, kv_cache_dtype=kv_cache_dtype)
    if num_blocks is None:
        tokens = cache_capacity_tokens(
            int(device.memory_bytes * MEMORY_SHARE),
            weight_bytes(transformer.num_parameters),
            token_nbytes,
        )
        num_blocks = tokens // block_size
    name = f"{model} on {device.name}" + (f", {kv_cache_dtype} KV cache" if kv_cache_dtype else "")
    return Machine(name, RooflineCost(transformer, device, kv_cache_dtype=kv_cache_dtype), num_blocks, token_nbytes)


Spec = TypeVar("Spec")


def _spec(name: str, kind: type[Spec]) -> Spec:
    found = getattr(specs, name.upper().replace("-", "_"), None)
    if not isinstance(found, kind):
        raise ValueError(f"no published {kind.__name__.lower()} {name!r}")
    return found
