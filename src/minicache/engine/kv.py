"""What a step of the engine runs on: a model, and the keys and values of the requests that it serves.

A scheduler's blocks are numbers. `PagedMemory` keeps their contents in a `PagedStorage`, and moves those that a step
swaps or copies; `DenseMemory` gives each request a `KVCache` of its own. Either makes the cache of one step, on which
any model runs. No phase builds this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.cache.packed import Blocks, PackedStep, StepTensors, step_tensors
from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.cache.quantized import KV_CACHE_DTYPES, QuantizedStorage, quantized_token_nbytes
from minicache.cache.selective import SelectiveStep
from minicache.cache.swap import HostStorage, copy_blocks
from minicache.errors import InvariantError, require_count
from minicache.memory.blocks import BlockPool, BlockTable, blocks_for
from minicache.memory.groups import BlockGroups, GroupedBlockPool
from minicache.model.groups import LayerGroups, layer_groups
from minicache.model.minigpt import Cache
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput

DEFAULT_NBYTES: Final = 64 * 2**20
"""The least size of an engine's cache on a CPU if num_blocks is not given: 64 MiB, 32,768 tokens of MiniGPT."""

DEFAULT_NUM_TOKENS: Final = 16_384
"""How many tokens it holds at least: eight requests of 2,048. A large model's 64 MiB would not hold one."""


class ModelConfig(Protocol):
    """What the engine must know of a model's shape; `minicache.model.MiniGPTConfig` is one."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""

    @property
    def num_layers(self) -> int:
        """Attention layers."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""

    @property
    def head_dim(self) -> int:
        """Size of one head."""

    @property
    def max_seq_len(self) -> int:
        """The most tokens of one sequence."""


class Model(Protocol):
    """What the engine asks of a model: `minicache.model.MiniGPT` is one, and so is any `torch.nn.Module` like it.

    A model may also offer the two halves of its forward pass: `hidden_states(token_ids, cache) -> [1, N, hidden_size]`
    and `logits(hidden) -> […, vocab]`. The engine then computes only the logits that it needs.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""

    def __call__(self, token_ids: Tensor, cache: Any, /) -> Tensor:
        """Token ids `[1, N]` int64 and the cache of one step → logits `[1, N, vocab]`."""

    def parameters(self) -> Any:
        """The weights; dtype and device are the first one's."""


def logits_at(model: Model, token_ids: Tensor, cache: Cache, rows: Tensor) -> Tensor:
    """Run a model over a step's tokens, and return the logits of some of them.

    Args:
        model: is run once.
        token_ids: `[1, N]` int64, on the model's device.
        cache: of the step; it receives the tokens' keys and values.
        rows: `[B]` int64, the positions among the N of the tokens whose logits are wanted.

    Returns:
        `[B, vocab]`.
    """
    if hasattr(model, "hidden_states") and hasattr(model, "logits"):
        return cast(Tensor, model.logits(model.hidden_states(token_ids, cache)[0, rows]))
    return model(token_ids, cache)[0, rows]


def check_kv_cache_dtype(kv_cache_dtype: object, cache: str) -> None:
    """Raise unless an engine's cache can hold this: None, as many bits as the weights; "int8" or "fp8_e4m3".

    Raises:
        TypeError: it is no string.
        ValueError: it is another string, or the cache is dense.
    """
    if kv_cache_dtype is None:
        return
    names = " or ".join(f'"{name}"' for name in KV_CACHE_DTYPES)
    if not isinstance(kv_cache_dtype, str):
        raise TypeError(f"kv_cache_dtype must be {names}, or None for the dtype of the weights; got {kv_cache_dtype!r}")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(
            f"kv_cache_dtype must be {names}, or None for the dtype of the weights; got {kv_cache_dtype!r}"
        )
    if cache == "dense":
        raise ValueError('a dense cache is not quantized: leave out kv_cache_dtype, or take cache="paged"')


def groups_of(config: ModelConfig, windows: Sequence[int | None] | None) -> LayerGroups:
    """The groups in which a cache holds a model's layers.

    Args:
        config: of the model; with `sliding_windows`, a window or None for each layer, if it has any.
        windows: of a scheduler's groups; None: it has no groups.

    Raises:
        ValueError: these are not the windows of the model's groups.
    """
    if windows is None or tuple(windows) == (None,):
        return layer_groups((None,) * config.num_layers)
    groups = layer_groups(getattr(config, "sliding_windows", (None,) * config.num_layers))
    if groups.windows != tuple(windows):
        raise ValueError(
            f"the scheduler's groups have the windows {tuple(windows)}, and the model's layers {groups.windows}: give "
            "create_scheduler the model's"
        )
    return groups


def kv_token_nbytes(model: Model, kv_cache_dtype: str | None = None, num_layers: int | None = None) -> int:
    """Bytes of a token's keys and values in all layers, and of their scales if the cache is quantized.

    Args:
        model: whose layers.
        kv_cache_dtype: as `LLM` takes it.
        num_layers: so many layers instead, those of a group for instance.
    """
    config = model.config
    num_layers = config.num_layers if num_layers is None else num_layers
    if kv_cache_dtype is not None:
        return quantized_token_nbytes(num_layers, config.num_kv_heads, config.head_dim)
    dtype: torch.dtype = next(iter(model.parameters())).dtype
    return 2 * num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def blocks_for_one(windows: Sequence[int | None] | None, block_size: int, num_tokens: int, max_step_tokens: int) -> int:
    """The most blocks that one request holds at a time.

    Args:
        windows: of the groups of layers; None: there are no groups.
        block_size: tokens of a block.
        num_tokens: of the request.
        max_step_tokens: the most of them in one step.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is below 1.
    """
    sizes = {"block_size": block_size, "max_model_len": num_tokens, "max_num_batched_tokens": max_step_tokens}
    for name, value in sizes.items():
        require_count(name, value)
    if windows is None:
        return blocks_for(num_tokens, block_size)
    pool = GroupedBlockPool(1, block_size)
    return BlockGroups(pool, windows, max_step_tokens=max_step_tokens).blocks_to_admit(num_tokens)


def request_nbytes(
    model: Model,
    block_size: int,
    num_tokens: int,
    max_step_tokens: int,
    kv_cache_dtype: str | None,
    groups: LayerGroups | None,
) -> int:
    """Bytes of the keys and values that one request holds at a time, at most.

    Args:
        model: what is run.
        block_size: tokens of a block.
        num_tokens: of the request.
        max_step_tokens: the most of them in one step.
        kv_cache_dtype: what the cache holds, as `LLM` takes it.
        groups: of layers; None: there are none.

    Raises:
        TypeError, ValueError: as `blocks_for_one`.
    """
    windows, num_layers = (None, None) if groups is None else (groups.windows, groups.num_layers)
    num_blocks = blocks_for_one(windows, block_size, num_tokens, max_step_tokens)
    num_slots = num_tokens if groups is None else num_blocks * block_size
    return num_slots * kv_token_nbytes(model, kv_cache_dtype, num_layers)


def default_nbytes(model: Model, kv_cache_dtype: str | None = None) -> int:
    """The size of an engine's cache on a CPU if num_blocks is not given: DEFAULT_NBYTES or DEFAULT_NUM_TOKENS."""
    return max(DEFAULT_NBYTES, DEFAULT_NUM_TOKENS * kv_token_nbytes(model, kv_cache_dtype))


def default_num_blocks(
    model: Model,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    nbytes: int = DEFAULT_NBYTES,
    kv_cache_dtype: str | None = None,
    groups: LayerGroups | None = None,
    max_num_batched_tokens: int = sys.maxsize,
) -> int:
    """How many blocks an engine's cache has if num_blocks is not given: as many as `nbytes` hold.

    At least those of one request of max_model_len tokens, and at most those of max_num_seqs such requests. With groups
    of layers, a block is of one group.

    Raises:
        TypeError: a number is not an int.
        ValueError: a number is below 1; or on a CPU, the machine has not as much memory as one request needs.
    """
    require_count("max_num_seqs", max_num_seqs)
    windows, num_layers = (None, None) if groups is None else (groups.windows, groups.num_layers)
    for_one = blocks_for_one(windows, block_size, max_model_len, max_num_batched_tokens)
    block_nbytes = kv_token_nbytes(model, kv_cache_dtype, num_layers) * block_size
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if next(iter(model.parameters())).device.type == "cpu" and for_one * block_nbytes > memory:
        raise ValueError(
            f"a request of max_model_len {max_model_len} tokens needs a cache of {for_one * block_nbytes / 2**30:.1f} "
            f"GiB, and this machine has {memory / 2**30:.1f} GiB: give a lower max_model_len"
        )
    return max(for_one, min(nbytes // block_nbytes, for_one * max_num_seqs))


class Memory(Protocol):
    """Where the keys and values of an engine's requests are: `PagedMemory` or `DenseMemory`.

    Attributes:
        num_steps: how many steps were made.
    """

    num_steps: int

    @property
    def storage(self) -> PagedStorage | None:
        """The blocks' memory; None where there are no blocks."""

    def move_blocks(self, output: SchedulerOutput) -> None:
        """Make the copies that a step asks for. Must be called before the model runs."""

    def make_step(self, output: SchedulerOutput) -> Cache:
        """The cache for a step: its tokens are those of `output.scheduled`, one request after the other.

        Raises:
            InvariantError: the scheduler has given a request fewer blocks than its tokens need, or counts tokens as
                computed that are not.
        """

    def forget(self, request_id: RequestId) -> None:
        """Drop what is held for a finished request, if anything."""

    def clear(self) -> None:
        """Drop what is held for all requests: a step has failed, and none of their tokens counts as computed."""


class PagedMemory:
    """Keys and values in the blocks that the scheduler allocates: one storage for all requests.

    Args:
        model: sizes, dtype and device are its own.
        scheduler: its pool is the storage's; its `host_pool`, if it has one, counts the CPU blocks.
        kv_cache_dtype: "int8" or "fp8_e4m3": a `QuantizedStorage`. None: the weights' dtype.

    Attributes:
        groups: the groups of layers. All of them have their keys and values in one storage, whose layers are those of a
            group (`LayerGroups.places`).
        blocks: what the requests' block tables are made of.
        storage: the blocks' memory. With groups that have windows it has one block more than the pool, the null block.
        kv_cache_dtype: as given.
        host_storage: the CPU blocks' memory; None if the scheduler does not swap. The scales of a quantized storage
            have one of their own, which `host_storage.nbytes` counts too.
        num_steps: how many steps were made.
    """

    def __init__(self, model: Model, scheduler: Scheduler, kv_cache_dtype: str | None = None) -> None:
        config, weights, pool = model.config, next(iter(model.parameters())), scheduler.pool
        tables = getattr(scheduler, "groups", None)  # an observed scheduler has it too
        windows = tables.windows if isinstance(tables, BlockGroups) else None
        self.groups = groups_of(config, windows)
        self.blocks = Blocks(pool.block_size)
        if windows is not None:
            self.blocks = Blocks(pool.block_size, len(self.groups.windows), null_block=pool.num_blocks)
            pool = BlockPool(pool.num_blocks + 1, pool.block_size)
        sizes = (self.groups.num_layers, config.num_kv_heads, config.head_dim)
        kind = PagedStorage if kv_cache_dtype is None else QuantizedStorage
        dtype = weights.dtype if kv_cache_dtype is None else KV_CACHE_DTYPES[kv_cache_dtype]
        self.storage = kind(pool, *sizes, dtype=dtype, device=weights.device)
        host_pool = scheduler.host_pool
        self.kv_cache_dtype = kv_cache_dtype
        self.host_storage = None if host_pool is None else HostStorage(self.storage, host_pool.num_blocks)
        self._storages = [(self.storage, self.host_storage)]
        if isinstance(self.storage, QuantizedStorage):
            scales = self.storage.scales
            self._storages.append((scales, None if host_pool is None else HostStorage(scales, host_pool.num_blocks)))
        self.num_steps = 0

    def move_blocks(self, output: SchedulerOutput) -> None:
        """As `Memory.move_blocks`: first out, then in, then on the device, as one block may be in all three."""
        for storage, host_storage in self._storages:
            if host_storage is not None:
                for pairs in output.swapped_out.values():  # one request at a time: two may share a block
                    host_storage.swap_out(pairs)
                host_storage.swap_in([pair for pairs in output.swapped_in.values() for pair in pairs])
            if output.blocks_to_copy:
                copy_blocks(storage, output.blocks_to_copy)

    def make_step(self, output: SchedulerOutput) -> Cache:
        """As `Memory.make_step`: a `RaggedStep` over the requests' blocks.

        Or a `PackedStep`, if the storage is quantized, or there are groups of layers.
        """
        return self.cache_of(self.begin(output))

    def begin(self, output: SchedulerOutput) -> Step:
        """A step's requests, checked and counted: what each runner begins with.

        Raises:
            InvariantError: as `Memory.make_step`.
        """
        step = Step(output, self.blocks)
        self.num_steps += 1
        return step

    def cache_of(self, step: Step) -> Cache:
        """The cache for a step, for any model."""
        if not isinstance(self.storage, QuantizedStorage) and self.blocks.null_block < 0:
            tables = [RequestTable(self.storage, request) for request in step.requests]
            return RaggedStep(self.storage, cast("list[BlockTable]", tables), step.counts)
        tensors = step.tensors()
        lengths = tensors.context_lens.tolist()
        tensors = StepTensors._make(each.to(self.storage.device) for each in tensors)
        places = self.groups.places
        return PackedStep(self.storage, tensors, num_new_tokens=step.counts, lengths=lengths, places=places)

    def forget(self, request_id: RequestId) -> None:
        """Nothing to do: the scheduler has freed the blocks."""

    def clear(self) -> None:
        """Nothing to do: as `forget`."""


class Step:
    """The requests of a step over blocks, made once of what the scheduler has put out.

    Args:
        output: of `schedule()`, with at least one request.
        blocks: of their block tables.

    Attributes:
        requests: in batch order.
        counts: how many tokens each computes.
        blocks: as given.
        width: the blocks of the request that has the most.

    Raises:
        InvariantError: a request has fewer blocks than its tokens need.
    """

    __slots__ = ("blocks", "counts", "requests", "width")

    def __init__(self, output: SchedulerOutput, blocks: Blocks) -> None:
        self.requests = output.scheduled
        self.counts = list(output.num_scheduled_tokens.values())
        self.blocks = blocks
        width, block_size = 0, blocks.block_size
        for request, count in zip(self.requests, self.counts, strict=True):
            num_blocks = len(request.block_ids)
            if request.num_computed_tokens + count > num_blocks * block_size:
                raise InvariantError(
                    f"the scheduler has {request!r} compute {count} tokens, and has given it {num_blocks} "
                    f"blocks of {block_size}"
                )
            if num_blocks > width:
                width = num_blocks
        self.width = width

    def tensors(self) -> StepTensors:
        """Its integers, on the CPU."""
        return step_tensors(self.requests, self.counts, self.blocks, self.width)


class RequestTable:
    """A request's blocks, as the `BlockTable` that `RaggedStep` reads. It allocates none: the scheduler has.

    Args:
        storage: the blocks' memory.
        request: whose blocks; they have room for the tokens of the step.

    Attributes:
        pool: the storage's.
        block_ids: the request's.
        num_tokens: the computed tokens, and those that were appended here.
    """

    __slots__ = ("block_ids", "num_tokens", "pool")

    def __init__(self, storage: PagedStorage, request: Request) -> None:
        self.pool = storage.pool
        self.block_ids = request.block_ids
        self.num_tokens = request.num_computed_tokens

    def blocks_needed(self, num_new_tokens: int) -> int:
        """0: the scheduler has allocated all of them."""
        return 0

    def append(self, num_new_tokens: int) -> list[int]:
        """The slots of the next tokens, as `BlockTable.append` gives them."""
        block_size, start = self.pool.block_size, self.num_tokens
        self.num_tokens = end = start + num_new_tokens
        if num_new_tokens == 1:
            return [self.block_ids[start // block_size] * block_size + start % block_size]
        slots: list[int] = []
        for index in range(start // block_size, blocks_for(end, block_size)):  # block by block: prompts are long
            first, at = self.block_ids[index] * block_size, index * block_size
            slots.extend(range(first + max(start - at, 0), first + min(end - at, block_size)))
        return slots


class DenseMemory:
    """A `KVCache` of its own for each request, with room for its longest answer.

    The scheduler counts blocks as always; nothing is stored in them.

    Args:
        model: sizes, dtype and device are its own.
        scheduler: must not swap, nor have a prefix cache.

    Attributes:
        storage: None.
        num_steps: how many steps were made.

    Raises:
        ValueError: the scheduler swaps, or has a prefix cache.
    """

    storage: Final = None

    def __init__(self, model: Model, scheduler: Scheduler) -> None:
        if scheduler.host_pool is not None:
            raise ValueError('a dense cache has no blocks to swap: take preemption="recompute", or cache="paged"')
        if scheduler.prefix_caching:
            raise ValueError('a dense cache has no blocks to share: leave out prefix_caching, or take cache="paged"')
        self._new_cache = _cache_maker(model, scheduler.max_model_len)
        self._caches: dict[RequestId, KVCache] = {}
        self.num_steps = 0

    def move_blocks(self, output: SchedulerOutput) -> None:
        """As `Memory.move_blocks`: the cache of a preempted request is dropped."""
        for request_id in output.preempted:
            self.forget(request_id)

    def make_step(self, output: SchedulerOutput) -> Cache:
        """As `Memory.make_step`: a `SelectiveStep` over the requests' caches."""
        caches, counts = [], list(output.num_scheduled_tokens.values())
        for request in output.scheduled:
            request_id, num_computed = request.request_id, request.num_computed_tokens
            cache = self._caches.get(request_id)
            if cache is None:
                cache = self._caches[request_id] = self._new_cache(request.num_prompt_tokens + request.max_tokens)
            if cache.num_tokens != num_computed:
                raise InvariantError(f"{request!r}: its cache holds {cache.num_tokens} tokens")
            caches.append(cache)
        self.num_steps += 1
        return SelectiveStep(caches, counts)

    def forget(self, request_id: RequestId) -> None:
        """As `Memory.forget`: its cache is dropped."""
        self._caches.pop(request_id, None)

    def clear(self) -> None:
        """As `Memory.clear`: all caches are dropped."""
        self._caches.clear()


def _cache_maker(model: Model, max_model_len: int | None) -> Callable[[int], KVCache]:
    """A function: num_tokens → an empty cache for one sequence of so many tokens, but at most max_model_len."""
    config, weights = model.config, next(iter(model.parameters()))

    def make(num_tokens: int) -> KVCache:
        if max_model_len is not None:
            num_tokens = min(num_tokens, max_model_len)
        sizes = (config.num_layers, 1, config.num_kv_heads, num_tokens, config.head_dim)
        return KVCache(*sizes, dtype=weights.dtype, device=weights.device)

    return make
