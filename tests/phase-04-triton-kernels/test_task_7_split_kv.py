"""Phase 4, task 7: split-KV: splits of one context in parallel, and their merge."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import paged_decode_attention
from minicache_course.checks import call, that

WIDE = 256
"""With this head size a tile has 16 tokens, so short contexts have several splits."""


def test_two_full_splits(batch, decode):
    """32 tokens, two tiles, two splits: each writes its maximum, sum and accumulator, and the merge adds them up."""
    decode(batch([32], 1, WIDE, 16), 1, num_splits=2)


def test_an_empty_split(batch, decode):
    """16 tokens, one tile, two splits: the second is empty, and still writes −inf, 0 and zeros."""
    decode(batch([16], 1, WIDE, 16), 1, num_splits=2)


def test_two_query_heads(batch, decode):
    """The two heads of a group have a maximum, a sum and an accumulator each, in every split."""
    decode(batch([32], 1, WIDE, 16), 2, num_splits=2)


def test_splits_of_ragged_contexts(batch, decode):
    """The output equals that without splits, for all lengths. Short contexts leave splits empty."""
    decode(batch([40, 1], 1, WIDE, 16), 2, num_splits=3)


def test_groups_of_query_heads(batch, decode):
    """Each query head has its own maximum, sum and accumulator in every split."""
    decode(batch([20], 2, WIDE, 8), 10, num_splits=2)


@pytest.mark.parametrize(("head_dim", "block_size", "length"), [(80, 16, 70), (5, 5, 150)], ids=str)
def test_sizes(batch, decode, head_dim, block_size, length):
    """Head sizes and block sizes that are and are not powers of two."""
    decode(batch([length], 1, head_dim, block_size), 2, num_splits=2)


def test_more_splits_than_tokens(batch, decode):
    """Most splits are empty: maximum −inf, sum 0. exp(−inf − −inf) is NaN, and must be avoided."""
    decode(batch([3], 1, 16, 8), 2, num_splits=5)


def test_no_context(batch, decode):
    """All splits of a context of 0 are empty: zeros, not 0 / 0."""
    decode(batch([0, 20], 1, WIDE, 8), 2, num_splits=3)


@pytest.mark.parametrize("position", [2, 20], ids=lambda what: f"in token {what}")
def test_a_split_may_hold_all_the_weight(batch, decode, device, position):
    """One key whose score is 128 above all others: its split has a separate maximum, and the others have weight 0."""
    some = batch([32], 1, WIDE, 16)
    some.keys[0].mul_(0.1)
    some.keys[0][position] = 8.0
    decode(some.moved(0), 2, q=torch.ones(1, 2, WIDE, device=device), num_splits=2)


def test_splits_far_below_zero(batch, decode, device):
    """All scores at −400: the merge subtracts the largest maximum, never 0."""
    low = batch([20], 1, WIDE, 8)
    low.keys[0].fill_(-5.0)
    decode(low.moved(0), 2, q=torch.full((1, 2, WIDE), 5.0, device=device), num_splits=2)


def test_an_empty_split_weighs_nothing(batch, decode, device):
    """All scores at −400, and an empty split: with a maximum of 0 it would outweigh the others."""
    low = batch([17], 1, WIDE, 8)
    low.keys[0].fill_(-5.0)
    decode(low.moved(0), 2, q=torch.full((1, 2, WIDE), 5.0, device=device), num_splits=3)


def test_splits_that_rise(batch, decode, device):
    """Scores that rise with the position: each split's maximum is above the last one's."""
    rising = batch([48], 1, WIDE, 16)
    for position in range(48):
        rising.keys[0][position] = (position - 24) / 8
    decode(rising.moved(0), 2, q=torch.ones(1, 2, WIDE, device=device), num_splits=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(batch, decode, dtype):
    """The splits store fp32: rounding to half precision would add an error."""
    decode(batch([40], 1, WIDE, 16, dtype=dtype), 2, num_splits=2)


def test_maxima_are_handed_over_in_fp32(batch, decode, device):
    """fp16, and a split's largest score is 298.54, the other's 300: in fp16 they would be 298.5 and 300."""
    some = batch([64], 1, WIDE, 16, dtype=torch.float16)
    some.keys[0].copy_(0.125)
    some.keys[0][:32] = 0.1244
    some.values[0].copy_(torch.where(torch.arange(64) < 32, -1.0, 1.0)[:, None, None])
    decode(some.moved(0), 1, q=torch.full((1, 1, WIDE), 150.0, device=device).half(), num_splits=2, tolerance=1e-3)


def test_sums_are_handed_over_in_fp32(batch, decode):
    """fp16, and each split sums 32 values of 4,000: fp16's largest number is 65,504."""
    some = batch([64], 1, WIDE, 16, dtype=torch.float16)
    some.keys[0].zero_()
    some.values[0].fill_(4000.0)
    decode(some.moved(0), 1, num_splits=2)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tables_and_lengths_with_gaps(batch, decode, apart, index):
    """Block tables and lengths may be every second number of wider tensors: the launcher makes them contiguous."""
    some = batch([17, 8], 1, WIDE, 8, index=index)
    some.block_tables, some.context_lens = apart(some.block_tables), apart(some.context_lens)
    decode(some, 2, num_splits=2)


def test_tables_cut_from_wider_ones(batch, decode):
    """A block table may be a slice of a wider tensor."""
    some = batch([17, 8], 1, WIDE, 8)
    num_blocks = some.block_tables.shape[1]
    some.block_tables = torch.cat([some.block_tables, some.block_tables.flip(0)], dim=1)[:, :num_blocks]
    decode(some, 2, num_splits=2)


def test_no_sequence(batch, launches_nothing):
    """An empty batch: an empty output, and nothing is launched, since CUDA refuses an empty grid."""
    from minicache.kernels import split_kv

    launches_nothing(split_kv.paged_decode_attention, batch([9], 1, 16, 8), num_splits=2)


def test_alibi_in_every_split(batch, decode, device, apart):
    """Positions count from the context's beginning, not from the split's. The slopes may have gaps."""
    slopes = apart(torch.tensor([0.25, 0.0625], device=device))
    decode(batch([20], 1, WIDE, 8), 2, num_splits=2, alibi_slopes=slopes)


def test_scales_and_a_soft_cap_in_every_split(batch, decode, device):
    """v_scale is applied once, in the splits or in the merge."""
    v_scale = torch.tensor([1.3, 0.6], device=device)
    decode(batch([20], 2, WIDE, 8, at=2.0), 2, num_splits=2, k_scale=0.7, v_scale=v_scale, softcap=1.5, scale=0.2)


@pytest.mark.parametrize("window", [1, 10, 30], ids=lambda what: f"a window of {what}")
def test_a_window_and_splits(batch, decode, window):
    """Only the window is cut into splits; a small one leaves some of them empty. Nothing before it is read."""
    decode(batch([60], 1, WIDE, 8), 2, num_splits=2, sliding_window=window)


def test_queries_with_strides_of_their_own(batch, decode, device):
    """q may be a view with any strides."""
    q = torch.randn(WIDE, 2, 2, device=device).permute(2, 1, 0)
    decode(batch([20, 8], 1, WIDE, 8), 2, q=q, num_splits=2)


def test_other_blocks_same_output(batch, watched, device):
    """The same entries in other blocks: the output is the same, bit for bit."""
    one = batch([20], 1, WIDE, 8)
    q = torch.randn(1, 2, WIDE, device=device)
    first = call(watched(paged_decode_attention), q, *one.paged, num_splits=2).value
    again = call(watched(paged_decode_attention), q, *one.moved(5).paged, num_splits=2).value
    that("the output with the entries in other blocks", again).gives(first)


def test_caches_and_queries_of_more_than_two_billion_numbers(batch, decode, far_apart, device):
    """A KV head or a sequence times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    some = batch([6], 3, 16, 8, dtype=torch.int8)
    some.k_cache, some.v_cache = far_apart(some.k_cache, 2), far_apart(some.v_cache, 2)
    decode(some, 3, num_splits=1 + 1)
    some = batch([3, 5, 4], 1, 16, 8, dtype=torch.float16)
    decode(some, 1, q=far_apart(torch.randn(3, 1, 16, device=device).half(), 0), num_splits=2)


def test_buffers_of_more_than_two_billion_numbers(last_of_thousands):
    """32,769 sequences, 16 heads of 256 numbers, 16 splits: the last row of acc begins after number 2³¹ − 1."""
    last_of_thousands(num_sequences=32769, num_heads=16, num_splits=16, head_dim=256)


def test_the_launcher_does_not_read_lengths(batch, device, reads_no_values):
    """Tables and lengths are on the GPU: a launcher that reads their values waits for the GPU."""
    from minicache.kernels import split_kv

    some, q = batch([9, 5], 1, 16, 8), torch.randn(2, 2, 16, device=device)
    got = call(reads_no_values(split_kv.paged_decode_attention), q, *some.paged, scale=1.0, num_splits=2).value
    that("the output's shape", list(got.shape)).gives([2, 2, 16])
