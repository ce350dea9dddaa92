"""An engine's tiers: which it has, and how a block becomes bytes and bytes a block. No phase builds this module.

What a block of a tier holds depends on the weights as much as on the tokens. So all of them are hashed when the engine
is made, which takes a second for two gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from hashlib import sha256
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from minicache.engine.kv import Model, PagedMemory, kv_token_nbytes
from minicache.engine.options import EngineOptions
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.tiers.contract import Tier
from minicache.tiers.specs import open_tier
from minicache.tiers.stack import TierStack

IDLE_SECONDS: Final = 0.01
"""The most that a step waits for loads if there is nothing to compute: requests that arrive meanwhile wait as long."""

FORMAT: Final = 1
"""Of a block's bytes. Another one has other keys, and finds nothing of this one's."""


def make_tiers(options: EngineOptions, model: Model) -> TierStack | None:
    """The tiers that an engine's options name; None if they name none.

    Args:
        options: of the engine. In the place of a specification, there may be a `Tier`.
        model: what it runs; it is on its device.

    Raises:
        TypeError, ValueError, OSError, MissingExtraError: as `open_tier`; or the engine cannot have tiers.
    """
    if not options.kv_tiers:
        return None
    if isinstance(options.kv_tiers, str):
        raise TypeError(f"kv_tiers is a list of tiers; got {options.kv_tiers!r}: write [{options.kv_tiers!r}]")
    if isinstance(options.scheduler, Scheduler):
        raise ValueError("kv_tiers: a scheduler that is given knows nothing of them; give the name of a stage")
    if options.cache != "paged":
        raise ValueError(f'kv_tiers: cache={options.cache!r} has no blocks to keep; take cache="paged"')
    if options.tensor_parallel_size > 1:
        raise ValueError("kv_tiers: each rank has a part of a block; leave out tensor_parallel_size")
    if options.speculative not in (None, "ngram") and getattr(options.speculative, "model", None) != "ngram":
        raise ValueError('kv_tiers: a draft model has keys and values of its own; take speculative="ngram"')
    tiers: list[Tier] = [open_tier(each) if isinstance(each, str) else each for each in options.kv_tiers]
    held, block_size = options.kv_cache_dtype, options.block_size
    dtype = next(iter(model.parameters())).dtype
    key = fingerprint(model, FORMAT, dtype, held, block_size)
    return TierStack(tiers, key, kv_token_nbytes(model, held) * block_size)


def fingerprint(model: Model, *others: object) -> bytes:
    """A hash of a model's config and weights, and of what else the bytes of its blocks depend on: 32 bytes."""
    digest = sha256(repr((type(model).__qualname__, model.config, *others)).encode())
    for tensor in _tensors(model if isinstance(model, nn.Module) else list(model.parameters()), set()):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.digest()


class TieredMemory(PagedMemory):
    """`PagedMemory`, whose blocks go to the tiers and come from there.

    Args:
        model: as for `PagedMemory`.
        scheduler: has tiers (`minicache.scheduler.tiered`).
        kv_cache_dtype: as for `PagedMemory`.
        tiers: the scheduler's.
    """

    def __init__(self, model: Model, scheduler: Scheduler, kv_cache_dtype: str | None, tiers: TierStack) -> None:
        super().__init__(model, scheduler, kv_cache_dtype)
        self._tiers = tiers

    def move_blocks(self, output: SchedulerOutput) -> None:
        """As `PagedMemory.move_blocks`; before, blocks are stored that it may overwrite, and after, others loaded."""
        self.store(output.blocks_to_store)
        super().move_blocks(output)
        if output.blocks_to_load:
            block_ids, _, contents = zip(*output.blocks_to_load, strict=True)
            self.write(block_ids, contents)

    def store(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Have blocks (block, hash) stored in the tiers, soon. They may be overwritten at once."""
        if blocks:
            for (_, its_hash), contents in zip(blocks, self.read([block_id for block_id, _ in blocks]), strict=True):
                self._tiers.store(its_hash, contents)

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each block: keys and values of all layers; of a quantized storage, then the scales."""
        rows = self._rows()
        blocks = (torch.cat([each[block_id].flatten() for each in rows]) for block_id in block_ids)
        return [each.cpu().numpy().tobytes() for each in blocks]

    def write(self, block_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put bytes of `read` into blocks, one after the other."""
        rows = self._rows()
        for block_id, block in zip(block_ids, contents, strict=True):
            data = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(rows[0].device)
            start = 0
            for target in (each[block_id] for each in rows):
                target.copy_(data[start : start + target.numel()].view(target.shape))
                start += target.numel()

    def _rows(self) -> list[Tensor]:
        """Keys and values as bytes: a tensor of blocks for each layer's keys, and its values, of each storage."""
        return [
            each(layer).view(torch.uint8)
            for storage, _ in self._storages
            for layer in range(storage.num_layers)
            for each in (storage.k, storage.v)
        ]


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a module, a dataclass or a container, in a fixed order, each once."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: Any = ()
    if isinstance(value, nn.Module):
        parts = vars(value).values()
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = cast("Sequence[Any]", value)
    for part in parts:
        yield from _tensors(part, seen)
