"""What a step costs: the roofline is phase 0's, the host's is what was measured, and a file that is none is refused."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from minicache.arithmetic.arithmetic import cache_bytes_per_token, step_bytes, step_flops, step_seconds
from minicache.arithmetic.specs import A100_40GB, DEEPSEEK_V3, H100, LLAMA_3_8B, OPT_13B
from minicache.simulator.costs import (
    PCIE_BANDWIDTH,
    FixedCost,
    HostCost,
    RooflineCost,
    StepLoad,
    decode_ends,
    kv_token_bytes,
)

HOST = HostCost(
    machine="a laptop",
    model="MiniGPT",
    fixed=0.003,
    together=0.0005,
    per_sequence=1e-4,
    per_new_token=2e-5,
    per_cached_token=1e-6,
    per_prefill=3e-4,
    per_prefill_pair=1e-7,
    per_swapped_token=2e-6,
)


def test_the_sums_of_a_batch():
    """A prompt of 4, two chunks of it cached already in the second case, and a decode after 10 tokens."""
    assert StepLoad.of([(4, 0), (1, 10)]) == StepLoad(2, 5, 10, 10 + 11, 1)
    assert StepLoad.of([(2, 4), (1, 10)]) == StepLoad(2, 3, 14, (5 + 6) + 11, 1)
    assert StepLoad.of([(1, 7), (1, 9)]).num_prefill_pairs == 0
    assert StepLoad.of([(3, 0)]).num_prefill_pairs == 1 + 2 + 3 - 1
    assert StepLoad.of([]) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("model", [OPT_13B, LLAMA_3_8B, DEEPSEEK_V3])
@pytest.mark.parametrize(("new", "cached", "batch"), [(1, 0, 1), (1, 500, 30), (700, 0, 1), (64, 300, 8), (2000, 0, 4)])
def test_the_roofline_of_equal_requests_is_that_of_phase_0(model, new, cached, batch):
    cost = RooflineCost(model, A100_40GB, flops_efficiency=1.0, bandwidth_efficiency=1.0, overhead_seconds=0.0)
    flops, nbytes = step_flops(model, new, cached, batch), step_bytes(model, new, cached, batch)
    expected = step_seconds(A100_40GB, flops, nbytes)
    assert cost.step_seconds(StepLoad.of([(new, cached)] * batch)) == pytest.approx(expected)


def test_efficiency_and_overhead():
    """A decode waits for the memory, a long prefill for the processor; both pay the overhead."""
    ideal = RooflineCost(OPT_13B, H100, flops_efficiency=1.0, bandwidth_efficiency=1.0, overhead_seconds=0.0)
    real = RooflineCost(OPT_13B, H100, flops_efficiency=0.5, bandwidth_efficiency=0.8, overhead_seconds=0.01)
    decode, prefill = StepLoad.of([(1, 300)]), StepLoad.of([(2000, 0)])
    assert real.step_seconds(decode) == pytest.approx(ideal.step_seconds(decode) / 0.8 + 0.01)
    assert real.step_seconds(prefill) == pytest.approx(ideal.step_seconds(prefill) / 0.5 + 0.01)
    assert RooflineCost(OPT_13B, H100, dtype="int8").step_seconds(decode) < real.step_seconds(decode)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_a_quantized_cache_by_hand(kv_cache_dtype):
    """OPT-13B: 40 layers, 40 heads of 128, keys and values: 128 bytes a row instead of 256, and 4 for its scale."""
    assert kv_token_bytes(OPT_13B) == 2 * 40 * 40 * 256
    assert kv_token_bytes(OPT_13B, kv_cache_dtype=kv_cache_dtype) == 2 * 40 * 40 * (128 + 4)
    assert kv_token_bytes(DEEPSEEK_V3, kv_cache_dtype=kv_cache_dtype) == 61 * (576 + 4)
    ideal = {"bandwidth_efficiency": 1.0, "overhead_seconds": 0.0}
    cost = RooflineCost(OPT_13B, A100_40GB, kv_cache_dtype=kv_cache_dtype, **ideal)
    plain = RooflineCost(OPT_13B, A100_40GB, **ideal)
    load = StepLoad.of([(1, 399)] * 30)
    saved = 30 * 400 * 2 * 40 * 40 * (256 - 132) / 1.555e12
    assert plain.step_seconds(load) - cost.step_seconds(load) == pytest.approx(saved)
    assert cost.swap_seconds(10) == pytest.approx(plain.swap_seconds(10) * 132 / 256)


def test_an_unknown_cache_is_refused():
    with pytest.raises(ValueError, match="int8 or fp8_e4m3"):
        RooflineCost(OPT_13B, A100_40GB, kv_cache_dtype="int4")


def test_a_swap_is_bytes_over_pcie():
    cost = RooflineCost(OPT_13B, A100_40GB, bandwidth_efficiency=0.5)
    assert cost.swap_seconds(100) == pytest.approx(100 * cache_bytes_per_token(OPT_13B) / (0.5 * PCIE_BANDWIDTH))
    assert pytest.approx(31.5e9, rel=0.01) == PCIE_BANDWIDTH


@pytest.mark.parametrize("option", ["flops_efficiency", "bandwidth_efficiency", "overhead_seconds"])
def test_what_no_machine_can_do_is_refused(option):
    with pytest.raises(ValueError, match=option):
        RooflineCost(OPT_13B, A100_40GB, **{option: -0.1})
    if option != "overhead_seconds":
        with pytest.raises(ValueError, match=option):
            RooflineCost(OPT_13B, A100_40GB, **{option: 1.1})


@pytest.mark.parametrize("cost", [RooflineCost(LLAMA_3_8B, A100_40GB), RooflineCost(LLAMA_3_8B, H100), FixedCost(0.5)])
@pytest.mark.parametrize(("num", "cached"), [(1, 0), (24, 9000), (700, 100_000)])
def test_the_ends_of_many_decode_steps_to_the_last_bit(cost, num, cached):
    now, ends = 3.7, []
    for step in range(40):
        before = cached + step * num
        now += cost.step_seconds(StepLoad(num, num, before, before + num, 0))
        ends.append(now)
    assert decode_ends(cost, 3.7, num, cached, 40) == ends
    assert decode_ends(cost, 3.7, num, cached, 0) == []


def test_a_clock_that_counts_steps():
    assert FixedCost(2.0).step_seconds(StepLoad.of([(5, 5)])) == 2.0
    assert FixedCost().swap_seconds(10) == 0.0
    with pytest.raises(ValueError, match="seconds"):
        FixedCost(0.0)


# The host


def test_the_host_adds_up_what_is_in_the_batch():
    load = StepLoad.of([(100, 0), (1, 50), (1, 70)])
    seconds = 0.003 + 0.0005 + 3e-4 + 102 * 2e-5 + 120e-6 + 3e-4 + (5050 - 1) * 1e-7
    assert HOST.step_seconds(load) == pytest.approx(seconds)
    assert HOST.step_seconds(StepLoad.of([(1, 3)])) == pytest.approx(0.003 + 1e-4 + 2e-5 + 3e-6)
    assert HOST.swap_seconds(1000) == pytest.approx(0.002)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "new" / "calibration.json"
    HOST.save(file)
    assert HostCost.load(file) == HOST


@pytest.mark.parametrize(
    ("text", "saying"),
    [
        ("{", "no calibration"),
        ("[]", "it needs"),
        ("{}", "it needs machine, model, fixed"),
        (json.dumps(asdict(HOST) | {"more": 1}), "nothing else"),
        (json.dumps(asdict(HOST) | {"fixed": -1}), "fixed must be seconds"),
        (json.dumps(asdict(HOST) | {"fixed": "1"}), "fixed must be seconds"),
        (json.dumps(asdict(HOST) | {"together": True}), "together must be seconds"),
        (json.dumps(asdict(HOST) | {"together": float("nan")}), "together must be seconds"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text, saying):
    file = tmp_path / "calibration.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=saying):
        HostCost.load(file)


def test_the_fit_finds_what_the_measurements_were_made_with():
    """Steps of a known host, each 2 % off: coefficients and predictions come back, and none is negative."""
    from minicache_cli.calibrate import Measurement, fit

    host, rng, loads = HOST, random.Random(0), []
    for batch in (1, 2, 8, 32):
        for length in (4, 50, 300):
            loads += [StepLoad.of([(length, 0)] * batch), StepLoad.of([(1, length)] * batch)]
            loads.append(StepLoad.of([(length, 0)] + [(1, 2 * length)] * batch))
    measured = [Measurement(load, host.step_seconds(load) * rng.uniform(0.98, 1.02)) for load in loads]
    found = fit(measured, per_swapped_token=2e-6)
    assert found.per_new_token == pytest.approx(host.per_new_token, rel=0.2)
    assert found.together == pytest.approx(host.together, rel=0.5)
    for load in loads:
        assert found.step_seconds(load) == pytest.approx(host.step_seconds(load), rel=0.06)
    backwards = replace(HOST, per_new_token=-1e-5, per_prefill_pair=-1e-8)
    numbers = fit([Measurement(load, max(1e-3, backwards.step_seconds(load))) for load in loads], 0.0)
    assert min(value for value in asdict(numbers).values() if not isinstance(value, str)) >= 0
