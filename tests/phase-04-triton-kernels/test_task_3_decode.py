"""Phase 4, task 3: paged decode attention."""

from __future__ import annotations

import pytest
import torch

from minicache.course.checks import call, that
from minicache.kernels import paged_decode_attention

HEADS = [(4, 4), (8, 2), (3, 1), (5, 1), (7, 1), (64, 8)]


def test_one_full_tile(batch, decode):
    """16 tokens of 256 numbers are one tile, all of it real: scores times 1 / √d, softmax, the values' weighted sum."""
    decode(batch([16], 1, 256, 8), 2)


@pytest.mark.parametrize("length", [15, 3], ids="{} tokens".format)
def test_rows_past_the_context(batch, decode, length):
    """A tile of 16 that reaches past the context: what is not there is not read, has score −∞ and counts nothing."""
    decode(batch([length], 1, 256, 8), 2)


def test_a_later_tile_may_bring_a_larger_score(batch, decode, device):
    """Scores that rise from tile to tile: what was summed under an old maximum has to be rescaled."""
    rising = batch([48], 1, 256, 16)
    q = torch.ones(1, 2, 256, device=device)
    for position in range(48):
        rising.keys[0][position] = (position - 24) / 6
    decode(rising.moved(0), 2, q=q)


def test_an_early_tile_may_have_the_largest_score(batch, decode, device):
    """Scores that fall from tile to tile: the old maximum stays, and later tiles add little to the old sums."""
    falling = batch([48], 1, 256, 16)
    q = torch.ones(1, 2, 256, device=device)
    for position in range(48):
        falling.keys[0][position] = (24 - position) / 6
    decode(falling.moved(0), 2, q=q)


@pytest.mark.parametrize("length", [17, 40], ids="{} tokens".format)
def test_more_than_one_tile(batch, decode, length):
    """With d = 256 a tile has 16 tokens: the running maximum, sum and accumulator go on from tile to tile."""
    decode(batch([length], 1, 256, 8), 2)


def test_scores_far_below_zero(batch, decode, device):
    """All scores at −400: a maximum that begins at 0 would leave nothing, and 0 / 0."""
    low = batch([20], 1, 16, 8)
    low.keys[0].fill_(-10.0)
    decode(low.moved(0), 2, q=torch.full((1, 2, 16), 10.0, device=device))


def test_large_scores_do_not_overflow(batch, decode):
    """Scores in the hundreds, of either sign: exp is taken of score − maximum, never of a score."""
    decode(batch([20, 33], 2, 64, 16, at=40.0), 4)


def test_no_context(batch, decode):
    """A sequence with context_lens 0 is a batch's padding: it gets zeros, and reads nothing."""
    decode(batch([0, 9, 0], 2, 16, 8), 4)


def test_what_attend_range_returns(attends_over):
    """Each row sees the tokens up to its own position; a row that sees none gets −inf, 0 and 0. acc is not divided."""
    attends_over(20, 50, range(18, 50, 2))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(*heads, id="{} query heads, {} kv heads".format(*heads)) for heads in HEADS],
)
def test_groups_of_query_heads(batch, decode, num_heads, num_kv_heads):
    """Query head h reads KV head h // (H / H_kv), whatever the group's size."""
    decode(batch([21, 7], num_kv_heads, 16, 8), num_heads)


@pytest.mark.parametrize("head_dim", [5, 64, 80, 128, 256], ids="d {}".format)
def test_head_sizes(batch, decode, head_dim):
    """Head sizes that are powers of two, and that are none: what the tile has beyond the head counts nothing."""
    decode(batch([19], 2, head_dim, 16), 4)


@pytest.mark.parametrize("block_size", [5, 8, 16, 32], ids="blocks of {}".format)
def test_block_sizes(batch, decode, block_size):
    """One token, one less than a block holds, all of it, one more, and a mix. NaN lies in every row not in use."""
    decode(batch([1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2], 1, 16, block_size), 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(batch, decode, dtype):
    """Error at most 3 times that of PyTorch in the same dtype: statistics and sums stay in fp32."""
    decode(batch([37, 5], 2, 64, 16, dtype=dtype), 8)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_integers_of_both_kinds(batch, decode, index):
    """Block tables and lengths may be int32 or int64."""
    decode(batch([21, 8], 2, 16, 8, index=index), 4)


def test_queries_with_strides_of_their_own(batch, decode, device):
    """q may be a slice of a larger tensor, its heads and numbers in any order."""
    some = batch([21, 8], 2, 16, 8)
    qkv = torch.randn(2, 8, 16, device=device)
    decode(some, 4, q=qkv[:, 2:6])
    decode(some, 4, q=torch.randn(16, 4, 2, device=device).permute(2, 1, 0))


def test_caches_with_strides_of_their_own(batch, decode):
    """A cache may be cut from a larger tensor: each cache has its own strides, of blocks, slots, heads and numbers."""
    decode(batch([21, 7], 2, 16, 8).strided(), 4)


def test_tables_cut_from_wider_ones(batch, decode):
    """A block table's rows may lie further apart than its entries: their stride counts, not their number."""
    some = batch([21, 8, 12], 2, 16, 8)
    some.block_tables = torch.cat([some.block_tables, some.block_tables.flip(0)], dim=1)[
        :, : some.block_tables.shape[1]
    ]
    decode(some, 4)


def test_other_blocks_same_output(batch, watched, device):
    """The same rows in other blocks: the output is the same, bit for bit."""
    one = batch([37, 20], 2, 16, 8)
    q = torch.randn(2, 4, 16, device=device)
    first = call(watched(paged_decode_attention), q, *one.paged, num_splits=1).value
    again = call(watched(paged_decode_attention), q, *one.moved(5).paged, num_splits=1).value
    that("the output with the rows in other blocks", again).gives(first)


def test_shared_blocks(batch, decode):
    """Two sequences that share their first blocks are attended to each on its own."""
    decode(batch([20, 27, 17], 2, 16, 8, shared=2), 4)
