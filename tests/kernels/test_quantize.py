"""Keys and values in one byte: how far a number comes back from where it was, and what happens past the end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minicache.kernels.quantize import LARGEST, quantize, scales

each_dtype = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)


def roundtrip(rows, scale, dtype):
    return quantize(rows, scale, dtype).double() * torch.as_tensor(scale).double().reshape(-1, 1)


@given(seed=st.integers(0, 50), per_head=st.booleans(), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_int8_comes_back_within_half_a_step(seed, per_head, size):
    """The numbers of int8 are a scale apart: rounding is off by half of one at most."""
    torch.manual_seed(seed)
    rows = size * torch.randn(7, 3, 5)
    scale = scales(rows, torch.int8, per_head=per_head)
    error = (roundtrip(rows, scale, torch.int8) - rows.double()).abs()
    assert (error <= 0.5001 * scale.double()[:, None]).all()


@given(seed=st.integers(0, 50), per_head=st.booleans(), size=st.sampled_from([1e-3, 1.0, 1e4]))
def test_fp8_comes_back_within_a_sixteenth(seed, per_head, size):
    """e4m3 has 3 bits behind the point: off by 1/16 of the number, or half of the smallest step, 2⁻⁹ scales."""
    torch.manual_seed(seed)
    rows = size * torch.randn(7, 3, 5)
    scale = scales(rows, torch.float8_e4m3fn, per_head=per_head)
    error = (roundtrip(rows, scale, torch.float8_e4m3fn) - rows.double()).abs()
    assert (error <= rows.double().abs() / 16 + 2.0**-10 * scale.double()[:, None] * 1.001).all()


@each_dtype
def test_the_scale_makes_the_largest_number_the_largest(dtype):
    rows = torch.tensor([[[1.0, -8.0], [0.5, 0.25]], [[2.0, 4.0], [-0.125, 0.0]]])  # [2, 2 heads, 2]
    together, apart = scales(rows, dtype), scales(rows, dtype, per_head=True)
    assert together.tolist() == pytest.approx([8 / LARGEST[dtype]] * 2)
    assert apart.tolist() == pytest.approx([8 / LARGEST[dtype], 0.5 / LARGEST[dtype]])
    assert quantize(rows, apart, dtype)[0, 0, 1].float() == -LARGEST[dtype]
    assert quantize(rows, apart, dtype)[0, 1, 0].float() == LARGEST[dtype]


@each_dtype
@pytest.mark.parametrize("value", [1e6, -1e6, float("inf"), -float("inf")])
def test_what_is_too_large_saturates(dtype, value):
    """It neither wraps round nor becomes NaN."""
    got = quantize(torch.full((1, 1, 2), value), 1.0, dtype)
    assert got.float().tolist() == [[[LARGEST[dtype] * (1 if value > 0 else -1)] * 2]]


@each_dtype
def test_zeros_have_a_scale(dtype):
    rows = torch.zeros(2, 3, 4)
    assert scales(rows, dtype).tolist() == [1.0] * 3
    assert quantize(rows, scales(rows, dtype), dtype).float().eq(0).all()


def test_rounding_and_not_cutting_off():
    got = quantize(torch.tensor([[[1.6, -1.6, 0.4, 2.5]]]), 1.0, torch.int8)
    assert got.tolist() == [[[2, -2, 0, 2]]]
    got = quantize(torch.tensor([[[17.5, -17.5]]]), 1.0, torch.float8_e4m3fn)  # neighbours: 16 and 18
    assert got.float().tolist() == [[[18.0, -18.0]]]


@each_dtype
def test_half_precision_rows(dtype):
    """A graph stays outside, and bfloat16 is quantized in fp32."""
    rows = torch.randn(3, 2, 4).bfloat16().requires_grad_()
    scale = scales(rows, dtype)
    assert (scale.dtype, scale.requires_grad) == (torch.float32, False)
    got = quantize(rows, scale, dtype)
    assert got.float().equal(quantize(rows.detach().float(), scale, dtype).float())


def test_other_dtypes_and_shapes_are_refused():
    for dtype in (torch.float16, torch.uint8, torch.float8_e5m2):
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            scales(torch.ones(2, 2, 2), dtype)
        with pytest.raises(ValueError, match="float8_e4m3fn"):
            quantize(torch.ones(2, 2, 2), 1.0, dtype)
    with pytest.raises(ValueError, match="H_kv"):
        quantize(torch.ones(3), 1.0, torch.int8)
