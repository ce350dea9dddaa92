"""Phase 1, task 7: attention with the cache as an optional argument."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.attention import attention_with_cache
from minicache.cache.dense import KVCache
from minicache.errors import CacheOverflowError
from minicache_course.checks import call, that

repeatable = settings(max_examples=30, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


class Recorder:
    """A cache that has only append and attend, and records how they were called."""

    def __init__(self, answer=None, error=None):
        self.calls, self.answer, self.error = [], answer, error

    def append(self, layer, k, v):
        self.calls.append(("append", layer, k, v))
        if self.error is not None:
            raise self.error

    def attend(self, layer, q):
        self.calls.append(("attend", layer, q))
        return self.answer


def draw_qkv(num_tokens, *, batch=2, num_heads=4, num_kv_heads=2, head_dim=8):
    q = torch.randn(batch, num_heads, num_tokens, head_dim)
    return q, *(torch.randn(batch, num_kv_heads, num_tokens, head_dim) for _ in range(2))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4], ids=lambda what: f"{what} KV heads")
def test_without_a_cache_it_is_causal_attention(by_hand, num_kv_heads):
    """cache=None: causal attention among the T tokens, as when it is left out."""
    q, k, v = draw_qkv(5, num_kv_heads=num_kv_heads)
    call(attention_with_cache, q, k, v, 0, None).is_close(by_hand(q, k, v))
    call(attention_with_cache, q, k, v, 3).is_close(by_hand(q, k, v))


def test_with_a_cache_the_prompt_gives_the_same(by_hand):
    """The first forward pass with an empty cache gives the same result as no cache, and stores k and v."""
    q, k, v = draw_qkv(5)
    cache = KVCache(1, 2, 2, 8, 8)
    call(attention_with_cache, q, k, v, 0, cache).is_close(by_hand(q, k, v))
    that("cache.read(0) afterwards", cache.read(0)).gives((k, v))


@repeatable
@given(
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    layers=st.integers(1, 3),
    batch=st.integers(1, 2),
    num_kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5, 8]),
)
def test_in_any_chunks_the_outputs_are_those_of_recomputation(by_hand, chunks, layers, batch, num_kv_heads, group):
    """With a cache, each layer gives in every forward pass what recomputing the whole text gives."""
    total = sum(chunks)
    shape = {"batch": batch, "num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 4}
    texts = [draw_qkv(total, **shape) for _ in range(layers)]
    expected = [by_hand(*text) for text in texts]
    cache = KVCache(layers, batch, num_kv_heads, total, 4)
    done = 0
    for chunk in chunks:
        for layer in range(layers):
            q, k, v = (x[:, :, done : done + chunk] for x in texts[layer])
            got = call(attention_with_cache, q, k, v, layer, cache).value
            that(f"layer {layer}, tokens {done} … {done + chunk - 1}", got).is_close(
                expected[layer][:, :, done : done + chunk]
            )
        done += chunk
    that("cache.num_tokens at the end", cache.num_tokens).gives(total)


def test_the_cache_is_asked_to_append_and_then_to_attend():
    """Any object with append and attend will do: append gets k and v once, then attend gets q, in the same layer."""
    q, k, v = draw_qkv(3)
    answer = torch.randn_like(q)
    cache = Recorder(answer)
    call(attention_with_cache, q, k, v, layer=5, cache=cache).gives(answer)
    that("the calls that the cache got", [made[:2] for made in cache.calls]).gives([("append", 5), ("attend", 5)])
    for name, got, sent in (("k", cache.calls[0][2], k), ("v", cache.calls[0][3], v), ("q", cache.calls[1][2], q)):
        that(f"the {name} that the cache got", got).gives(sent)


def test_a_cache_that_looks_empty_is_still_a_cache(by_hand):
    """A cache counts if it is not None, even if it is falsy: one with len() 0 is a cache."""

    class Sized(KVCache):
        def __len__(self):
            return self.num_tokens

    q, k, v = draw_qkv(3)
    cache = Sized(1, 2, 2, 8, 8)
    call(attention_with_cache, q, k, v, 0, cache).is_close(by_hand(q, k, v))
    that("cache.num_tokens afterwards", cache.num_tokens).gives(3)


def test_what_the_cache_refuses_is_refused(by_hand):
    """A full cache's error reaches the caller, attend is not called, and the cache is unchanged."""
    refusing = Recorder(error=CacheOverflowError("full"))
    call(attention_with_cache, *draw_qkv(3), 0, refusing).raises(CacheOverflowError)
    that("the calls that the refusing cache got", [made[0] for made in refusing.calls]).gives(["append"])
    cache = KVCache(1, 2, 2, 4, 8)
    q, k, v = draw_qkv(3)
    call(attention_with_cache, q, k, v, 0, cache).is_close(by_hand(q, k, v))
    call(attention_with_cache, q, k, v, 0, cache).raises(CacheOverflowError)
    that("cache.read(0) afterwards", cache.read(0)).gives((k, v))


def test_shapes_that_do_not_fit_are_refused():
    """Without a cache, whatever causal_attention refuses raises ValueError."""
    q, k, v = draw_qkv(3)
    call(attention_with_cache, q[:, :3], k, v, 0).raises(ValueError)
