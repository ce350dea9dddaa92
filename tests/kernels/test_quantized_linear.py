"""Linear layers over weights of few bits: what they compute, against the dequantized weight in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicache import kernels
from minicache.errors import KernelUnavailableError
from minicache.kernels import configs
from minicache.kernels.group_quantize import GroupQuantized, dequantize_groups, quantize_groups

EACH_DTYPE = pytest.mark.parametrize("dtype", ["int8", "int4"])
EACH_BACKEND = pytest.mark.parametrize("backend", ["torch", "triton"])


def multiplied(hidden: Tensor, weight: GroupQuantized, device: torch.device, backend: str | None = None) -> Tensor:
    """`kernels.linear` on the device."""
    moved = GroupQuantized(*(None if each is None else each.to(device) for each in weight))
    return kernels.linear(hidden.to(device), moved, backend=backend).cpu()


@EACH_DTYPE
@EACH_BACKEND
@pytest.mark.parametrize("num_inputs", [32, 160, 288])
@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 40), (3, 64), (17, 33), (0, 5), (40, 1)])
def test_it_multiplies_by_the_dequantized_weight(
    device: torch.device, dtype: str, backend: str, num_inputs: int, num_rows: int, num_outputs: int
) -> None:
    hidden = torch.randn(num_rows, num_inputs)
    weight = quantize_groups(torch.randn(num_outputs, num_inputs) + 0.3, dtype)
    expected = hidden.double() @ dequantize_groups(weight).double().T
    got = multiplied(hidden, weight, device, backend)
    assert got.shape == (num_rows, num_outputs)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@EACH_DTYPE
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_sums_are_in_fp32(device: torch.device, dtype: str, stored: torch.dtype) -> None:
    """A thousand products of one size: a sum in half precision stops growing, or gets steps of 8."""
    hidden = torch.ones(2, 1024, dtype=stored)
    weight = quantize_groups(torch.rand(16, 1024) + 1, dtype)
    expected = dequantize_groups(weight).double().sum(1).expand(2, -1)
    got = multiplied(hidden, weight, device, "triton")
    assert got.dtype == stored
    torch.testing.assert_close(got.double(), expected, rtol=0.004, atol=0)


@EACH_DTYPE
def test_rows_of_any_strides(device: torch.device, dtype: str) -> None:
    weight = quantize_groups(torch.randn(20, 64), dtype)
    for hidden in (torch.randn(7, 200)[:, 100:164], torch.randn(64, 7).T, torch.randn(1, 64).expand(5, -1)):
        expected = hidden.double() @ dequantize_groups(weight).double().T
        torch.testing.assert_close(
            multiplied(hidden, weight, device, "triton").double(), expected, rtol=1e-5, atol=1e-4
        )


def test_it_chooses_by_device(device: torch.device) -> None:
    hidden, weight = torch.randn(2, 32), quantize_groups(torch.randn(8, 32), "int8")
    assert multiplied(hidden, weight, device).equal(
        multiplied(hidden, weight, device, "triton" if device.type == "cuda" else "torch")
    )


def test_without_values() -> None:
    weight = GroupQuantized(*(each.to("meta") for each in quantize_groups(torch.randn(8, 32), "int4")))
    got = kernels.linear(torch.empty(3, 32, device="meta", dtype=torch.float16), weight)
    assert (got.shape, got.dtype, got.is_meta) == ((3, 8), torch.float16, True)


@pytest.mark.parametrize(
    ("changes", "hidden", "error", "says"),
    [
        ({}, torch.ones(2, 33), ValueError, r"hidden must be \['?N'?, 64\]; got \[2, 33\]"),
        ({}, torch.randn(64), ValueError, "hidden must be"),
        ({}, torch.randn(2, 64).double(), TypeError, "hidden must be float16 or bfloat16 or float32; got float64"),
        ({}, torch.randn(2, 64, device="meta"), ValueError, "weight.scale is on cpu, other arguments on meta"),
        ({"numbers": torch.zeros(8, 64)}, torch.randn(2, 64), TypeError, "weight.numbers must be int8"),
        ({"minimum": torch.zeros(8, 2).half()}, torch.randn(2, 64), TypeError, "weight.numbers must be uint8"),
        ({"numbers": torch.zeros(8, 32).char()}, torch.randn(2, 64), ValueError, r"weight.numbers must be \[8, 64\]"),
        ({"scale": torch.zeros(8, 2)}, torch.randn(2, 64), TypeError, "weight.scale must be float16"),
        ({"numbers": torch.zeros(64, 8).char().T}, torch.randn(2, 64), ValueError, "must be contiguous"),
    ],
    ids=[
        "inputs",
        "a vector",
        "float64",
        "device",
        "numbers",
        "four bits",
        "columns",
        "scale",
        "strides",
    ],
)
def test_what_is_refused(changes: dict[str, Tensor], hidden: Tensor, error: type, says: str) -> None:
    weight = quantize_groups(torch.randn(8, 64), "int8")._replace(**changes)
    with pytest.raises(error, match=says):
        kernels.linear(hidden, weight)


def test_numba_has_weights_of_its_own() -> None:
    with pytest.raises(KernelUnavailableError, match=r"minicache\.model\.panels"):
        kernels.linear(torch.randn(1, 32), quantize_groups(torch.randn(2, 32), "int8"), backend="numba")


def test_more_rows_take_larger_tiles() -> None:
    for arch in configs.SHARED_KB:
        for dtype in (torch.float32, torch.float16):
            rows = [configs.choose_linear(arch, dtype, num).rows for num in (1, 16, 17, 64, 65, 4096)]
            assert rows == sorted(rows), "a tile of rows shrinks"
            assert rows[0] == configs.MIN_ROWS
