"""Folders: what is read of them, and what is refused, by which words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minicache.errors import CheckpointError, UnsupportedModelError
from minicache.model import Decoder, decoder_config, load_folder
from minicache.model.decoder import LinearScaling, Llama3Scaling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}


EVERY_OTHER = ["sliding_attention", "full_attention"] * 2


def config(**values):
    return {**LLAMA, **values}


def family(name, **values):
    return config(architectures=[f"{name}ForCausalLM"], **values)


# What config.json says


def test_a_config_as_older_transformers_wrote_it():
    """Llama 3.2 1B's, shortened to four layers."""
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    got = decoder_config(
        config(
            head_dim=64, tie_word_embeddings=True, torch_dtype="bfloat16", rope_scaling=scaling, eos_token_id=128001
        ),
        {"eos_token_id": [128001, 128009]},
    )
    assert (got.vocab_size, got.hidden_size, got.intermediate_size) == (128256, 2048, 8192)
    assert (got.num_layers, got.num_heads, got.num_kv_heads, got.head_dim) == (4, 32, 8, 64)
    assert (got.max_seq_len, got.norm_eps, got.rope_theta) == (131072, 1e-5, 500000.0)
    assert got.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert got.tie_word_embeddings
    assert (got.attention_bias, got.output_bias, got.mlp_bias, got.qk_norm) == (False,) * 4
    assert got.sliding_windows == (None,) * 4
    assert got.end_token_ids == (128001, 128009)


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({"rope_theta": None}, 10_000.0, None),
        ({"rope_scaling": None}, 500_000.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 500_000.0, LinearScaling(2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9.0}}, 9.0, LinearScaling(4.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            500_000.0,
            Llama3Scaling(8.0, 1.0, 4.0, 131072),
        ),
    ],
    ids=str,
)
def test_both_spellings_of_rope(values, theta, scaling):
    got = decoder_config(config(**values))
    assert (got.rope_theta, got.rope_scaling) == (theta, scaling)


def test_what_a_config_leaves_out():
    values = config()
    del values["num_key_value_heads"], values["rms_norm_eps"], values["rope_theta"]
    got = decoder_config(values)
    assert (got.num_kv_heads, got.head_dim, got.norm_eps, got.rope_theta) == (32, 64, 1e-6, 10_000.0)
    assert decoder_config(family("Qwen3")).head_dim == 128
    assert not got.tie_word_embeddings
    assert got.end_token_ids == ()


@pytest.mark.parametrize(
    ("values", "biases", "qk_norm"),
    [
        (config(attention_bias=True), (True, True, False), False),
        (config(mlp_bias=True), (False, False, True), False),
        (family("Mistral", attention_bias=True, mlp_bias=True), (False, False, False), False),
        (family("Qwen2"), (True, False, False), False),
        (family("Qwen3"), (False, False, False), True),
        (family("Qwen3", attention_bias=True), (True, True, False), True),
    ],
    ids=str,
)
def test_what_a_family_has(values, biases, qk_norm):
    got = decoder_config(values)
    assert (got.attention_bias, got.output_bias, got.mlp_bias) == biases
    assert got.qk_norm == qk_norm


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_gemma_3_as_it_was_published():
    got = decoder_config(GEMMA_3_1B)
    assert (got.num_heads, got.num_kv_heads, got.head_dim, got.max_seq_len) == (4, 1, 256, 32768)
    assert (got.rope_theta, got.local_rope_theta, got.rope_scaling) == (1e6, 1e4, None)
    assert (got.activation, got.query_scale, got.tie_word_embeddings, got.qk_norm) == ("gelu_tanh", 1 / 16, True, True)
    assert [layer for layer, window in enumerate(got.sliding_windows) if window is None] == [5, 11, 17, 23]
    assert set(got.sliding_windows) == {None, 512}


def test_gemma_3_as_transformers_writes_it():
    values = GEMMA_3_1B | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 13,
    }
    for name in ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern"):
        del values[name]
    got = decoder_config(values)
    assert (got.rope_theta, got.local_rope_theta, got.rope_scaling) == (2e6, 3e4, LinearScaling(8.0))
    assert got.sliding_windows == (512, None) * 13


def test_what_gemma_3_leaves_out():
    left_out = ("head_dim", "num_key_value_heads", "max_position_embeddings", "query_pre_attn_scalar", "sliding_window")
    got = decoder_config({name: value for name, value in GEMMA_3_1B.items() if name not in left_out})
    assert (got.head_dim, got.num_kv_heads, got.max_seq_len, got.query_scale) == (256, 4, 131072, 1 / 16)
    assert got.sliding_windows[0] == 4096


@pytest.mark.parametrize(
    ("values", "saying"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported; supported: None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu', which is not supported"),
        ({"sliding_window": None}, "sliding_window is None, which is not supported; supported: a number of tokens"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures is"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention is",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.rope_type"),
    ],
    ids=str,
)
def test_what_of_gemma_3_is_not_supported(values, saying):
    with pytest.raises(UnsupportedModelError, match=re.escape(saying)):
        decoder_config(GEMMA_3_1B | values)


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (config(sliding_window=9), [None] * 4),
        (family("Mistral", sliding_window=9), [9] * 4),
        (family("Mistral", sliding_window=None), [None] * 4),
        (family("Mistral"), [4096] * 4),
        (family("Qwen2", sliding_window=9, max_window_layers=1), [None] * 4),
        (family("Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1), [None, 9, 9, 9]),
        (family("Qwen2", use_sliding_window=True, sliding_window=9), [None] * 4),
        (
            family(
                "Qwen3",
                use_sliding_window=True,
                sliding_window=9,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            [9, None, 9, None],
        ),
    ],
    ids=str,
)
def test_who_has_a_window(values, windows):
    assert list(decoder_config(values).sliding_windows) == windows


@pytest.mark.parametrize(
    ("values", "generation", "ids"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [4, 2, 4]}, (4, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 5}, (5,)),
    ],
    ids=str,
)
def test_end_tokens(values, generation, ids):
    assert decoder_config(config(**values), generation).end_token_ids == ids


@pytest.mark.parametrize(
    ("values", "saying"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is ['GPT2LMHeadModel']"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "supported: default, linear, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is 'gptq'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types is 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is 'sliding_attention'"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "layer_types": EVERY_OTHER,
            },
            "one kind for all layers",
        ),
    ],
    ids=str,
)
def test_what_is_not_supported(values, saying):
    with pytest.raises(UnsupportedModelError, match=re.escape(saying)):
        decoder_config(config(**values))


@pytest.mark.parametrize(
    ("values", "saying"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive whole number; it is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number"),
        ({"vocab_size": "many"}, "vocab_size must be a positive whole number; it is 'many'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,024; it is 1,000,000,000"),
        ({"hidden_size": 10**19}, "hidden_size must be at most 1,048,576"),
        ({"head_dim": 10**9}, "head_dim must be at most 1,048,576"),
        ({"vocab_size": 2**63}, "vocab_size must be at most 1,048,576"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be at most 4,294,967,296"),
        ({"eos_token_id": 10**30}, "eos_token_id must be a token id"),
        ({"eos_token_id": [2, 2**31]}, "eos_token_id must be a token id"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor must be a positive number; it is None"),
        (
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            },
            "high_freq_factor must be more",
        ),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"attention_bias": "no"}, "attention_bias must be true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types must name one kind for each of 4 layers"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1}, "max_window"),
    ],
    ids=str,
)
def test_what_no_model_can_have(values, saying):
    with pytest.raises(CheckpointError, match=re.escape(saying)) as raised:
        decoder_config(config(**values))
    assert not isinstance(raised.value, UnsupportedModelError)


# What the files hold


def tensors_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def change(path: Path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_tensors(folder: Path, **tensors):
    """Write tensors, by their names with "/" for "."; None takes one away."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **{name.replace("/", "."): tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, path, {"format": "pt"})


def test_shards_are_the_single_file(save):
    single, sharded = (load_folder(save("qwen3", head_dim=16, max_shard_size=size).folder) for size in ("5GB", "20KB"))
    assert len(list(save("qwen3", head_dim=16, max_shard_size="20KB").folder.glob("*.safetensors"))) > 3
    assert tensors_of(single).keys() == tensors_of(sharded).keys()
    assert all(torch.equal(tensor, tensors_of(sharded)[name]) for name, tensor in tensors_of(single).items())


def test_parameter_names_are_those_of_transformers(save):
    saved = save("llama", attention_bias=True, mlp_bias=True)
    ours = {name if name.startswith("lm_head") else f"model.{name}" for name in load_folder(saved.folder).state_dict()}
    assert ours == set(saved.theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_is_the_folders(save, dtype):
    folder = save("llama", dtype=dtype, fresh=True).folder
    assert {tensor.dtype for tensor in load_folder(folder).state_dict().values()} == {dtype}
    values = json.loads((folder / "config.json").read_text())
    values["torch_dtype"] = values.pop("dtype")  # the older spelling
    (folder / "config.json").write_text(json.dumps(values))
    assert load_folder(folder).norm.weight.dtype == dtype
    del values["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(values))
    assert load_folder(folder).norm.weight.dtype == dtype


def test_the_weights_are_no_part_of_the_file(save):
    """A folder may be deleted or written to while the model runs."""
    folder = save("llama", fresh=True).folder
    model = load_folder(folder)
    before = tensors_of(model)
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux says how much memory was in use")
def test_there_are_never_two_copies_of_the_weights(save, tmp_path):
    """100 MiB of bfloat16, loaded as bfloat16: with a second copy somewhere, of the file's pages too, it were 200."""
    values = config(hidden_size=512, intermediate_size=2816, vocab_size=512, num_hidden_layers=10, head_dim=16)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(decoder_config(values)).state_dict().items()}
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors").stat().st_size
    assert weights > 90 * 2**20
    code = f"""
from pathlib import Path
from minicache.model import load_folder
def used(what):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(what)) * 1024
load_folder({str(save("llama").folder)!r})  # a small one, so all code that it takes is in memory
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = used("VmRSS")
model = load_folder({str(tmp_path)!r})
print((used("VmHWM") - before) / {weights})
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.6


def test_what_older_transformers_wrote_without_need(save):
    saved = save("llama", tie_word_embeddings=True, fresh=True)
    embedding = load_file(saved.folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(
        saved.folder,
        **{"lm_head/weight": embedding.clone(), "model/layers/0/self_attn/rotary_emb/inv_freq": torch.ones(6)},
    )
    model = load_folder(saved.folder)
    assert model.lm_head is None
    token_ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids), saved.logits(token_ids), atol=1e-4, rtol=1e-4)
    change_tensors(saved.folder, **{"lm_head/weight": embedding + 1})
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        load_folder(saved.folder)


def test_the_end_tokens_of_the_folder(save):
    folder = save("llama", eos_token_id=7, fresh=True).folder
    assert load_folder(folder).config.end_token_ids == (7,)
    change(folder / "generation_config.json", eos_token_id=[8, 9])
    assert load_folder(folder).config.end_token_ids == (8, 9)


def take_away(name):
    return lambda folder: (folder / name).unlink()


def cut(name):
    def do(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])

    return do


def as_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def stored_as(dtype):
    return lambda folder: change_tensors(folder, **{"model/norm/weight": torch.ones(48).to(dtype)})


@pytest.mark.parametrize(
    ("break_it", "error", "saying"),
    [
        (take_away("config.json"), CheckpointError, "has no config.json: is it the folder of a model?"),
        (lambda folder: (folder / "config.json").write_text("{"), CheckpointError, "config.json cannot be read"),
        (
            lambda folder: (folder / "config.json").write_text("[" * 10**5),
            CheckpointError,
            "config.json cannot be read",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), CheckpointError, "must hold a JSON object"),
        (take_away("model.safetensors"), CheckpointError, "has neither model.safetensors nor model.safetensors.index"),
        (as_pickle, UnsupportedModelError, "pickle, pytorch_model.bin, and loading one can run code"),
        (cut("model.safetensors"), CheckpointError, "model.safetensors cannot be read as a safetensors file"),
        (
            lambda folder: change(folder / "config.json", num_hidden_layers=4),
            CheckpointError,
            "lacks 9 tensors, by what config.json says of the model: model.layers.3.input_layernorm.weight, ",
        ),
        (
            lambda folder: change_tensors(folder, **{"model/norm/weight": None}),
            CheckpointError,
            "lacks 1 tensor, by what config.json says of the model: model.norm.weight",
        ),
        (
            lambda folder: change_tensors(folder, **{"model/norm/weight": torch.ones(47)}),
            CheckpointError,
            "model.norm.weight is [47], by config.json it is [48]",
        ),
        (stored_as(torch.float8_e4m3fn), UnsupportedModelError, "model.norm.weight is stored as F8_E4M3"),
        (
            lambda folder: change(folder / "config.json", dtype="float8_e4m3fn"),
            UnsupportedModelError,
            "dtype is 'float8_e4m3fn', which is not supported; supported: bfloat16, float16, float32; or say",
        ),
    ],
)
def test_a_folder_that_is_refused(save, break_it, error, saying):
    folder = save("llama", fresh=True).folder
    break_it(folder)
    with pytest.raises(error, match=re.escape(saying)) as raised:
        load_folder(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("break_it", "saying"),
    [
        (take_away("model-00002-of-00003.safetensors"), "lacks model-00002-of-00003.safetensors, which model.safe"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (
            lambda folder: change(folder / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"}),
            "names a file outside its folder: '../model.safetensors'",
        ),
        (
            lambda folder: (folder / "model-00002-of-00003.safetensors").write_bytes(
                (folder / "model-00001-of-00003.safetensors").read_bytes()
            ),
            "both have ",
        ),
    ],
)
def test_shards_that_are_refused(save, break_it, saying):
    folder = save("llama", max_shard_size="100KB", fresh=True).folder
    assert (folder / "model-00003-of-00003.safetensors").is_file()
    break_it(folder)
    with pytest.raises(CheckpointError, match=re.escape(saying)):
        load_folder(folder)
