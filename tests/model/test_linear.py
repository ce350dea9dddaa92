"""Packed linear layers: quantized by group, and multiplied by rows as PyTorch does it."""

import os
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.kernels.group_quantize import dequantize_groups, quantize_groups
from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig
from minicache.model.linear import pack
from minicache.model.panels import Panels

DTYPES = [None, "int8", "int4"]
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "max_seq_len": 128}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


def a_weight(size, depth, seed=0):
    return torch.randn(size, depth, generator=torch.Generator().manual_seed(seed))


def rounded(weight, dtype):
    return weight if dtype is None else dequantize_groups(quantize_groups(weight, dtype))


# Rounding


def test_a_group_that_is_worked_out_by_hand():
    group = torch.zeros(1, 32)
    group[0, :4] = torch.tensor([12.7, -6.35, 0.04, 0.06])
    eight = quantize_groups(group, "int8")
    assert eight.numbers[0, :4].tolist() == [127, -64, 0, 1]  # 63.5 steps of 0.1 are as near to 64 as to 63: to even
    assert eight.scale.tolist() == [[pytest.approx(0.1, abs=1e-4)]]
    assert eight.minimum is None

    group = torch.arange(32.0)[None] % 16 - 3  # −3 … 12, twice
    four = quantize_groups(group, "int4")
    assert (four.scale.item(), four.minimum.item()) == (1, -3)
    assert four.numbers.tolist() == [[number | number << 4 for number in range(16)]]
    assert dequantize_groups(four).equal(group)


@pytest.mark.parametrize(("dtype", "num_steps"), [("int8", 254), ("int4", 15)])
def test_a_number_is_off_by_half_a_step_of_its_own_group(dtype, num_steps):
    weight = a_weight(50, 96) * torch.logspace(-3, 3, 50)[:, None]
    groups = weight.view(50, 3, 32)
    width = 2 * groups.abs().amax(-1) if dtype == "int8" else groups.amax(-1) - groups.amin(-1)
    error = (rounded(weight, dtype) - weight).view(50, 3, 32).abs().amax(-1)
    assert (error <= 0.51 * width / num_steps + 2e-3 * groups.abs().amax(-1) * (dtype == "int4")).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_rounded_already_is_rounded_no_further(dtype):
    once = rounded(a_weight(40, 64), dtype)
    again = rounded(once, dtype)
    assert torch.equal(once, again)
    assert rounded(torch.zeros(2, 32), dtype).equal(torch.zeros(2, 32))


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match='"int8" or "int4"; got \'int3\''):
        quantize_groups(torch.zeros(2, 32), "int3")
    with pytest.raises(ValueError, match=r"multiple of 32; got \[2, 33\]"):
        quantize_groups(torch.zeros(2, 33), "int8")
    for wrong in (torch.nan, torch.inf, 1e9):
        for dtype in ("int8", "int4"):
            with pytest.raises(ValueError, match="infinite, NaN, or too large"):
                quantize_groups(torch.full((2, 32), wrong) * torch.eye(2, 32), dtype)


# Products

SHAPES = [(97, 64, 1), (32, 32, 5), (200, 96, 12), (33, 64, 13), (5, 32, 300), (2100, 64, 31)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "depth", "num_rows"), SHAPES)
def test_products_are_those_of_pytorch(size, depth, num_rows, dtype):
    weight, rows = a_weight(size, depth), a_weight(num_rows, depth, seed=1)
    panels = Panels.of(weight, dtype=dtype)
    expected = F.linear(rows.double(), rounded(weight, dtype).double()).float()
    torch.testing.assert_close(panels.linear(rows), expected, atol=1e-4, rtol=1e-5)
    ids = torch.tensor([[0, size - 1, size // 2]])
    assert panels.rows(ids).equal(rounded(weight, dtype)[ids])
    for wrong in (-1, size):
        with pytest.raises(IndexError, match="out of range"):
            panels.rows(torch.tensor([0, wrong]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gives_the_same_bits_in_every_batch(dtype):
    panels, rows = Panels.of(a_weight(70, 64), dtype=dtype), a_weight(261, 64, seed=1)
    alone = torch.cat([panels.linear(row[None]) for row in rows])
    for size in (2, 3, 7, 12, 13, 100, 261):
        assert torch.cat([panels.linear(some) for some in rows.split(size)]).equal(alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_layers_in_one(dtype):
    weights = [a_weight(size, 64, seed) for seed, size in enumerate([40, 32, 7])]
    joined, rows = Panels.of(*weights, dtype=dtype), a_weight(3, 64, seed=9)
    parts = [Panels.of(weight, dtype=dtype).linear(rows) for weight in weights]
    assert joined.linear(rows).equal(torch.cat(parts, dim=1))
    assert [part.linear(rows).tolist() for part in joined.split()] == [part.tolist() for part in parts]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_panels(dtype):
    panels, rows = Panels.of(a_weight(4000, 640), dtype=dtype), a_weight(64, 640, seed=1)
    before, alone = torch.get_num_threads(), panels.linear(rows)
    torch.set_num_threads(3)
    try:
        assert panels.linear(rows).equal(alone)
    finally:
        torch.set_num_threads(before)


def test_threads_after_a_fork():
    """A child has none of its parent's threads: a product that waited for them would never return."""
    code = """
import os, torch
from minicache.model.panels import Panels
torch.set_num_threads(2)
panels, rows = Panels.of(torch.ones(4000, 640)), torch.ones(64, 640)
assert (panels.linear(rows) == 640).all()
if (child := os.fork()) == 0:
    os._exit(int(panels.linear(rows).numpy().min() != 640))
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_processors_with_registers_of_eight_numbers(tmp_path):
    """The tiles of a processor without AVX-512, compiled for one."""
    code = """
import llvmlite.binding, torch
llvmlite.binding.get_host_cpu_features = dict
from minicache.kernels.cpu import products
from minicache.kernels.group_quantize import dequantize_groups, quantize_groups
from minicache.model.panels import Panels
assert products.TILE_ROWS == 6
for dtype in (None, "int8", "int4"):
    weight, rows = torch.randn(75, 64), torch.randn(20, 64)
    exact = weight if dtype is None else dequantize_groups(quantize_groups(weight, dtype))
    torch.testing.assert_close(Panels.of(weight, dtype=dtype).linear(rows), rows @ exact.t(), atol=1e-4, rtol=1e-4)
"""
    narrow = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110, env=os.environ | narrow)


# Models


def a_model(kind, **options):
    torch.manual_seed(0)
    config = (MiniGPTConfig if kind is MiniGPT else DecoderConfig)(**SIZES, **HEADS, **options)
    return kind(config).eval()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MiniGPT, {}), (Decoder, {"tie_word_embeddings": True}), (Decoder, {"attention_bias": True, "mlp_bias": True})],
)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_model_of_few_bits_generates_what_one_with_the_rounded_weights_does(kind, options, dtype):
    model = a_model(kind, **options)
    reference = deepcopy(model)
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.ndim == 2 and not (name.startswith("embed") and reference.lm_head is not None):
                head = name.startswith(("embed", "lm_head"))
                weight.copy_(rounded(weight, "int8" if head else dtype))
    pack(model, dtype)
    prompts = [[5, 9, 2], [11] * 40, [3, 1, 4]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for cache in ("paged", "dense"):
        for prompt, answer in zip(prompts, LLM(model, cache=cache).generate(prompts, params), strict=True):
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(12):
                    tokens.append(int(reference(torch.tensor([tokens]))[0, -1].argmax()))
            assert answer.token_ids == tokens[len(prompt) :]


def test_weights_of_few_bits_take_few_bytes():
    weight = a_weight(320, 640)
    sizes = {
        dtype: sum(each.nbytes for each in (panels.numbers, panels.scale, panels.minimum) if each is not None)
        for dtype in DTYPES
        for panels in [Panels.of(weight, dtype=dtype)]
    }
    per_number = {dtype: 8 * size / weight.numel() for dtype, size in sizes.items()}
    assert per_number == {None: 32, "int8": 8.5, "int4": 5}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_without_numba_a_model_computes_the_same(monkeypatch, dtype):
    monkeypatch.setattr("minicache.kernels.cpu.is_available", lambda: False)
    model, packed = a_model(Decoder, tie_word_embeddings=True), a_model(Decoder, tie_word_embeddings=True)
    names = [name for name, _ in model.named_parameters()]
    pack(model)
    assert [name for name, _ in model.named_parameters()] == names
    pack(model, dtype)
    monkeypatch.undo()
    pack(packed, dtype)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), packed(tokens), atol=1e-4, rtol=1e-4)


def test_options_of_an_engine():
    assert LLM(weight_dtype="int8").generate(["Yesterday I"], SamplingParams())[0].text
    with pytest.raises(ValueError, match="the model's name or path"):
        LLM(a_model(Decoder), weight_dtype="int8")
    with pytest.raises(ValueError, match='"int8" or "int4", or be left out; got \'int2\''):
        LLM(weight_dtype="int2")
    with pytest.raises(ValueError, match="not divided among ranks"):
        LLM(weight_dtype="int8", tensor_parallel_size=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_do_not_fit_are_refused(dtype):
    panels = Panels.of(a_weight(40, 64), dtype=dtype)
    for rows in (torch.ones(3, 32), torch.ones(3, 96), torch.ones(3, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"rows must be float32 \[…, 64\]; got torch"):
            panels.linear(rows)


def test_rows_that_are_not_contiguous_and_no_rows():
    panels = Panels.of(a_weight(40, 32))
    rows = a_weight(32, 6, seed=2).t()
    np.testing.assert_allclose(panels.linear(rows), F.linear(rows, a_weight(40, 32)), rtol=1e-4, atol=1e-4)
    assert panels.linear(torch.zeros(0, 32)).shape == (0, 40)
