"""Models without memory, and what building them must not cost."""

from __future__ import annotations

import subprocess
import sys

import torch

from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig
from minicache.model.assembling import assemble, without_memory

SIZES = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
DECODER = DecoderConfig(**SIZES, intermediate_size=12, max_seq_len=20, qk_norm=True, mlp_bias=True)


def test_a_model_without_memory_has_its_shapes_and_takes_its_weights():
    model = Decoder(DECODER)
    with without_memory():
        empty = Decoder(DECODER)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert {name: each.shape for name, each in empty.named_parameters()} == {
        name: each.shape for name, each in model.named_parameters()
    }
    made = assemble(empty, model.state_dict().items())
    token_ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(made(token_ids), model.eval()(token_ids))
    assert torch.equal(torch.ones(2), torch.tensor([1.0, 1.0]))  # nothing outside is changed


def test_building_without_memory_does_not_import_dynamo():
    """It takes a second and 145 MiB. In a process of its own: another test may have imported it."""
    code = f"""
import sys
from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig
from minicache.model.assembling import without_memory
with without_memory():
    Decoder({DECODER!r})
    MiniGPT({MiniGPTConfig(**SIZES)!r})
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_tables_are_computed_where_weights_are_not():
    with without_memory():
        empty = MiniGPT(MiniGPTConfig(**SIZES))
    assert torch.equal(empty.cos, MiniGPT(MiniGPTConfig(**SIZES)).cos)
