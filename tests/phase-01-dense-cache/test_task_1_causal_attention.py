"""Phase 1, task 1: causal attention of the last T of S tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.attention import causal_attention
from minicache_course.checks import call, that

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def test_one_token_alone_gets_its_own_value():
    """With one token all weight is on that token: the output is its value."""
    q, k, v = (torch.randn(2, 3, 1, 4) for _ in range(3))
    call(causal_attention, q, k, v).is_close(v)


def test_two_tokens_worked_by_hand():
    """Two tokens, d = 4: the second weighs the values 1/4 and 3/4, the first sees only itself."""
    # q · k / √4 is 0 for the first key and ln 3 for the second, so the weights are 1 : 3.
    q = torch.tensor([[0.0, 0, 0, 0], [2.0, 0, 0, 0]])[None, None]
    k = torch.tensor([[0.0, 5, 0, 0], [math.log(3), 0, 7, 0]])[None, None]
    v = torch.tensor([[4.0, 0, 8, 0], [0.0, 4, 8, 1]])[None, None]
    call(causal_attention, q, k, v).is_close(torch.tensor([[4.0, 0, 8, 0], [1.0, 3, 8, 0.75]])[None, None])


def test_equal_keys_give_the_mean_of_what_is_visible():
    """Equal keys get equal weights: query t of the last T gets the mean of values 0 … S − T + t."""
    v = torch.tensor([0.0, 2, 4, 6, 8]).reshape(1, 1, 5, 1)
    k = torch.ones(1, 1, 5, 1)
    for num_new, means in ((5, [0.0, 1, 2, 3, 4]), (3, [2.0, 3, 4]), (1, [4.0])):
        q = torch.ones(1, 1, num_new, 1)
        call(causal_attention, q, k, v).is_close(torch.tensor(means).reshape(1, 1, num_new, 1))


@repeatable
@given(
    batch=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    num_new=st.integers(1, 4),
    num_before=st.integers(0, 5),
    head_dim=st.sampled_from([1, 2, 5, 8]),
)
def test_any_shape_agrees_with_attention_by_hand(by_hand, batch, num_kv_heads, group, num_new, num_before, head_dim):
    """For many shapes, the result is that of attention computed one head, query and key at a time."""
    q = torch.randn(batch, num_kv_heads * group, num_new, head_dim)
    k, v = (torch.randn(batch, num_kv_heads, num_before + num_new, head_dim) for _ in range(2))
    call(causal_attention, q, k, v).is_close(by_hand(q, k, v))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((4, 4), (4, 2), (6, 2), (5, 1), (16, 2))],
)
def test_each_query_head_reads_the_kv_head_of_its_group(num_heads, num_kv_heads):
    """Query head h reads key/value head h // (H / H_kv): neighbours share, as 0 0 1 1 for H = 4, H_kv = 2."""
    q = torch.randn(1, num_heads, 2, 3)
    k = torch.randn(1, num_kv_heads, 3, 3)
    v = torch.arange(num_kv_heads, dtype=torch.float32).reshape(1, -1, 1, 1).expand(1, num_kv_heads, 3, 3)
    read = call(causal_attention, q, k, v).value[0, :, 0, 0]
    group = num_heads // num_kv_heads
    that(
        f"the kv head that each of {num_heads} query heads reads, of {num_kv_heads} (v is the head's number)", read
    ).is_close(torch.tensor([float(h // group) for h in range(num_heads)]))


def test_later_tokens_change_nothing():
    """A query sees no later token: changing keys and values after it leaves its output as it was."""
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    before = call(causal_attention, q, k, v).value
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 4:] += 100.0
    v2[:, :, 4:] -= 1000.0
    after = call(causal_attention, q, k2, v2).value
    that("the outputs of tokens 0 … 3 after tokens 4 and 5 were changed", after[:, :, :4]).is_close(before[:, :, :4])


@pytest.mark.parametrize("num_new", [1, 2, 5], ids="T = {}".format)
def test_the_new_tokens_are_the_last_ones(num_new):
    """The last T queries alone give the last T rows of the result for all queries."""
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    everything = call(causal_attention, q, k, v).value
    call(causal_attention, q[:, :, -num_new:], k, v).is_close(everything[:, :, -num_new:])


def test_equal_keys_through_a_window_of_two():
    """Equal keys get equal weights: with window=2 each query gets the mean of its own value and the one before it."""
    k, v = torch.ones(1, 1, 5, 1), torch.tensor([0.0, 2, 4, 6, 8]).reshape(1, 1, 5, 1)
    call(causal_attention, k, k, v, window=2).is_close(torch.tensor([0.0, 1, 3, 5, 7]).reshape(1, 1, 5, 1))


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 100])
@pytest.mark.parametrize(("num_new", "num_tokens"), [(1, 12), (4, 12), (12, 12), (7, 9)], ids="{}".format)
def test_a_window_hides_what_lies_further_back(by_hand, window, num_new, num_tokens):
    """With window=W each query sees itself and the W − 1 tokens before it. A longer window hides nothing."""
    q, k, v = torch.randn(2, 4, num_new, 8), torch.randn(2, 2, num_tokens, 8), torch.randn(2, 2, num_tokens, 8)
    call(causal_attention, q, k, v, window=window).is_close(by_hand(q, k, v, window))


@pytest.mark.parametrize("num_before", [0, 3], ids=lambda what: f"{what} tokens before")
def test_large_scores_do_not_overflow(by_hand, num_before):
    """Scores of several thousand give no infinity and no NaN."""
    q = 100 * torch.randn(1, 2, 3, 8)
    k = 100 * torch.randn(1, 2, 3 + num_before, 8)
    v = torch.randn(1, 2, 3 + num_before, 8)
    call(causal_attention, q, k, v).is_close(by_hand(q, k, v), atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)],
    ids=["float64", "bfloat16", "float16"],
)
def test_the_result_has_the_dtype_of_q(by_hand, dtype, tolerance):
    """float64, bfloat16 and float16 inputs give outputs of the same dtype, as exact as it allows."""
    q = torch.randn(1, 4, 2, 8, dtype=dtype)
    k, v = (torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(2))
    call(causal_attention, q, k, v).is_close(by_hand(q, k, v), rtol=tolerance, atol=tolerance)


def test_views_are_welcome_and_stay_as_they_are(by_hand):
    """Transposed and sliced views give the right result, and no argument is changed."""
    q = torch.randn(2, 3, 4, 8).transpose(1, 2)
    k, v = (torch.randn(2, 9, 2, 8).transpose(1, 2)[:, :, :5] for _ in range(2))
    kept = [x.clone() for x in (q, k, v)]
    call(causal_attention, q, k, v).is_close(by_hand(q, k, v))
    for name, now, then in zip("qkv", (q, k, v), kept, strict=True):
        that(f"{name} after the call", now).gives(then)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        pytest.param((4, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8), id="q has three dimensions"),
        pytest.param((1, 4, 2, 8), (2, 2, 8), (2, 2, 8), id="k and v have three dimensions: no batch"),
        pytest.param((1, 4, 2, 8), (1, 2, 8), (1, 2, 8), id="k and v have three dimensions: no heads"),
        pytest.param((1, 4, 2, 8), (1, 1, 2, 2, 8), (1, 1, 2, 2, 8), id="k and v have five dimensions"),
        pytest.param((1, 4, 2, 8), (1, 2, 5, 8), (1, 2, 4, 8), id="v has fewer tokens than k"),
        pytest.param((1, 4, 2, 8), (1, 2, 5, 8), (1, 1, 5, 8), id="v has fewer heads than k"),
        pytest.param((2, 4, 2, 8), (1, 2, 5, 8), (1, 2, 5, 8), id="another batch size"),
        pytest.param((1, 4, 2, 8), (1, 2, 5, 4), (1, 2, 5, 4), id="another head size"),
        pytest.param((1, 4, 2, 8), (1, 3, 5, 8), (1, 3, 5, 8), id="4 query heads, 3 KV heads"),
        pytest.param((1, 2, 2, 8), (1, 4, 5, 8), (1, 4, 5, 8), id="more KV heads than query heads"),
        pytest.param((1, 4, 3, 8), (1, 2, 2, 8), (1, 2, 2, 8), id="more queries than tokens"),
        pytest.param((1, 4, 0, 8), (1, 2, 2, 8), (1, 2, 2, 8), id="no queries"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q, k, v):
    """Shapes that do not fit together raise ValueError; broadcasting must not hide them."""
    call(causal_attention, torch.randn(q), torch.randn(k), torch.randn(v)).raises(ValueError)


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError)], ids=str)
def test_a_window_that_is_no_count_is_refused(window, error):
    """A window below 1 is a ValueError, one that is not an int a TypeError."""
    call(causal_attention, *(torch.randn(1, 1, 3, 4) for _ in range(3)), window=window).raises(error)
