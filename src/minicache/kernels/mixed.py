"""A mixed step on a GPU: its decodes run through the decode kernel, its chunks through the prefill kernel.

The prefill kernel computes any step, but a sequence with a single query takes a whole tile of its query rows, and one
program walks through all of its context. The decode kernel has a tile of the size of one query's heads, and split-KV
gives a long context to several programs. So `minicache.kernels.paged_attention` divides a step's sequences, once for
all layers, from lengths that the host has: nothing here waits for the device if the metadata was given them.

No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from minicache.kernels import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Part:
    """Some sequences of a step, computed by one kernel.

    Attributes:
        rows: which of the step's queries they have: a slice where these are neighbours, else `[n]` int64.
        metadata: of these sequences; without `query_start_loc` if each has one query.
    """

    rows: slice | Tensor
    metadata: AttentionMetadata


def parts(metadata: AttentionMetadata) -> list[Part]:
    """Divide a step into its decodes and its chunks, at the first call; later calls return the same list.

    A sequence without queries is in neither. A step without decodes is one part, as it was given.
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
    """The part of some sequences: views where they are neighbours, else copies by the next three `indices`."""
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
    """Whether rising numbers follow each other without a gap."""
    return group[-1] - group[0] == len(group) - 1


def _indices(metadata: AttentionMetadata, group: list[int]) -> list[list[int]]:
    """The numbers of some sequences and of their queries, and where the queries of each begin among these."""
    starts = metadata.starts
    rows = [row for i in group for row in range(starts[i], starts[i + 1])]
    return [group, rows, [0, *accumulate(starts[i + 1] - starts[i] for i in group)]]


def _copied(lists: list[list[int]], metadata: AttentionMetadata) -> Sequence[Tensor]:
    """Lists of int64 on the step's device, in one copy. From pinned memory it is queued there, and the host goes on."""
    if not lists:
        return ()
    pinned = torch.tensor([number for numbers in lists for number in numbers], pin_memory=torch.cuda.is_available())
    return torch.split(pinned.to(metadata.context_lens.device, non_blocking=True), [len(numbers) for numbers in lists])
