"""Phase 4, task 1: store keys and values through a slot mapping."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import store_kv
from minicache_course.checks import call, that


def rows(device, *shape, dtype=torch.float32):
    """Random keys and values."""
    return [torch.randn(shape).to(dtype).to(device) for _ in range(2)]


def empty(device, *shape, dtype=torch.float32):
    """Two caches that hold −7 everywhere."""
    return [torch.full(shape, -7, dtype=dtype, device=device) for _ in range(2)]


def after(cache, new, slots):
    """The expected cache, written one slot at a time."""
    expected = cache.clone()
    for row, slot in zip(new, slots, strict=True):
        if slot >= 0:
            expected[slot // cache.shape[1], slot % cache.shape[1]] = row
    return expected


@pytest.fixture(scope="session")
def stores(watched):
    """`stores(k, v, k_cache, v_cache, slots)`: run store_kv and compare both caches with the expected ones."""

    def run(k, v, k_cache, v_cache, slots, slot_mapping=None):
        __tracebackhide__ = True
        expected = after(k_cache, k, slots), after(v_cache, v, slots)
        if slot_mapping is None:
            slot_mapping = torch.tensor(slots, device=k.device)
        call(watched(store_kv), k, v, k_cache, v_cache, slot_mapping).gives(None)
        that("k_cache afterwards", k_cache).gives(expected[0])
        that("v_cache afterwards", v_cache).gives(expected[1])

    return run


def test_one_row(device, stores):
    """One token, one head of 16 numbers, slot 6 of blocks of 4: offset 2 of block 1, in both caches."""
    stores(*rows(device, 1, 1, 16), *empty(device, 3, 4, 1, 16), [6])


def test_two_rows_of_two_heads(device, stores):
    """Each program stores one token, with all of its heads."""
    stores(*rows(device, 2, 2, 16), *empty(device, 3, 4, 2, 16), [6, 1])


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [
        pytest.param(*sizes, id=f"{sizes[0]} KV heads, d {sizes[1]}, blocks of {sizes[2]}")
        for sizes in ((2, 64, 16), (4, 80, 8), (3, 5, 4), (17, 4, 4))
    ],
)
def test_rows_land_in_their_slots(device, stores, num_kv_heads, head_dim, block_size):
    """Slot s is offset s % block_size of block s // block_size: every token is stored, and nothing else changes."""
    caches = empty(device, 4, block_size, num_kv_heads, head_dim)
    slots = [block_size + 1, 0, 4 * block_size - 1, block_size, 2 * block_size + 3]
    stores(*rows(device, 5, num_kv_heads, head_dim), *caches, slots)


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param([-1, 3, 9], id="first"),
        pytest.param([3, -1, 9], id="between"),
        pytest.param([3, 9, -1], id="last"),
        pytest.param([-1, -1, -1], id="all"),
    ],
)
def test_slot_minus_one_is_skipped(device, stores, slots):
    """A row with slot −1 is padding: it is not written anywhere, not even to the last slot."""
    stores(*rows(device, 3, 2, 16), *empty(device, 3, 4, 2, 16), slots)


@pytest.mark.parametrize("launched", [[-7, 3, -2], [-(2**40), 3, -1]], ids=str)
def test_any_negative_slot_is_skipped(device, store_rows, launched):
    """Every negative slot is padding, not only −1."""
    k, v = rows(device, 3, 2, 16)
    k_cache, v_cache = empty(device, 3, 4, 2, 16)
    expected = after(k_cache, k, launched), after(v_cache, v, launched)
    call(store_rows, k, v, k_cache, v_cache, torch.tensor(launched, device=device)).gives(None)
    that("k_cache afterwards", k_cache).gives(expected[0])
    that("v_cache afterwards", v_cache).gives(expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_number_arrives_bit_for_bit(device, stores, dtype):
    """Storing copies: no number changes, in any dtype."""
    k, v = ((each * 30).to(dtype) for each in rows(device, 3, 2, 16))
    stores(k, v, *empty(device, 3, 4, 2, 16, dtype=dtype), [5, 11, 0])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_slot_mappings_of_both_integers(device, stores, index):
    """Slots may be int32 or int64, and strided."""
    slots = [6, -1, 1]
    longer = torch.tensor([value for slot in slots for value in (slot, 4)], dtype=index, device=device)
    stores(*rows(device, 3, 2, 16), *empty(device, 3, 4, 2, 16), slots, longer[::2])


def test_keys_and_values_with_strides_of_their_own(device, stores):
    """k and v may be views with any strides, different from each other's."""
    wide = torch.randn(3, 2, 48, device=device)
    k = torch.randn(16, 2, 3, device=device).permute(2, 1, 0)
    v = wide[:, :, 8:24]
    stores(k, v, *empty(device, 3, 4, 2, 16), [6, 2, 11])


def test_caches_with_strides_of_their_own(device, stores, strided):
    """A cache may be a view of a larger tensor: no stride follows from another one."""
    stores(*rows(device, 3, 2, 16), *strided(*empty(device, 3, 4, 2, 16)), [6, 2, 11])


def test_keys_as_a_model_makes_them(device, stores):
    """q, k and v may be slices of one matrix product, with the row stride of all three."""
    qkv = torch.randn(4, (4 + 2 + 2) * 16, device=device)
    k, v = qkv[:, 64:96].view(4, 2, 16), qkv[:, 96:].view(4, 2, 16)
    stores(k, v, *empty(device, 3, 4, 2, 16), [8, 9, 10, 11])


def test_no_tokens(device, stores):
    """N = 0: nothing is launched, since CUDA refuses an empty grid, and nothing changes."""
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    stores(*rows(device, 0, 2, 16), *empty(device, 3, 4, 2, 16), [], slots)


def test_the_launcher_does_not_read_slots(device, reads_no_values):
    """The slots are on the GPU: a launcher that reads their values waits for the GPU."""
    from minicache.kernels import store

    slots = torch.tensor([6, -1, 1], device=device)
    given = *rows(device, 3, 2, 16), *empty(device, 3, 4, 2, 16), slots
    call(reads_no_values(store.store_kv), *given).gives(None)


def test_padding_is_not_stored_whatever_it_holds(device, stores):
    """A padding row may hold NaN, which must not reach any slot."""
    k, v = rows(device, 4, 3, 20)
    k[1::2] = v[1::2] = float("nan")
    stores(k, v, *empty(device, 2, 4, 3, 20), [4, -1, 5, -1])


@pytest.mark.parametrize(
    "dim", [pytest.param(d, id=n) for d, n in enumerate(("blocks", "slots in the block", "heads"))]
)
def test_a_cache_of_more_than_two_billion_numbers(device, stores, far_apart, dim):
    """A block, a slot in it or a head times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    caches = (far_apart(each, dim) for each in empty(device, 3, 3, 3, 4, dtype=torch.int8))
    stores(*(each.to(torch.int8) for each in rows(device, 2, 3, 4)), *caches, [8, 1])


@pytest.mark.parametrize("dim", [pytest.param(0, id="tokens"), pytest.param(1, id="heads")])
def test_rows_more_than_two_billion_numbers_apart(device, stores, far_apart, dim):
    """k and v may be views of a tensor so large that a token or a head times its stride exceeds 2³¹ − 1."""
    k, v = (far_apart(each.to(torch.int8), dim) for each in rows(device, 3, 3, 4))
    stores(k, v, *empty(device, 3, 4, 3, 4, dtype=torch.int8), [6, 1, 4])
