# Phase 3, paged-cache: your file. It stands in for minicache.cache.paged.
# Write what raises NotImplementedError. `minicache grade 3` grades it, `minicache hint 3.K` helps with task K.
"""Keys and values in blocks: storage that many sequences share, and two views of it that a model can run on.

Phase 3 builds it. `PagedStorage` is the memory, one tensor of blocks for keys and one for values in each layer;
`minicache.memory.blocks` assigns blocks to sequences. `PagedKVCache` is `KVCache` without the reservation: a
batch of sequences of one length. `RaggedStep` is one step of a serving engine: sequences of any lengths, each with its
own number of new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minicache import kernels
from minicache.cache.dense import KVCache
from minicache.cache.rows import LayerTurns, check_dtype, check_layer, check_rows, zeros
from minicache.errors import CacheOverflowError, OutOfBlocksError, SharedBlockError, require_count
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for


class PagedStorage:
    """The memory of a pool's blocks, for every layer: block b of the pool is block b of each tensor here.

    One block id refers to 2 · num_layers blocks of memory: a sequence has one block table, and every layer reads its
    keys and values through it (Kwon et al. 2023, §4.2).

    Args:
        pool: allocates the blocks; its num_blocks and block_size are the storage's.
        num_layers: attention layers, ≥ 1.
        num_kv_heads: key/value heads (H_kv), ≥ 1.
        head_dim: size of one head (d), ≥ 1.
        dtype: a floating-point `torch.dtype` to store.
        device: where to store it.

    Attributes:
        pool, num_layers, num_kv_heads, head_dim, dtype: as given.
        device: where the blocks are, a `torch.device`.

    Raises:
        TypeError: a size is not an int, or `dtype` is not a floating-point `torch.dtype`.
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, size in (("num_layers", num_layers), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
            require_count(name, size)
        check_dtype(dtype)
        self.pool = pool
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (2, num_layers, pool.num_blocks, pool.block_size, num_kv_heads, head_dim)
        rows = zeros(shape, dtype=dtype, device=device)
        self._k, self._v = rows[0].unbind(), rows[1].unbind()
        self.device = rows.device

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks: keys and values, all layers."""
        return self.pool.num_blocks * self.pool.block_size * self.token_nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token: keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def k(self, layer: int) -> Tensor:
        """The keys of `layer`, `[num_blocks, block_size, H_kv, d]`: the storage itself, to be read and written.

        Raises:
            IndexError: there is no such layer (negative ones included).
        """
        check_layer(layer, self.num_layers)
        return self._k[layer]

    def v(self, layer: int) -> Tensor:
        """The values of `layer`, as `k`."""
        check_layer(layer, self.num_layers)
        return self._v[layer]


class PagedKVCache(KVCache):
    """`KVCache` over blocks: the same methods and results, and memory that is allocated as tokens arrive.

    Each sequence of the batch has a `BlockTable`. Layer 0's `append` allocates the blocks that the forward pass needs,
    for the whole batch or not at all; every layer writes to the same slots. `reset` frees all blocks. A cache that
    is dropped without `reset` keeps its blocks: there is no finaliser.

    Args:
        num_layers: attention layers, ≥ 1.
        batch_size: sequences, ≥ 1.
        num_kv_heads: key/value heads (H_kv), ≥ 1.
        max_seq_len: tokens that a sequence may have (S_max), ≥ 1.
        head_dim: size of one head (d), ≥ 1.
        dtype: a floating-point `torch.dtype` to store.
        device: where to store it.
        block_size: tokens of a block, ≥ 1, if the cache makes its storage. A given storage has its pool's, and this is
            not used.
        storage: blocks to share with other caches. None: the cache makes one, with a new pool of just enough blocks
            for `max_seq_len` tokens of every sequence.

    Attributes:
        num_layers, batch_size, num_kv_heads, max_seq_len, head_dim, dtype: as given.
        device: a `torch.device`, where the storage is.
        storage: where keys and values are.
        block_tables: a `BlockTable` for each sequence, to be read.

    Raises:
        TypeError: a size is not an int, `dtype` is not a floating-point `torch.dtype`, or not the storage's.
        ValueError: a size is below 1, or the storage has other layers, heads, head size or device.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        max_seq_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_size: int = 16,
        storage: PagedStorage | None = None,
    ) -> None:
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds, per sequence. During a forward pass the tables are ahead of it."""
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    @property
    def nbytes(self) -> int:
        """Bytes reserved for this cache.

        With its own storage: keys and values, all layers, `max_seq_len` tokens of every sequence, as in `KVCache`. Over
        a given storage, and for a `fork`, nothing is reserved, and it is `nbytes_allocated`.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the blocks that the tables hold, finished or not; blocks shared with a fork count in both."""
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    @property
    def nbytes_used(self) -> int:
        """The part of `nbytes_allocated` that holds tokens: `num_tokens` of every sequence."""
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the next tokens in their sequences, for rotary embeddings.

        Args:
            num_new_tokens: T, how many tokens come next, ≥ 0.

        Returns:
            `[T]` int64 on the cache's device: num_tokens, num_tokens + 1, …

        Raises:
            ValueError: T is negative.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of T new tokens in `layer`.

        Values are copied; no gradient flows through a cache. A call that raises has written nothing, changed no table
        and begun no forward pass. The slots are computed at layer 0, once for all layers.

        Args:
            layer: 0 … num_layers − 1; must be the next layer (see `KVCache`).
            k: keys `[batch_size, num_kv_heads, T, head_dim]`, T ≥ 1, in the cache's dtype and on its device.
            v: values, the same shape.

        Raises:
            IndexError: there is no such layer (negative ones included).
            TypeError: `k` or `v` is not a tensor, or has another dtype than the cache.
            ValueError: another shape or device; T = 0; T differs from this pass's earlier layers; or the layer is out
                of order.
            CacheOverflowError: num_tokens + T > max_seq_len.
            OutOfBlocksError: the pool has fewer free blocks than the batch needs.
            SharedBlockError: a sequence's last block is unfinished and shared with a fork.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of every token that `layer` holds, gathered from the blocks.

        Between forward passes S = num_tokens. During one, a layer that has its new entries returns them too.

        Args:
            layer: 0 … num_layers − 1.

        Returns:
            `(k, v)`, each `[batch_size, num_kv_heads, S, head_dim]`, oldest token first. To be read, until the next
            `append` or `reset`.

        Raises:
            IndexError: there is no such layer (negative ones included).
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the newest T tokens over everything that `layer` holds, through the block tables.

        Call it after `append(layer, …)`: the queries belong to the last T tokens of `read(layer)`.
        `minicache.kernels.paged_attention` computes prefill and decode.

        Args:
            layer: 0 … num_layers − 1.
            q: queries `[batch_size, num_heads, T, head_dim]`, T ≥ 1; num_heads is a multiple of num_kv_heads.
            window: W ≥ 1, the layer's sliding window: a token sees itself and the W − 1 before it. None: all before it.

        Returns:
            `[batch_size, num_heads, T, head_dim]`.

        Raises:
            IndexError: there is no such layer.
            TypeError: `q` is not a tensor, or has another dtype than the cache; or `window` is not an int.
            ValueError: shapes do not fit, T is more than the layer holds, or `window` is below 1.
        """
        raise NotImplementedError(
            "phase 3, task 8: The cache attends; read docs/en/phase-03-paged-cache/lab/02-attend-through-the-table.md"
        )

    def reset(self) -> None:
        """Drop every token and free the blocks: the next append writes position 0 again.

        Also ends an incomplete forward pass, so a cache can be used again after an error in the model.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of every sequence, and free the blocks that are then empty.

        Ends an incomplete forward pass, as `reset` does: `cache.truncate(cache.num_tokens)` undoes it. A call that
        raises leaves the pass under way.

        Args:
            num_tokens: how many to keep, 0 … the cache's num_tokens.

        Raises:
            TypeError: `num_tokens` is not an int.
            ValueError: it is negative, or more than the cache has.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )

    def fork(self) -> PagedKVCache:
        """A cache with the same tokens in the same blocks: nothing is copied.

        Both read the shared blocks; neither may write to one. So where num_tokens is no multiple of the block size,
        `append` raises SharedBlockError in both, until the other has freed the unfinished block (`reset`, or
        `truncate`). A fork of a cache with its own storage shares that storage: together they have the blocks of one.
        The fork reserves nothing, so its `nbytes` is `nbytes_allocated`.

        Returns:
            A new cache over the same storage.

        Raises:
            ValueError: a forward pass is under way.
        """
        raise NotImplementedError(
            "phase 3, task 6: A drop-in cache; read docs/en/phase-03-paged-cache/lab/01-the-paged-cache.md"
        )


class RaggedStep:
    """One step of an engine: sequences of any lengths, each with some new tokens, in one forward pass.

    The N new tokens of all sequences are concatenated in a batch of 1, without padding. So a model that takes `[1, N]`
    token ids and a cache needs no second forward method: `model(token_ids[None], step)`. A sequence in prefill has many
    new tokens, a sequence in decode has one, and both may be in one step (Yu et al. 2022, §3).

    All blocks are allocated when the step is made, or none. A step serves one forward pass: each layer is appended to
    once, in order, and can be read and attended to from then on. If the pass fails, the tables keep the new tokens'
    slots until they are truncated. Its tensors are on the storage's device.

    Args:
        storage: where keys and values are.
        tables: a `BlockTable` over the storage's pool for each of B ≥ 1 sequences; they grow.
        num_new_tokens: the number of new tokens of each sequence, ≥ 1 each.

    Attributes:
        slot_mapping: `[N]` int64, the slot of each new token.
        context_lens: `[B]` int64, tokens of each sequence, including the new ones.
        query_start_loc: `[B + 1]` int64: of the N tokens, query_start_loc[i] : query_start_loc[i + 1] are sequence i's.
        block_tables: `[B, max_blocks]` int64, as wide as the longest table: each sequence's blocks in order, −1 after
            the last.

    Raises:
        TypeError: a count is not an int.
        ValueError: no sequences, a different number of counts than tables, a count below 1, a table over another pool,
            or a table given twice.
        OutOfBlocksError: the pool has fewer free blocks than the step needs. No table has changed.
        SharedBlockError: a new token would go into a shared block. No table has changed.
    """

    def __init__(self, storage: PagedStorage, tables: Sequence[BlockTable], num_new_tokens: Sequence[int]) -> None:
        raise NotImplementedError(
            "phase 3, task 9: The ragged step; read docs/en/phase-03-paged-cache/lab/03-the-ragged-step.md"
        )

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's tokens, each in its own sequence.

        Args:
            num_new_tokens: N, the tokens of all sequences together.

        Returns:
            `[N]` int64 on the storage's device.

        Raises:
            ValueError: another number than the step was made for.
        """
        raise NotImplementedError(
            "phase 3, task 9: The ragged step; read docs/en/phase-03-paged-cache/lab/03-the-ragged-step.md"
        )

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the step's N tokens in `layer`, each sequence's in its own blocks.

        Args:
            layer: 0 … num_layers − 1; must be the next layer.
            k: keys `[1, H_kv, N, d]`, in the storage's dtype and on its device.
            v: values, the same shape.

        Raises:
            IndexError: there is no such layer (negative ones included).
            TypeError: `k` or `v` is not a tensor, or has another dtype than the storage.
            ValueError: another shape, device or number of tokens; the layer is out of order; or the last layer has its
                rows, and the step is over.
        """
        raise NotImplementedError(
            "phase 3, task 9: The ragged step; read docs/en/phase-03-paged-cache/lab/03-the-ragged-step.md"
        )

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of the step's tokens, each over its own sequence, through the block tables.

        Args:
            layer: 0 … num_layers − 1; it must have its rows.
            q: queries `[1, num_heads, N, d]`; num_heads is a multiple of the storage's num_kv_heads.
            window: W ≥ 1, the layer's sliding window: a token sees itself and the W − 1 before it. None: all before it.

        Returns:
            `[1, num_heads, N, d]`.

        Raises:
            IndexError: there is no such layer.
            TypeError: `q` is not a tensor, or has another dtype than the storage; or `window` is not an int.
            ValueError: shapes do not fit, `window` is below 1, or `layer` has not been appended to.
        """
        raise NotImplementedError(
            "phase 3, task 9: The ragged step; read docs/en/phase-03-paged-cache/lab/03-the-ragged-step.md"
        )

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens of all sequences in `layer`, one sequence after the other.

        Args:
            layer: 0 … num_layers − 1; it must have its rows.

        Returns:
            `(k, v)`, each `[1, H_kv, Σ context_lens, d]`, the oldest token of each sequence first. Read-only.

        Raises:
            IndexError: there is no such layer.
            ValueError: `layer` has not been appended to.
        """
        raise NotImplementedError(
            "phase 3, task 9: The ragged step; read docs/en/phase-03-paged-cache/lab/03-the-ragged-step.md"
        )
