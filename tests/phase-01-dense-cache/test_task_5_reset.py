"""Phase 1, task 5: reset."""

from __future__ import annotations

import torch

from minicache.cache.dense import KVCache
from minicache.errors import CacheOverflowError
from minicache_course.checks import call, that


def run_pass(cache, rows, layers=2):
    """One forward pass: the same entries in every layer."""
    for layer in range(layers):
        call(cache.append, layer, rows, -rows).gives(None)


def test_a_reset_cache_is_as_good_as_new(numbered):
    """After reset: no tokens, no bytes in use, nothing to read, positions from 0."""
    cache = KVCache(2, 1, 2, 6, 3)
    run_pass(cache, numbered(1, 2, 4, 3))
    call(cache.reset).gives(None)
    that("num_tokens after reset", cache.num_tokens).gives(0)
    that("nbytes_used after reset", cache.nbytes_used).gives(0)
    that("positions(2) after reset", cache.positions(2)).gives(torch.tensor([0, 1]))
    for layer in range(2):
        shapes = [list(x.shape) for x in call(cache.read, layer).value]
        that(f"the shapes of read({layer}) after reset", shapes).gives([[1, 2, 0, 3], [1, 2, 0, 3]])


def test_the_memory_is_kept(numbered):
    """nbytes is the same before and after: reset neither frees nor allocates memory."""
    cache = KVCache(2, 1, 2, 6, 3)
    reserved = cache.nbytes
    for num_tokens in (1, 6, 3):
        run_pass(cache, numbered(1, 2, num_tokens, 3))
        call(cache.reset).gives(None)
        that(f"nbytes after {num_tokens} tokens and a reset", cache.nbytes).gives(reserved)


def test_new_tokens_start_at_position_0(numbered):
    """After a reset, read returns only what was appended since: no old entry, before or after it."""
    cache = KVCache(2, 1, 2, 6, 3)
    run_pass(cache, numbered(1, 2, 5, 3))
    call(cache.reset).gives(None)
    new = numbered(1, 2, 2, 3, start=100)
    run_pass(cache, new)
    for layer in range(2):
        that(f"read({layer}) of 2 tokens after a reset", cache.read(layer)).gives((new, -new))
    that("num_tokens", cache.num_tokens).gives(2)


def test_all_the_room_is_there_again(numbered):
    """A full cache, reset, holds max_seq_len tokens again, and no more."""
    cache = KVCache(2, 1, 2, 6, 3)
    for round_ in range(3):
        rows = numbered(1, 2, 6, 3, start=100 * round_)
        run_pass(cache, rows)
        that("read(1) of the full cache", cache.read(1)).gives((rows, -rows))
        call(cache.append, 0, rows[:, :, :1], rows[:, :, :1]).raises(CacheOverflowError)
        call(cache.reset).gives(None)


def test_room_is_not_what_was_used_before(numbered):
    """After 2 of 6 tokens and a reset, 6 tokens fit, not 2."""
    cache = KVCache(2, 1, 2, 6, 3)
    run_pass(cache, numbered(1, 2, 2, 3))
    call(cache.reset).gives(None)
    run_pass(cache, numbered(1, 2, 6, 3))
    that("num_tokens", cache.num_tokens).gives(6)


def test_a_pass_cut_short_is_forgotten(numbered):
    """reset in the middle of a forward pass: layer 0 is next, with any number of tokens, and its entries are gone."""
    for served in (1, 2):
        cache = KVCache(3, 1, 1, 6, 2)
        run_pass(cache, numbered(1, 1, 2, 2), layers=3)
        run_pass(cache, numbered(1, 1, 3, 2), layers=served)
        call(cache.reset).gives(None)
        for layer in range(3):
            k, _ = call(cache.read, layer).value
            that(f"entries in read({layer}) after layer {served - 1} and a reset", k.shape[2]).gives(0)
        new = numbered(1, 1, 1, 2, start=70)
        run_pass(cache, new, layers=3)
        that("num_tokens after the next forward pass", cache.num_tokens).gives(1)
        that("read(2)", cache.read(2)).gives((new, -new))


def test_reset_of_an_empty_cache_does_no_harm(numbered):
    """reset on a new cache, or twice, has no effect."""
    cache = KVCache(2, 1, 2, 6, 3)
    call(cache.reset).gives(None)
    call(cache.reset).gives(None)
    rows = numbered(1, 2, 3, 3)
    run_pass(cache, rows)
    call(cache.read, 1).gives((rows, -rows))
