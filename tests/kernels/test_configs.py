"""Which launches have a configuration, which are refused, and that the committed table of what they take is theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minicache import kernels
from minicache.errors import KernelUnavailableError
from minicache.kernels import configs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT8, FP8 = torch.int8, torch.float8_e4m3fn
CUDA = torch.device("cuda")
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "int8": INT8, "fp8 (e4m3)": FP8}
COMPILED = json.loads((Path(__file__).parents[2] / "benchmarks/results/compiled.json").read_text(encoding="utf-8"))
LAUNCHES = [each for table in COMPILED["launches"].values() for each in table]


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), 75),
        ((8, 0), 80),
        ((8, 6), 86),
        ((8, 7), 86),
        ((8, 9), 89),
        ((9, 0), 90),
        ((10, 3), 100),
        ((11, 0), 100),
        ((12, 1), 120),
    ],
)
def test_a_gpu_takes_its_own_configurations_or_the_next_older_ones(monkeypatch, capability, arch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert configs.architecture(CUDA) == arch


def test_a_gpu_older_than_all_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(KernelUnavailableError, match=r"compute capability 7\.5 and later; this one has 7\.0"):
        configs.architecture(CUDA)


@pytest.mark.parametrize(
    ("launch", "saying"),
    [
        (
            ("prefill", 90, BF16, BF16, 576, 8),
            "prefill kernel on sm_90.*head_dim 576 is too large, 512 at most; a larger",
        ),
        (("prefill", 80, BF16, BF16, 576, 8), "at least 192 KB of shared memory, and a program has 163 KB"),
        (("decode", 80, FP32, FP32, 576, 8), "512 at most; its tiles take at least 320 KB of shared memory"),
        (("prefill", 86, FP16, FP16, 512, 8), "256 at most; its tiles take at least 128 KB .* a program has 99 KB"),
        (("decode", 90, FP32, INT8, 64, 8), "on sm_90, torch.float32 over torch.int8.*queries are bfloat16 or float16"),
        (("decode", 90, FP64, FP64, 64, 8), "torch.float64 over torch.float64"),
        (("prefill", 90, FP32, FP32, 128, 48), "48 query heads per key/value head are too many, 32 at most"),
        (("decode", 80, FP32, FP32, 128, 48), "48 query heads per key/value head are too many, 32 at most"),
    ],
)
def test_what_cannot_be_launched_is_refused_by_name(launch, saying):
    with pytest.raises(KernelUnavailableError, match=saying):
        configs.choose(*launch)


@pytest.mark.parametrize("arch", [75, 80, 86])
def test_fp8_is_refused_before_it_has_instructions(arch):
    with pytest.raises(
        KernelUnavailableError, match=rf"float8_e4m3fn .* 8\.9 or later; this one is an sm_{arch}: store int8"
    ):
        configs.require_storable(arch, FP8)
    configs.require_storable(arch, INT8)
    configs.require_storable(89, FP8)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_large_group_fits_into_one_program(arch):
    for group, rows in ((1, 16), (16, 16), (17, 32), (71, 128)):
        assert configs.choose("decode", arch, BF16, BF16, 64, group).rows == rows


@pytest.mark.parametrize("launch", [(FP32, FP8, 576, 8), (FP64, FP64, 64, 300), (BF16, BF16, 5, 1)])
def test_the_interpreter_runs_anything(launch):
    for kernel in ("decode", "prefill"):
        config = configs.choose(kernel, configs.architecture(torch.device("cpu")), *launch)
        assert config.rows >= launch[3]
    configs.require_storable(configs.INTERPRETER, FP8)


def test_attention_is_refused_before_anything_is_launched(device, monkeypatch):
    """By the functions that users call, on a GPU that PyTorch says is there."""
    monkeypatch.setattr(configs, "architecture", lambda device: 86)
    cache = torch.zeros(2, 16, 1, 576, dtype=FP16, device=device)
    q, table, lens = (
        cache[0, :1, :],
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.ones(1, device=device).int(),
    )
    with pytest.raises(KernelUnavailableError, match="head_dim 576 is too large"):
        kernels.paged_decode_attention(q, cache, cache, table, lens, backend="triton")
    eighth = cache.to(FP8)
    with pytest.raises(KernelUnavailableError, match="float8_e4m3fn"):
        kernels.store_kv(eighth[0], eighth[0], eighth, eighth, torch.arange(16, device=device), backend="triton")


def test_no_more_splits_than_the_merge_can_hold(device):
    cache = torch.zeros(2, 16, 1, 16, device=device)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, device=device).int()
    with pytest.raises(ValueError, match=r"num_splits must be 1 … 64.*got 65"):
        kernels.paged_decode_attention(cache[0, :1], cache, cache, table, lens, num_splits=65, backend="triton")


# The committed table


def attention():
    return [each for each in LAUNCHES if each["kernel"] in ("decode_kernel", "split_kernel", "prefill_kernel")]


def test_the_table_is_of_these_configurations():
    """Else run `python -m benchmarks.compiled`."""
    for each in attention():
        kernel = "prefill" if each["kernel"] == "prefill_kernel" else "decode"
        arch = int(each["architecture"].removeprefix("sm_"))
        config = configs.choose(kernel, arch, DTYPES[each["queries"]], DTYPES[each["cache"]], each["head_dim"], 8)
        assert (each["rows"], each["tile"], each["stages"]) == (config.rows, config.tile, config.num_stages), each
        assert each["threads"] == 32 * config.num_warps, each
    for arch in configs.SHARED_KB:
        assert any(each["architecture"] == f"sm_{arch}" for each in attention())


def test_no_launch_spills_and_all_fit():
    for each in LAUNCHES:
        arch = int(each["architecture"].removeprefix("sm_"))
        assert each["spilled"] == 0, each
        assert each["shared"] <= configs.SHARED_KB[arch] << 10, each
        assert each["registers"] * each["threads"] <= 64 << 10, each


def test_processors_hold_two_decode_programs():
    """One loads while the other computes: see `minicache.kernels.split_kv.PROGRAMS_PER_PROCESSOR`."""
    for each in attention():
        if (
            each["architecture"] in ("sm_80", "sm_90", "sm_100")
            and each["head_dim"] <= 128
            and each["kernel"] != "prefill_kernel"
        ):
            arch = int(each["architecture"].removeprefix("sm_"))
            assert 2 * (each["shared"] + 1024) <= (configs.SHARED_KB[arch] + 1) << 10, each
            assert 2 * each["registers"] * each["threads"] <= 64 << 10, each
