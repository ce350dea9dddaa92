"""Phase 3, task 5: store rows in slots, and gather them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.kernels.plain import gather_kv, store_kv
from minicache_course import scenario
from minicache_course.checks import call, that

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


NUMBERS = "keys count from 0, values from 100, and −1 is what was there"


def caches(num_blocks, block_size, *row, dtype=torch.float32):
    """Empty keys and values: −1 everywhere, to make a written slot visible."""
    return [torch.full((num_blocks, block_size, *row), -1.0).to(dtype) for _ in range(2)]


def test_each_row_goes_to_its_slot(numbered):
    """Slot 9 with blocks of 4 is offset 1 of block 2: three rows go to slots 9, 2 and 4, and nothing else changes."""
    k_cache, v_cache = caches(4, 4, 1, 2)
    k, v = numbered(3, 1, 2, start=2), numbered(3, 1, 2, start=102)
    scenario.remember("k of store_kv(k, v, k_cache, v_cache, slots)", k)
    scenario.remember("v of store_kv(k, v, k_cache, v_cache, slots)", v)
    call(store_kv, k, v, k_cache, v_cache, torch.tensor([9, 2, 4])).gives(None)
    for name, cache, rows in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        expected = torch.full((4, 4, 1, 2), -1.0)
        for row, (block, offset) in zip(rows, ((2, 1), (0, 2), (1, 0)), strict=True):
            expected[block, offset] = row
        that(f"{name} after rows for slots 9, 2, 4; {NUMBERS}", cache).gives(expected)


def test_slot_minus_one_is_skipped(numbered):
    """A row with slot −1 is padding: it is not stored, not in the last slot either."""
    k_cache, v_cache = caches(2, 2, 1, 2)
    k, v = numbered(4, 1, 2), numbered(4, 1, 2, start=100)
    call(store_kv, k, v, k_cache, v_cache, torch.tensor([-1, 2, -1, 0])).gives(None)
    for name, cache, rows in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        nothing = torch.full((1, 2), -1.0)
        expected = torch.stack([rows[3], nothing, rows[1], nothing]).reshape(2, 2, 1, 2)
        that(f"{name} after rows for slots −1, 2, −1, 0; {NUMBERS}", cache).gives(expected)


@pytest.mark.parametrize("slots", [[], [-1, -1]], ids=["no rows", "padding only"])
def test_nothing_to_store(slots):
    """No rows, or only padding: the cache is unchanged."""
    k_cache, v_cache = caches(2, 2, 1, 2)
    rows = torch.randn(len(slots), 1, 2)
    call(store_kv, rows, rows, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64)).gives(None)
    that("k_cache afterwards", k_cache).gives(torch.full((2, 2, 1, 2), -1.0))


@repeatable
@given(
    num_blocks=st.integers(1, 5),
    block_size=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    ints=st.sampled_from([torch.int32, torch.int64]),
    data=st.data(),
)
def test_any_slots_in_any_cache(num_blocks, block_size, num_kv_heads, head_dim, ints, data):
    """For any slots in any order, int32 or int64, row n is in block slot // block_size, at offset slot % block_size."""
    free = data.draw(st.permutations(range(num_blocks * block_size)), label="slots")
    slots = [
        slot if data.draw(st.booleans(), label="stored") else -1
        for slot in free[: data.draw(st.integers(0, len(free)))]
    ]
    k_cache, v_cache = caches(num_blocks, block_size, num_kv_heads, head_dim)
    k, v = (torch.randn(len(slots), num_kv_heads, head_dim) for _ in range(2))
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for n, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // block_size, slot % block_size] = k[n]
            expected[1][slot // block_size, slot % block_size] = v[n]
    call(store_kv, k, v, k_cache, v_cache, torch.tensor(slots, dtype=ints)).gives(None)
    that(f"k_cache after slots {slots}", k_cache).gives(expected[0])
    that(f"v_cache after slots {slots}", v_cache).gives(expected[1])


@pytest.mark.parametrize(
    "slots", [[0, 1, 12], [0, 1, 10**6], [0, -2, 1], [-13, 0, 1], [0, -1, -2]], ids=lambda what: f"slots {what}"
)
def test_slots_that_do_not_exist(slots):
    """A slot below −1 or past the last is an IndexError, and no row is written, not even the valid ones before it."""
    k_cache, v_cache = caches(3, 4, 2, 2)
    k, v = (torch.randn(3, 2, 2) for _ in range(2))
    call(store_kv, k, v, k_cache, v_cache, torch.tensor(slots)).raises(IndexError)
    that("k_cache after the refused call", k_cache).gives(torch.full((3, 4, 2, 2), -1.0))
    that("v_cache after the refused call", v_cache).gives(torch.full((3, 4, 2, 2), -1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_any_dtype_is_stored_bit_by_bit(dtype):
    """A cache of float16, bfloat16, int8 or fp8 numbers stores its input unchanged."""
    k_cache, v_cache = caches(2, 3, 2, 4, dtype=dtype)
    k, v = ((20 * torch.randn(2, 2, 4)).to(dtype) for _ in range(2))
    call(store_kv, k, v, k_cache, v_cache, torch.tensor([4, 1])).gives(None)
    that("keys in slots 4 and 1", torch.stack([k_cache[1, 1], k_cache[0, 1]]).float()).gives(k.float())
    that("values in slots 4 and 1", torch.stack([v_cache[1, 1], v_cache[0, 1]]).float()).gives(v.float())


def test_views_are_accepted_and_gradients_are_not_stored():
    """Transposed rows of an autograd graph are stored; the cache does not become part of the graph."""
    k_cache, v_cache = caches(2, 3, 2, 4)
    k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(2))
    slots = torch.arange(5)
    call(store_kv, (2 * k).transpose(0, 1), (2 * v).transpose(0, 1), k_cache, v_cache, slots).gives(None)
    that("requires_grad of the caches", [k_cache.requires_grad, v_cache.requires_grad]).gives([False, False])
    that("the keys in slots 0 … 4", k_cache.flatten(0, 1)[:5]).gives(2 * k.detach().transpose(0, 1))


def test_rows_come_back_in_the_order_of_the_tokens(numbered):
    """Blocks 3, 0, 2 of 2 slots each: tokens 0 … 4 are in slots 6, 7, 0, 1, 4 of the cache."""
    cache = numbered(4, 2, 1, 1)
    expected = torch.tensor([6.0, 7, 0, 1, 4]).reshape(5, 1, 1)
    call(gather_kv, cache, torch.tensor([3, 0, 2]), 5).gives(expected)


@repeatable
@given(
    num_tokens=st.integers(0, 17),
    block_size=st.integers(1, 6),
    ints=st.sampled_from([torch.int32, torch.int64]),
    order=st.integers(0, 5),
)
def test_any_number_of_tokens(scatter, num_tokens, block_size, ints, order):
    """For any length and block size, exact multiples too, all KV entries of the sequence are gathered and no others."""
    rows = [torch.randn(num_tokens, 2, 3), torch.randn(4, 2, 3)]
    cache, _, tables, _ = scatter(rows, rows, block_size, order=order, ints=ints)
    call(gather_kv, cache, tables[0], num_tokens).gives(rows[0])


def test_the_tail_of_a_table_is_not_read():
    """Entries past the last block in use may be anything: −1, or blocks that do not exist."""
    cache = torch.randn(2, 4, 1, 2)
    for tail in ([-1, -1], [10**6, -5], []):
        got = call(gather_kv, cache, torch.tensor([1, *tail]), 3)
        got.gives(cache[1, :3])


@pytest.mark.parametrize("block", [-1, 3, 10**6], ids=lambda what: f"block {what}")
def test_a_block_in_use_that_does_not_exist(block):
    """A block in use outside the cache is an IndexError: −1 is not the last block."""
    call(gather_kv, torch.randn(3, 2, 1, 2), torch.tensor([0, block]), 3).raises(IndexError)


@pytest.mark.parametrize("kind", ["one layer of a tensor of two", "heads before tokens in memory"])
def test_a_cache_of_any_strides(kind):
    """A cache that is not contiguous is gathered like any other; view cannot make a list of slots of it."""
    if kind == "one layer of a tensor of two":
        cache = torch.randn(4, 2, 3, 2, 4)[:, 1]  # [blocks, layers, tokens, heads, d]
    else:
        cache = torch.randn(4, 2, 3, 4).transpose(1, 2)  # [blocks, heads, tokens, d]
    expected = torch.cat([cache[2], cache[0], cache[3, :1]])
    call(gather_kv, cache, torch.tensor([2, 0, 3, -1]), 7).gives(expected)


def test_gathering_changes_nothing():
    """The cache is unchanged, and the result has the cache's dtype."""
    cache = torch.randn(3, 2, 2, 4).bfloat16()
    kept = cache.clone()
    call(gather_kv, cache, torch.tensor([2, 0]), 4).gives(kept[[2, 0]].flatten(0, 1))
    that("the cache afterwards", cache).gives(kept)
