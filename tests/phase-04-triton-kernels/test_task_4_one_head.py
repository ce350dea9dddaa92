"""Phase 4, task 4: attend_range, the online softmax over one head's KV entries in the blocks of one sequence."""

from __future__ import annotations

import math

import pytest
import torch


def scored(batch, scores, block_size=16):
    """A sequence whose keys, with a query (4, 0, 0, …), have `scores`; and such a query."""
    one = batch([len(scores)], 1, 16, block_size)
    one.keys[0].zero_()
    one.keys[0][:, 0, 0] = torch.tensor(scores)
    return one.moved(0), torch.tensor([[4.0] + [0.0] * 15]).to(one.k_cache)


# One query that sees all of the range


def test_one_block(batch, attends_over):
    """32 tokens in one block of 32 are one full tile: the block's id comes from the table."""
    attends_over(batch([32], 1, 64, 32), 0, 32, [31], tile=32)  # 16 rows, 32 tokens, 64 numbers: no axis fits another


def test_two_blocks(batch, attends_over):
    """16 tokens in two blocks of 8, one tile: each token's block is looked up."""
    attends_over(batch([16], 1, 16, 8), 0, 16, [15])


@pytest.mark.parametrize("length", [15, 3], ids=lambda what: f"{what} tokens")
def test_rows_past_the_end(batch, attends_over, length):
    """A tile that reaches past `end`: nothing past it is read, table included, and its weight is 0."""
    attends_over(batch([length], 1, 16, 8), 0, length, [length - 1])


@pytest.mark.parametrize("length", [17, 40], ids=lambda what: f"{what} tokens")
def test_more_than_one_tile(batch, attends_over, length):
    """The running maximum, sum and accumulator carry over from tile to tile."""
    attends_over(batch([length], 1, 16, 8), 0, length, [length - 1])


def test_a_later_tile_brings_a_larger_score(batch, attends_over):
    """16 scores of 0, then 16 of ln 4: the sums under the old maximum are divided by 4."""
    one, q = scored(batch, [0.0] * 16 + [math.log(4)] * 16)
    attends_over(one, 0, 32, [31], q=q)


def test_an_earlier_tile_has_the_largest_score(batch, attends_over):
    """16 scores of ln 4, then 32 of 0: the maximum stays, and the later tiles have a quarter of the weight."""
    one, q = scored(batch, [math.log(4)] * 16 + [0.0] * 32)
    attends_over(one, 0, 48, [47], q=q)


def test_a_range_that_does_not_begin_at_0(batch, attends_over):
    """Tokens 5 … 29 in blocks of 8: the first tile begins in the middle of a block. Nothing before 5 is read."""
    attends_over(batch([40], 1, 16, 8), 5, 30, [39])


def test_an_empty_range(batch, attends_over):
    """No token: −inf, 0 and 0, and nothing is read. Split-KV uses such ranges."""
    attends_over(batch([40], 1, 16, 8), 30, 30, [39], tolerance=0)
    attends_over(batch([40], 1, 16, 8), 30, 20, [39], tolerance=0)


# Queries that see different tokens


def test_each_row_sees_the_tokens_up_to_its_position(batch, attends_over):
    """16 queries, one at each of 16 positions: a token after a query's position has score −∞ for that query."""
    attends_over(batch([16], 1, 16, 8), 0, 16, range(16))


def test_a_row_that_sees_nothing(batch, attends_over):
    """Tokens 20 … 29 and queries at 18, 19 and 20: the first two see none of them. −inf, 0 and 0, never NaN."""
    attends_over(batch([30], 1, 16, 8), 20, 30, [18, 19, 20])


def test_rows_that_see_nothing_in_later_tiles(batch, attends_over):
    """Tokens 2 … 49 in tiles of 16: the queries at 3, 20, 40 and 59 see tokens of one tile, two, three and three."""
    attends_over(batch([60], 1, 16, 8), 2, 50, [3, 20, 40, 59])


def test_a_range_that_ends_before_the_query(batch, attends_over):
    """Tokens 20 … 29, a query at 59: it may see the tokens after 29, but they are not in the range."""
    attends_over(batch([60], 1, 16, 8), 20, 30, [59])


# Numbers


def test_scores_far_below_zero(batch, attends_over):
    """All scores at −400: with a maximum initialised to 0 every exponential is 0."""
    one, q = scored(batch, [-400.0] * 20)
    attends_over(one, 0, 20, [19], q=q)


def test_large_scores_do_not_overflow(batch, attends_over):
    """Scores in the hundreds, of either sign: exp is taken of score − maximum, never of a score."""
    attends_over(batch([33], 1, 16, 16, at=200.0), 0, 33, [32])


def test_queries_keys_and_values_of_halves(batch, attends_over):
    """All in fp16: the two tiles of a tl.dot have one dtype, the probabilities too; results are fp32."""
    one = batch([16], 1, 16, 8, dtype=torch.float16)
    attends_over(one, 0, 16, [15], q=torch.tensor([[4.0] + [0.0] * 15]).to(one.k_cache), tolerance=1e-2)


def test_an_int8_cache(batch, attends_over):
    """One-byte keys and values, q in fp32: they are converted to q's dtype when they are loaded."""
    attends_over(batch([16], 1, 16, 8, dtype=torch.int8), 0, 16, [15])


def test_sums_of_halves_are_fp32(batch, attends_over):
    """q, keys and values in fp16: 70 values of 1,000 add up to 70,000, more than fp16's 65,504."""
    one = batch([70], 1, 16, 8, dtype=torch.float16)
    one.keys[0].zero_()
    one.values[0].fill_(1000.0)
    one = one.moved(0)
    attends_over(one, 0, 70, [69], q=torch.randn(1, 16).to(one.k_cache))


def test_results_of_halves_are_fp32_without_a_tile(batch, attends_over):
    """q in fp16, an empty range: the sums are fp32 before the loop, and no variable changes its dtype in it."""
    one = batch([16], 1, 16, 8, dtype=torch.float16)
    attends_over(one, 8, 8, [15], q=torch.randn(1, 16).to(one.k_cache))


def test_small_weights_of_halves_count(batch, attends_over):
    """q in fp16: 79 weights of 2⁻¹⁶ and one of 1. A tile of 16 of them is 2⁻¹², and fp16 has no 1 + 2⁻¹²."""
    one = batch([80], 1, 16, 8, dtype=torch.float16)
    one.keys[0].zero_()
    one.keys[0][1:, 0, 0] = -16 * math.log(2) / 4
    one = one.moved(0)
    attends_over(one, 0, 80, [79], q=torch.tensor([[16.0] + [0.0] * 15]).to(one.k_cache))


# Sizes, dtypes, strides


@pytest.mark.parametrize("head_dim", [5, 80], ids="d {}".format)
def test_head_sizes_that_are_no_power_of_two(batch, attends_over, head_dim):
    """The tile is wider than a key: nothing past its end is loaded."""
    attends_over(batch([19], 1, head_dim, 8), 0, 19, [18, 9])


@pytest.mark.parametrize("block_size", [1, 5, 32], ids=lambda what: f"blocks of {what}")
def test_block_sizes(batch, attends_over, block_size):
    """A tile may span many blocks, or be part of one; blocks of any size."""
    attends_over(batch([37], 1, 16, block_size), 3, 37, [36, 20])


def test_block_tables_of_int64(batch, attends_over):
    """Block ids may be int32 or int64."""
    attends_over(batch([21], 1, 16, 8, index=torch.int64), 0, 21, [20])


def test_caches_with_strides_of_their_own(batch, attends_over):
    """A cache may be a view of a larger tensor: the caches' strides of blocks, slots and dims are unrelated."""
    attends_over(batch([21], 1, 16, 8).strided(), 0, 21, [20])


def test_tiles_of_another_size(batch, attends_over):
    """TILE is independent of the block size, and the result does not depend on it."""
    attends_over(batch([70], 1, 16, 8), 1, 70, [69, 30], tile=32)


@pytest.mark.parametrize("dim", [pytest.param(0, id="blocks"), pytest.param(1, id="slots")])
def test_a_cache_of_more_than_two_billion_numbers(batch, attends_over, far_apart, dim):
    """A block id or a slot times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    one = batch([6], 1, 16, 3, dtype=torch.int8)
    one.k_cache, one.v_cache = far_apart(one.k_cache[:3], dim), far_apart(one.v_cache[:3], dim)
    attends_over(one, 0, 6, [5])
