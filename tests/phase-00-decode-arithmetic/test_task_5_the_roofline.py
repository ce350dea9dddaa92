"""Phase 0, task 5: the roofline, its ridge, and the time of a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.arithmetic import specs
from minicache.arithmetic.arithmetic import attainable_flops, is_memory_bound, ridge_point, step_seconds
from minicache.arithmetic.specs import Accelerator
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

TIMES = one_of(1, [2, 4, 8, 16])  # under a secret seed, the accelerators are so many times as fast
TOY = Accelerator("toy", memory_bytes=1024, bandwidth=TIMES * 4.0, peak_flops=TIMES * 32.0)  # its ridge: 8 FLOP/byte

rates = st.floats(1e-3, 1e15)
amounts = st.floats(1e-3, 1e15)
accelerators = st.builds(Accelerator, st.just("any"), st.just(1), bandwidth=rates, peak_flops=rates)


@pytest.mark.parametrize(
    ("accelerator", "ridge"),
    [
        (specs.A100_40GB, 200.64),
        (specs.A100_80GB, 153.02),
        (specs.H100, 295.22),
        (specs.H200, 206.04),
        (specs.L4, 403.33),
        (specs.LAPTOP_CPU, 10.0),
        (TOY, 8.0),
    ],
    ids=lambda value: value.name if isinstance(value, Accelerator) else None,
)
def test_ridge_points(accelerator: Accelerator, ridge: float) -> None:
    """Peak FLOP/s divided by bytes/s."""
    bandwidth, peak_flops = TIMES * accelerator.bandwidth, TIMES * accelerator.peak_flops
    call(ridge_point, replace(accelerator, bandwidth=bandwidth, peak_flops=peak_flops)).is_near(ridge, 1e-4)


@pytest.mark.parametrize(
    ("intensity", "flops"), [(1, 4.0), (0.25, 1.0), (7.5, 30.0), (8, 32.0), (9, 32.0), (1000, 32.0)]
)
def test_the_roofline_rises_and_then_is_flat(intensity: float, flops: float) -> None:
    """4 bytes/s and 32 FLOP/s: 4 FLOP/s for each FLOP/byte, up to 32."""
    call(attainable_flops, TOY, intensity).is_close(TIMES * flops, rtol=1e-12, atol=0)


def test_decode_on_an_a100_reaches_half_a_percent_of_its_peak() -> None:
    """Decode at batch 1 is limited by the bandwidth: of the two rates the lower one holds."""
    call(attainable_flops, specs.A100_40GB, 1.0).is_close(1.555e12, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("flops", "nbytes", "seconds"), [(32, 1, 1.0), (1, 4, 1.0), (64, 4, 2.0), (32, 12, 3.0), (32, 4, 1.0)]
)
def test_a_step_takes_the_longer_of_the_two_times(flops: float, nbytes: float, seconds: float) -> None:
    """4 bytes/s and 32 FLOP/s: reading and computing overlap, and the longer of the two counts."""
    call(step_seconds, TOY, TIMES * flops, TIMES * nbytes).is_close(seconds, rtol=1e-12, atol=0)


def test_a_token_of_llama_3_8b_takes_10_ms_on_an_a100() -> None:
    """A token of Llama-3-8B takes 10 ms on an A100: the longer of the two times, not their sum."""
    call(step_seconds, specs.A100_40GB, 16_061_046_784, 16_060_653_568).is_near(0.010328, 1e-3)


@pytest.mark.parametrize(("intensity", "bound"), [(0.1, True), (7.99, True), (8, False), (8.01, False), (500, False)])
def test_memory_bound_is_left_of_the_ridge(intensity: float, bound: bool) -> None:
    """The ridge is at 8 FLOP/byte: work below it is memory-bound, work exactly at it is not."""
    call(is_memory_bound, TOY, intensity).gives(bound)


@given(accelerator=accelerators, intensity=amounts)
def test_nothing_lies_above_either_line(accelerator: Accelerator, intensity: float) -> None:
    """Any accelerator: the lower of peak and bandwidth · intensity."""
    roof = call(attainable_flops, accelerator, intensity).value
    lines = sorted([accelerator.peak_flops, accelerator.bandwidth * intensity])
    that(f"attainable_flops({accelerator}, {intensity})", roof).is_close(lines[0], rtol=1e-9, atol=0)


@given(accelerator=accelerators, flops=amounts, nbytes=amounts)
def test_time_times_attainable_rate_is_the_work(accelerator: Accelerator, flops: float, nbytes: float) -> None:
    """Any step: its seconds times the attainable rate are its FLOPs."""
    seconds = call(step_seconds, accelerator, flops, nbytes).value
    rate = min(accelerator.peak_flops, accelerator.bandwidth * flops / nbytes)
    that(f"FLOPs done in the seconds of step_seconds({accelerator}, {flops}, {nbytes})", seconds * rate).is_close(
        flops, rtol=1e-9, atol=0
    )


@given(accelerator=accelerators, factor=st.floats(1.001, 1000))
def test_the_ridge_divides_the_two_sides(accelerator: Accelerator, factor: float) -> None:
    """Any accelerator: memory-bound just below its ridge, and not just above."""
    ridge = accelerator.peak_flops / accelerator.bandwidth
    call(ridge_point, accelerator).is_close(ridge, rtol=1e-12, atol=0)
    call(is_memory_bound, accelerator, ridge / factor).gives(True)
    call(is_memory_bound, accelerator, ridge * factor).gives(False)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf")])
def test_impossible_amounts_are_refused(wrong: float) -> None:
    """An intensity, FLOPs or bytes of 0, negative, NaN or infinite: ValueError."""
    call(attainable_flops, TOY, wrong).raises(ValueError)
    call(is_memory_bound, TOY, wrong).raises(ValueError)
    call(step_seconds, TOY, wrong, 1.0).raises(ValueError)
    call(step_seconds, TOY, 1.0, wrong).raises(ValueError)


@pytest.mark.parametrize("wrong", ["8", None])
def test_amounts_that_are_no_numbers_are_refused(wrong: object) -> None:
    """A string or None: TypeError."""
    call(attainable_flops, TOY, wrong).raises(TypeError)
    call(is_memory_bound, TOY, wrong).raises(TypeError)
    call(step_seconds, TOY, wrong, 1.0).raises(TypeError)
    call(step_seconds, TOY, 1.0, wrong).raises(TypeError)
