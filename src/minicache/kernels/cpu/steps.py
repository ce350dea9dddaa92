"""One step's metadata for the kernels: checked once, as numpy arrays, for all layers.

A query of a decode step is a sequence of the decode kernel. So is each query of a short prompt: query t has the
sequence's blocks and, as its context, the tokens up to t. Those of a long prompt share each key that is read
(`prompts`). Which prompts are long is decided per sequence.

The first call for a cache dtype compiles or loads the kernels, unless `warming` has done so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from minicache.kernels import AttentionMetadata
from minicache.kernels.cpu import array_of, rows
from minicache.kernels.cpu.attention import decode, find_fault
from minicache.kernels.cpu.prompts import attend_prompt
from minicache.kernels.cpu.warming import require_ready

LONGEST_PROMPT = 32
"""The most tokens of a whole prompt that use the decode kernel, one sequence each.

Measured (`benchmarks/short_prompts.py`): up to here it is faster, or slower by a tenth at most.
"""

LONGEST_CHUNK = 12
"""The same for new tokens after cached ones. Each of them reads all of those, which the kernel for prompts reads once.
"""


@dataclass(frozen=True)
class _Queries:
    """Consecutive query rows `start` … `end` − 1 of a step, each a sequence of the decode kernel.

    Attributes:
        block_tables: `[end − start, max_blocks]` int64.
        context_lens: `[end − start]` int64.
    """

    start: int
    end: int
    block_tables: NDArray[np.int64]
    context_lens: NDArray[np.int64]


@dataclass(frozen=True)
class _Prompt:
    """The query rows `start` … `end` − 1 of one long prompt, its blocks, and its tokens with the new ones."""

    start: int
    end: int
    block_table: NDArray[np.int64]
    context_len: int


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """`minicache.kernels.paged_attention` with the numba kernels, and with a scale. No gradient flows.

    `k_scale` and `v_scale` are `[num_blocks, block_size, H_kv]`, or None for float32 caches.

    Returns:
        `[N, H, d]` float32. Zeros for a sequence with context_lens 0.
    """
    require_ready(k_cache.dtype)
    plan = plan_step(metadata, *k_cache.shape[:2])
    q = q.detach()
    if q.stride(2) != 1:
        q = q.contiguous()
    out = q.new_empty(q.shape)  # contiguous
    scale = q.shape[2] ** -0.5 if scale is None else scale
    caches = CacheArrays.of(k_cache, v_cache, k_scale, v_scale)
    plan.attend(q.numpy(), caches, scale, sliding_window or 0, out.numpy())
    return out


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`minicache.kernels.store_kv` with the numba kernel; contiguous caches.

    Raises:
        IndexError: a slot lies outside the cache. Nothing was written.
    """
    require_ready(k_cache.dtype)
    slots = check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[1])
    k, v = (new.detach() if new.stride(2) == 1 else new.detach().contiguous() for new in (k, v))
    caches = CacheArrays.of(k_cache, v_cache, k_scale, v_scale, by_slot=True)
    rows.store_kv(k.numpy(), v.numpy(), *caches, np.ascontiguousarray(slots))


class CacheArrays(NamedTuple):
    """The keys and values of one layer as the kernels take them: `[num_blocks, block_size, …]`, or `[num_slots, …]`.

    Attributes:
        k: `[…, H_kv, d]`: float32, int8, or float8_e4m3fn as uint8.
        v: likewise.
        k_scale: `[…, H_kv]` float32 for a cache with one byte per number, else None.
        v_scale: likewise.
    """

    k: NDArray[Any]
    v: NDArray[Any]
    k_scale: NDArray[np.float32] | None
    v_scale: NDArray[np.float32] | None

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, *, by_slot: bool = False
    ) -> CacheArrays:
        """The memory of a layer's tensors, block by block, or slot by slot if these are contiguous.

        Raises:
            RuntimeError: they are not contiguous: writes to a copy would be lost.
        """
        tensors = [k, v] if k_scale is None or v_scale is None else [k, v, k_scale, v_scale]
        if by_slot:
            tensors = [each.view(-1, *each.shape[2:]) for each in tensors]
        k_array, v_array, *scales = map(array_of, tensors)
        return cls(k_array, v_array, *(scales or (None, None)))


class StepPlan:
    """How the queries of a step attend: made by `plan_step`, which has checked what the kernels do not.

    Attributes:
        num_queries: N, the rows of q.
    """

    def __init__(self, num_queries: int, parts: list[_Queries | _Prompt]) -> None:
        self.num_queries = num_queries
        self._parts = parts

    def attend(
        self,
        q: NDArray[np.float32],
        caches: CacheArrays,
        scale: float,
        window: int,
        out: NDArray[np.float32],
    ) -> None:
        """Attention of one layer, written to `out`.

        Args:
            q: `[N, ≥ H, d]`, the first H heads are the queries: it may be the joined q, k and v.
            caches: of the layer, with the number and size of blocks that the plan was made for.
            scale: the factor of the scores.
            window: W ≥ 1: a query sees itself and the W − 1 tokens before it. 0 is no limit.
            out: `[N, H, d]`, contiguous.

        Raises:
            ValueError: `q` or `out` does not have the step's number of rows.
        """
        if len(q) != self.num_queries or len(out) != self.num_queries:
            raise ValueError(f"this step has {self.num_queries} queries; q has {len(q)} rows, out {len(out)}")
        for part in self._parts:
            queries, result = q[part.start : part.end], out[part.start : part.end]
            if isinstance(part, _Queries):
                decode(queries, *caches, part.block_tables, part.context_lens, scale, window, result)
            else:
                attend_prompt(queries, *caches, part.block_table, part.context_len, scale, window, result)


def plan_step(metadata: AttentionMetadata, num_blocks: int, block_size: int) -> StepPlan:
    """The plan of a step, made and checked at the first call, and cached in the metadata.

    Args:
        metadata: of the step; CPU tensors.
        num_blocks: of the caches.
        block_size: likewise.

    Raises:
        ValueError: a length is negative, more than its table's blocks hold, or less than its number of queries.
        IndexError: a block in use is not in the caches.
    """
    key = (plan_step, num_blocks, block_size)
    plan: StepPlan | None = metadata.plans.get(key)
    if plan is None:
        starts = metadata.query_start_loc
        plan = metadata.plans[key] = make_plan(
            metadata.block_tables.long().numpy(),
            metadata.context_lens.long().numpy(),
            None if starts is None else starts.long().numpy(),
            num_blocks,
            block_size,
        )
    return plan


def make_plan(
    block_tables: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    starts: NDArray[np.int64] | None,
    num_blocks: int,
    block_size: int,
) -> StepPlan:
    """As `plan_step`, of the arrays of an `AttentionMetadata`; `starts` are its query_start_loc."""
    _check(block_tables, context_lens, num_blocks, block_size)
    if starts is None:
        return StepPlan(len(context_lens), [_Queries(0, len(context_lens), block_tables, context_lens)])
    num_new = np.diff(starts)
    if np.any(num_new > context_lens):
        wrong = int(np.argmax(num_new > context_lens))
        raise ValueError(f"sequence {wrong} has {context_lens[wrong]} tokens, fewer than its {num_new[wrong]} queries")
    is_long = num_new > np.where(num_new == context_lens, LONGEST_PROMPT, LONGEST_CHUNK)
    parts: list[_Queries | _Prompt] = []
    # Consecutive sequences between two long prompts share one call of the kernel.
    borders = [-1, *np.flatnonzero(is_long).tolist(), len(num_new)]
    for before, after in pairwise(borders):
        if starts[before + 1] < starts[after]:
            parts.append(_queries(block_tables, context_lens, starts, before + 1, after))
        if after < len(num_new):
            parts.append(
                _Prompt(int(starts[after]), int(starts[after + 1]), block_tables[after], int(context_lens[after]))
            )
    return StepPlan(int(starts[-1]), parts)


def _queries(
    block_tables: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    starts: NDArray[np.int64],
    first: int,
    end: int,
) -> _Queries:
    """The queries of the sequences `first` … `end` − 1, each as a sequence."""
    num_new = np.diff(starts[first : end + 1])
    rows = np.arange(starts[first], starts[end])
    # Query row r is as far from its sequence's end as r is from the sequence's last row.
    contexts = np.repeat(context_lens[first:end] - starts[first + 1 : end + 1], num_new) + rows + 1
    return _Queries(int(starts[first]), int(starts[end]), np.repeat(block_tables[first:end], num_new, axis=0), contexts)


def _check(block_tables: NDArray[np.int64], context_lens: NDArray[np.int64], num_blocks: int, block_size: int) -> None:
    sequence, wrong = find_fault(block_tables, context_lens, num_blocks, block_size)
    if sequence < 0:
        return
    room = block_tables.shape[1] * block_size
    if not 0 <= context_lens[sequence] <= room:
        raise ValueError(f"a context_len must be 0 … {room}, what {block_tables.shape[1]} blocks hold; got {wrong}")
    raise IndexError(f"no block {wrong}: this cache has blocks 0 … {num_blocks - 1}")


def check_slots(slot_mapping: Tensor, num_slots: int) -> NDArray[np.int64]:
    """The checked slots of a step for `rows.store_kv` and `rows.rope_store`.

    Args:
        slot_mapping: `[…, N]` int32 or int64 on the CPU.
        num_slots: of the caches.

    Raises:
        IndexError: a slot is below −1 or past the last.
    """
    slots: NDArray[np.int64] = slot_mapping.long().numpy()
    if slots.size and (slots.min() < -1 or slots.max() >= num_slots):
        wrong = slots[(slots < -1) | (slots >= num_slots)][0]
        raise IndexError(f"no slot {wrong}: this cache has slots 0 … {num_slots - 1}")
    return slots
