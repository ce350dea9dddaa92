"""Phase 1, task 3: append and read, and the cursor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.dense import KVCache
from minicache_course.checks import call, that

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def test_a_new_cache_holds_nothing():
    """A new cache has 0 tokens, uses 0 bytes, and reads as empty tensors."""
    cache = KVCache(2, 3, 4, 5, 6)
    that("num_tokens of a new cache", cache.num_tokens).gives(0)
    that("nbytes_used of a new cache", cache.nbytes_used).gives(0)
    for layer in range(2):
        k, v = call(cache.read, layer).value
        that(f"the shapes of read({layer})", [list(k.shape), list(v.shape)]).gives([[3, 4, 0, 6], [3, 4, 0, 6]])


def test_read_gives_back_what_was_appended(numbered):
    """Three tokens in, the same three tokens out: keys as keys, values as values."""
    cache = KVCache(1, 2, 3, 8, 4)
    k, v = numbered(2, 3, 3, 4), numbered(2, 3, 3, 4, start=1000)
    call(cache.append, 0, k, v).gives(None)
    call(cache.read, 0).gives((k, v))


def test_new_tokens_follow_the_old_ones(numbered):
    """A second append writes after the first: oldest token first."""
    cache = KVCache(1, 1, 2, 8, 4)
    first, second = numbered(1, 2, 3, 4), numbered(1, 2, 2, 4, start=100)
    call(cache.append, 0, first, -first).gives(None)
    call(cache.append, 0, second, -second).gives(None)
    both = torch.cat([first, second], dim=2)
    call(cache.read, 0).gives((both, -both))


def test_the_cursor_moves_when_the_last_layer_has_its_rows(numbered):
    """num_tokens, positions and nbytes_used do not change until the last layer has appended."""
    cache = KVCache(3, 1, 1, 8, 1)
    for token, before in ((0, 0), (1, 2)):
        for layer in range(3):
            told = f"before layer {layer} of forward pass {token}"
            that(f"num_tokens {told}", cache.num_tokens).gives(before)
            that(f"positions(2) {told}", cache.positions(2)).gives(torch.tensor([before, before + 1]))
            that(f"nbytes_used {told}", cache.nbytes_used).gives(24 * before)
            call(cache.append, layer, numbered(1, 1, 2, 1), numbered(1, 1, 2, 1)).gives(None)
        that(f"num_tokens after forward pass {token}", cache.num_tokens).gives(before + 2)


def test_each_layer_has_its_own_rows(numbered):
    """Layer 0 does not read what layer 1 stores."""
    cache = KVCache(3, 1, 2, 8, 4)
    rows = [numbered(1, 2, 2, 4, start=100 * layer) for layer in range(3)]
    for layer in range(3):
        call(cache.append, layer, rows[layer], -rows[layer]).gives(None)
    for layer in range(3):
        call(cache.read, layer).gives((rows[layer], -rows[layer]))


def test_in_the_middle_of_a_pass_a_layer_shows_its_new_rows(numbered):
    """During a forward pass, layers that have appended return the new entries; the others only the old ones."""
    cache = KVCache(3, 1, 1, 8, 2)
    old, new = numbered(1, 1, 2, 2), numbered(1, 1, 3, 2, start=50)
    for layer in range(3):
        call(cache.append, layer, old, old).gives(None)
    call(cache.append, 0, new, new).gives(None)
    call(cache.append, 1, new, new).gives(None)
    both = torch.cat([old, new], dim=2)
    for layer, expected in ((0, both), (1, both), (2, old)):
        that(f"read({layer}) when layers 0 and 1 have new entries", cache.read(layer)).gives((expected, expected))


@st.composite
def chunked_caches(draw):
    """Sizes of a cache, and chunks of tokens that fill it in part or exactly."""
    chunks = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    spare = draw(st.sampled_from([0, 0, 1, 4]))
    layers, batch, heads, head_dim = (draw(st.integers(1, 3)) for _ in range(4))
    return (layers, batch, heads, sum(chunks) + spare, head_dim), chunks


@repeatable
@given(chunked_caches())
def test_any_chunks_in_any_cache_read_back_whole(case):
    """However the tokens are cut into appends, each layer reads all of them in order; exactly full is fine."""
    (layers, batch, heads, max_seq_len, head_dim), chunks = case
    cache = KVCache(layers, batch, heads, max_seq_len, head_dim)
    everything = torch.randn(2, layers, batch, heads, sum(chunks), head_dim)
    done = 0
    for chunk in chunks:
        that(f"num_tokens after {done} tokens", cache.num_tokens).gives(done)
        that(f"positions({chunk}) after {done} tokens", cache.positions(chunk)).gives(torch.arange(done, done + chunk))
        for layer in range(layers):
            k, v = everything[:, layer, :, :, done : done + chunk]
            call(cache.append, layer, k, v).gives(None)
            got = call(cache.read, layer).value
            expected = everything[:, layer, :, :, : done + chunk]
            that(f"read({layer}) after {done} + {chunk} of {max_seq_len} slots", got).gives(tuple(expected))
        done += chunk
    for layer in range(layers):
        that(f"read({layer}) at the end", cache.read(layer)).gives(tuple(everything[:, layer]))
    row = 2 * layers * batch * heads * head_dim * 4
    that(f"nbytes_used with {done} tokens", cache.nbytes_used).gives(done * row)
    that("nbytes, which tokens do not change", cache.nbytes).gives(max_seq_len * row)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_values_are_stored_in_the_caches_dtype(dtype):
    """What is stored in float64, float16 or bfloat16 is read back bit for bit, and takes that dtype's bytes."""
    cache = KVCache(1, 2, 2, 4, 3, dtype=dtype)
    k, v = (torch.randn(2, 2, 3, 3).to(dtype) for _ in range(2))
    call(cache.append, 0, k, v).gives(None)
    call(cache.read, 0).gives((k, v))
    that("nbytes_used", cache.nbytes_used).gives(2 * 2 * 2 * 3 * 3 * dtype.itemsize)


def test_a_full_cache_can_be_read(numbered):
    """max_seq_len tokens fit, one at a time or all at once."""
    k = numbered(1, 1, 4, 2)
    at_once, one_by_one = KVCache(1, 1, 1, 4, 2), KVCache(1, 1, 1, 4, 2)
    call(at_once.append, 0, k, k).gives(None)
    for t in range(4):
        call(one_by_one.append, 0, k[:, :, t : t + 1], k[:, :, t : t + 1]).gives(None)
    for cache in (at_once, one_by_one):
        call(cache.read, 0).gives((k, k))
        that("num_tokens of a full cache", cache.num_tokens).gives(4)
        that("nbytes_used of a full cache", cache.nbytes_used).gives(cache.nbytes)


def test_positions_are_those_of_the_next_tokens(numbered):
    """positions(T) is the int64 tensor num_tokens, num_tokens + 1, …; it may be empty, T below 0 is a ValueError."""
    cache = KVCache(1, 1, 1, 8, 2)
    call(cache.append, 0, numbered(1, 1, 5, 2), numbered(1, 1, 5, 2)).gives(None)
    call(cache.positions, 3).gives(torch.tensor([5, 6, 7]))
    call(cache.positions, 0).gives(torch.tensor([], dtype=torch.int64))
    call(cache.positions, -1).raises(ValueError)


def test_the_callers_tensors_are_copied(numbered):
    """Changing k and v after the append changes nothing in the cache."""
    cache = KVCache(1, 1, 2, 8, 2)
    k, v = numbered(1, 2, 3, 2), numbered(1, 2, 3, 2, start=50)
    kept = (k.clone(), v.clone())
    call(cache.append, 0, k, v).gives(None)
    k.zero_()
    v.zero_()
    that("read(0) after the caller overwrote its own k and v", cache.read(0)).gives(kept)


def test_the_cache_keeps_values_and_no_gradients():
    """k and v may be part of a gradient graph; what the cache holds is not."""
    cache = KVCache(1, 1, 2, 8, 2)
    k, v = (torch.randn(1, 2, 3, 2, requires_grad=True) for _ in range(2))
    call(cache.append, 0, k * 2, v * 2).gives(None)
    read = call(cache.read, 0).value
    that("requires_grad of what read(0) gives", [x.requires_grad for x in read]).gives([False, False])
    that("read(0)", read).gives((k.detach() * 2, v.detach() * 2))


def test_views_can_be_appended():
    """k and v may be transposed views, as a model makes them."""
    cache = KVCache(1, 2, 3, 8, 4)
    k, v = (torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(2))
    call(cache.append, 0, k, v).gives(None)
    call(cache.read, 0).gives((k, v))


def test_reading_changes_nothing(numbered):
    """read can be called repeatedly."""
    cache = KVCache(1, 1, 2, 8, 2)
    k = numbered(1, 2, 3, 2)
    call(cache.append, 0, k, k).gives(None)
    for _ in range(3):
        call(cache.read, 0).gives((k, k))
    that("num_tokens", cache.num_tokens).gives(3)


def test_two_caches_share_nothing(numbered):
    """Two caches share no storage."""
    one, other = KVCache(1, 1, 1, 8, 2), KVCache(1, 1, 1, 8, 2)
    k = numbered(1, 1, 3, 2)
    call(one.append, 0, k, k).gives(None)
    that("num_tokens of the other cache", other.num_tokens).gives(0)
    call(other.append, 0, k + 100, k + 100).gives(None)
    call(one.read, 0).gives((k, k))


def test_the_cache_lives_on_its_device():
    """A cache on another device takes and gives tensors on that device, positions too."""
    cache = KVCache(1, 1, 2, 8, 2, device="meta")
    k = torch.zeros(1, 2, 3, 2, device="meta")
    call(cache.append, 0, k, k).gives(None)
    read = call(cache.read, 0).value
    that("devices of read(0) and positions(1)", [x.device.type for x in (*read, cache.positions(1))]).gives(
        ["meta"] * 3
    )
    that("the shape of read(0)", list(read[0].shape)).gives([1, 2, 3, 2])
