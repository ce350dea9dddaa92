"""Constrained answers of a random model over bytes: JSON of a schema, whatever the model would like to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tests.real_models.conftest import Save
from transformers import PreTrainedTokenizerFast

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model.tokenizer import folder_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["é", "😀", "plain"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(save: Save, add_tokenizer: Callable[[Path], PreTrainedTokenizerFast]) -> Path:
    folder = save("llama", vocab_size=300, fresh=True).folder  # more logits than tokens
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder)


def test_every_answer_is_json_of_the_schema(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=0, n=20, json_schema=SCHEMA)
    for answer in llm.generate(["the cat"], params):
        assert answer.finish_reason == "stop"
        found = json.loads(answer.text)
        assert found.keys() == {"name", "age", "tags"}
        assert len(found["name"]) <= 6
        assert 0 <= found["age"] <= 130
        assert {*found["tags"]} <= {"é", "😀", "plain"}


def test_letters_of_several_tokens_are_whole(llm: LLM) -> None:
    params = SamplingParams(max_tokens=80, temperature=2.0, seed=1, n=10, regex="[é-ü😀-😅]{3,9}")
    for answer in llm.generate(["hello"], params):
        assert answer.finish_reason == "stop"
        assert 3 <= len(answer.text) <= 9
        assert all("é" <= letter <= "ü" or "😀" <= letter <= "😅" for letter in answer.text)


def test_draft_tokens_change_nothing(folder: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, temperature=1.0, seed=3, n=3, json_schema=SCHEMA)
    assert LLM(folder, speculative="ngram").generate(["the mat"], params) == llm.generate(["the mat"], params)


def test_the_bytes_of_tokens(folder: Path) -> None:
    tokenizer = folder_tokenizer(folder)
    assert tokenizer is not None
    tokens, theirs = tokenizer.token_bytes(), LLTokenizer(tokenizer.to_json())
    assert len(tokens) == theirs.vocab_size
    for token_id, text in enumerate(tokens):
        if text == b"\xff":  # begins no letter: llguidance marks special tokens with it
            continue
        assert text == (b"" if theirs.is_special_token(token_id) else theirs.decode_bytes([token_id]))
