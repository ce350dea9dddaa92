"""Phase 1, task 6: attention over what the cache holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.dense import KVCache
from minicache_course.checks import call, that

repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [pytest.param(h, kv, id=f"{h} query heads, {kv} KV heads") for h, kv in ((2, 2), (4, 2), (3, 1), (5, 1), (16, 2))],
)
def test_a_whole_prompt_gets_causal_attention(by_hand, num_heads, num_kv_heads):
    """Prefill: all tokens at once give causal attention over the prompt."""
    cache = KVCache(1, 2, num_kv_heads, 8, 4)
    q = torch.randn(2, num_heads, 5, 4)
    k, v = (torch.randn(2, num_kv_heads, 5, 4) for _ in range(2))
    call(cache.append, 0, k, v).gives(None)
    call(cache.attend, 0, q).is_close(by_hand(q, k, v))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4], ids=lambda what: f"{what} KV heads")
def test_one_new_token_sees_the_whole_prompt(by_hand, num_kv_heads):
    """Decode: one new token sees the whole prompt and itself."""
    cache = KVCache(1, 1, num_kv_heads, 8, 4)
    q, k, v = torch.randn(1, 4, 8, 4), *(torch.randn(1, num_kv_heads, 8, 4) for _ in range(2))
    call(cache.append, 0, k[:, :, :5], v[:, :, :5]).gives(None)
    expected = by_hand(q, k, v)
    for t in (5, 6, 7):
        now = slice(t, t + 1)
        call(cache.append, 0, k[:, :, now], v[:, :, now]).gives(None)
        that(f"attend of token {t}", call(cache.attend, 0, q[:, :, now]).value).is_close(expected[:, :, now])


@repeatable
@given(
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    spare=st.sampled_from([0, 1, 3]),
    layers=st.integers(1, 3),
    batch=st.integers(1, 3),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5, 8]),
)
def test_any_chunks_give_the_attention_of_the_whole(by_hand, chunks, spare, layers, batch, num_kv_heads, group):
    """However a text is cut into forward passes, every layer's outputs are those of the whole text at once."""
    total, head_dim = sum(chunks), 4
    q = torch.randn(layers, batch, num_kv_heads * group, total, head_dim)
    k, v = (torch.randn(layers, batch, num_kv_heads, total, head_dim) for _ in range(2))
    expected = [by_hand(q[layer], k[layer], v[layer]) for layer in range(layers)]
    cache = KVCache(layers, batch, num_kv_heads, total + spare, head_dim)
    done = 0
    for chunk in chunks:
        now = slice(done, done + chunk)
        for layer in range(layers):
            call(cache.append, layer, k[layer, :, :, now], v[layer, :, :, now]).gives(None)
            got = call(cache.attend, layer, q[layer, :, :, now]).value
            that(f"attend({layer}, q) of tokens {done} … {done + chunk - 1}", got).is_close(
                expected[layer][:, :, now], atol=1e-5
            )
        done += chunk


def test_rows_that_are_not_in_use_are_not_read(by_hand):
    """Slots left over from before a reset hold NaN here: none of it may reach the result."""
    cache = KVCache(2, 1, 2, 8, 4)
    poison = torch.full((1, 2, 8, 4), float("nan"))
    for layer in range(2):
        call(cache.append, layer, poison, poison).gives(None)
    call(cache.reset).gives(None)
    q, k, v = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    for layer in range(2):
        call(cache.append, layer, k, v).gives(None)
        call(cache.attend, layer, q).is_close(by_hand(q, k, v))


def test_fewer_queries_are_those_of_the_last_tokens(by_hand):
    """The queries belong to the last T tokens: 1 query after 3 appended tokens is the last one's."""
    cache = KVCache(1, 1, 2, 8, 4)
    q, k, v = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    call(cache.append, 0, k, v).gives(None)
    call(cache.attend, 0, q[:, :, -1:]).is_close(by_hand(q, k, v)[:, :, -1:])


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_a_window_reaches_over_earlier_passes(by_hand, window):
    """A layer's window covers tokens of earlier forward passes: prompt, chunk and single tokens see W tokens each."""
    q, k, v = torch.randn(2, 4, 12, 4), torch.randn(2, 2, 12, 4), torch.randn(2, 2, 12, 4)
    expected, cache = by_hand(q, k, v, window), KVCache(1, 2, 2, 12, 4)
    for now in (slice(0, 6), slice(6, 7), slice(7, 11), slice(11, 12)):
        call(cache.append, 0, k[:, :, now], v[:, :, now]).gives(None)
        call(cache.attend, 0, q[:, :, now], window=window).is_close(expected[:, :, now], atol=1e-5)


def test_attending_changes_nothing():
    """attend can be repeated: the cache reads as before, and the result is the same."""
    cache = KVCache(1, 1, 2, 8, 4)
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    call(cache.append, 0, k, v).gives(None)
    first = call(cache.attend, 0, q).value.clone()
    call(cache.attend, 0, q).is_close(first)
    that("read(0) after attend", cache.read(0)).gives((k, v))
    that("num_tokens after attend", cache.num_tokens).gives(3)


def test_a_bfloat16_cache_takes_and_gives_bfloat16(by_hand):
    """A bfloat16 cache takes and gives bfloat16."""
    cache = KVCache(1, 1, 2, 8, 4, dtype=torch.bfloat16)
    q = torch.randn(1, 4, 5, 4, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 5, 4, dtype=torch.bfloat16) for _ in range(2))
    call(cache.append, 0, k, v).gives(None)
    call(cache.attend, 0, q).is_close(by_hand(q, k, v), rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize(
    ("layer", "shape", "error"),
    [
        pytest.param(1, (1, 4, 1, 4), IndexError, id="no such layer"),
        pytest.param(-1, (1, 4, 1, 4), IndexError, id="layer -1"),
        pytest.param(0, (1, 4, 4, 4), ValueError, id="4 queries, 3 tokens"),
        pytest.param(0, (1, 4, 0, 4), ValueError, id="no queries"),
        pytest.param(0, (2, 4, 1, 4), ValueError, id="another batch size"),
        pytest.param(0, (1, 3, 1, 4), ValueError, id="3 query heads on 2 KV heads"),
        pytest.param(0, (1, 4, 1, 8), ValueError, id="another head size"),
    ],
)
def test_queries_that_do_not_fit_are_refused(layer, shape, error):
    """No such layer: IndexError. Queries that do not match what the layer holds: ValueError."""
    cache = KVCache(1, 1, 2, 8, 4)
    k = torch.randn(1, 2, 3, 4)
    call(cache.append, 0, k, k).gives(None)
    call(cache.attend, layer, torch.randn(shape)).raises(error)


def test_an_empty_cache_has_nothing_to_attend_to():
    """Attending before anything was appended is a ValueError: append first."""
    call(KVCache(1, 1, 2, 8, 4).attend, 0, torch.randn(1, 4, 1, 4)).raises(ValueError)
