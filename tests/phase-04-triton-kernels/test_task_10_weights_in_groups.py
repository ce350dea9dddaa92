"""Phase 4, task 10: weights of a byte or of four bits, with a scale for each group of 32 inputs."""

from __future__ import annotations

import itertools

import pytest
import torch

from minicache.kernels.group_quantize import GroupQuantized, dequantize_groups, quantize_groups
from minicache_course.checks import call, that

both = pytest.mark.parametrize("dtype", ["int8", "int4"])


def random_weight(num_outputs, num_groups):
    """Normal numbers; groups differ in size by a factor of up to a thousand, and in mean."""
    size = 10 ** torch.empty(num_outputs, num_groups, 1).uniform_(-2, 1)
    return ((torch.randn(num_outputs, num_groups, 32) + torch.randn(num_outputs, num_groups, 1)) * size).flatten(1)


def group(*numbers):
    """A weight `[1, 32]` that begins with these; the rest are zeros."""
    return torch.tensor([[*numbers, *[0.0] * (32 - len(numbers))]])


def codes(quantized):
    """The numbers of a weight as integers `[out, in]`, in the order of the inputs."""
    numbers, _, minimum = quantized
    if minimum is None:
        return numbers.int()
    halves = numbers.int().view(len(numbers), -1, 16)
    return torch.cat([halves % 16, halves // 16], dim=-1).flatten(1)


def read(quantized):
    """The weight in float64: numbers times scales, plus minimums."""
    scale = quantized.scale.double().repeat_interleave(32, 1)
    weight = codes(quantized).double() * scale
    return weight if quantized.minimum is None else weight + quantized.minimum.double().repeat_interleave(32, 1)


@pytest.fixture(scope="session")
def quantizes():
    """`quantizes(weight, dtype)`: run quantize_groups and check shapes and dtypes; its result."""

    def run(weight, dtype):
        __tracebackhide__ = True
        got = call(quantize_groups, weight, dtype).value
        num_outputs, num_inputs = weight.shape
        form = [(list(each.shape), each.dtype) if each is not None else None for each in got]
        groups = ([num_outputs, num_inputs // 32], torch.float16)
        numbers = ([num_outputs, num_inputs], torch.int8) if dtype == "int8" else None
        numbers = numbers or ([num_outputs, num_inputs // 2], torch.uint8)
        expected = [numbers, groups, None if dtype == "int8" else groups]
        that("shapes and dtypes of numbers, scale and minimum", form).gives(expected)
        return got

    return run


@pytest.fixture(scope="session")
def is_near():
    """`is_near(weight, quantized)`: each number that is read back lies within half of its group's scale."""

    def run(weight, quantized):
        __tracebackhide__ = True
        back = read(quantized)
        for output, place in itertools.product(range(len(weight)), range(weight.shape[1] // 32)):
            inputs = slice(32 * place, 32 * place + 32)
            exact = weight[output, inputs].float()
            if quantized.minimum is None:
                scale, moved = exact.abs().max().item() / 127, 0.0
            else:  # float16 moves a minimum by up to 1/2048 of it, and clamping may cost as much
                scale, moved = (exact.max() - exact.min()).item() / 15, exact.min().abs().item() / 1024
            what = f"what group {place} of output {output} reads as, of the scale {scale:.3g}: half a scale off at most"
            that(what, back[output, inputs].float()).is_close(exact, rtol=1e-6, atol=0.502 * scale + moved)

    return run


def test_the_group_worked_by_hand_in_int8(quantizes):
    """(0.9, −0.6, 0.16, 0.03, 0 …) has the scale 0.9 / 127, and the numbers 127, −85, 23, 4."""
    got = quantizes(group(0.9, -0.6, 0.16, 0.03), "int8")
    that("the scale", got.scale.float()).is_close(torch.tensor([[0.9 / 127]]), rtol=1e-3, atol=0)
    that("the numbers", codes(got)[0, :5].tolist()).gives([127, -85, 23, 4, 0])


def test_the_group_worked_by_hand_in_int4(quantizes):
    """A group from −0.6 to 0.9 has the minimum −0.6, the scale 1.5 / 15, and the numbers 15, 0, 8, 6."""
    got = quantizes(group(0.9, -0.6, 0.16, 0.03), "int4")
    that("the scale", got.scale.float()).is_close(torch.tensor([[0.1]]), rtol=1e-3, atol=0)
    that("the minimum", got.minimum.float()).is_close(torch.tensor([[-0.6]]), rtol=1e-3, atol=0)
    that("the low halves of the first bytes", codes(got)[0, :5].tolist()).gives([15, 0, 8, 6, 6])


def test_the_largest_number_may_be_negative(quantizes):
    """The scale follows the largest magnitude: −1.27 becomes −127, and 0.5 becomes 50."""
    got = quantizes(group(0.5, -1.27), "int8")
    that("the numbers", codes(got)[0, :3].tolist()).gives([50, -127, 0])


@both
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 5)], ids=lambda s: f"{s[0]} outputs, {s[1]} groups")
def test_each_group_has_its_own_scale(quantizes, is_near, shape, dtype):
    """A group is 32 consecutive inputs of one output: a small one keeps its digits next to a large one."""
    weight = random_weight(*shape)
    is_near(weight, quantizes(weight, dtype))


@both
def test_groups_lie_along_the_inputs(quantizes, dtype):
    """Output i is a row times 2ⁱ⁻⁴: in groups of inputs all have the same numbers."""
    row = torch.randn(32)
    got = codes(quantizes(row * 2.0 ** torch.arange(-4, 12)[:, None], dtype))
    for output in (1, 15):
        that(f"the numbers of output {output}", got[output].tolist()).gives(got[0].tolist())


def test_where_the_halves_of_a_byte_lie(quantizes):
    """Minimum 0 and scale 1: number i of a group is in the low half of byte i, number i + 16 in the high half."""
    weight = torch.cat([torch.arange(16.0), 15 - torch.arange(16.0), torch.full((16,), 15.0), torch.zeros(16)])[None]
    got = quantizes(weight, "int4")
    first = [i + 16 * (15 - i) for i in range(16)]
    that("the bytes", got.numbers[0].tolist()).gives(first + [15] * 16)
    that("the minimums", got.minimum[0].tolist()).gives([0.0, 0.0])


@both
def test_halves_go_to_the_even_number(quantizes, dtype):
    """At scale 1: 0.5, 1.5, 2.5, 3.5 become 0, 2, 2, 4; 1.9 becomes 2."""
    largest = {"int8": 127.0, "int4": 15.0}[dtype]
    got = quantizes(group(largest, 0.5, 1.5, 2.5, 3.5, 1.9), dtype)
    that("the numbers", codes(got)[0, :6].tolist()).gives([int(largest), 0, 2, 2, 4, 2])


@both
def test_a_group_of_zeros(quantizes, dtype):
    """Scale 0, numbers 0, read as 0: 0 is not divided by 0. Its neighbour is unaffected."""
    weight = torch.cat([torch.zeros(1, 32), torch.randn(1, 32)], dim=1)
    got = quantizes(weight, dtype)
    that("the numbers of the group of zeros", codes(got)[0, :32].tolist()).gives([0] * 32)
    that("what it is read as", call(dequantize_groups, got).value[0, :32]).gives(torch.zeros(32))


def test_a_group_whose_scale_is_zero_in_float16(quantizes):
    """10⁻⁹ / 127 is below float16's numbers: the scale is 0, so are the numbers, and nothing is divided by 0."""
    got = quantizes(group(1e-9, -1e-9), "int8")
    that("the scale", got.scale.item()).gives(0.0)
    that("the numbers", codes(got)[0, :3].tolist()).gives([0, 0, 0])


def test_a_group_of_equal_numbers(quantizes):
    """Smallest = largest: the scale is 0, and the minimum says it all."""
    got = quantizes(torch.full((1, 32), 0.75), "int4")
    that("the numbers", codes(got)[0].tolist()).gives([0] * 32)
    that("what it is read as", call(dequantize_groups, got).value).gives(torch.full((1, 32), 0.75))


def test_a_group_far_from_zero(quantizes, is_near):
    """About 1, 0.0001 apart: float16 moves the minimum by several scales, and numbers are clamped to 0 … 15."""
    weight = 1.0006 + 0.0001 * torch.arange(32.0)[None] % 0.0015
    is_near(weight, quantizes(weight, "int4"))
    is_near(-weight, quantizes(-weight, "int4"))


def test_numbers_count_from_the_minimum_that_is_kept(quantizes):
    """float16 keeps 1.0004 as 1: with the scale 0.001, 1.0077 is 7.7 steps above that, and becomes 8, not 7."""
    weight = torch.full((1, 32), 1.0004)
    weight[0, :2] = torch.tensor([1.0154, 1.0077])
    got = quantizes(weight, "int4")
    that("the minimum", got.minimum.item()).gives(1.0)
    that("the numbers", codes(got)[0, :3].tolist()).gives([15, 8, 0])


def test_a_group_of_tiny_numbers(quantizes):
    """float16 rounds the scale 8.6 · 10⁻⁸ down to 6.0 · 10⁻⁸, its smallest number: the numbers are clamped to ±127."""
    got = quantizes(group(1.09e-5, -1.09e-5, 3e-6), "int8")
    that("the numbers", codes(got)[0, :3].tolist()).gives([127, -127, 50])


@both
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_other_dtypes(quantizes, is_near, dtype, stored):
    """All arithmetic is in float32, and the weight is not changed. It may be a parameter."""
    weight = torch.nn.Parameter(random_weight(2, 3).to(stored))
    before = weight.detach().clone()
    got = quantizes(weight, dtype)
    is_near(weight.detach(), got)
    that("the weight afterwards", weight.detach()).gives(before)
    same = quantizes(before.float(), dtype)
    that("the scales, against those of the weight in float32", got.scale.float()).gives(same.scale.float())


@both
def test_dequantize(dtype):
    """Numbers times scale, plus minimum, in float32 and in the order of the inputs."""
    scale, minimum = torch.rand(3, 2).half() + 0.5, torch.randn(3, 2).half()
    numbers = torch.randint(-127, 128, (3, 64), dtype=torch.int8), torch.randint(0, 256, (3, 32), dtype=torch.uint8)
    given = GroupQuantized(*((numbers[0], scale, None) if dtype == "int8" else (numbers[1], scale, minimum)))
    got = call(dequantize_groups, given).value
    that("its dtype", got.dtype).gives(torch.float32)
    that("the weight", got).is_close(read(given).float(), rtol=1e-5, atol=1e-5)


@both
def test_read_and_rounded_again(quantizes, dtype):
    """A weight that was read from such numbers gives the same numbers."""
    weight = random_weight(2, 3)
    first = quantizes(weight, dtype)
    again = quantizes(call(dequantize_groups, first).value, dtype)
    that("the numbers, the second time", codes(again).tolist()).gives(codes(first).tolist())


@pytest.mark.parametrize(
    ("weight", "dtype", "says"),
    [
        pytest.param(torch.zeros(2, 32), "int3", "int3", id="another dtype"),
        pytest.param(torch.zeros(2, 48), "int8", "48", id="a broken group"),
        pytest.param(torch.zeros(32), "int8", "32", id="a vector"),
        pytest.param(group(float("nan")), "int8", "", id="NaN"),
        pytest.param(group(float("-inf")), "int4", "", id="infinity"),
        pytest.param(group(1e8), "int8", "", id="too large for a scale in float16"),
        pytest.param(torch.full((1, 32), 1e5), "int4", "", id="too large for a minimum in float16"),
    ],
)
def test_what_is_refused(weight, dtype, says):
    """A ValueError, before anything unusable is returned."""
    call(quantize_groups, weight, dtype).raises(ValueError, saying=says)
