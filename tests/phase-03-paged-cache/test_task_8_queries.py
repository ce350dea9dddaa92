"""Phase 3, task 8: queries that a paged cache refuses, and no kernel would notice."""

from __future__ import annotations

import pytest
import torch

from minicache.cache.paged import PagedKVCache
from minicache_course.checks import call


def two_sequences():
    """A cache of one layer, two KV heads of 4, and two sequences of 5 tokens."""
    cache = PagedKVCache(1, 2, 2, 16, 4, block_size=4)
    rows = torch.randn(2, 2, 5, 4)
    call(cache.append, 0, rows, -rows).gives(None)
    return cache


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 4, 2, 4), id="1 sequence of 2 queries: as many rows as 2 of 1"),
        pytest.param((4, 4, 1, 4), id="4 sequences of 1 query: as many rows as 2 of 2"),
        pytest.param((1, 4, 4, 4), id="1 sequence of 4 queries: as many rows as 2 of 2"),
        pytest.param((3, 4, 1, 4), id="3 sequences"),
    ],
)
def test_another_batch_is_refused(shape):
    """The cache holds 2 sequences of 5 tokens. Queries of another batch: ValueError."""
    call(two_sequences().attend, 0, torch.randn(shape)).raises(ValueError)


def test_a_layer_without_entries_is_refused():
    """append(0, …) and then attend(1, …): the tables have grown, and layer 1 holds no token: ValueError."""
    cache = PagedKVCache(2, 2, 2, 16, 4, block_size=4)
    rows = torch.randn(2, 2, 5, 4)
    call(cache.append, 0, rows, -rows).gives(None)
    call(cache.attend, 1, torch.randn(2, 4, 5, 4)).raises(ValueError)


def test_queries_are_a_tensor():
    """q is not a tensor, or has another dtype than the cache: TypeError."""
    cache = two_sequences()
    call(cache.attend, 0, [[1.0]]).raises(TypeError)
    call(cache.attend, 0, torch.randn(2, 4, 1, 4, dtype=torch.float64)).raises(TypeError)
