"""Phase 3, task 7: attention over keys and values in blocks, for a batch of sequences of any lengths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.kernels.plain import paged_decode_attention, paged_prefill_attention
from minicache_course.checks import call, that

repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

groups = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((2, 2), (4, 2), (6, 2), (5, 1), (16, 2))],
)


def sequences(lengths, num_kv_heads=2, head_dim=4, dtype=torch.float32):
    """Keys and values of sequences of these lengths, each `[S, H_kv, d]`."""
    return [[torch.randn(n, num_kv_heads, head_dim).to(dtype) for n in lengths] for _ in range(2)]


def contiguous(by_hand, q, k, v):
    """By hand, for one sequence without blocks: `q` `[n, H, d]` are the last of `k`, `v` `[S, H_kv, d]`."""
    return by_hand(*(rows.transpose(0, 1)[None] for rows in (q, k, v)))[0].transpose(0, 1)


def ragged(counts):
    """query_start_loc of sequences with these numbers of queries."""
    return torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)])


# Decode: one query a sequence


def test_two_sequences_worked_by_hand():
    """Equal keys have equal weights: one sequence gets the mean of its 3 values, the other of its 2, in any blocks."""
    k_cache, v_cache = torch.zeros(4, 2, 1, 1), torch.full((4, 2, 1, 1), 1e6)
    v_cache[3, 0], v_cache[3, 1], v_cache[0, 0] = 1.0, 2.0, 6.0  # the first sequence: blocks 3 and 0
    v_cache[2, 0], v_cache[2, 1] = 10.0, 30.0  # the second: block 2
    tables, lens = torch.tensor([[3, 0], [2, -1]]), torch.tensor([3, 2])
    q = torch.ones(2, 1, 1)
    call(paged_decode_attention, q, k_cache, v_cache, tables, lens).is_close(torch.tensor([[[3.0]], [[20.0]]]))


@repeatable
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    head_dim=st.sampled_from([1, 4, 5]),
    ints=st.sampled_from([torch.int32, torch.int64]),
)
def test_decode_is_attention_over_each_sequences_rows(
    by_hand, scatter, lengths, block_size, num_kv_heads, group, head_dim, ints
):
    """Ragged lengths, exact multiples of the block, any group: each sequence gets attention over its keys and values.

    All other rows hold NaN, and the tables' tails no block.
    """
    k, v = sequences(lengths, num_kv_heads, head_dim)
    q = torch.randn(len(lengths), num_kv_heads * group, head_dim)
    expected = torch.cat([contiguous(by_hand, q[i : i + 1], k[i], v[i]) for i in range(len(lengths))])
    call(paged_decode_attention, q, *scatter(k, v, block_size, ints=ints)).is_close(expected)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100], ids=lambda what: f"{what} tokens")
def test_decode_around_whole_blocks(scatter, length):
    """One token, a block less one, a block, a block and one, two blocks, many: as attention over contiguous keys."""
    k, v = sequences([length, 40], head_dim=32)
    q = torch.randn(2, 6, 32)
    expected = [
        F.scaled_dot_product_attention(
            q[i, :, None],
            k[i].transpose(0, 1).repeat_interleave(3, dim=0),
            v[i].transpose(0, 1).repeat_interleave(3, dim=0),
        )[:, 0]
        for i in range(2)
    ]
    call(paged_decode_attention, q, *scatter(k, v, 16)).is_close(torch.stack(expected))


@groups
def test_each_query_head_reads_the_kv_head_of_its_group(scatter, num_heads, num_kv_heads):
    """Query head h reads key/value head h // (H / H_kv), in decode and in prefill."""
    k = [torch.randn(3, num_kv_heads, 4)]
    v = [torch.arange(num_kv_heads, dtype=torch.float32)[None, :, None].expand(3, num_kv_heads, 4)]
    group = num_heads // num_kv_heads
    expected = torch.tensor([float(h // group) for h in range(num_heads)])
    paged = scatter(k, v, 2)
    decode = call(paged_decode_attention, torch.randn(1, num_heads, 4), *paged).value
    heads = f"each of {num_heads} query heads (KV heads: {num_kv_heads}; v is the head's number)"
    that(f"in decode, the KV head read by {heads}", decode[0, :, 0]).is_close(expected)
    prefill = call(paged_prefill_attention, torch.randn(2, num_heads, 4), *paged, torch.tensor([0, 2])).value
    that(f"in prefill, the KV head read by {heads}", prefill[0, :, 0]).is_close(expected)


def test_where_the_blocks_lie_changes_no_bit(scatter):
    """The same keys and values in other blocks give the same result to the last bit."""
    lengths = [1, 16, 23, 64]
    k, v = sequences(lengths, head_dim=8)
    q = torch.randn(4, 4, 8)
    first = call(paged_decode_attention, q, *scatter(k, v, 8)).value
    for order in range(1, 5):
        call(paged_decode_attention, q, *scatter(k, v, 8, order=order)).gives(first)
    counts = [1, 5, 2, 64]
    q, starts = torch.randn(72, 4, 8), ragged(counts)
    first = call(paged_prefill_attention, q, *scatter(k, v, 8), starts).value
    for order in range(1, 5):
        call(paged_prefill_attention, q, *scatter(k, v, 8, order=order), starts).gives(first)


def test_shared_blocks(by_hand):
    """Two tables may have the same blocks, and both read them."""
    k_cache, v_cache = torch.randn(5, 4, 2, 4), torch.randn(5, 4, 2, 4)
    q = torch.randn(2, 4, 4)
    tables, lens = torch.tensor([[2, 0, 4], [2, 0, 1]]), torch.tensor([10, 9])
    expected = [
        contiguous(by_hand, q[i : i + 1], k_cache[tables[i]].flatten(0, 1)[:n], v_cache[tables[i]].flatten(0, 1)[:n])
        for i, n in enumerate((10, 9))
    ]
    call(paged_decode_attention, q, k_cache, v_cache, tables, lens).is_close(torch.cat(expected))


def test_a_sequence_without_rows_gets_zeros(by_hand, scatter):
    """context_lens 0 is padding of a batch: zeros, no NaN, and the other sequences are unaffected."""
    k, v = sequences([5, 0, 3])
    q = torch.randn(3, 4, 4)
    zeros = torch.zeros(1, 4, 4)
    expected = [contiguous(by_hand, q[:1], k[0], v[0]), zeros, contiguous(by_hand, q[2:], k[2], v[2])]
    call(paged_decode_attention, q, *scatter(k, v, 4)).is_close(torch.cat(expected))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 5e-3)], ids=["bfloat16", "float16"]
)
def test_half_precision(by_hand, scatter, dtype, tolerance):
    """bfloat16 and float16 queries give a result of their dtype, to its precision, in decode and in prefill."""
    k, v = sequences([5, 12], dtype=dtype)
    q, paged = torch.randn(2, 4, 4).to(dtype), scatter(k, v, 4)
    expected = torch.cat([contiguous(by_hand, q[i : i + 1], k[i], v[i]) for i in range(2)])
    call(paged_decode_attention, q, *paged).is_close(expected, rtol=tolerance, atol=tolerance)
    call(paged_prefill_attention, q, *paged, torch.arange(3)).is_close(expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "more"), [(torch.bfloat16, 1 / 4), (torch.float16, 1 / 32)], ids=str)
def test_scores_of_16_bits_are_fp32(by_hand, scatter, dtype, more):
    """Two scores, 64 and a little more: rounded to the dtype of the queries they are equal, and should not be."""
    k, v = torch.tensor([[64, more], [64, 0]])[:, None], torch.tensor([[1.0, 1.0], [0.0, 0.0]])[:, None]
    q = torch.ones(1, 1, 2)
    expected = contiguous(by_hand, q * 2**0.5, k, v)  # √d is 2**0.5: the scale is 1
    paged = scatter([k.to(dtype)], [v.to(dtype)], 4)
    decode = call(paged_decode_attention, q.to(dtype), *paged, scale=1.0)
    prefill = call(paged_prefill_attention, q.to(dtype), *paged, torch.arange(2), scale=1.0)
    for each in (decode, prefill):
        each.is_close(expected.to(dtype), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", ["one layer of a tensor of two", "heads before tokens in memory"])
def test_caches_of_any_strides(by_hand, scatter, kind):
    """Caches that are not contiguous are read like any others, in decode and in prefill."""
    k, v = sequences([5, 8])
    *caches, tables, lens = scatter(k, v, 4)
    if kind == "one layer of a tensor of two":
        caches = [torch.stack([torch.full_like(cache, float("nan")), cache], dim=1)[:, 1] for cache in caches]
    else:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    q, starts = torch.randn(5, 4, 4), ragged([2, 3])
    expected = [contiguous(by_hand, q[starts[i] : starts[i + 1]], k[i], v[i]) for i in range(2)]
    decode = torch.stack([rows[-1] for rows in expected])
    call(paged_decode_attention, q[[1, 4]], *caches, tables, lens).is_close(decode)
    call(paged_prefill_attention, q, *caches, tables, lens, starts).is_close(torch.cat(expected))


@pytest.mark.parametrize("block", [-1, 9, 10**6], ids=lambda what: f"block {what}")
def test_a_block_in_use_that_is_not_there(block):
    """A block in use outside the cache is an IndexError: −1 is not the last block."""
    cache, tables, lens = torch.randn(9, 2, 2, 4), torch.tensor([[0, 1], [3, block]]), torch.tensor([4, 3])
    call(paged_decode_attention, torch.randn(2, 4, 4), cache, cache, tables, lens).raises(IndexError)
    queries = torch.randn(3, 4, 4)
    call(paged_prefill_attention, queries, cache, cache, tables, lens, torch.tensor([0, 1, 3])).raises(IndexError)


# Prefill: any number of queries a sequence


def test_a_prompt_alone(by_hand, scatter):
    """All tokens of one sequence are new: causal attention, as without a cache."""
    k, v = sequences([7])
    q = torch.randn(7, 4, 4)
    paged = scatter(k, v, 4)
    call(paged_prefill_attention, q, *paged, torch.tensor([0, 7])).is_close(contiguous(by_hand, q, k[0], v[0]))


@repeatable
@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5]),
    ints=st.sampled_from([torch.int32, torch.int64]),
)
def test_prompts_chunks_and_decode_in_one_call(by_hand, scatter, counts, block_size, num_kv_heads, group, ints):
    """Each sequence's queries are its last tokens: whole prompts, chunks, single tokens and none, in one batch."""
    new = [n for n, _ in counts]
    k, v = sequences([n + before for n, before in counts], num_kv_heads)
    q = torch.randn(sum(new), num_kv_heads * group, 4)
    starts = ragged(new)
    expected = [contiguous(by_hand, q[starts[i] : starts[i + 1]], k[i], v[i]) for i in range(len(new))]
    paged = scatter(k, v, block_size, ints=ints)
    call(paged_prefill_attention, q, *paged, starts.to(ints)).is_close(torch.cat(expected))


def test_the_scale_is_the_callers(by_hand, scatter):
    """scale multiplies the scores, 0 too; None is 1 / √d. The expected result scales the queries."""
    k, v = sequences([6, 9])
    for scale in (1.0, 0.1, 0.0):
        q = torch.randn(2, 4, 4)
        expected = [contiguous(by_hand, q[i : i + 1] * scale * 2, k[i], v[i]) for i in range(2)]  # √d is 2
        call(paged_decode_attention, q, *scatter(k, v, 4), scale=scale).is_close(torch.cat(expected))
        q, starts = torch.randn(5, 4, 4), ragged([2, 3])
        expected = [
            contiguous(by_hand, q[:2] * scale * 2, k[0], v[0]),
            contiguous(by_hand, q[2:] * scale * 2, k[1], v[1]),
        ]
        call(paged_prefill_attention, q, *scatter(k, v, 4), starts, scale=scale).is_close(torch.cat(expected))


def test_one_query_each_is_decode(scatter):
    """With one query a sequence, prefill and decode give the same."""
    k, v = sequences([3, 8, 17])
    q = torch.randn(3, 6, 4)
    paged = scatter(k, v, 4)
    decode = call(paged_decode_attention, q, *paged).value
    call(paged_prefill_attention, q, *paged, torch.arange(4)).is_close(decode)


def test_a_prompt_in_chunks_is_the_prompt(scatter):
    """The outputs of a prompt cut into chunks of 1, 5 and 6 are those of the whole prompt."""
    k, v = sequences([12])
    q = torch.randn(12, 4, 4)
    whole = call(paged_prefill_attention, q, *scatter(k, v, 4), torch.tensor([0, 12])).value
    for start, end in ((0, 1), (1, 6), (6, 12)):
        paged = scatter([k[0][:end]], [v[0][:end]], 4)
        got = call(paged_prefill_attention, q[start:end], *paged, torch.tensor([0, end - start])).value
        that(f"the outputs of tokens {start} … {end - 1}", got).is_close(whole[start:end])


def test_large_scores_do_not_overflow(by_hand, scatter):
    """Scores of several thousand give no infinity and no NaN."""
    k, v = sequences([5, 3])
    k = [100 * rows for rows in k]
    q = 100 * torch.randn(2, 4, 4)
    expected = torch.cat([contiguous(by_hand, q[i : i + 1], k[i], v[i]) for i in range(2)])
    call(paged_decode_attention, q, *scatter(k, v, 2)).is_close(expected, atol=1e-4)


def test_attending_changes_nothing(scatter):
    """Queries, caches, tables and lengths are unchanged, and a second call gives the same result."""
    paged, q = scatter(*sequences([5, 9]), 4), torch.randn(2, 4, 4)
    kept = [x.clone() for x in paged]
    first = call(paged_decode_attention, q, *paged).value.clone()
    call(paged_decode_attention, q, *paged).gives(first)
    call(paged_prefill_attention, q, *paged, torch.arange(3)).is_close(first)
    for name, now, then in zip(("k_cache", "v_cache", "block_tables", "context_lens"), paged, kept, strict=True):
        that(f"{name} afterwards", now.nan_to_num()).gives(then.nan_to_num())
