"""The fused forward pass gives what the modules give: logits, and keys and values in the same slots."""

import gc
import weakref
from copy import deepcopy
from itertools import accumulate

import pytest
import torch
from safetensors.torch import save_file

from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.engine.llm import LLM
from minicache.engine.runner import logits_at
from minicache.engine.sampling import SamplingParams
from minicache.memory.blocks import BlockPool, BlockTable
from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig
from minicache.model.decoder import Llama3Scaling
from minicache.model.fused import fuse, is_fused

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_layers": 3, "max_seq_len": 512}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MODELS = {
    "minigpt": MiniGPTConfig(**SIZES, **HEADS),
    "one layer": MiniGPTConfig(**(SIZES | HEADS | {"num_layers": 1})),
    "no groups": MiniGPTConfig(**(SIZES | HEADS | {"num_kv_heads": 4})),
    "groups of 5, heads of 80": MiniGPTConfig(**(SIZES | {"num_heads": 5, "num_kv_heads": 1, "head_dim": 80})),
    "biases": DecoderConfig(**SIZES, **HEADS, attention_bias=True, output_bias=True, mlp_bias=True),
    "normed queries, tied": DecoderConfig(**SIZES, **HEADS, qk_norm=True, tie_word_embeddings=True),
    "windows": DecoderConfig(**SIZES, **HEADS, sliding_windows=(None, 5, 11)),
    "a window in the last layer": DecoderConfig(**SIZES, **HEADS, sliding_windows=(None, None, 3)),
    "stretched positions": DecoderConfig(**SIZES, **HEADS, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)),
}
STEPS = {
    "prompts": [7, 1, 30, 16],
    "decode": [1, 1, 1, 1],
    "chunks and decode": [1, 9, 1, 20],
    "a long prompt": [300, 1, 2, 1],
}


def a_model(config, seed=0):
    torch.manual_seed(seed)
    model = (MiniGPT if isinstance(config, MiniGPTConfig) else Decoder)(config).eval()
    with torch.no_grad():  # gains and biases start as ones and zeros, which would hide that one is not applied
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


class Served:
    """Four sequences of a model in blocks, step by step."""

    def __init__(self, model, block_size=4):
        config = model.config
        pool = BlockPool(300, block_size)
        self.storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
        for layer in range(config.num_layers):  # no row that was not written may count
            self.storage.k(layer).fill_(torch.nan)
            self.storage.v(layer).fill_(torch.nan)
        self.tables = [BlockTable(pool) for _ in range(4)]
        self.model = model

    @torch.inference_mode()
    def run(self, counts, seed, rows=None):
        tokens = torch.randint(97, (1, sum(counts)), generator=torch.Generator().manual_seed(seed))
        step = RaggedStep(self.storage, self.tables, counts)
        rows = torch.tensor([end - 1 for end in accumulate(counts)] if rows is None else rows)
        return logits_at(self.model, tokens, step, rows)


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_caches_are_those_of_the_modules(name, in_place):
    model = a_model(MODELS[name])
    modules, fused = Served(deepcopy(model)), Served(model)
    assert fuse(model, in_place=in_place)
    assert is_fused(model)
    assert not is_fused(modules.model)
    for seed, counts in enumerate([[5, 12, 3, 1], *STEPS.values()]):
        torch.testing.assert_close(fused.run(counts, seed), modules.run(counts, seed), atol=2e-5, rtol=2e-5)
    for layer in range(model.config.num_layers):
        for ours, theirs in zip(
            (fused.storage.k(layer), fused.storage.v(layer)),
            (modules.storage.k(layer), modules.storage.v(layer)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5, equal_nan=True)


def test_any_rows_can_be_read():
    model = a_model(MODELS["windows"])
    modules, fused = Served(deepcopy(model)), Served(model)
    fuse(model)
    for seed, rows in enumerate(([0, 6, 11, 12], list(range(20)), [19])):
        ours, theirs = (each.run([6, 6, 1, 7], seed, rows) for each in (fused, modules))
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_more_rows_than_go_through_a_feed_forward_block_at_a_time():
    model = a_model(MODELS["biases"])
    modules, fused = Served(deepcopy(model), 8), Served(model, 8)
    fuse(model)
    counts = [500, 13, 499, 30]
    torch.testing.assert_close(fused.run(counts, 0), modules.run(counts, 0), atol=2e-5, rtol=2e-5)


def test_what_a_model_refuses_is_refused_before_anything_is_written():
    model = a_model(MODELS["minigpt"])
    fuse(model)
    served = Served(model)
    step = RaggedStep(served.storage, served.tables, [1, 1, 1, 1])
    rows = torch.arange(4)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        logits_at(model, torch.tensor([[1, 2, 97, 3]]), step, rows)
    with pytest.raises(ValueError, match="made for 4 tokens"):
        logits_at(model, torch.tensor([[1, 2, 3]]), step, rows)
    step.slot_mapping[0] = 4 * 300
    with pytest.raises(IndexError, match="no slot 1200"):
        logits_at(model, torch.tensor([[1, 2, 3, 4]]), step, rows)
    step.slot_mapping[0], step.block_tables[1, 0] = 0, 300
    with pytest.raises(IndexError, match="no block 300"):
        logits_at(model, torch.tensor([[1, 2, 3, 4]]), step, rows)
    assert served.storage.k(0).isnan().all()


# Whose weights they are


def test_weights_in_place_are_held_once_and_compute_what_they_did():
    model = a_model(MODELS["biases"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = torch.arange(9)[None]
    logits = model(tokens)
    fuse(model, in_place=True)
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    torch.testing.assert_close(model(tokens), logits)
    q, k = (getattr(model.layers[0].self_attn, name).weight for name in ("q_proj", "k_proj"))
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()


def test_copies_leave_the_model_as_it_was(tmp_path):
    model = a_model(MODELS["biases"])
    fuse(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_a_weight_that_is_changed_later_counts(in_place):
    """In a step of the same engine too: fine-tune, ask, fine-tune, ask."""
    model = a_model(MODELS["normed queries, tied"])
    fuse(model, in_place=in_place)
    fused = Served(model)
    fused.run([3, 4, 5, 6], 0)
    model.load_state_dict(a_model(MODELS["normed queries, tied"], seed=1).state_dict())
    modules = Served(deepcopy(model))
    fused = Served(model)
    torch.testing.assert_close(fused.run([3, 4, 5, 6], 0), modules.run([3, 4, 5, 6], 0), atol=2e-5, rtol=2e-5)


def test_what_cannot_be_fused_is_left_alone():
    class Doubled(MiniGPT):
        def logits(self, hidden):
            return 2 * super().logits(hidden)

    assert not fuse(Doubled(MODELS["minigpt"]))
    assert not fuse(a_model(MODELS["minigpt"]).bfloat16())
    assert not fuse(a_model(MiniGPTConfig(**(SIZES | HEADS | {"head_dim": 12}))))
    assert not fuse("minigpt")


def test_a_model_that_is_converted_runs_through_its_modules():
    model = a_model(MODELS["minigpt"])
    fuse(model)
    model.double()
    assert not is_fused(model)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert len(LLM(model).generate([[1, 2, 3]], params)[0].token_ids) == 4


def test_a_model_that_is_dropped_is_freed():
    model = a_model(MODELS["minigpt"])
    fuse(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_engine_answers_as_the_modules_do():
    """Greedy tokens of a batch, through the engine, against the model without a cache."""
    model = a_model(MODELS["windows"])
    reference = deepcopy(model)
    prompts = [[5, 9, 2], [11] * 40, [3, 1, 4, 1, 5, 9, 2, 6], [42]]
    answers = LLM(model, block_size=4, max_num_batched_tokens=16).generate(
        prompts, SamplingParams(max_tokens=20, ignore_eos=True)
    )
    assert is_fused(model)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(20):
                tokens.append(int(reference(torch.tensor([tokens]))[0, -1].argmax()))
        assert answer.token_ids == tokens[len(prompt) :]
