"""benchmarks/real_model.py with MiniGPT in the real model's place: counts, not times."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import _record
from benchmarks import real_model as benchmark

from minicache.model import load_minigpt


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    end_token_ids = ()
    end_token_id = -1
    max_token_chars = 1

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 300 + 5 for letter in text]

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(chr(each % 26 + 97) for each in ids)

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> list[int]:
        return [each for message in messages for each in self.encode(f"{message['role']}:{message['content']}\n")]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    model, tokenizer = load_minigpt(), Letters()
    monkeypatch.setattr(benchmark, "model", lambda: model)
    monkeypatch.setattr(benchmark, "tokenizer", lambda: tokenizer)
    for name, value in {"REPEATS": 2, "NUM_NEW": 8, "NUM_TEXT": 60, "LONG": 60, "CHUNK": 16}.items():
        monkeypatch.setattr(benchmark, name, value)
    told = {"system": "s" * 60, "desk": ["a?", "b?"], "conversation": ["c?", "d?"], "questions": ["e?", "f?", "g?"]}
    monkeypatch.setattr(benchmark, "PROMPTS", told)


def test_full_blocks_of_a_prefix_are_found():
    found = benchmark.prefix_sharing()
    shared = len("system:") + 60 + len("\nuser:")
    assert found["system_prompt"]["system_tokens"] == shared
    assert found["system_prompt"]["cached_tokens"] == shared // 16 * 16
    first = len("user:c?\n")
    assert found["conversation"]["prompt_tokens"] == first + first + len("assistant:\n") + 8 + len("user:d?\n")


def test_chunks_are_shorter_steps():
    found = benchmark.chunked_prefill()
    assert found["whole"]["ttft_ms"] == found["whole"]["longest_gap_ms"]
    assert found["chunked"]["ttft_ms"] >= found["chunked"]["longest_gap_ms"]


def test_own_and_accepted_tokens_add_up(monkeypatch):
    monkeypatch.setattr(benchmark, "KINDS", ("chat",))
    monkeypatch.setattr(benchmark, "NUM_NEW", 60)
    prompts = [[5, 6, 7, 8] * 4, [9, 10] * 6]
    monkeypatch.setattr(benchmark, "to_answer", lambda kind: prompts)
    found = benchmark.speculation()["chat"]
    assert found["num_tokens"] == 59 + 59
    assert 1 <= found["tokens_per_step"] <= 1 + benchmark.NUM_DRAFTS
    assert 0 <= found["acceptance"] <= 1


def test_other_tokens_are_an_error():
    ways = {"plain": benchmark.engine(), "ngram": benchmark.engine()}
    ways["ngram"].sample = lambda logits, rows, samplers: [5] * len(rows)
    with pytest.raises(RuntimeError, match="changed the answers"):
        benchmark.compared(ways, [[[5, 6, 7, 8]]], "chat")


def test_perplexity_is_that_of_the_model():
    ids = benchmark.text("prose")
    nats, likeliest = benchmark.read(benchmark.engine(), ids)
    with torch.inference_mode():
        logits = benchmark.model()(torch.tensor([ids]))[0, :-1]
    assert nats.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item(), 1e-4)
    assert likeliest.equal(logits.argmax(-1))


def test_caches_of_one_byte_are_compared_with_float32():
    found = benchmark.kv_quantization()
    assert found["num_answers"] == 3
    for name in ("int8", "fp8_e4m3"):
        assert 0 <= found[name]["equal_answers"] <= 3
        told = found["texts"]["code"]["perplexity"] * (1 + found[name]["code"]["loss"] / 100)
        assert found[name]["code"]["perplexity"] == pytest.approx(told, rel=1e-3)


def test_subjects_that_were_not_asked_for_stay(monkeypatch, tmp_path):
    for module in (benchmark, _record):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/real_model.py", "chunked_prefill"])
    (tmp_path / "real_model.json").write_text('{"speculation": 1, "machine": "m", "command": "c", "date": "d"}')
    monkeypatch.setitem(benchmark.SUBJECTS, "chunked_prefill", lambda: 2)
    benchmark.main()
    found = json.loads((tmp_path / "real_model.json").read_text())
    assert (found["speculation"], found["chunked_prefill"]) == (1, 2)
    assert found["command"] == "python -m benchmarks.real_model chunked_prefill"
