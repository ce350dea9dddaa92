"""Phase 4, task 8: prefill attention: many new tokens of many sequences, over cached context."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import paged_prefill_attention
from minicache_course.checks import call, that


def test_one_prompt(batch, prefill):
    """One sequence of 5 tokens, all new, one head: each token sees itself and those before it."""
    prefill(batch([5], 1, 16, 8), [5], 1)


@pytest.mark.parametrize("cached", [1, 8, 30], ids=lambda what: f"{what} cached")
def test_a_chunk_after_cached_context(batch, prefill, cached):
    """The new tokens are the last ones: the first of them sees all cached tokens and itself."""
    prefill(batch([cached + 5], 1, 16, 8), [5], 1)


def test_two_prompts(batch, prefill):
    """The queries of two sequences, concatenated: each attends to its own sequence."""
    prefill(batch([13, 6], 1, 16, 8), [13, 6], 1)


def test_three_sequences_in_many_tiles(batch, prefill):
    """Three starts are padded to four: the fourth belongs to no sequence. With 16 query heads a tile has two tokens."""
    prefill(batch([9, 5, 6], 1, 16, 8), [9, 3, 4], 16)


def test_more_queries_than_a_program_has(batch, prefill):
    """Tiles of queries: the rows after a sequence's last query are the next sequence's."""
    prefill(batch([40, 9], 1, 16, 8), [37, 9], 2)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((2, 2), (8, 2), (3, 1), (16, 1))],
)
def test_groups_of_query_heads(batch, prefill, num_heads, num_kv_heads):
    """Rows are tokens and heads of a group; where the group does not divide the rows, the last ones are padding."""
    prefill(batch([13], num_kv_heads, 16, 8), [13], num_heads)


@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 8), (256, 16), (5, 5)], ids=str)
def test_sizes(batch, prefill, head_dim, block_size):
    """Head sizes and block sizes that are and are not powers of two."""
    prefill(batch([block_size + 1, block_size], 1, head_dim, block_size), [block_size + 1, 3], 2)


def test_more_tokens_than_a_tile(batch, prefill):
    """A long chunk over a long context: several tiles of queries, several of keys, nothing read past the last query."""
    prefill(batch([50], 1, 256, 16), [20], 2)


def test_decodes_between_prefills(batch, prefill):
    """One step of an engine: a prompt, a decode (one new token), a chunk, another decode."""
    prefill(batch([11, 22, 19, 1], 1, 16, 8), [11, 1, 6, 1], 4)


def test_a_sequence_that_rests(batch, prefill):
    """No new tokens (n = 0) at the beginning and in the middle: the other sequences keep their rows."""
    prefill(batch([9, 12, 5, 17, 4, 6], 1, 16, 8), [0, 4, 0, 3, 0, 2], 4)


def test_no_token_sees_a_later_one(batch, watched, device):
    """Change the last key and value: only the last output may change."""
    one = batch([12], 1, 16, 8)
    other = batch([12], 1, 16, 8)
    other.keys[0][-1] += 3.0
    other.values[0][-1] -= 3.0
    q = torch.randn(7, 2, 16, device=device)
    starts = torch.tensor([0, 7], dtype=torch.int32, device=device)
    attention = watched(paged_prefill_attention)
    before = call(attention, q, *one.paged, starts).value
    after = call(attention, q, *other.moved(0).paged, starts).value
    that("the outputs of all tokens but the last, the last key and value changed", after[:-1]).gives(before[:-1])


def test_scores_that_rise_with_the_position(batch, prefill, device):
    """A later tile may have a larger score, and the future even larger ones, which must have weight 0."""
    rising = batch([24], 1, 256, 8)
    for position in range(24):
        rising.keys[0][position] = (position - 12) / 8
    prefill(rising.moved(0), [14], 2, q=torch.ones(14, 2, 256, device=device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(batch, prefill, dtype):
    """Error at most 3 times that of PyTorch in the same dtype: statistics and sums stay in fp32."""
    prefill(batch([25], 1, 64, 16, dtype=dtype), [6], 4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_tables_lengths_and_starts_with_gaps(batch, prefill, apart, index):
    """All three may be every second number of wider tensors: the launcher makes them contiguous."""
    some = batch([20, 9], 1, 16, 8, index=index)
    some.block_tables, some.context_lens = apart(some.block_tables), apart(some.context_lens)
    prefill(some, [6, 9], 2, spread=apart)


def test_the_launcher_does_not_read_lengths(batch, device, reads_no_values):
    """Tables, lengths and starts are on the GPU: a launcher that reads their values waits for the GPU."""
    from minicache.kernels import prefill

    some = batch([9, 5], 1, 16, 8)
    starts = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    q = torch.randn(6, 2, 16, device=device)
    got = call(reads_no_values(prefill.paged_prefill_attention), q, *some.paged, starts, scale=1.0).value
    that("the output's shape", list(got.shape)).gives([6, 2, 16])


def test_no_queries(batch, device):
    """N = 0, with two sequences without new tokens: an empty output, and nothing is launched."""
    from minicache.kernels import prefill
    from minicache_course.kernels.tracer import trace

    some = batch([9, 5], 1, 16, 8)
    q, starts = torch.zeros(0, 2, 16, device=device), torch.zeros(3, dtype=torch.int32, device=device)

    def launches(*given):
        if device.type == "cuda":
            return prefill.paged_prefill_attention(*given, scale=1.0), []
        with trace() as log:
            return prefill.paged_prefill_attention(*given, scale=1.0), sorted({each.kernel for each in log.accesses})

    launches.__qualname__ = "paged_prefill_attention"
    out, kernels = call(launches, q, *some.paged, starts).value
    that("the output for no queries", out).gives(q)
    that("the kernels launched for no queries", kernels).gives([])


def test_queries_with_strides_of_their_own(batch, prefill, device):
    """q may be a view with any strides."""
    q = torch.randn(16, 2, 9, device=device).permute(2, 1, 0)
    prefill(batch([20, 9], 1, 16, 8), [6, 3], 2, q=q)


def test_caches_with_strides_of_their_own(batch, prefill):
    """A cache may be a view of a larger tensor: the caches' strides are unrelated."""
    prefill(batch([13], 2, 16, 8).strided(), [5], 2)


def test_other_blocks_same_output(batch, watched, device):
    """The same entries in other blocks: the output is the same, bit for bit."""
    one = batch([20, 9], 1, 16, 8)
    q, starts = torch.randn(9, 2, 16, device=device), torch.tensor([0, 6, 9], device=device)
    first = call(watched(paged_prefill_attention), q, *one.paged, starts).value
    again = call(watched(paged_prefill_attention), q, *one.moved(5).paged, starts).value
    that("the output with the entries in other blocks", again).gives(first)


def test_shared_blocks(batch, prefill):
    """Two sequences may share a prefix."""
    prefill(batch([20, 27], 1, 16, 8, shared=2), [4, 11], 2)


@pytest.mark.parametrize("window", [1, 4, 12], ids=lambda what: f"a window of {what}")
def test_a_window_of_its_own_for_each_token(batch, prefill, window):
    """Each new token sees itself and the W − 1 before it. A tile reads nothing before its first token's window."""
    prefill(batch([20, 9], 1, 16, 8), [11, 9], 4, sliding_window=window)  # 8 tokens a tile


def test_alibi(batch, prefill, device, apart):
    """Each row has its own position and its head's slope. The slopes may have gaps."""
    slopes = apart(torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device))
    prefill(batch([20, 9], 2, 16, 8), [6, 9], 4, alibi_slopes=slopes)


def test_scales_and_a_soft_cap(batch, prefill, device):
    """A scale for all keys, one for each head's values, a soft cap, and a scale of the scores."""
    options = {"k_scale": 0.7, "v_scale": torch.tensor([1.3, 0.6], device=device), "softcap": 1.5, "scale": 0.5}
    prefill(batch([20], 2, 16, 8, at=2.0), [6], 4, **options)


def test_an_int8_cache(batch, prefill, device):
    """Eight-bit keys and values with a scale per head."""
    k_scale, v_scale = torch.tensor([0.02, 0.03], device=device), torch.tensor([0.01, 0.04], device=device)
    prefill(batch([21], 2, 16, 8, dtype=torch.int8), [9], 4, k_scale=k_scale, v_scale=v_scale)


def test_caches_and_queries_of_more_than_two_billion_numbers(batch, prefill, far_apart, device):
    """A KV head or a query token times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    some = batch([6], 3, 16, 8, dtype=torch.int8)
    some.k_cache, some.v_cache = far_apart(some.k_cache, 2), far_apart(some.v_cache, 2)
    prefill(some, [2], 3)
    q = far_apart(torch.randn(3, 2, 16, device=device).half(), 0)
    prefill(batch([6, 5], 1, 16, 8, dtype=torch.float16), [1, 2], 2, q=q)
