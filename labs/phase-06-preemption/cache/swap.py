# Phase 6, preemption: your file. It stands in for minicache.cache.swap.
# Write what raises NotImplementedError. `minicache grade 6` grades it, `minicache hint 6.K` helps with task K.
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
        raise NotImplementedError(
            "phase 6, task 6: Blocks on the host; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all CPU blocks: keys and values, all layers."""
        raise NotImplementedError(
            "phase 6, task 6: Blocks on the host; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks of the storage into CPU blocks: keys and values of every layer. The storage does not change.

        Args:
            pairs: (block, CPU block); no block and no CPU block twice. May be empty.

        Raises:
            TypeError: an id is not an int.
            IndexError: an id is outside the storage, or outside the swap space. Negative ids do not count from the end.
            ValueError: a block or a CPU block is named twice. Whatever is raised, nothing was copied.
        """
        raise NotImplementedError(
            "phase 6, task 6: Blocks on the host; read docs/en/phase-06-preemption/lab/01-swap.md"
        )

    def swap_in(self, pairs: Pairs) -> None:
        """Copy CPU blocks into blocks of the storage: keys and values of every layer. The CPU blocks do not change.

        Args:
            pairs: (CPU block, block); no CPU block and no block twice. May be empty.

        Raises:
            TypeError, IndexError, ValueError: as `swap_out`.
        """
        raise NotImplementedError(
            "phase 6, task 6: Blocks on the host; read docs/en/phase-06-preemption/lab/01-swap.md"
        )


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
    raise NotImplementedError(
        "phase 6, task 6: Blocks on the host; read docs/en/phase-06-preemption/lab/01-swap.md"
    )
