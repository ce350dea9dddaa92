"""What a GPU's cache and weights take, of a GPU that is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from minicache.engine.llm import LLM
from minicache.engine.loading import half_on_gpu
from minicache.kernels import runtime
from minicache.model import MiniGPT

runtime.interpret_without_gpu()  # before anything imports Triton

from tests.engine.simulated_gpu import moved, simulated_gpu  # noqa: E402

BLOCK_NBYTES = 2 * 4 * 2 * 32 * 4 * 16
"""Of MiniGPT in float32: keys and values, layers, KV heads, head size, bytes, tokens."""


@pytest.fixture
def gpu_model(model: MiniGPT, monkeypatch: pytest.MonkeyPatch) -> Iterator[MiniGPT]:
    config = model.config
    assert 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * 16 == BLOCK_NBYTES
    with simulated_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        yield moved(deepcopy(model))


def with_free_memory(monkeypatch: pytest.MonkeyPatch, model: MiniGPT, num_blocks: float) -> list[tuple[int, int]]:
    """A GPU with room for so many blocks; the shapes of the forward passes that came before it was asked."""
    passes: list[tuple[int, int]] = []
    model.embed_tokens.register_forward_pre_hook(lambda module, args: passes.append(tuple(args[0].shape)))

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        assert passes, "asked before the largest step has run"
        return int(num_blocks * BLOCK_NBYTES), 10**12

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return passes


def test_the_cache_takes_what_is_left(gpu_model: MiniGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = with_free_memory(monkeypatch, gpu_model, 1000)
    options: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 100, "max_model_len": 64}
    assert LLM(gpu_model, gpu_memory_utilization=0.5, **options).scheduler.pool.num_blocks == 500
    assert LLM(gpu_model, **options).scheduler.pool.num_blocks == 900
    assert LLM(gpu_model, max_num_seqs=3, **options).scheduler.pool.num_blocks == 3 * 4  # no more than requests can use
    assert passes[0] == (2, 64)  # 100 tokens, and positions that the model has
    del passes[:]
    assert LLM(gpu_model, num_blocks=77, **options).scheduler.pool.num_blocks == 77
    assert not passes


def test_memory_for_less_than_a_request(gpu_model: MiniGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free_memory(monkeypatch, gpu_model, 4.4)
    with pytest.raises(ValueError, match="give a lower max_model_len"):
        LLM(gpu_model, enforce_eager=True, max_num_batched_tokens=64, max_model_len=64)
    LLM(gpu_model, enforce_eager=True, max_num_batched_tokens=64, max_model_len=63)


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan")])
def test_utilization_out_of_bounds(model: MiniGPT, value: float) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        LLM(model, gpu_memory_utilization=value)


@pytest.mark.parametrize(
    ("capability", "stored", "expected"),
    [
        ((7, 5), torch.float32, torch.float16),
        ((7, 5), torch.bfloat16, torch.float16),
        ((8, 0), torch.float32, torch.bfloat16),
        ((9, 0), torch.float16, torch.float16),
        ((12, 0), torch.bfloat16, torch.bfloat16),
    ],
)
def test_sixteen_bits_on_a_gpu(
    gpu_model: MiniGPT,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    stored: torch.dtype,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert half_on_gpu(gpu_model.to(stored)).norm.weight.dtype == expected


def test_the_cpu_keeps_its_dtype() -> None:
    assert LLM().model.norm.weight.dtype == torch.float32  # type: ignore[attr-defined]
