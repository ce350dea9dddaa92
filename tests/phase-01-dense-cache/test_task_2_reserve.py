"""Phase 1, task 2: reserve the memory."""

from __future__ import annotations

import pytest
import torch

from minicache.cache.dense import KVCache
from minicache_course.checks import call, that

SIZES = {"num_layers": 3, "batch_size": 2, "num_kv_heads": 5, "max_seq_len": 7, "head_dim": 11}


def test_minigpt_reserves_one_mebibyte():
    """MiniGPT's cache (4 layers, 2 KV heads of 32, 512 tokens, float32) takes 1,048,576 bytes."""
    cache = call(KVCache, 4, 1, 2, 512, 32).value
    that("KVCache(4, 1, 2, 512, 32).nbytes", cache.nbytes).gives(1_048_576)


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [(torch.float64, 8), (torch.float32, 4), (torch.float16, 2), (torch.bfloat16, 2), (torch.float8_e4m3fn, 1)],
    ids=["float64", "float32", "float16", "bfloat16", "float8"],
)
def test_bytes_follow_the_dtype(dtype, itemsize):
    """Keys and values: 2 · L · B · H_kv · S_max · d numbers, each of the dtype's size."""
    cache = call(KVCache, *SIZES.values(), dtype=dtype).value
    that(f"nbytes of {SIZES} in {dtype}", cache.nbytes).gives(2 * 3 * 2 * 5 * 7 * 11 * itemsize)


@pytest.mark.parametrize("doubled", SIZES)
def test_twice_any_size_takes_twice_the_bytes(doubled):
    """Doubling any one of the five sizes doubles the memory."""
    once = call(KVCache, **SIZES).value.nbytes
    twice = call(KVCache, **{**SIZES, doubled: 2 * SIZES[doubled]}).value.nbytes
    that(f"nbytes with {doubled} doubled", twice).gives(2 * once)


def test_one_of_everything_takes_eight_bytes():
    """All sizes 1: one key and one value, 8 bytes in float32."""
    that("KVCache(1, 1, 1, 1, 1).nbytes", call(KVCache, 1, 1, 1, 1, 1).value.nbytes).gives(8)


def test_its_sizes_can_be_read():
    """The sizes, dtype and device are public attributes: phase 5 asks each cache of a batch for them."""
    cache = call(KVCache, **SIZES, dtype=torch.float16).value
    for name, size in {**SIZES, "dtype": torch.float16, "device": torch.device("cpu")}.items():
        that(f"cache.{name}", getattr(cache, name, "no such attribute")).gives(size)


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")], ids=str)
def test_a_device_is_given_by_name_or_object(device):
    """`device` may be a name or a torch.device; "meta" counts bytes without allocating any."""
    that(f"nbytes on {device}", call(KVCache, **SIZES, device=device).value.nbytes).gives(18480)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_below_one_are_refused(name, size):
    """A size of 0 or less raises ValueError."""
    call(KVCache, **{**SIZES, name: size}).raises(ValueError)


@pytest.mark.parametrize("size", [2.0, "2", None, True], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_no_int_are_refused(name, size):
    """A size that is not an int raises TypeError: 2.0, "2", None, and True, which Python would take for 1."""
    call(KVCache, **{**SIZES, name: size}).raises(TypeError)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float32", None], ids=str)
def test_dtypes_that_are_not_floating_point_are_refused(dtype):
    """Keys and values are floating-point numbers: any other dtype, or a dtype's name, raises TypeError."""
    call(KVCache, **SIZES, dtype=dtype).raises(TypeError)
