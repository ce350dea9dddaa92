"""A mixed step on a GPU: its decodes run through the decode kernel, its chunks through the prefill kernel.

The prefill kernel computes any step, but a sequence with a single query takes a whole tile of its query rows, and one
program walks through all of its context. The decode kernel has a tile of the size of one query's heads, and split-KV
gives a long context to several programs. So `minicache.kernels.paged_attention` divides a step's sequences, once for
all layers, from lengths that the host has: nothing here waits for the device if the metadata was given them. If the
decodes come first, or last, nothing is copied to it either.

No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

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
    divided = [_part(metadata, decodes, None)]
    if chunks:
        divided.append(_part(metadata, chunks, [counts[i] for i in chunks]))
    return divided


def _part(metadata: AttentionMetadata, sequences: list[int], num_new_tokens: list[int] | None) -> Part:
    """The part of these sequences, in their order. `num_new_tokens` None: one each."""
    starts, device = metadata.starts, metadata.context_lens.device
    chosen = _index(sequences, device)
    rows = _index(list(chain.from_iterable(range(starts[i], starts[i + 1]) for i in sequences)), device)
    query_start_loc = None
    if num_new_tokens is not None and isinstance(chosen, slice):
        assert metadata.query_start_loc is not None
        query_start_loc = metadata.query_start_loc[chosen.start : chosen.stop + 1] - starts[chosen.start]
    elif num_new_tokens is not None:
        query_start_loc = _to_device([0, *accumulate(num_new_tokens)], device)
    lengths = None if metadata.known_lengths is None else [metadata.known_lengths[i] for i in sequences]
    tables, context_lens = metadata.block_tables[chosen], metadata.context_lens[chosen]
    part = AttentionMetadata(
        tables, context_lens, query_start_loc, lengths=lengths, num_new_tokens=num_new_tokens or [1] * len(sequences)
    )
    return Part(rows, part)


def _index(chosen: list[int], device: torch.device) -> slice | Tensor:
    """A slice if the chosen numbers are neighbours: its result is a view, and nothing is copied to the device."""
    if chosen[-1] - chosen[0] == len(chosen) - 1:
        return slice(chosen[0], chosen[-1] + 1)
    return _to_device(chosen, device)


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Int64 numbers on the device. From pinned memory the copy is queued there, and the host goes on."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)
