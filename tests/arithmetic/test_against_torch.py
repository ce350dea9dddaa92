"""`step_flops` against PyTorch's own count of the FLOPs that MiniGPT does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minicache.arithmetic.arithmetic import step_flops
from minicache.arithmetic.specs import MINIGPT
from minicache.cache.dense import KVCache
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT, MiniGPTConfig


@pytest.mark.parametrize(("batch_size", "context_len"), [(1, 1), (1, 200), (3, 64)])
def test_a_decode_step_of_minigpt(batch_size: int, context_len: int) -> None:
    config = MiniGPTConfig(vocab_size=Tokenizer().vocab_size)
    model = MiniGPT(config)
    cache = KVCache(config.num_layers, batch_size, config.num_kv_heads, config.max_seq_len, config.head_dim)
    # The fused attention of the CPU does its FLOPs unseen; the plain one is two matrix multiplications.
    with torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(batch_size, context_len, dtype=torch.long), cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(batch_size, 1, dtype=torch.long), cache)
    # The norms' weights are counted by us and do no matrix multiplication: less than 1 %.
    spec = replace(MINIGPT, num_parameters=sum(parameter.numel() for parameter in model.parameters()))
    assert step_flops(spec, 1, context_len, batch_size) == pytest.approx(counter.get_total_flops(), rel=0.01)
