"""Blocks that move: between a cache's storage and CPU memory, and inside the storage.

Phase 6 builds it. A scheduler decides which block goes where and lists the pairs (`SchedulerOutput`); this module moves
the bytes. A pair names one block of each side, and stands for its keys and values in all layers. The engine copies out,
then in, then on the device, and only then runs the model: a block that was copied out may have been allocated to
another request in the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicache.cache.paged import PagedStorage
from minicache.errors import require_count

Pairs = Sequence[tuple[int, int]]
"""(from, to), a block id each."""


class HostStorage:
    """CPU swap space: the memory of the CPU blocks, which hold the KV entries of requests that are swapped out.

    A block has the same size and dtype here as in the storage. A copy takes time and memory for the blocks that move,
    not for all. The layout of this memory is private. With a GPU it is pinned, so a transfer needs no second copy;
    otherwise it is ordinary memory.

    The two storages number their blocks separately: block 3 and CPU block 3 are unrelated.

    Args:
        storage: where the blocks come from and go back to.
        num_host_blocks: blocks of the CPU swap space, ≥ 1.

    Attributes:
        storage: as given.
        num_host_blocks: as given.

    Raises:
        TypeError: `num_host_blocks` is not an int.
        ValueError: it is below 1.
    """

    def __init__(self, storage: PagedStorage, num_host_blocks: int) -> None:
        require_count("num_host_blocks", num_host_blocks)
        self.storage = storage
        self.num_host_blocks = num_host_blocks
        shape = (num_host_blocks, *self._block_shape())
        self._rows = torch.zeros(shape, dtype=storage.dtype, pin_memory=storage.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Bytes of all CPU blocks: keys and values, all layers."""
        return self.num_host_blocks * self.storage.pool.block_size * self.storage.token_nbytes

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the storage into CPU blocks: keys and values of every layer. The storage does not change.

        Args:
            pairs: (block, CPU block); no block and no CPU block twice. May be empty.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the storage, or outside the swap space. Negative ids do not count from the end.
            ValueError: a block or a CPU block is named twice. Whatever is raised, nothing was copied.
        """
        blocks, host_blocks = self._checked(pairs, from_host=False)
        if not blocks:
            return
        staged, ids = self._staged(blocks)
        for layer in range(self.storage.num_layers):
            staged[:, 0, layer] = self.storage.k(layer)[ids]
            staged[:, 1, layer] = self.storage.v(layer)[ids]
        for block, host_block in zip(staged, host_blocks, strict=True):
            self._rows[host_block].copy_(block, non_blocking=True)  # all on one stream: later copies wait for it

    def swap_in(self, pairs: Pairs) -> None:
        """Copy CPU blocks into blocks of the storage: keys and values of every layer. The CPU blocks do not change.

        Args:
            pairs: (CPU block, block); no CPU block and no block twice. May be empty.

        Raises:
            TypeError, IndexError, ValueError: as `swap_out`.
        """
        host_blocks, blocks = self._checked(pairs, from_host=True)
        if not blocks:
            return
        staged, ids = self._staged(blocks)
        for block, host_block in zip(staged, host_blocks, strict=True):
            block.copy_(self._rows[host_block], non_blocking=True)
        for layer in range(self.storage.num_layers):
            self.storage.k(layer)[ids] = staged[:, 0, layer]
            self.storage.v(layer)[ids] = staged[:, 1, layer]

    def _block_shape(self) -> tuple[int, ...]:
        """The shape of one block: keys and values, layers, tokens, heads, head size.

        A block is contiguous, so a copy between device and host is one transfer a block.
        """
        storage = self.storage
        return 2, storage.num_layers, storage.pool.block_size, storage.num_kv_heads, storage.head_dim

    def _staged(self, blocks: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Memory on the device for these blocks, laid out as CPU blocks are, and their ids as a tensor there."""
        device, dtype = self.storage.device, self.storage.dtype
        staged = torch.empty((len(blocks), *self._block_shape()), dtype=dtype, device=device)
        return staged, torch.tensor(blocks, device=device)

    def _checked(self, pairs: Pairs, *, from_host: bool) -> tuple[list[int], list[int]]:
        """Both sides of the pairs; raises unless they may be copied."""
        sizes = {"block": self.storage.pool.num_blocks, "CPU block": self.num_host_blocks}
        sides = sizes.items() if not from_host else reversed(sizes.items())
        columns = [[pair[side] for pair in pairs] for side in (0, 1)]
        for (name, size), column in zip(sides, columns, strict=True):
            _check_ids(name, column, size)
            _check_distinct(name, column)
        return columns[0], columns[1]


def copy_blocks(storage: PagedStorage, pairs: Pairs) -> None:
    """Copy blocks to other blocks of the same storage: keys and values of every layer (phase 8's copy-on-write).

    All sources are read before any target is written: a block may be one pair's target and another's source.

    Args:
        storage: where both are.
        pairs: (source, target); no target twice. One source may have several targets. May be empty.

    Raises:
        TypeError: an id is not an int.
        IndexError: an id is outside the storage. Negative ids do not count from the end.
        ValueError: a target is named twice. Whatever is raised, nothing was copied.
    """
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    for name, column in (("source", sources), ("target", targets)):
        _check_ids(name, column, storage.pool.num_blocks)
    _check_distinct("target", targets)
    if not sources:
        return
    source_ids, target_ids = (torch.tensor(column, device=storage.device) for column in (sources, targets))
    for layer in range(storage.num_layers):
        for rows in (storage.k(layer), storage.v(layer)):
            rows[target_ids] = rows[source_ids]  # indexing with a tensor copies


def _check_ids(name: str, block_ids: Sequence[int], size: int) -> None:
    for block_id in block_ids:
        if not isinstance(block_id, int) or isinstance(block_id, bool):
            raise TypeError(f"a {name} must be an int; got {block_id!r}")
        if not 0 <= block_id < size:
            raise IndexError(f"no {name} {block_id}: there are 0 … {size - 1}")


def _check_distinct(name: str, block_ids: Sequence[int]) -> None:
    if len(set(block_ids)) < len(block_ids):
        twice = next(each for each in block_ids if block_ids.count(each) > 1)
        raise ValueError(f"{name} {twice} is named twice")
