"""Paged attention in PyTorch: in tiles and through windows, against the oracle, and one sequence after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minicache import kernels
from minicache.kernels import oracle, plain, tiles

HEAD_DIM, BLOCK = 8, 4

lengths_of = st.lists(st.integers(0, 40), min_size=1, max_size=12)
repeatable = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def a_batch(lengths: list[int], num_kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Caches, tables and lengths. NaN is in every row that is no sequence's, and in all of block 0; tails are wild."""
    needed = [-(-length // BLOCK) for length in lengths]
    num_blocks = sum(needed) + 2
    caches = torch.full((2, num_blocks, BLOCK, num_kv_heads, HEAD_DIM), torch.nan, dtype=dtype)
    free = (1 + torch.randperm(num_blocks - 1)).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 10**6)
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[i, :count] = torch.tensor(blocks, dtype=torch.int64)
        for position in range(length):
            caches[:, blocks[position // BLOCK], position % BLOCK] = torch.randn(2, num_kv_heads, HEAD_DIM)
    return *caches, tables, torch.tensor(lengths)


def queries(num: int, num_heads: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num, num_heads, HEAD_DIM).to(dtype)


@repeatable
@given(lengths=lengths_of, window=st.integers(1, 45))
def test_decode_through_a_window(lengths: list[int], window: int) -> None:
    paged, q = a_batch(lengths), queries(len(lengths))
    got = kernels.paged_decode_attention(q, *paged, scale=0.3, sliding_window=window, backend="torch")
    torch.testing.assert_close(got, oracle.attention(q, *paged, scale=0.3, sliding_window=window))


@pytest.mark.parametrize("tile", [1, 3, 256])
@repeatable
@given(
    counts=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 1, 1, 2, 5, 11])), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 45),
)
def test_prompts_beside_sequences_in_decode(tile: int, counts: list[tuple[int, int]], window: int | None) -> None:
    new = torch.tensor([num_new for _, num_new in counts])
    paged = a_batch([before + num_new for before, num_new in counts])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    q = queries(int(new.sum()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "QUERY_TILE", tile)
        got = kernels.paged_prefill_attention(q, *paged, starts, sliding_window=window, backend="torch")
    torch.testing.assert_close(got, oracle.attention(q, *paged, starts, sliding_window=window))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype, index: torch.dtype) -> None:
    k, v, tables, lens = a_batch([9, 3, 17, 16], dtype=dtype)
    q = queries(4, dtype=dtype)
    got = kernels.paged_decode_attention(q, k, v, tables.to(index), lens.to(index), backend="torch")
    expected = plain.paged_decode_attention(q.double(), k.double(), v.double(), tables, lens)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-2)


def test_a_block_in_use_that_is_not_there() -> None:
    for wrong in (-1, 10**6):
        k, v, tables, lens = a_batch([9, 3, 17])
        tables[2, 1] = wrong
        with pytest.raises(IndexError):
            kernels.paged_decode_attention(queries(3), k, v, tables, lens, backend="torch")
