"""The fused forward pass gives what the modules give: logits, and keys and values in the same slots."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from minicache.cache.packed import StepTensors
from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.engine.kv import logits_at
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.memory.blocks import BlockPool, BlockTable
from minicache.model import Decoder, DecoderConfig, MiniGPT, MiniGPTConfig, fused
from minicache.model.decoder import Llama3Scaling
from minicache.model.fused import fuse, layer_caches
from minicache.model.linear import PackedLinear, pack

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 72, "num_layers": 3, "max_seq_len": 512}
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
GEMMA_3 = {
    "qk_norm": True,
    "activation": "gelu_tanh",
    "centered_norms": True,
    "post_norms": True,
    "scaled_embedding": True,
    "query_scale": 0.3,
    "local_rope_theta": 77.0,
    "tie_word_embeddings": True,
}
MODELS = {
    "minigpt": MiniGPTConfig(**SIZES, **HEADS),
    "one layer": MiniGPTConfig(**(SIZES | HEADS | {"num_layers": 1})),
    "no groups": MiniGPTConfig(**(SIZES | HEADS | {"num_kv_heads": 4})),
    "groups of 5, heads of 80": MiniGPTConfig(**(SIZES | {"num_heads": 5, "num_kv_heads": 1, "head_dim": 80})),
    "biases": DecoderConfig(**SIZES, **HEADS, attention_bias=True, output_bias=True, mlp_bias=True),
    "normed queries, tied": DecoderConfig(**SIZES, **HEADS, qk_norm=True, tie_word_embeddings=True),
    "windows": DecoderConfig(**SIZES, **HEADS, sliding_windows=(None, 5, 11)),
    "a window in the last layer": DecoderConfig(**SIZES, **HEADS, sliding_windows=(None, None, 3)),
    "like gemma 3": DecoderConfig(**SIZES, **HEADS, **GEMMA_3, sliding_windows=(5, None, 11)),
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
    """Four sequences of a model in blocks, step by step: through the modules, or fused."""

    def __init__(self, model, run, block_size=4):
        config = model.config
        pool = BlockPool(300, block_size)
        self.storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
        for layer in range(config.num_layers):  # no row that was not written may count
            self.storage.k(layer).fill_(torch.nan)
            self.storage.v(layer).fill_(torch.nan)
        self.tables = [BlockTable(pool) for _ in range(4)]
        self.model, self.logits_at = model, run

    def step(self, counts, seed=0):
        tokens = torch.randint(97, (sum(counts),), generator=torch.Generator().manual_seed(seed))
        return tokens, RaggedStep(self.storage, self.tables, counts)

    @torch.inference_mode()
    def run(self, counts, seed):
        return self.logits_at(self.model, *self.step(counts, seed))


def by_modules(model, tokens, step):
    return logits_at(model, tokens[None], step, step.query_start_loc[1:] - 1)


def by_kernels(model, tokens, step):
    return fused.logits_at(model, layer_caches(step.storage), tensors_of(tokens, step))


def tensors_of(tokens, step):
    last = step.query_start_loc[1:] - 1
    positions = step.positions(len(tokens))
    return StepTensors(
        tokens,
        positions,
        step.slot_mapping[None],
        last,
        step.context_lens,
        step.query_start_loc,
        step.block_tables[None],
    )


def pair(name_or_model, block_size=4, packed=False):
    """The same model served in both ways."""
    model = a_model(MODELS[name_or_model]) if isinstance(name_or_model, str) else name_or_model
    modules = Served(deepcopy(model), by_modules, block_size)
    if packed:
        pack(model)
    assert fuse(model) is model
    return modules, Served(model, by_kernels, block_size)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("packed", [False, True], ids=["copied", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_caches_are_those_of_the_modules(name, packed):
    modules, kernels = pair(name, packed=packed)
    for seed, counts in enumerate([[5, 12, 3, 1], *STEPS.values()]):
        close(kernels.run(counts, seed), modules.run(counts, seed))
    for layer in range(kernels.storage.num_layers):
        close(kernels.storage.k(layer), modules.storage.k(layer))
        close(kernels.storage.v(layer), modules.storage.v(layer))


def test_more_rows_than_go_through_a_feed_forward_block_at_a_time():
    modules, kernels = pair("biases", block_size=8)
    counts = [500, 13, 499, 30]
    close(kernels.run(counts, 0), modules.run(counts, 0))


def test_defaults_of_pytorch_do_not_count():
    modules, kernels = pair("windows")
    counts = [3, 1, 200, 30]
    expected = modules.run(counts, 0)
    steps = kernels.step(counts, 0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.inference_mode():
            logits = by_kernels(kernels.model, *steps)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    close(logits, expected)


@pytest.mark.parametrize("packed", [False, True], ids=["copied", "packed"])
def test_what_a_model_or_a_storage_does_not_have_is_refused_before_anything_is_written(packed):
    _, kernels = pair("minigpt", packed=packed)
    storage, model = kernels.storage, kernels.model
    tokens, step = kernels.step([1, 1, 1, 1])
    good = tensors_of(tokens, step)
    wrong = {
        "token_ids": (torch.tensor([1, 2, 97, 3]), "index out of range"),
        "positions": (torch.tensor([0, 0, 512, 0]), "out of bounds"),
        "slot_mapping": (torch.tensor([[0, 4, 8, 4 * 300]]), "no slot 1200"),
        "block_tables": (torch.tensor([[[0], [300], [2], [3]]]), "no block 300"),
    }
    for name, (values, message) in wrong.items():
        with pytest.raises(IndexError, match=message):
            fused.logits_at(model, layer_caches(storage), good._replace(**{name: values}))
    with pytest.raises(ValueError, match="context_len"):
        fused.logits_at(model, layer_caches(storage), good._replace(context_lens=torch.tensor([1, 1, 5, 1])))
    assert storage.k(0).isnan().all()


# Whose weights they are


def test_packed_weights_are_held_once_and_compute_what_they_did():
    model = a_model(MODELS["normed queries, tied"])
    tokens = torch.arange(9)[None]
    logits = model(tokens)
    pack(model)
    close(model(tokens), logits)
    fuse(model)
    close(model(tokens), logits)
    held = {layer.weights.numbers.untyped_storage() for layer in model.modules() if isinstance(layer, PackedLinear)}
    assert len({storage.data_ptr() for storage in held}) == 4 * len(model.layers) + 1  # q, k, v are one; gate, up too
    assert not [name for name, parameter in model.named_parameters() if parameter.ndim == 2]


def test_copies_leave_the_model_as_it_was(tmp_path):
    model = a_model(MODELS["biases"])
    fuse(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")


def test_a_weight_that_is_changed_later_counts():
    """In the next step of the same engine: fine-tune, ask, fine-tune, ask."""
    modules, kernels = pair("normed queries, tied")
    close(kernels.run([3, 4, 5, 6], 0), modules.run([3, 4, 5, 6], 0))
    other = a_model(MODELS["normed queries, tied"], seed=1).state_dict()
    kernels.model.load_state_dict(other)
    modules.model.load_state_dict(other)
    close(kernels.run([1, 1, 2, 6], 1), modules.run([1, 1, 2, 6], 1))


def add_to(parameters):
    for weight in parameters:
        weight.data.add_(torch.rand_like(weight), alpha=0.1)


def adam_w(parameters):
    """PyTorch does not count what this changes."""
    parameters = list(parameters)
    for weight in parameters:
        weight.grad = torch.rand_like(weight) - 0.5
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()


@pytest.mark.parametrize("change", [add_to, adam_w])
def test_a_change_that_pytorch_does_not_count_is_noticed(change):
    _, kernels = pair("biases")
    kernels.run([3, 4, 5, 6], 0)
    change(kernels.model.parameters())
    modules = Served(deepcopy(kernels.model), by_modules)
    kernels = Served(kernels.model, by_kernels)
    close(kernels.run([3, 4, 5, 6], 0), modules.run([3, 4, 5, 6], 0))


def test_other_parameters_and_other_modules_count_in_the_next_engine():
    other = a_model(MODELS["windows"], seed=1)
    modules, kernels = pair("windows")
    for seed, change in enumerate(
        [
            lambda model: model.load_state_dict(deepcopy(other.state_dict()), assign=True),
            lambda model: setattr(model.layers[1], "mlp", deepcopy(a_model(MODELS["windows"], seed=2).layers[1].mlp)),
            lambda model: setattr(model.norm, "weight", torch.nn.Parameter(torch.arange(96.0)[::2])),
        ]
    ):
        change(modules.model)
        change(kernels.model)
        assert fuse(kernels.model) is kernels.model
        close(kernels.run([3, 4, 5, 6], seed), modules.run([3, 4, 5, 6], seed))


def test_weights_that_are_joined_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        model = LLM("minigpt").model
    for _ in range(2):
        model(torch.tensor([[1, 2, 3]])).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        with torch.inference_mode():
            assert fuse(model) is model


def test_a_model_that_was_made_in_inference_mode():
    with torch.inference_mode():
        model = a_model(MODELS["biases"])
    modules, kernels = pair(model)
    close(kernels.run([3, 4, 5, 6], 0), modules.run([3, 4, 5, 6], 0))


def test_what_cannot_be_fused_is_left_alone():
    class Doubled(MiniGPT):
        def logits(self, hidden):
            return 2 * super().logits(hidden)

    assert fuse(Doubled(MODELS["minigpt"])) is None
    assert fuse(a_model(MODELS["minigpt"]).bfloat16()) is None
    assert fuse(a_model(MiniGPTConfig(**(SIZES | HEADS | {"head_dim": 12})))) is None
    assert fuse(a_model(MiniGPTConfig(**(SIZES | HEADS | {"intermediate_size": 7})))) is None
    assert fuse("minigpt") is None


class Tripled(torch.nn.Linear):
    def forward(self, rows):
        return 3 * super().forward(rows)


def test_a_model_that_computes_something_else_than_its_class_is_not_fused():
    for change in (
        lambda model: model.layers[1].register_forward_hook(lambda *_: None),
        lambda model: model.layers[0].mlp.register_forward_pre_hook(lambda *_: None),
        lambda model: setattr(model.norm, "forward", lambda hidden: hidden),
        lambda model: setattr(model.layers[0].mlp, "up_proj", Tripled(48, 72, bias=False)),
        lambda model: setattr(model.layers[0].mlp, "up_proj", torch.nn.Linear(48, 40, bias=False)),
        lambda model: setattr(model.layers[0].mlp, "up_proj", torch.nn.Linear(48, 72)),
        lambda model: torch.nn.utils.parametrizations.weight_norm(model.layers[0].mlp.up_proj),
    ):
        model = a_model(MODELS["minigpt"])
        change(model)
        assert fuse(model) is None
        model = a_model(MODELS["minigpt"])
        fuse(model)
        change(model)
        assert fuse(model) is None


def test_a_model_that_is_converted_is_fused_no_more():
    model = a_model(MODELS["minigpt"])
    assert fuse(model) is model
    assert fuse(model.double()) is None


def test_a_model_that_is_converted_between_steps_is_refused():
    _, kernels = pair("biases")
    kernels.run([3, 4, 5, 6], 0)
    kernels.model.double()
    with pytest.raises(ValueError, match="make a new engine"):
        kernels.run([1, 1, 1, 1], 1)
    kernels.model.float()
    kernels.model.layers[0].mlp.up_proj.weight.data = torch.zeros(40, 48)
    with pytest.raises(ValueError, match="make a new engine"):
        kernels.run([1, 1, 1, 1], 1)


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
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(20):
                tokens.append(int(reference(torch.tensor([tokens]))[0, -1].argmax()))
        assert answer.token_ids == tokens[len(prompt) :]
