"""The oracle with every option, against attention in double precision, one query and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minicache.kernels import oracle, paged_decode_attention, paged_prefill_attention, plain
from minicache.kernels.quantize import LARGEST, nearest

NAN = float("nan")


def by_loops(q, keys, values, *, scale=None, alibi_slopes=None, sliding_window=None, softcap=None):
    """`q` `[n, H, d]` are the last n tokens of `keys`, `values` `[S, H_kv, d]`. Loops and floats only."""
    num_new, num_heads, head_dim = q.shape
    num_tokens, num_kv_heads = keys.shape[:2]
    q, keys, values = q.double(), keys.double(), values.double()
    out = torch.zeros(num_new, num_heads, head_dim, dtype=torch.float64)
    for t in range(num_new):
        position = num_tokens - num_new + t
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for h in range(num_heads):
            head = h * num_kv_heads // num_heads
            scores = []
            for s in range(first, position + 1):
                score = float(q[t, h] @ keys[s, head]) * (1 / math.sqrt(head_dim) if scale is None else scale)
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                if alibi_slopes is not None:
                    score += float(alibi_slopes[h]) * (s - position)
                scores.append(score)
            total = sum(math.exp(score - max(scores)) for score in scores)
            for s, score in enumerate(scores, start=first):
                out[t, h] += math.exp(score - max(scores)) / total * values[s, head]
    return out


def blocks(rows, block_size, ids):
    """Sequences `[S_i, H_kv, d]` in a cache whose other rows are NaN (or 127), and a table `[B, max_blocks]`."""
    counts = [-(-len(each) // block_size) for each in rows]
    cache = torch.full((sum(counts) + 2, block_size, *rows[0].shape[1:]), NAN)
    if not rows[0].dtype.is_floating_point:
        cache = cache.nan_to_num(127)
    cache = cache.to(rows[0].dtype)
    tables = torch.full((len(rows), max(counts) + 1), -5)
    free = list(ids)
    for i, each in enumerate(rows):
        mine = [free.pop() for _ in range(counts[i])]
        tables[i, : counts[i]] = torch.tensor(mine, dtype=torch.int64)
        for position in range(len(each)):
            cache[mine[position // block_size], position % block_size] = each[position]
    return cache, tables


options = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.sampled_from([0.1, 1.0]),
        "alibi": st.just(True),
        "sliding_window": st.integers(1, 12),
        "softcap": st.sampled_from([0.5, 30.0]),
    },
)


@given(
    counts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3),
    block_size=st.integers(1, 5),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    chosen=options,
    seed=st.integers(0, 9),
)
def test_any_options_agree_with_loops(counts, block_size, num_kv_heads, group, chosen, seed):
    torch.manual_seed(seed)
    chosen = dict(chosen)
    if chosen.pop("alibi", False):
        chosen["alibi_slopes"] = torch.rand(num_kv_heads * group)
    lengths = [new + before for new, before in counts]
    keys, values = ([torch.randn(n, num_kv_heads, 4) for n in lengths] for _ in range(2))
    ids = torch.randperm(sum(-(-n // block_size) for n in lengths) + 2).tolist()
    (k_cache, tables), (v_cache, _) = blocks(keys, block_size, ids), blocks(values, block_size, ids)
    queries = [torch.randn(new, num_kv_heads * group, 4) for new, _ in counts]
    starts = torch.tensor([0, *torch.tensor([new for new, _ in counts]).cumsum(0).tolist()])
    paged = (k_cache, v_cache, tables, torch.tensor(lengths))
    got = oracle.attention(torch.cat(queries), *paged, starts, **chosen)
    expected = torch.cat([by_loops(*each, **chosen) for each in zip(queries, keys, values, strict=True)])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    last = torch.stack([each[-1] for each in queries])
    got = oracle.attention(last, *paged, **chosen)
    torch.testing.assert_close(got.double(), expected[starts[1:] - 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_without_options_it_is_the_plain_way(group):
    """Two implementations that share no line, at sizes of real heads."""
    torch.manual_seed(group)
    lengths = [1, 16, 17, 70]
    keys, values = ([torch.randn(n, 2, 64) for n in lengths] for _ in range(2))
    ids = torch.randperm(11).tolist()
    (k_cache, tables), (v_cache, _) = blocks(keys, 16, ids), blocks(values, 16, ids)
    paged = (k_cache, v_cache, tables, torch.tensor(lengths))
    q = torch.randn(4, 2 * group, 64)
    torch.testing.assert_close(oracle.attention(q, *paged), plain.paged_decode_attention(q, *paged))
    q, starts = torch.randn(34, 2 * group, 64), torch.tensor([0, 1, 2, 14, 34])
    torch.testing.assert_close(oracle.attention(q, *paged, starts), plain.paged_prefill_attention(q, *paged, starts))


def test_a_sequence_without_rows_gets_zeros():
    q, cache = torch.randn(3, 4, 8), torch.randn(4, 4, 2, 8)
    tables, lens = torch.tensor([[1, 2], [-1, -1], [3, 0]]), torch.tensor([5, 0, 8])
    got = oracle.attention(q, cache, cache, tables, lens, sliding_window=3)
    alone = oracle.attention(q[[0, 2]], cache, cache, tables[[0, 2]], lens[[0, 2]], sliding_window=3)
    assert got.equal(torch.stack([alone[0], torch.zeros(4, 8), alone[1]]))


def test_a_padded_batch_alone_is_zeros():
    q, cache = torch.randn(2, 4, 8), torch.randn(4, 4, 2, 8)
    got = oracle.attention(q, cache, cache, torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0, 0]))
    assert got.equal(torch.zeros(2, 4, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_fp32(dtype):
    """The error is the rounding of the result, and no more."""
    keys, values = ([torch.randn(33, 2, 16).to(dtype)] for _ in range(2))
    (k_cache, tables), (v_cache, _) = blocks(keys, 8, range(7)), blocks(values, 8, range(7))
    q = torch.randn(1, 4, 16).to(dtype)
    got = oracle.attention(q, k_cache, v_cache, tables, torch.tensor([33]))
    assert got.dtype == dtype
    assert got.equal(by_loops(q, keys[0], values[0]).to(dtype)) or torch.allclose(
        got.double(), by_loops(q, keys[0], values[0]), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "a scale a head"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantized_cache(dtype, per_head):
    """The numbers of the cache times the scale are the keys and values: exactly, for the loops too."""
    torch.manual_seed(0)
    lengths, block_size = [9, 4], 4
    exact = [[torch.randn(n, 2, 8) * torch.tensor([1.0, 9.0])[:, None] for n in lengths] for _ in range(2)]
    largest = [torch.cat(rows).abs().amax(dim=(0, 2) if per_head else (0, 1, 2)) for rows in exact]
    found = [(each / LARGEST[dtype]).expand(2) for each in largest]
    small = [[nearest(each / by[:, None], dtype) for each in rows] for rows, by in zip(exact, found, strict=True)]
    (k_cache, tables), (v_cache, _) = (blocks(rows, block_size, range(6)) for rows in small)
    back = [[each.double() * scale[:, None] for each in rows] for rows, scale in zip(small, found, strict=True)]
    q, lens = torch.randn(2, 4, 8), torch.tensor(lengths)
    scale_of = {"k_scale": found[0], "v_scale": found[1]}
    if not per_head:
        scale_of = {name: float(value[0]) for name, value in scale_of.items()}
    got = paged_decode_attention(q, k_cache, v_cache, tables, lens, **scale_of)
    expected = torch.cat([by_loops(q[i : i + 1], back[0][i], back[1][i]) for i in range(2)])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)
    q, starts = torch.randn(5, 4, 8), torch.tensor([0, 3, 5])
    got = paged_prefill_attention(q, k_cache, v_cache, tables, lens, starts, **scale_of)
    expected = torch.cat([by_loops(q[starts[i] : starts[i + 1]], back[0][i], back[1][i]) for i in range(2)])
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_softcap_does_not_overflow():
    """Scores of a million are capped, not infinite: tanh by exponentials of the score would be."""
    q, cache = torch.full((1, 2, 4), 1e3), torch.full((2, 4, 1, 4), 1e3)
    got = oracle.attention(q, cache, cache, torch.tensor([[1, 0]]), torch.tensor([7]), softcap=50.0)
    torch.testing.assert_close(got, torch.full((1, 2, 4), 1e3))
