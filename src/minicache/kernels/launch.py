"""A step's attention on a GPU: which Triton kernel computes which sequences, and with how many splits.

The prefill kernel could compute any step, but a sequence with a single query would take a whole tile of query rows,
with one program for all of its context. The decode kernel's tile has the size of one query's heads, and split-KV
divides a long context among several programs. So `paged_attention` divides the sequences of a mixed step, once for all
layers, by the lengths on the host: nothing waits for the device if the metadata has them.

No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from minicache.kernels import checks
from minicache.kernels.metadata import AttentionMetadata


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, **options: Any) -> Tensor:
    """`minicache.kernels.paged_attention` in Triton: decodes through the decode kernel, chunks through prefill's.

    The options are those of `launch`.

    Returns:
        `[N, H, d]`, the dtype of `q`.
    """
    divided = parts(metadata)
    if len(divided) == 1:  # it has all queries
        return launch(q, k_cache, v_cache, divided[0].metadata, **options)
    out = torch.empty_like(q)
    for part in divided:
        out[part.rows] = launch(q[part.rows], k_cache, v_cache, part.metadata, **options)
    return out


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    num_splits: int | None = None,
    **options: Any,
) -> Tensor:
    """One kernel for all queries: prefill if the metadata has `query_start_loc`, else decode, in splits or not.

    Args:
        q: queries `[N, H, d]`.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`.
        v_cache: values, the same shape and dtype.
        metadata: of these queries.
        scale: the factor of the scores; None is 1 / √d.
        sliding_window: W ≥ 1, or None.
        num_splits: of each context in decode, 1 … 64. None chooses by the sizes of the batch and the block tables.
        options: the other options of the kernels' launchers.

    Returns:
        `[N, H, d]`, the dtype of `q`.

    Raises:
        ValueError: more than 64 splits.
        IndexError: a block in use lies outside the cache (CPU tensors).
        KernelUnavailableError: no kernel for these dtypes, head size and heads.
    """
    if q.device.type == "cpu":
        checks.blocks_in_use(k_cache, metadata.block_tables, metadata.context_lens)
    paged = (q, k_cache, v_cache, metadata.block_tables, metadata.context_lens)
    options |= {"scale": q.shape[2] ** -0.5 if scale is None else scale, "sliding_window": sliding_window}
    if metadata.query_start_loc is not None:
        from minicache.kernels import prefill

        return prefill.paged_prefill_attention(*paged, metadata.query_start_loc, **options)
    from minicache.kernels import split_kv

    if num_splits is None:
        longest = metadata.max_context_len or metadata.block_tables.shape[1] * k_cache.shape[1]  # what the tables hold
        longest = min(longest, sliding_window or longest)
        num_splits = split_kv.choose_num_splits(q.shape[0], k_cache.shape[2], longest, num_processors(q.device))
    if num_splits > split_kv.MAX_SPLITS:
        raise ValueError(f"num_splits must be 1 … {split_kv.MAX_SPLITS}: the merge holds all of them; got {num_splits}")
    if num_splits > 1:
        return split_kv.paged_decode_attention(*paged, **options, num_splits=num_splits)
    from minicache.kernels import decode

    return decode.paged_decode_attention(*paged, **options)


def num_processors(device: torch.device) -> int:
    """A GPU's multiprocessors; 1 under the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a step, computed by one kernel.

    Attributes:
        rows: the step's queries that belong to them: a slice where these are consecutive, else `[n]` int64.
        metadata: of these sequences; without `query_start_loc` if each has one query.
    """

    rows: slice | Tensor
    metadata: AttentionMetadata


def parts(metadata: AttentionMetadata) -> list[Part]:
    """Divide a step into its decodes and its chunks, at the first call; later calls return the same list.

    A sequence without queries is in neither. A step without decodes is one part, unchanged.
    """
    found: list[Part] | None = metadata.plans.get("parts")
    if found is None:
        found = metadata.plans["parts"] = _divide(metadata)
    return found


def _divide(metadata: AttentionMetadata) -> list[Part]:
    whole = [Part(slice(None), metadata)]
    if metadata.query_start_loc is None:
        return whole
    counts = [end - start for start, end in pairwise(metadata.starts)]
    decodes = [i for i, count in enumerate(counts) if count == 1]
    chunks = [i for i, count in enumerate(counts) if count > 1]
    if not decodes:
        return whole
    groups = [group for group in (decodes, chunks) if group]
    apart = [group for group in groups if not _are_neighbours(group)]
    indices = iter(_copied([numbers for group in apart for numbers in _indices(metadata, group)], metadata))
    return [_part(metadata, group, counts, indices) for group in groups]


def _part(metadata: AttentionMetadata, group: list[int], counts: list[int], indices: Iterator[Tensor]) -> Part:
    """The part of some sequences: views where they are consecutive, else copies by the next three `indices`."""
    first, end = group[0], group[-1] + 1
    starts: Tensor
    sequences: slice | Tensor
    rows: slice | Tensor
    if _are_neighbours(group) and metadata.query_start_loc is not None:
        sequences, rows = slice(first, end), slice(metadata.starts[first], metadata.starts[end])
        starts = metadata.query_start_loc[first : end + 1] - metadata.starts[first]
    else:
        sequences, rows, starts = next(indices), next(indices), next(indices)
    known = metadata.known_lengths
    part = AttentionMetadata(
        metadata.block_tables[sequences],
        metadata.context_lens[sequences],
        None if counts[first] == 1 else starts,
        lengths=None if known is None else [known[i] for i in group],
        num_new_tokens=[counts[i] for i in group],
    )
    return Part(rows, part)


def _are_neighbours(group: list[int]) -> bool:
    """Whether increasing numbers are consecutive."""
    return group[-1] - group[0] == len(group) - 1


def _indices(metadata: AttentionMetadata, group: list[int]) -> list[list[int]]:
    """The indices of some sequences and of their queries, and the start of each sequence among these."""
    starts = metadata.starts
    rows = [row for i in group for row in range(starts[i], starts[i + 1])]
    return [group, rows, [0, *accumulate(starts[i + 1] - starts[i] for i in group)]]


def _copied(lists: list[list[int]], metadata: AttentionMetadata) -> Sequence[Tensor]:
    """Lists as int64 tensors on the step's device, in one copy; asynchronous, because the memory is pinned."""
    if not lists:
        return ()
    pinned = torch.tensor([number for numbers in lists for number in numbers], pin_memory=torch.cuda.is_available())
    return torch.split(pinned.to(metadata.context_lens.device, non_blocking=True), [len(numbers) for numbers in lists])
