"""benchmarks/kv_quantization.py: errors and bytes on a few tokens. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import kv_quantization as benchmark

from minicache.model import MiniGPT


@pytest.fixture
def text(model: MiniGPT, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(benchmark, "NUM_TEXT", 64)
    monkeypatch.setattr(benchmark, "NUM_PROMPTS", 1)
    return benchmark.prompts_of(model)[0]


def test_errors_add_up_from_layer_to_layer(model: MiniGPT, text: list[int]) -> None:
    """Before the first layer nothing was rounded; int8 has finer steps than e4m3, and both have some."""
    layers = benchmark.errors_by_layer(model, text)
    assert [each["layer"] for each in layers] == list(range(model.config.num_layers))
    for name in ("int8", "fp8_e4m3"):
        assert layers[0][f"{name}_own"] == layers[0][f"{name}_carried"] > 0
    for each in layers:
        assert each["int8_own"] < each["fp8_e4m3_own"] < 1 / 16


def test_bytes_are_36_of_128(model: MiniGPT) -> None:
    found = benchmark.bytes_per_token(model)
    assert found["int8"] / found["float32"] == 36 / 128
    assert found["times_int8"] == round(128 / 36, 2)


def test_a_scale_for_a_block_depends_on_how_it_was_filled(model: MiniGPT, text: list[int]) -> None:
    for found in benchmark.scales_by_block(model, text).values():
        assert found["error_by_row"] < found["error_at_once"] < found["error_one_by_one"]
        assert 0 < found["share_that_differs"] < 0.5


def test_the_first_row_of_a_block_is_rounded_as_if_it_were_alone() -> None:
    """Then a row twice as large makes the scale twice as large, and what was there is rounded again."""
    blocks = torch.zeros(1, benchmark.BLOCK_SIZE, 2)
    blocks[0, 0], blocks[0, 1] = torch.tensor([127.0, 3.0]), torch.tensor([254.0, 0.0])
    numbers, scale = benchmark.filled_one_by_one(blocks, torch.int8)
    assert scale.tolist() == [2.0]
    assert numbers[0, :2].tolist() == [[64, 2], [127, 0]]  # 63.5 and 1.5, to even
