"""Written by hand for `minicache distil`: what stands between block tables and the kernels.

The package chooses a kernel by device and cache; here each is called as it is. Nothing imports this module: it is read.
"""

# mypy: ignore-errors
# It is checked as part of the file that it becomes: a class here stands in for another of the package.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minicache.engine.kv import RequestTable
from minicache.kernels.plain import paged_decode_attention, paged_prefill_attention


def _grow(tables: Sequence[RequestTable], counts: Sequence[int]) -> list[int]:
    """The slots of counts[i] new tokens of tables[i], for all of them: the scheduler has allocated their blocks."""
    return [slot for table, count in zip(tables, counts, strict=True) for slot in table.append(count)]


@dataclass
class AttentionMetadata:
    """Which tokens of a step attend to which; `query_start_loc` is None where each sequence has one query."""

    block_tables: Tensor
    context_lens: Tensor
    query_start_loc: Tensor | None
    lengths: list[int]
    num_new_tokens: list[int]


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, *, sliding_window: int | None = None
) -> Tensor:
    """Attention of one layer, of each sequence's newest tokens over all its KV entries: `[N, H, d]` → `[N, H, d]`."""
    tables, lengths = metadata.block_tables, metadata.context_lens
    if metadata.query_start_loc is None:
        return paged_decode_attention(q, k_cache, v_cache, tables, lengths)
    return paged_prefill_attention(q, k_cache, v_cache, tables, lengths, metadata.query_start_loc)
