"""Phase 4, task 11: a linear layer that reads weights of a byte or of four bits, and dequantizes them in registers."""

from __future__ import annotations

import pytest
import torch

from minicache import kernels
from minicache.kernels.group_quantize import GroupQuantized
from minicache_course.checks import call, that
from minicache_course.kernels.tracer import trace

GROUP = 32

both = pytest.mark.parametrize("dtype", ["int8", "int4"])


def random_weight(num_outputs, num_groups, dtype):
    """Any numbers that fit; groups differ in size by a factor of up to a hundred."""
    scale = (10 ** torch.empty(num_outputs, num_groups).uniform_(-2, 0)).half()
    if dtype == "int8":
        return GroupQuantized(
            torch.randint(-127, 128, (num_outputs, num_groups * GROUP), dtype=torch.int8), scale, None
        )
    numbers = torch.randint(0, 256, (num_outputs, num_groups * GROUP // 2), dtype=torch.uint8)
    return GroupQuantized(numbers, scale, torch.randn(num_outputs, num_groups).half())


def read(weight):
    """The weight `[out, in]` in float64."""
    numbers, scale, minimum = (each.double().cpu() if each is not None else None for each in weight)
    if minimum is None:
        return (numbers.view(*scale.shape, GROUP) * scale[..., None]).flatten(1)
    halves = numbers.view(*scale.shape, GROUP // 2)
    codes = torch.cat([halves % 16, halves.div(16).floor()], dim=-1)
    return (codes * scale[..., None] + minimum[..., None]).flatten(1)


@pytest.fixture(scope="session")
def linear(device, watching):
    """`minicache.kernels.linear` with Triton, and traced if the interpreter runs it."""

    def linear(hidden, weight):
        hidden, weight = hidden.to(device), GroupQuantized(*(None if w is None else w.to(device) for w in weight))
        if device.type == "cuda":
            return kernels.linear(hidden, weight, backend="triton").cpu()
        given = {"hidden": hidden, **{name: each for name, each in weight._asdict().items() if each is not None}}
        with watching({}, given, "quantized_linear_kernel" if len(hidden) else None):
            return kernels.linear(hidden, weight, backend="triton")

    return linear


@pytest.fixture(scope="session")
def multiplies(linear):
    """`multiplies(hidden, weight)`: run and compare with the same product in float64."""

    def run(hidden, weight):
        __tracebackhide__ = True
        got = call(linear, hidden, weight).value
        expected = hidden.double() @ read(weight).T
        that("the output's shape and dtype", (list(got.shape), got.dtype)).gives((list(expected.shape), hidden.dtype))
        size = hidden.double().abs() @ read(weight).abs().T  # of what is summed
        near = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[hidden.dtype]
        that("the output", got.float()).is_close(expected.float(), rtol=near, atol=1e-6 * size.max().item())

    return run


def test_a_group_worked_by_hand(linear):
    """Numbers 127, −85, 23, 4, 0 … with the scale 1/128: inputs 1, 2, 3, 4 give (127 − 170 + 69 + 16) / 128."""
    numbers = torch.tensor([[127, -85, 23, 4, *[0] * 28]], dtype=torch.int8)
    weight = GroupQuantized(numbers, torch.tensor([[1 / 128]]).half(), None)
    got = call(linear, torch.tensor([[1.0, 2, 3, 4, *[9] * 28]]), weight).value
    that("the output", got).is_close(torch.tensor([[42 / 128]]))


@both
def test_every_weight_meets_its_own_input(multiplies, dtype):
    """Rows with a single 1, one for each input of two groups: the outputs are the weights themselves."""
    multiplies(torch.eye(2 * GROUP), random_weight(3, 2, dtype))


def test_the_halves_of_a_byte(linear):
    """Byte i holds number i in its low half and number i + 16 in its high one; scale 1, minimum 0."""
    numbers = torch.arange(16, dtype=torch.uint8) + 16 * torch.arange(16, dtype=torch.uint8).flip(0)
    weight = GroupQuantized(numbers[None], torch.ones(1, 1).half(), torch.zeros(1, 1).half())
    got = call(linear, torch.eye(GROUP), weight).value
    that("the weights", got[:, 0].tolist()).gives([*map(float, range(16)), *map(float, reversed(range(16)))])


def test_the_minimum_is_added_to_every_number(linear):
    """Numbers 0 with the scale 2 and the minimum −0.5: 32 inputs of 1 give −16."""
    weight = GroupQuantized(
        torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[2.0]]).half(), torch.tensor([[-0.5]]).half()
    )
    that("the output", call(linear, torch.ones(1, GROUP), weight).value).is_close(torch.tensor([[-16.0]]))


@both
@pytest.mark.parametrize("num_groups", [1, 4, 5, 18], ids=lambda n: f"{n} groups")
def test_any_number_of_groups(multiplies, num_groups, dtype):
    """An iteration takes several groups; the last may have fewer."""
    multiplies(torch.randn(2, num_groups * GROUP), random_weight(5, num_groups, dtype))


@both
@pytest.mark.parametrize(("num_rows", "num_outputs"), [(1, 1), (1, 33), (17, 32), (35, 70)])
def test_any_number_of_rows_and_outputs(multiplies, num_rows, num_outputs, dtype):
    """Tiles that are not full store what exists, and load nothing else."""
    multiplies(torch.randn(num_rows, GROUP), random_weight(num_outputs, 1, dtype))


@both
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_rows_in_half_precision(multiplies, dtype, stored):
    """The output has the dtype of the rows."""
    multiplies(torch.randn(3, 5 * GROUP).to(stored), random_weight(7, 5, dtype))


def test_sums_are_in_fp32(linear):
    """16384 products of 1, and 32 of 1/128: half precision keeps neither the large sum nor the small steps."""
    num_groups = 513
    numbers = torch.ones(1, num_groups * GROUP, dtype=torch.int8)
    scale = torch.ones(1, num_groups)
    scale[0, -1] = 1 / 128
    got = call(linear, torch.ones(1, num_groups * GROUP), GroupQuantized(numbers, scale.half(), None)).value
    that("the output", got).is_close(torch.tensor([[16384.25]]), rtol=0, atol=1e-3)


@both
def test_strides(multiplies, dtype):
    """Rows may be columns of a matrix, a slice of wider rows, or one row many times."""
    weight = random_weight(6, 2, dtype)
    multiplies(torch.randn(2 * GROUP, 3).T, weight)
    multiplies(torch.randn(3, 5 * GROUP)[:, GROUP : 3 * GROUP], weight)
    multiplies(torch.randn(1, 2 * GROUP).expand(3, -1), weight)


@both
def test_one_bad_row_stays_alone(linear, dtype):
    """A row of NaN gives a row of NaN; the rows next to it have their own sums."""
    hidden, weight = torch.randn(3, 5 * GROUP), random_weight(4, 5, dtype)
    hidden[1] = float("nan")
    got = call(linear, hidden, weight).value
    that("which rows hold a NaN", got.isnan().any(1).tolist()).gives([False, True, False])


def test_a_weight_of_more_than_two_gigabytes(device):
    """The last outputs lie past element 2³¹: an address is computed in int64. Only the last program runs."""
    if device.type == "cuda":
        return
    num_outputs, num_groups = 2**20 + 1, 65
    try:  # memory that is not touched takes none
        numbers = torch.empty(num_outputs, num_groups * GROUP, dtype=torch.int8)
    except RuntimeError:
        return
    weight = GroupQuantized(numbers, torch.empty(num_outputs, num_groups, dtype=torch.float16), None)
    weight.numbers[-1], weight.scale[-1] = 1, 0.5

    def linear(hidden):
        with trace(only=[(2**15, 0, 0)]):  # 32 outputs in each program
            return kernels.linear(hidden, weight, backend="triton")

    got = call(linear, torch.ones(1, num_groups * GROUP)).value[0, -1]
    that("the last output", got.item()).gives(num_groups * GROUP / 2)


def test_no_rows(linear):
    """Nothing to multiply: no error, and an empty output."""
    got = call(linear, torch.randn(0, GROUP), random_weight(5, 1, "int8")).value
    that("the output's shape", list(got.shape)).gives([0, 5])
