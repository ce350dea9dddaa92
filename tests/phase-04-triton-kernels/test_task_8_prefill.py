"""Phase 4, task 6: prefill attention: many new tokens of many sequences, over cached context."""

from __future__ import annotations

import pytest
import torch

from minicache.course.checks import call, that
from minicache.kernels import paged_prefill_attention


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} kv heads") for h, kv in ((4, 4), (8, 2), (3, 1), (5, 1), (16, 2))],
)
def test_whole_prompts(batch, prefill, num_heads, num_kv_heads):
    """Nothing cached before: each token sees itself and those before it."""
    prefill(batch([13, 6], num_kv_heads, 16, 8), [13, 6], num_heads)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (128, 32), (256, 16), (5, 5)], ids=str)
def test_sizes(batch, prefill, head_dim, block_size):
    """Head sizes and block sizes that are powers of two, and that are none."""
    lengths = [block_size + 1, block_size, 2 * block_size + 3]
    prefill(batch(lengths, 1, head_dim, block_size), [block_size + 1, 3, 4], 2)


@pytest.mark.parametrize("cached", [1, 7, 8, 9, 30], ids="{} cached".format)
def test_a_chunk_after_cached_context(batch, prefill, cached):
    """The new tokens are the last ones: the first of them sees all that is cached, and itself."""
    prefill(batch([cached + 5], 2, 16, 8), [5], 4)


def test_more_tokens_than_a_tile(batch, prefill):
    """A long chunk over a long context: several tiles of queries, several of keys, none read past its last query."""
    prefill(batch([70], 1, 256, 16), [45], 2)


def test_decodes_between_prefills(batch, prefill):
    """One step of an engine: a prompt, a decode (one new token), a chunk, another decode."""
    prefill(batch([11, 22, 19, 1], 2, 16, 8), [11, 1, 6, 1], 4)


def test_a_sequence_that_rests(batch, prefill):
    """No new tokens (n = 0) at the beginning, in the middle and at the end: its neighbours keep their rows."""
    prefill(batch([9, 12, 5, 17, 4], 2, 16, 8), [0, 4, 0, 3, 0], 4)


def test_no_token_sees_a_later_one(batch, watched, device):
    """Change the last key and value: no output but the last one's may change."""
    one = batch([12], 2, 16, 8)
    other = batch([12], 2, 16, 8)
    other.keys[0][-1] += 3.0
    other.values[0][-1] -= 3.0
    q = torch.randn(7, 4, 16, device=device)
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    attention = watched(paged_prefill_attention)
    before = call(attention, q, *one.paged, starts).value
    after = call(attention, q, *other.moved(0).paged, starts).value
    that("the outputs of all tokens but the last, the last key and value changed", after[:-1]).gives(before[:-1])


def test_scores_that_rise_with_the_position(batch, prefill, device):
    """A later tile may bring a larger score, and the future larger ones still, which count nothing."""
    rising = batch([40], 1, 256, 8)
    for position in range(40):
        rising.keys[0][position] = (position - 20) / 8
    prefill(rising.moved(0), [30], 2, q=torch.ones(30, 2, 256, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(batch, prefill, dtype):
    """Error at most 3 times that of PyTorch in the same dtype: statistics and sums stay in fp32."""
    prefill(batch([25, 9], 2, 64, 16, dtype=dtype), [20, 1], 4)


def test_integers_of_both_kinds(batch, prefill):
    """Tables, lengths and query_start_loc may be int64."""
    prefill(batch([20, 9], 2, 16, 8, index=torch.int64), [6, 9], 4)


def test_queries_with_strides_of_their_own(batch, prefill, device):
    """q may be a view whose heads and numbers lie in any order."""
    q = torch.randn(16, 4, 9, device=device).permute(2, 1, 0)
    prefill(batch([20, 9], 2, 16, 8), [6, 3], 4, q=q)


def test_other_blocks_same_output(batch, watched, device):
    """The same rows in other blocks: the output is the same, bit for bit."""
    one = batch([20, 9], 2, 16, 8)
    q, starts = torch.randn(9, 4, 16, device=device), torch.tensor([0, 6, 9], device=device)
    first = call(watched(paged_prefill_attention), q, *one.paged, starts).value
    again = call(watched(paged_prefill_attention), q, *one.moved(5).paged, starts).value
    that("the output with the rows in other blocks", again).gives(first)


def test_shared_blocks(batch, prefill):
    """A prefix that two sequences share is attended to by both."""
    prefill(batch([20, 27], 2, 16, 8, shared=2), [4, 11], 4)


@pytest.mark.parametrize("window", [1, 4, 12], ids="a window of {}".format)
def test_a_window_of_its_own_for_each_token(batch, prefill, window):
    """Each new token sees itself and the W − 1 before it. A tile reads nothing before its first token's window."""
    prefill(batch([20, 9], 2, 16, 8), [11, 9], 4, sliding_window=window)


def test_options(batch, prefill, device):
    """Every option, each with the query's own position."""
    some = batch([20, 9], 2, 16, 8, at=2.0)
    alibi_slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    prefill(some, [6, 9], 4, alibi_slopes=alibi_slopes)
    prefill(some, [6, 9], 4, k_scale=0.7, v_scale=torch.tensor([1.3, 0.6], device=device))
    prefill(some, [6, 9], 4, softcap=1.5, scale=0.5, alibi_slopes=8 * alibi_slopes)


def test_an_int8_cache(batch, prefill, device):
    """Eight-bit keys and values with a scale per head."""
    k_scale, v_scale = torch.tensor([0.02, 0.03], device=device), torch.tensor([0.01, 0.04], device=device)
    prefill(batch([21, 7], 2, 16, 8, dtype=torch.int8), [9, 2], 4, k_scale=k_scale, v_scale=v_scale)
