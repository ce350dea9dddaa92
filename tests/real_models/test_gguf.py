"""A GGUF file is the folder that it was made from: every family, every type; tokenizers; files that are refused."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from minicache.errors import CheckpointError, MinicacheError, UnsupportedModelError
from minicache.model import load_folder, load_gguf
from minicache.model.decoder import LinearScaling, Llama3Scaling
from minicache.model.gguf_file import TYPES, GGUFFile
from minicache.model.tokenizer import gguf_tokenizer

from .gguf_files import add_tokenizer, write_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def require_equal(got, folder, *, dtype=torch.float32):
    want = load_folder(folder, dtype=dtype)
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    return want


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_a_file_is_the_folder_of_its_family(save, tmp_path, family, config):
    folder = save(family, **SIZES, **config, fresh=True).folder
    model = load_gguf(write_gguf(folder, tmp_path / "model.gguf"))
    want = require_equal(model, folder)
    assert model.config == want.config
    assert not model.training


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_is_the_folder_of_its_numbers(save, tmp_path, kind, monkeypatch):
    """Read a few rows at a time, as large tensors are; and rounded once for a model of 16 bits."""
    monkeypatch.setattr("minicache.model.gguf_file.CHUNK_NBYTES", 1000)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = save("llama", **sizes, fresh=True).folder
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors} == {"F32", kind}
    require_equal(load_gguf(path), folder)
    require_equal(load_gguf(path, dtype=torch.bfloat16), folder, dtype=torch.bfloat16)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux says how much memory was in use")
def test_there_are_never_two_copies_of_the_weights(save, tmp_path):
    """100 MiB of float32, from a quarter of that."""
    sizes = {"hidden_size": 512, "intermediate_size": 2816, "vocab_size": 512, "num_hidden_layers": 6, "head_dim": 16}
    path = write_gguf(save("llama", **sizes, fresh=True).folder, tmp_path / "model.gguf", kind="Q8_0")
    small = write_gguf(save("llama", **SIZES, fresh=True).folder, tmp_path / "small.gguf", kind="Q8_0")
    code = f"""
from pathlib import Path
from minicache.model import load_gguf
def used(what):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(what)) * 1024
load_gguf({str(small)!r})  # so all code that it takes is in memory
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = used("VmRSS")
model = load_gguf({str(path)!r})
weights = sum(weight.nbytes for weight in model.parameters())
assert weights > 90 * 2**20
print((used("VmHWM") - before) / weights)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.25


def test_rotary_positions_that_are_stretched(save, tmp_path):
    folder = save("llama", **SIZES, head_dim=16, fresh=True).folder
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert load_gguf(write_gguf(folder, tmp_path / "a.gguf", **linear)).config.rope_scaling == LinearScaling(4.0)

    frequencies = 1 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    want = Llama3Scaling(8.0, 1.0, 4.0, 64).scale(frequencies)
    save_rope = {"rope_freqs.weight": (frequencies / want).numpy()}
    got = load_gguf(write_gguf(folder, tmp_path / "b.gguf", extra=save_rope)).frequencies
    torch.testing.assert_close(got, want)


# Tokenizers

TEXTS = [
    "Hello there, we'll see; DON'T you'RE it's",
    "  two  spaces\n\n\tx=1 \r\n\r\n  y ",
    "1 12 123 1234  5,000.75\n2024-12-31 a1b22",
    "¿Qué tal, niños? Ελληνικά русский עברית ไทย",
    "你好，世界 😀 👩‍👩‍👧‍👦 e\u0301 ²³ ٣٤\u00a0\u3000z",
    "<|user|>hi<|assistant|> <tool>x</tool></s>",
    "def f(x):\n    return x**2  # sq\n",
    "",
    "   ",
]


def bpe(split, **model) -> Tokenizer:
    """A small tokenizer that splits in some way."""
    made = Tokenizer(models.BPE(**model))
    made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


def split_at(pattern):
    parts = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def merges_of(made):
    return json.loads(made.to_str())["model"]["merges"]


def file_of(made, path, pre, **more):
    writer = GGUFWriter(path, "llama")
    add_tokenizer(writer, made, merges_of(made), pre, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tokens_of_llama_3(tmp_path):
    made = bpe(split_at(TikTokenConverter().pattern), ignore_merges=True)
    got = gguf_tokenizer(file_of(made, tmp_path / "model.gguf", "llama-bpe"))
    for text in TEXTS:
        ids = made.encode(text, add_special_tokens=False).ids
        assert got.encode(text) == [made.token_to_id("<s>"), *ids]  # which it puts before every text
        assert got.decode(ids) == made.decode([each for each in ids if each != got.end_token_id])


def test_tokens_of_qwen2(tmp_path):
    made = bpe(split_at(r"\p{L}+|\p{N}|."))
    theirs = Qwen2Tokenizer(vocab=made.get_vocab(), merges=[tuple(merge) for merge in merges_of(made)])
    theirs.add_special_tokens({"additional_special_tokens": ["<s>", "</s>", "<|user|>", "<|assistant|>"]})
    theirs.add_tokens(["<tool>"])
    got = gguf_tokenizer(file_of(made, tmp_path / "model.gguf", "qwen2", add_bos=False))
    for text in TEXTS:
        assert got.encode(text) == theirs.encode(text)


def test_tokens_of_smollm(tmp_path):
    """Digits one by one, and blanks before a digit on their own: as its tokenizer.json has it."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made = bpe(pre_tokenizers.Sequence(steps))
    got = gguf_tokenizer(file_of(made, tmp_path / "model.gguf", "smollm", add_bos=False))
    for text in TEXTS:
        assert got.encode(text) == made.encode(text, add_special_tokens=False).ids
    assert [got.decode([each]) for each in got.encode("a  12")] == ["a", "  ", "1", "2"]


def test_a_conversation_is_that_of_the_folder(save, add_tokenizer, tmp_path):
    folder = save("llama", **SIZES, vocab_size=300, fresh=True).folder
    theirs = add_tokenizer(folder)
    got = gguf_tokenizer(write_gguf(folder, tmp_path / "model.gguf", tokenizer=True))
    messages = [{"role": "user", "content": "hello 日?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert got.apply_chat_template(messages) == theirs.encode(text, add_special_tokens=False)
    with pytest.raises(ValueError, match="no role judge"):
        got.apply_chat_template([{"role": "judge", "content": "no"}])
    assert got.encode("a\ud800b\udcff") == got.encode("a\ufffdb\ufffd")  # bytes of an argument that are no UTF-8
    assert got.apply_chat_template([{"role": "user", "content": "\ud83d"}])
    assert got.end_token_ids == load_gguf(tmp_path / "model.gguf").config.end_token_ids == (1,)
    assert gguf_tokenizer(write_gguf(folder, tmp_path / "bare.gguf")) is None


@pytest.mark.parametrize(
    ("pre", "error", "saying"),
    [
        ("tekken", UnsupportedModelError, "tokenizer.ggml.pre is 'tekken', which is not supported; supported: smollm"),
        (None, UnsupportedModelError, "tokenizer.ggml.pre is None"),
    ],
)
def test_a_tokenizer_that_is_refused(tmp_path, pre, error, saying):
    made = bpe(split_at("."))
    with pytest.raises(error, match=re.escape(saying)):
        gguf_tokenizer(file_of(made, tmp_path / "model.gguf", pre))


@pytest.mark.parametrize(
    ("fields", "saying"),
    [
        ({"merges": None}, "tokenizer.ggml.merges must be a list of str"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of str"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' is there twice"),
        ({"bos_token_id": 2**63}, "tokenizer.ggml.bos_token_id must be one of 276 tokens; it is 9223372036854775808"),
        ({"eos_token_id": 276}, "tokenizer.ggml.eos_token_id must be one of 276 tokens; it is 276"),
        ({"eot_token_id": -1}, "tokenizer.ggml.eot_token_id must be one of 276 tokens; it is -1"),
        ({"tokens": [str(number) for number in range(301)]}, "has 301 tokens, and embeddings for 300"),
    ],
)
def test_a_tokenizer_that_is_broken(save, add_tokenizer, tmp_path, monkeypatch, fields, saying):
    """Nothing of it is found out only when a conversation begins."""
    folder = save("llama", **SIZES, vocab_size=300, fresh=True).folder
    add_tokenizer(folder)
    path = write_gguf(folder, tmp_path / "model.gguf", tokenizer=True)
    read = GGUFFile.__init__

    def broken(file, path):
        read(file, path)
        file.fields |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}

    monkeypatch.setattr(GGUFFile, "__init__", broken)
    with pytest.raises(CheckpointError, match=re.escape(saying)):  # noqa: PT012  # whichever an engine loads first
        load_gguf(path)
        gguf_tokenizer(path)


# Files that are refused


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


def overwrite(path, old, new):
    content = path.read_bytes()
    assert content.count(old) >= 1
    path.write_bytes(content.replace(old, new, 1))


def count(number):
    return struct.pack("<Q", number)


STRING, ARRAY, OF_FLAGS = (struct.pack("<I", kind) for kind in (8, 9, 7))


@pytest.mark.parametrize(
    ("break_it", "error", "saying"),
    [
        (lambda path: path.unlink(), CheckpointError, "cannot be read as a GGUF file"),
        (lambda path: cut(path, 0), CheckpointError, "cannot be read as a GGUF file"),
        (lambda path: cut(path, 200), CheckpointError, "Was it downloaded to its end?"),
        (lambda path: cut(path, path.stat().st_size - 4000), CheckpointError, "was it downloaded to its end?"),
        (lambda path: overwrite(path, b"GGUF", b"GGML"), CheckpointError, "is no GGUF file: it begins with b'GGML'"),
        (
            lambda path: overwrite(path, b"GGUF\3", b"GGUF\1"),
            UnsupportedModelError,
            "is GGUF version 1; supported: 2",
        ),
        (
            lambda path: overwrite(path, b"general.architecture\x08\0", b"general.architecture\x63\0"),
            CheckpointError,
            "there is a value of type 99",
        ),
        (  # a string of so many letters
            lambda path: overwrite(path, STRING + count(5), STRING + count(2**60)),
            CheckpointError,
            f"its header goes on for {2**60} bytes",
        ),
        *(
            (  # a list of so many values; the second would be in the file
                lambda path, length=length: overwrite(path, STRING + count(5), ARRAY + OF_FLAGS + count(length)),
                CheckpointError,
                f"there is a list of {length} values",
            )
            for length in (2**60, 10_000)
        ),
        (  # a tensor with so many axes, which would be in the file
            lambda path: overwrite(path, b"token_embd.weight\2\0\0\0", b"token_embd.weight\0\4\0\0"),
            CheckpointError,
            "has the tensor 'token_embd.weight' twice, or with 1024 axes",
        ),
        (lambda path: (path.unlink(), os.mkfifo(path)), CheckpointError, "is no file"),
        (
            lambda path: overwrite(path, b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"),
            CheckpointError,
            "lacks 1 tensor, by what its header says of the model: blk.0.attn_q.weight",
        ),
        (
            lambda path: overwrite(path, b"token_embd.weight", b"token_emb_.weight"),
            CheckpointError,
            "lacks 1 tensor, which every model has: token_embd.weight",
        ),
    ],
)
def test_a_broken_file(save, tmp_path, break_it, error, saying, monkeypatch):
    monkeypatch.setattr("minicache.model.gguf_file.MAX_LENGTH", 9_999)
    path = write_gguf(save("llama", **SIZES, fresh=True).folder, tmp_path / "model.gguf")
    break_it(path)
    with pytest.raises(error, match=re.escape(saying)) as raised:
        load_gguf(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "error", "saying"),
    [
        (
            {"rope__scaling__type": "yarn"},
            UnsupportedModelError,
            "llama.rope.scaling.type is 'yarn', which is not supp",
        ),
        ({"expert_count": 8}, UnsupportedModelError, "it has the field llama.expert_count, 8, which is not supported"),
        ({"rope__dimension_count": 8}, UnsupportedModelError, "llama.rope.dimension_count is 8"),
        ({"block_count": None}, CheckpointError, "llama.block_count must be a positive whole number; it is None"),
        (
            {"feed_forward_length": 97},
            CheckpointError,
            "blk.0.ffn_gate.weight is [96, 64], by its header it is [97, 64]",
        ),
        ({"attention__head_count": 3}, CheckpointError, "no model can have this shape: 3 query heads"),
        # models that no memory has room for
        ({"block_count": 2**31}, CheckpointError, "llama.block_count is 2147483648, and by its tensors at most 21"),
        ({"embedding_length": 2**31}, CheckpointError, "llama.embedding_length is 2147483648, and by its tensors at"),
        ({"attention__key_length": 2**31}, CheckpointError, "llama.attention.key_length is 2147483648, and by its ten"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, CheckpointError, "is [3]; it must be [8]"),
        ({"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}}, CheckpointError, "must be positive; it is [0.0"),
    ],
)
def test_a_model_that_is_refused(save, tmp_path, fields, error, saying):
    path = write_gguf(save("llama", **SIZES, fresh=True).folder, tmp_path / "model.gguf", **fields)
    with pytest.raises(error, match=re.escape(saying)):
        load_gguf(path)


def test_types_and_architectures_that_are_refused(save, tmp_path):
    folder = save("llama", **SIZES, fresh=True).folder
    with pytest.raises(UnsupportedModelError, match=r"is of type Q5_0, which is not supported; supported: F32"):
        load_gguf(write_gguf(folder, tmp_path / "a.gguf", kind="Q5_0"))
    path = write_gguf(folder, tmp_path / "b.gguf")
    overwrite(path, b"llama", b"gemma")
    with pytest.raises(
        UnsupportedModelError, match="architecture is 'gemma', which is not supported; supported: llama"
    ):
        load_gguf(path)


@pytest.mark.parametrize("seed", range(200))
def test_any_header_is_loaded_or_refused(tokenized, tmp_path, seed):
    """Some bytes of it are others, or numbers are very large, or bytes are missing."""
    chance = random.Random(seed)
    content = bytearray(tokenized.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 4])):
        at = chance.randrange(min(tensor.offset for tensor in GGUFFile(tokenized).tensors.values()))
        change = chance.randrange(3)
        if change == 0:
            content[at] = chance.randrange(256)
        elif change == 1:
            content[at : at + 8] = count(chance.choice([0, 1, 2**16, 2**31, 2**60, 2**63, 2**64 - 1]))
        else:
            del content[at : at + chance.randrange(1, 20)]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with suppress(MinicacheError):
        load_gguf(path)
    with suppress(MinicacheError):
        gguf_tokenizer(path)


@pytest.fixture(scope="module")
def tokenized(save, add_tokenizer, tmp_path_factory):
    folder = save("llama", **SIZES, vocab_size=300, fresh=True).folder
    add_tokenizer(folder)
    return write_gguf(folder, tmp_path_factory.mktemp("tokenized") / "model.gguf", tokenizer=True)
