"""`LLM(model=PATH)`: the tokens of `transformers`, in any batch; texts, and where they end."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import torch
from tests.grid import grid

from minicache.engine.decoding import decode
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from minicache.model.tokenizer import folder_tokenizer
from minicache.scheduler.observe import Observer

from .gguf_files import write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
MODELS = {
    "llama": ("llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", {"head_dim": 16, **WINDOWS}),
    "gemma3": ("gemma3", {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 6, **GEMMA_LAYERS}),
}
FEW = {"mistral": 12, "qwen2": 36, "qwen3": 36, "gemma3": 50}
LENGTHS = (3, 31, 12, 1, 20)
PROMPTS = [
    torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
PARAMS = SamplingParams(max_tokens=16)


class Watch(Observer):
    def __init__(self):
        self.num_preempted = 0
        self.batches = []

    def on_schedule(self, scheduler, output):
        self.num_preempted += len(output.preempted)
        self.batches.append(dict(output.num_scheduled_tokens))


@pytest.fixture(scope="module")
def theirs():
    """`theirs(saved)`: what `transformers` answers to each prompt alone, greedily; no near tie may decide a test."""

    @cache
    def tokens(saved):
        answers = []
        for prompt in PROMPTS:
            out = saved.theirs.generate(
                torch.tensor([prompt]),
                max_new_tokens=16,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
            first, second = torch.cat(out.scores).topk(2).values.unbind(dim=1)
            assert (first - second).min() > 1e-4, "a near tie: take another prompt"
            answers.append(out.sequences[0, len(prompt) :].tolist())
        return answers

    return tokens


ENGINES = {
    "paged": {},
    "small blocks": {"block_size": 1, "num_blocks": 300},
    "dense": {"cache": "dense"},
    "two at a time": {"max_num_seqs": 2},
    "in chunks": {"max_num_batched_tokens": 9},
    "dense, in chunks": {"cache": "dense", "max_num_batched_tokens": 9},
    "preempted": {"num_blocks": 16, "block_size": 4},
    "dense, preempted": {"cache": "dense", "num_blocks": 16, "block_size": 4},
    "swapped": {
        "scheduler": "fair",
        "num_blocks": 16,
        "block_size": 4,
        "preemption": "swap",
        "num_host_blocks": 40,
    },
    "prefix cache": {"prefix_caching": True, "block_size": 4},
    "static": {"scheduler": "static"},
}


@grid({"engine": list(ENGINES), "name": list(MODELS)})
def test_greedy_tokens(save, theirs, name, engine):
    family, options = MODELS[name]
    saved, watch = save(family, **options), Watch()
    how = {"num_blocks": 100, **ENGINES[engine]}
    if engine == "preempted":  # a block is of one group of layers, and what has left a window goes back
        how["num_blocks"] = FEW.get(name, 16)
    llm = LLM(saved.folder, observers=[watch], **how)
    assert llm.tokenizer is None
    for _ in range(2 if "prefix" in engine else 1):
        assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == theirs(saved)
    assert (watch.num_preempted > 0) == (ENGINES[engine].get("num_blocks") == 16)
    assert max(map(len, watch.batches)) > 1
    assert llm.scheduler.pool.num_used == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(save, dtype):
    """Its weights are spread, so the best token is well ahead of the second: rounding decides nothing."""
    saved = save("qwen2", dtype=dtype, tie_word_embeddings=True, hidden_size=64, head_dim=16, **WINDOWS)
    llm = LLM(saved.folder, num_blocks=100, block_size=4, dtype=dtype)  # even where the CPU does not compute in it
    assert llm.storage.dtype == dtype
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
        tokens = torch.tensor([[*prompt, *answer.token_ids]])
        logits = saved.logits(tokens)[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        # Theirs may round another way: what was picked is their best, or as good as it.
        assert (logits.max(dim=1).values - chosen).max() < 0.1


def test_the_other_ways_to_decode(save, theirs):
    """A model with windows in phase 1's loop, and in an engine that verifies draft tokens."""
    family, options = MODELS["mistral"]
    saved = save(family, **options)
    llm = LLM(saved.folder, num_blocks=100, speculative="ngram")
    plain = [int(token) for token in decode(llm.model, torch.tensor([PROMPTS[1]]), 16)]
    assert plain == theirs(saved)[1]
    assert [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)] == theirs(saved)


# Dtype and device


# Texts


@pytest.fixture(scope="module")
def speaking(save, add_tokenizer):
    """A folder with a tokenizer; what the model generates is noise, in all bytes there are."""
    folder = save("llama", vocab_size=300, eos_token_id=1, fresh=True).folder
    return folder, add_tokenizer(folder)


TEXTS = ["the cat sat", "hello 日本語, ¿qué? 🙂🙂", "a"]


def test_a_text_is_the_tokens_text(speaking):
    folder, theirs = speaking
    llm = LLM(folder, num_blocks=200)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.5, seed=3)
    for text, answer in zip(TEXTS, llm.generate(TEXTS, params), strict=True):
        prompt = theirs.encode(text)
        assert prompt[0] == theirs.bos_token_id
        assert text + answer.text == theirs.decode([*prompt, *answer.token_ids], skip_special_tokens=True)
        again = llm.generate([prompt], params)[0]
        assert (again.token_ids, again.text) == (answer.token_ids, answer.text)


def test_a_stream_shows_no_half_letters(speaking):
    """Tokens are bytes of letters: three for 日, four for 🙂. A letter is shown when its last byte is there."""
    folder, theirs = speaking
    said = "日本 🙂, ¿qué tal? hello 語"
    tokens = theirs.encode(said, add_special_tokens=False)

    class Parrot(torch.nn.Module):
        """Says the tokens above one after the other, by where it stands."""

        def __init__(self, config):
            super().__init__()
            self.config = config
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, token_ids, cache):
            positions = cache.positions(token_ids.shape[1])
            rows = torch.zeros(1, token_ids.shape[1], self.config.num_kv_heads, self.config.head_dim).transpose(1, 2)
            for layer in range(self.config.num_layers):
                cache.append(layer, rows, rows)
            following = torch.tensor([*tokens, 1, 1])[(positions - 1).clamp(max=len(tokens))]
            return torch.nn.functional.one_hot(following, 300)[None].float()

    model = Parrot(LLM(folder, num_blocks=10).model.config)
    llm = LLM(model, num_blocks=20, tokenizer=folder_tokenizer(folder))
    chunks = list(llm.stream(["a"], SamplingParams(max_tokens=100)))
    pieces = [chunk.text for chunk in chunks]
    assert "".join(pieces) == said
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].token_id == 1
    assert not any("�" in piece for piece in pieces)
    assert "日" in pieces
    assert "🙂" in pieces


def test_every_end_token_ends_an_answer(speaking, save, add_tokenizer):
    """Of generation_config.json, and the tokenizer's own; alone, as a list, without a tokenizer too; unless ignored."""
    folder = save("llama", vocab_size=300, fresh=True).folder
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = LLM(folder, num_blocks=50).generate([[5, 6, 7]], long)[0].token_ids
    ends = [plain[4], plain[9]]
    first = plain.index(ends[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    for step, given in (("no tokenizer", None), ("another tokenizer", Letters()), ("its own", None)):
        llm = LLM(folder, num_blocks=50, tokenizer=given)
        answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=30))[0]
        assert (answer.token_ids, answer.finish_reason) == (plain[: first + 1], "stop"), step
        assert llm.generate([[5, 6, 7]], long)[0].token_ids == plain
        add_tokenizer(folder)
    assert set(llm.tokenizer.end_token_ids) == {*ends, 1}
    assert llm.tokenizer.decode([40, *ends, 41]) == llm.tokenizer.decode([40, 41])


class Letters:
    """A tokenizer that knows no end."""

    end_token_id = -1

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_a_tokenizer_that_is_given_counts(speaking):
    folder, _ = speaking
    llm = LLM(folder, num_blocks=20, tokenizer=Letters())
    answer = llm.generate(["abc"], SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert answer.text == "".join(map(chr, answer.token_ids))


def test_a_folder_without_a_tokenizer_takes_token_ids(save):
    llm = LLM(save("llama").folder, num_blocks=10)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate(["hello"], PARAMS)
    assert llm.generate([[1, 2]], PARAMS)[0].text == ""


def test_token_ids_that_only_one_of_the_two_knows(speaking):
    """A model may have more tokens than its tokenizer; those have no text."""
    folder, theirs = speaking
    tokenizer = folder_tokenizer(folder)
    assert len(theirs) < 299
    assert tokenizer.decode([50, 299, 51]) == tokenizer.decode([50, 51])
    with pytest.raises(IndexError, match="300"):
        LLM(folder, num_blocks=10).generate([[300]], PARAMS)


def test_no_token_has_more_characters_than_the_bound(speaking):
    """What refuses a text by its length alone, before it is tokenized, must refuse none that fits."""
    folder, theirs = speaking
    tokenizer = folder_tokenizer(folder)
    shown = [theirs.decode([token_id], skip_special_tokens=False) for token_id in range(len(theirs))]
    assert max(map(len, shown)) <= tokenizer.max_token_chars <= 2 * max(map(len, shown))


# Conversations


def test_a_conversation_is_the_templates_text(speaking):
    folder, theirs = speaking
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the mat"},
        {"role": "user", "content": "日?"},
    ]
    text = "<s><|user|>hello<|assistant|>the mat<|user|>日?<|assistant|>"
    got = folder_tokenizer(folder).apply_chat_template(messages)
    assert got == theirs.encode(text, add_special_tokens=False)
    assert got.count(theirs.bos_token_id) == 1
    assert LLM(folder, num_blocks=20).generate([got], PARAMS)[0].token_ids


def test_messages_that_a_template_refuses(speaking, save, add_tokenizer):
    folder, _ = speaking
    with pytest.raises(ValueError, match="chat template refuses these messages: no role judge"):
        folder_tokenizer(folder).apply_chat_template([{"role": "judge", "content": "no"}])
    bare = save("llama", fresh=True).folder
    add_tokenizer(bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        folder_tokenizer(bare).apply_chat_template([{"role": "user", "content": "no"}])


# Sixteen bits on a CPU


@pytest.mark.parametrize("field", ["dtype", "torch_dtype", None])
def test_sixteen_bits_are_loaded_as_float32_on_a_cpu(save, caplog, field):
    """It is said once for each model, wherever the dtype is known from; a dtype that is asked for is taken."""
    folder = save("llama", dtype=torch.bfloat16, fresh=True).folder
    values = json.loads((folder / "config.json").read_text())
    values |= {field: values.pop("dtype")} if field else {"dtype": None}
    (folder / "config.json").write_text(json.dumps(values))
    assert {weight.dtype for weight in LLM(folder, num_blocks=20).model.parameters()} == {torch.float32}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{folder} holds bfloat16: loaded as float32, which the CPU kernels compute in, in twice the memory. To keep "
        "it, without the kernels, give dtype=torch.bfloat16 (--dtype bfloat16)"
    ]
    caplog.clear()
    asked_for = LLM(folder, num_blocks=20, dtype=torch.bfloat16)
    assert all(weight.dtype == torch.bfloat16 for weight in asked_for.model.parameters())
    assert caplog.records == []


# GGUF files


def test_a_gguf_file_gives_the_tokens_of_its_folder(save, add_tokenizer, tmp_path):
    folder = save("llama", vocab_size=300, fresh=True).folder
    add_tokenizer(folder)
    path = write_gguf(folder, tmp_path / "model.gguf", tokenizer=True)
    prompts = ["hello the mat", "日本 😀", [5, 7]]
    ours, want = (LLM(model, num_blocks=40).generate(prompts, PARAMS) for model in (str(path), folder))
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in want]
    assert [answer.text for answer in ours] == [answer.text for answer in want]


def test_a_folder_with_nothing_but_a_gguf_file(save, tmp_path):
    folder = save("llama", fresh=True).folder
    path = write_gguf(folder, tmp_path / "a.gguf")
    with pytest.raises(
        CheckpointError, match=re.escape(f"has no config.json: it has a GGUF file, so give that, {path}")
    ):
        LLM(tmp_path)
    path.with_name("b.gguf").touch()
    with pytest.raises(CheckpointError, match="it has 2 GGUF files, so give one of them"):
        LLM(tmp_path)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_model_that_cannot_be_divided_is_refused_before_its_weights_are_read(save, tmp_path, as_file):
    folder = save("llama", fresh=True).folder
    path = write_gguf(folder, tmp_path / "model.gguf")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide the model's num_heads, 4"):
        LLM(path if as_file else folder, tensor_parallel_size=3)


def test_the_default_cache_holds_eight_requests_of_2048_tokens(save):
    large = {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 4096}
    llm = LLM(save("llama", **large).folder)
    assert llm.storage.nbytes == 8 * 2048 * 2 * 3 * 4 * 256 * 4
    assert LLM(save("llama", **large).folder, max_num_seqs=2).storage.nbytes == llm.storage.nbytes / 2


def test_a_request_may_be_longer_than_there_is_memory_for(save, tmp_path):
    path = write_gguf(save("llama", fresh=True).folder, tmp_path / "model.gguf", context_length=2**32 - 1)
    with pytest.raises(ValueError, match=r"max_model_len 4294967295 tokens needs a cache of .* a lower max_model_len"):
        LLM(path)
    assert LLM(path, max_model_len=10**5).max_model_len == 10**5
    assert LLM(path, num_blocks=20).max_model_len == 2**32 - 1


# What is refused


def test_a_tokenizer_that_cannot_be_read(save):
    folder = save("llama", fresh=True).folder
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read"):
        LLM(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"sentences")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer as tokenizer\.model, and only tokenizer\.json is read"):
        LLM(folder)


def test_what_is_missing_is_said(speaking, monkeypatch):
    """Without transformers a folder's text cannot be read; its model can."""
    folder, _ = speaking
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'minicache-course[hf]'")):
        LLM(folder)
    monkeypatch.setattr("minicache.engine.loading.load_tokenizer", lambda model: None)
    assert LLM(folder, num_blocks=10, tokenizer=FakeTokenizer()).model.config.vocab_size == 300


class FakeTokenizer:
    end_token_id = 0


@pytest.mark.parametrize(
    ("path", "saying"),
    [
        ("no-such-model", "there is no checkpoint at"),
        ("a/b/c", "there is no checkpoint at"),
        ("x/y.safetensors", "no ch"),
        ("x/y.gguf", "cannot be read as a GGUF file"),
    ],
)
def test_a_path_where_nothing_is(path, saying):
    with pytest.raises(CheckpointError, match=saying):
        LLM(path)
