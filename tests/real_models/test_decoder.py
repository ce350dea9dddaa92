"""`Decoder` against `transformers`: every family, every option, every dtype, with a cache and without."""

from __future__ import annotations

import pytest
import torch

from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache, PagedStorage, RaggedStep
from minicache.cache.selective import SelectiveStep
from minicache.memory.blocks import BlockPool, BlockTable
from minicache.model import Decoder, DecoderConfig, load_folder

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA_3 = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
GEMMA_3["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": ("llama", {}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, larger heads": ("llama", {"head_dim": 20, "rms_norm_eps": 1e-2}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0}),
    "llama, llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, windows": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, bias, windows": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("gemma3", GEMMA_3),
    "gemma3, other scale, all that is optional": (
        "gemma3",
        {
            **GEMMA_3,
            "head_dim": 16,
            "query_pre_attn_scalar": 11,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.12}
"""Of logits whose standard deviation is about 2 and whose largest is about 8: a few units in the last place."""

TOKEN_IDS = torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=MODELS)
def saved(request, save):
    family, options = MODELS[request.param]
    return save(family, **options)


def test_logits(saved):
    model = load_folder(saved.folder)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKEN_IDS), saved.logits(TOKEN_IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama, llama3", "mistral, window", "qwen2", "qwen3, bias, windows", "gemma3"])
def test_logits_in_sixteen_bits(save, name, dtype):
    family, options = MODELS[name]
    saved = save(family, dtype=dtype, **options)
    model = load_folder(saved.folder)
    with torch.no_grad():
        logits, theirs = model(TOKEN_IDS), saved.logits(TOKEN_IDS)
    assert logits.dtype == theirs.dtype == dtype
    torch.testing.assert_close(logits, theirs, atol=TOLERANCE[dtype], rtol=0)


def test_angles_stay_exact_in_a_model_that_is_converted(save):
    """At position 200, half a head's angles rounded to bfloat16 would be wrong by up to a radian."""
    saved = save("llama")
    token_ids = torch.randint(0, 97, (1, 250), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        converted = load_folder(saved.folder).to(torch.bfloat16)(token_ids)
        loaded = load_folder(saved.folder, dtype=torch.bfloat16)(token_ids)
    assert torch.equal(converted, loaded)


# With a cache


@pytest.mark.parametrize("make_cache", [KVCache, PagedKVCache])
@pytest.mark.parametrize("chunks", [[40], [17, 1, 1, 5, 16]], ids=str)
def test_a_cache_changes_no_logits(saved, make_cache, chunks):
    model = load_folder(saved.folder)
    config = model.config
    cache = make_cache(config.num_layers, 2, config.num_kv_heads, 64, config.head_dim)
    with torch.no_grad():
        got = torch.cat([model(chunk, cache) for chunk in TOKEN_IDS.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(got, saved.logits(TOKEN_IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral, window", "qwen3, bias, windows", "gemma3"])
@pytest.mark.parametrize("kind", ["ragged", "selective"])
def test_a_step_over_many_sequences_has_windows(save, name, kind):
    """Prompts and decodes side by side, some shorter than the window and some longer."""
    family, options = MODELS[name]
    saved = save(family, **options)
    model = load_folder(saved.folder)
    config, steps = model.config, [(3, 20, 9), (1, 1, 1), (4, 1, 12)]
    sizes = (config.num_layers, config.num_kv_heads, config.head_dim)
    storage = PagedStorage(BlockPool(20, 4), *sizes)
    tables = [BlockTable(storage.pool) for _ in steps[0]]
    caches = [KVCache(sizes[0], 1, sizes[1], 64, sizes[2]) for _ in steps[0]]
    got = [[] for _ in steps[0]]
    done = [0, 0, 0]
    for counts in steps:
        step = RaggedStep(storage, tables, counts) if kind == "ragged" else SelectiveStep(caches, counts)
        parts = [TOKEN_IDS[1, start : start + count] for start, count in zip(done, counts, strict=True)]
        with torch.no_grad():
            logits = model(torch.cat(parts)[None], step)[0].split(counts)
        for sequence, (rows, count) in enumerate(zip(logits, counts, strict=True)):
            got[sequence].append(rows)
            done[sequence] += count
    for rows, length in zip(got, done, strict=True):
        torch.testing.assert_close(torch.cat(rows), saved.logits(TOKEN_IDS[1:, :length])[0], atol=1e-4, rtol=1e-4)


# The config


def config_of(**options):
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_seq_len": 32,
    }
    return DecoderConfig(**{**sizes, **options})


@pytest.mark.parametrize(
    ("options", "error", "saying"),
    [
        ({"num_kv_heads": 3}, ValueError, "cannot share"),
        ({"head_dim": 7}, ValueError, "even"),
        ({"hidden_size": 0}, ValueError, "hidden_size"),
        ({"num_layers": 2.0}, TypeError, "num_layers"),
        ({"rope_theta": "10000"}, TypeError, "rope_theta"),
        ({"sliding_windows": (4,)}, ValueError, "1 windows for 2 layers"),
        ({"sliding_windows": (4, 0)}, ValueError, "sliding window must be 1"),
        ({"activation": "relu"}, ValueError, "activation must be"),
        ({"query_scale": 0.1, "qk_norm": True}, ValueError, "centered_norms"),
    ],
    ids=str,
)
def test_a_shape_that_no_model_has(options, error, saying):
    with pytest.raises(error, match=saying):
        config_of(**options)


def test_wrong_token_ids_are_refused():
    model = Decoder(config_of())
    with pytest.raises(IndexError, match="token id 40"):
        model(torch.tensor([[40]]))
    with pytest.raises(ValueError, match="position 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_parameters_are_counted_once():
    tied, own = (Decoder(config_of(tie_word_embeddings=tied)) for tied in (True, False))
    assert own.num_parameters() - tied.num_parameters() == 40 * 16
    assert tied.num_parameters() == 40 * 16 + 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24 + 2 * 16) + 16
