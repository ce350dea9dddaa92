"""Phase 4, task 5: paged decode attention, one program per sequence and key/value head."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import paged_decode_attention
from minicache_course.checks import call, that


def test_one_head(batch, decode):
    """One sequence of 16 tokens, one query head, one KV head: what attend_range returns, divided."""
    decode(batch([16], 1, 32, 8), 1)


def test_a_query_head_for_each_kv_head(batch, decode):
    """Two query heads and two KV heads: each query head attends to the keys and values of its KV head."""
    decode(batch([16], 2, 16, 8), 2)


def test_two_query_heads_for_each_kv_head(batch, decode):
    """Four query heads and two KV heads: the first two query heads read KV head 0, the others KV head 1."""
    decode(batch([16], 2, 16, 8), 4)


def test_two_sequences(batch, decode):
    """Each sequence has its own query, its own row of the block tables, and its own length."""
    decode(batch([16, 9], 1, 16, 8), 1)


def test_no_context(batch, decode):
    """A sequence with context_lens 0 is padding: its output is zeros, and nothing is read."""
    decode(batch([0, 9, 0], 1, 16, 8), 2)


def test_no_sequence(batch, launches_nothing):
    """An empty batch: an empty output, and nothing is launched, since CUDA refuses an empty grid."""
    from minicache.kernels import decode

    launches_nothing(decode.paged_decode_attention, batch([9], 1, 16, 8))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((3, 1), (10, 2), (17, 1), (6, 3))],
)
def test_groups_of_query_heads(batch, decode, num_heads, num_kv_heads):
    """Query head h reads KV head h // (H / H_kv), for any group size; the rows that pad it to 16 are not stored."""
    decode(batch([21], num_kv_heads, 16, 8), num_heads)


@pytest.mark.parametrize("head_dim", [5, 80, 256], ids="d {}".format)
def test_head_sizes(batch, decode, head_dim):
    """Head sizes that are and are not powers of two: the tile's padding is not stored."""
    decode(batch([19], 2, head_dim, 16), 2)


@pytest.mark.parametrize("block_size", [5, 16], ids=lambda what: f"blocks of {what}")
def test_block_sizes(batch, decode, block_size):
    """One token, one less than a block holds, all of it, one more, and a mix. Unused slots hold NaN."""
    decode(batch([1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2], 1, 16, block_size), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(batch, decode, dtype):
    """Error at most 3 times that of PyTorch in the same dtype: statistics and sums stay in fp32."""
    decode(batch([37], 1, 64, 16, dtype=dtype), 8)


def test_queries_with_strides_of_their_own(batch, decode, device):
    """q may be a slice of a larger tensor, its heads and numbers in any order."""
    some = batch([21, 8], 1, 16, 8)
    decode(some, 2, q=torch.randn(2, 8, 16, device=device)[:, 2:4])
    decode(some, 2, q=torch.randn(16, 2, 2, device=device).permute(2, 1, 0))


def test_caches_with_strides_of_their_own(batch, decode):
    """A cache may be a view of a larger tensor: the caches' strides of blocks, slots, heads and dims are unrelated."""
    decode(batch([21], 2, 16, 8).strided(), 2)


def test_tables_cut_from_wider_ones(batch, decode):
    """A block table may be a slice of a wider tensor: use its row stride, not its number of entries."""
    some = batch([21, 8], 1, 16, 8)
    num_blocks = some.block_tables.shape[1]
    some.block_tables = torch.cat([some.block_tables, some.block_tables.flip(0)], dim=1)[:, :num_blocks]
    decode(some, 2)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tables_and_lengths_with_gaps(batch, decode, apart, index):
    """Block tables and lengths may be every second number of wider tensors: the launcher makes them contiguous."""
    some = batch([21, 8], 1, 16, 8, index=index)
    some.block_tables, some.context_lens = apart(some.block_tables), apart(some.context_lens)
    decode(some, 2)


def test_other_blocks_same_output(batch, watched, device):
    """The same entries in other blocks: the output is the same, bit for bit."""
    one = batch([37, 20], 1, 16, 8)
    q = torch.randn(2, 2, 16, device=device)
    first = call(watched(paged_decode_attention), q, *one.paged, num_splits=1).value
    again = call(watched(paged_decode_attention), q, *one.moved(5).paged, num_splits=1).value
    that("the output with the entries in other blocks", again).gives(first)


def test_shared_blocks(batch, decode):
    """Two sequences may share their first blocks."""
    decode(batch([20, 27], 1, 16, 8, shared=2), 2)


def test_a_cache_of_more_than_two_billion_numbers(batch, decode, far_apart, device):
    """A KV head times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    some = batch([6], 3, 16, 8, dtype=torch.int8)
    some.k_cache, some.v_cache = far_apart(some.k_cache, 2), far_apart(some.v_cache, 2)
    decode(some, 3)


@pytest.mark.parametrize("dim", [pytest.param(0, id="sequences"), pytest.param(1, id="heads")])
def test_queries_more_than_two_billion_numbers_apart(batch, decode, far_apart, device, dim):
    """A sequence or a query head times its stride in q may exceed 2³¹ − 1."""
    some = batch([3, 5, 4], 1, 16, 8, dtype=torch.float16)
    decode(some, 3, q=far_apart(torch.randn(3, 3, 16, device=device).half(), dim))


def test_a_scale_that_is_given(batch, decode):
    """Scores are multiplied by `scale`, whatever the head size would suggest."""
    decode(batch([20, 5], 1, 16, 8), 2, scale=0.75)


def test_the_launcher_does_not_read_lengths(batch, device, reads_no_values):
    """Tables and lengths are on the GPU: a launcher that reads their values waits for the GPU."""
    from minicache.kernels import decode

    some, q = batch([9, 5], 1, 16, 8), torch.randn(2, 2, 16, device=device)
    got = call(reads_no_values(decode.paged_decode_attention), q, *some.paged, scale=1.0).value
    that("the output's shape", list(got.shape)).gives([2, 2, 16])
