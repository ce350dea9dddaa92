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
        # Not super().__init__(): that would reserve the memory of a dense cache.
        sizes = {
            "num_layers": num_layers,
            "batch_size": batch_size,
            "num_kv_heads": num_kv_heads,
            "max_seq_len": max_seq_len,
            "head_dim": head_dim,
            "block_size": block_size,
        }
        for name, size in sizes.items():
            require_count(name, size)
        check_dtype(dtype)
        self._owns_storage = storage is None
        if storage is None:
            pool = BlockPool(batch_size * blocks_for(max_seq_len, block_size), block_size)
            storage = PagedStorage(pool, num_layers, num_kv_heads, head_dim, dtype=dtype, device=device)
        _check_storage(storage, num_layers, num_kv_heads, head_dim, dtype, torch.device(device))
        self.num_layers = num_layers
        self.batch_size = batch_size
        self.num_kv_heads = num_kv_heads
        self.max_seq_len = max_seq_len
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = storage.device
        self.storage = storage
        self.block_tables = [BlockTable(storage.pool) for _ in range(batch_size)]
        self._turns = LayerTurns(num_layers)
        self._follow_tables()

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds, per sequence. During a forward pass the tables are ahead of it."""
        return self.block_tables[0].num_tokens - (self._turns.num_new if self._turns.in_pass else 0)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for this cache.

        With its own storage: keys and values, all layers, `max_seq_len` tokens of every sequence, as in `KVCache`. Over
        a given storage, and for a `fork`, nothing is reserved, and it is `nbytes_allocated`.
        """
        if not self._owns_storage:
            return self.nbytes_allocated
        return self.batch_size * self.max_seq_len * self.storage.token_nbytes

    @property
    def nbytes_allocated(self) -> int:
        """Bytes of the blocks that the tables hold, finished or not; blocks shared with a fork count in both."""
        num_blocks = sum(len(table.block_ids) for table in self.block_tables)
        return num_blocks * self.storage.pool.block_size * self.storage.token_nbytes

    @property
    def nbytes_used(self) -> int:
        """The part of `nbytes_allocated` that holds tokens: `num_tokens` of every sequence."""
        return self.batch_size * self.num_tokens * self.storage.token_nbytes

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the next tokens in their sequences, for rotary embeddings.

        Args:
            num_new_tokens: T, how many tokens come next, ≥ 0.

        Returns:
            `[T]` int64 on the cache's device: num_tokens, num_tokens + 1, …

        Raises:
            ValueError: T is negative.
        """
        if num_new_tokens < 0:
            raise ValueError(f"cannot place {num_new_tokens} tokens: give a count of 0 or more")
        return torch.arange(self.num_tokens, self.num_tokens + num_new_tokens, device=self.device)

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
        check_layer(layer, self.num_layers)
        check_rows(k, v, self.batch_size, self.num_kv_heads, self.head_dim, self.dtype, self.device)
        num_new = k.shape[2]
        self._turns.check(layer, num_new)
        if not self._turns.in_pass:
            self._take_slots(num_new)
        k, v = (rows.transpose(1, 2).flatten(0, 1) for rows in (k, v))  # [B · T, H_kv, d], sequence after sequence
        kernels.store_kv(k, v, self.storage.k(layer), self.storage.v(layer), self._slot_mapping)
        self._turns.advance(num_new)

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
        num_rows = self._num_rows(layer)
        k, v = (
            torch.stack([kernels.gather_kv(cache, table, num_rows) for table in self._tables]).transpose(1, 2)
            for cache in (self.storage.k(layer), self.storage.v(layer))
        )
        return k, v

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
        num_rows = self._num_rows(layer)
        _check_queries(q, self.batch_size, self.num_kv_heads, self.head_dim)
        num_new = q.shape[2]
        if num_new > num_rows:
            raise ValueError(f"{num_new} new tokens cannot be the last of {num_rows}: append them before attending")
        rows = q.transpose(1, 2).flatten(0, 1)  # [B · T, H, d], sequence after sequence
        caches, metadata = (self.storage.k(layer), self.storage.v(layer)), self._metadata_of(num_rows, num_new)
        out = kernels.paged_attention(rows, *caches, metadata, sliding_window=window)
        return out.reshape(self.batch_size, num_new, -1, self.head_dim).transpose(1, 2)

    def reset(self) -> None:
        """Drop every token and free the blocks: the next append writes position 0 again.

        Also ends an incomplete forward pass, so a cache can be used again after an error in the model.
        """
        for table in self.block_tables:
            table.release()
        self._turns.reset()
        self._follow_tables()

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
        if num_tokens > self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} tokens of {self.num_tokens}")
        for table in self.block_tables:
            table.truncate(num_tokens)
        self._turns.reset()
        self._follow_tables()

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
        if self._turns.in_pass:
            raise ValueError("a forward pass is under way: fork before it or after its last layer")
        fork = PagedKVCache(
            self.num_layers,
            self.batch_size,
            self.num_kv_heads,
            self.max_seq_len,
            self.head_dim,
            dtype=self.dtype,
            device=self.device,
            storage=self.storage,
        )
        fork.block_tables = [table.fork() for table in self.block_tables]
        fork._follow_tables()
        return fork

    def _num_rows(self, layer: int) -> int:
        """Tokens of each sequence that `layer` holds, including those of a forward pass under way."""
        check_layer(layer, self.num_layers)
        return self.num_tokens + (self._turns.num_new if self._turns.is_ahead(layer) else 0)

    def _metadata_of(self, num_rows: int, num_new: int) -> kernels.AttentionMetadata:
        """For the last `num_new` of each sequence's `num_rows` tokens; made once for all layers of a forward pass."""
        if (num_rows, num_new) not in self._metadata:
            context_lens = torch.full((self.batch_size,), num_rows, device=self.device)
            starts = None
            if num_new > 1:
                starts = torch.arange(0, self.batch_size * num_new + 1, num_new, device=self.device)
            self._metadata[num_rows, num_new] = kernels.AttentionMetadata(
                self._tables,
                context_lens,
                starts,
                lengths=[num_rows] * self.batch_size,
                num_new_tokens=[num_new] * self.batch_size,
            )
        return self._metadata[num_rows, num_new]

    def _take_slots(self, num_new: int) -> None:
        """Begin a forward pass of T tokens: allocate blocks, and prepare what all layers share."""
        if self.num_tokens + num_new > self.max_seq_len:
            raise CacheOverflowError(
                f"{self.num_tokens} tokens + {num_new} new > max_seq_len {self.max_seq_len}: "
                f"reserve a longer cache, append less, or reset()"
            )
        slots = _grow(self.block_tables, [num_new] * self.batch_size)
        self._slot_mapping = torch.tensor(slots, device=self.device)
        self._follow_tables()

    def _follow_tables(self) -> None:
        """Copy the block tables into `_tables`, the tensor that kernels read."""
        self._tables = _tensor_of(self.block_tables, self.device)
        self._metadata: dict[tuple[int, int], kernels.AttentionMetadata] = {}  # by rows and new tokens of a sequence


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
        if not tables or len(tables) != len(num_new_tokens):
            raise ValueError(f"one count for each table, at least one; got {len(tables)} and {len(num_new_tokens)}")
        for count in num_new_tokens:
            require_count("num_new_tokens", count)
        if any(table.pool is not storage.pool for table in tables):
            raise ValueError("a table is over another pool than the storage's")
        if len(set(map(id, tables))) < len(tables):
            raise ValueError("a table is given twice: pass each sequence once, with all its new tokens")
        slots = _grow(tables, num_new_tokens)
        device = storage.device
        lens = [table.num_tokens for table in tables]
        spans = [range(end - count, end) for end, count in zip(lens, num_new_tokens, strict=True)]
        self.storage = storage
        self.slot_mapping = torch.tensor(slots, device=device)
        self.context_lens = torch.tensor(lens, device=device)
        self.query_start_loc = torch.tensor([0, *accumulate(num_new_tokens)], device=device)
        self.block_tables = _tensor_of(tables, device)
        self._positions = torch.tensor([position for span in spans for position in span], device=device)
        starts = None if max(num_new_tokens) == 1 else self.query_start_loc
        self._metadata = kernels.AttentionMetadata(
            self.block_tables, self.context_lens, starts, lengths=lens, num_new_tokens=num_new_tokens
        )
        self._turns = LayerTurns(storage.num_layers)
        self._is_over = False

    def positions(self, num_new_tokens: int) -> Tensor:
        """The positions of the step's tokens, each in its own sequence.

        Args:
            num_new_tokens: N, the tokens of all sequences together.

        Returns:
            `[N]` int64 on the storage's device.

        Raises:
            ValueError: another number than the step was made for.
        """
        if num_new_tokens != self._positions.shape[0]:
            raise ValueError(f"this step was made for {self._positions.shape[0]} tokens, not for {num_new_tokens}")
        return self._positions

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
        check_layer(layer, self.storage.num_layers)
        check_rows(k, v, 1, self.storage.num_kv_heads, self.storage.head_dim, self.storage.dtype, self.storage.device)
        if self._is_over:
            raise ValueError("every layer has its rows: a step serves one forward pass, so make another step")
        self.positions(k.shape[2])  # refuses any other number of tokens
        self._turns.check(layer, k.shape[2])
        k, v = (rows[0].transpose(0, 1) for rows in (k, v))
        kernels.store_kv(k, v, self.storage.k(layer), self.storage.v(layer), self.slot_mapping)
        self._is_over = self._turns.advance(k.shape[0])

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
        self._check_appended(layer)
        _check_queries(q, 1, self.storage.num_kv_heads, self.storage.head_dim)
        self.positions(q.shape[2])
        rows, k_cache, v_cache = q[0].transpose(0, 1), self.storage.k(layer), self.storage.v(layer)
        out = kernels.paged_attention(rows, k_cache, v_cache, self._metadata, sliding_window=window)
        return out.transpose(0, 1)[None]

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
        self._check_appended(layer)
        sequences = list(zip(self.block_tables, self.context_lens.tolist(), strict=True))
        k, v = (
            torch.cat([kernels.gather_kv(cache, *sequence) for sequence in sequences]).transpose(0, 1)[None]
            for cache in (self.storage.k(layer), self.storage.v(layer))
        )
        return k, v

    def _check_appended(self, layer: int) -> None:
        """Raise unless `layer` has the rows of this step."""
        check_layer(layer, self.storage.num_layers)
        if not (self._is_over or self._turns.is_ahead(layer)):
            raise ValueError(f"layer {layer} has no rows of this step yet: append them first")


def _grow(tables: Sequence[BlockTable], counts: Sequence[int]) -> list[int]:
    """Append counts[i] tokens to tables[i], for all tables or for none.

    Only `BlockTable`s are checked for shared blocks. An engine uses other tables: its scheduler copies shared blocks
    before they are written, and a request may read a block in the step that fills it (phase 8).

    Returns:
        The slots of the new tokens, table after table.
    """
    pool = tables[0].pool
    for table in tables:
        is_unfinished = isinstance(table, BlockTable) and table.num_tokens % pool.block_size
        if is_unfinished and pool.ref_count(table.block_ids[-1]) > 1:
            raise SharedBlockError(f"block {table.block_ids[-1]} is unfinished and shared: it cannot be written")
    needed = sum(table.blocks_needed(count) for table, count in zip(tables, counts, strict=True))
    if needed > pool.num_free:
        raise OutOfBlocksError(f"{sum(counts)} tokens need {needed} more blocks, and {pool.num_free} are free")
    return [slot for table, count in zip(tables, counts, strict=True) for slot in table.append(count)]


def _tensor_of(tables: Sequence[BlockTable], device: torch.device) -> Tensor:
    """Block tables as kernels read them: `[B, max_blocks]` int64, padded with −1: reading the tail is an error."""
    width = max(len(table.block_ids) for table in tables)
    rows = [table.block_ids + [-1] * (width - len(table.block_ids)) for table in tables]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _check_storage(
    storage: PagedStorage,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise unless `storage` has these sizes, dtype and device."""
    here = (storage.num_layers, storage.num_kv_heads, storage.head_dim)
    if here != (num_layers, num_kv_heads, head_dim):
        raise ValueError(
            f"layers, KV heads and head_dim are {num_layers, num_kv_heads, head_dim}; the storage has {here}"
        )
    if storage.dtype != dtype:
        raise TypeError(f"the cache's dtype is {dtype}, the storage's is {storage.dtype}")
    if storage.device.type != device.type:
        raise ValueError(f"the cache's device is {device}, the storage's is {storage.device}")


def _check_queries(q: Tensor, batch_size: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise unless `q` is `[batch_size, H, T ≥ 1, head_dim]`, H a multiple of num_kv_heads."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a tensor; got {type(q).__name__}")
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (batch_size, head_dim) or q.shape[1] % num_kv_heads or 0 in q.shape:
        raise ValueError(
            f"q must be [{batch_size}, a multiple of {num_kv_heads}, T ≥ 1, {head_dim}]; got {list(q.shape)}"
        )
