"""A conversation with a folder's model: over HTTP with OpenAI's own client, and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.chatting import SAID, write_folder
from tests.server.conftest import running

from minicache.model import load_folder
from minicache.model.tokenizer import FolderTokenizer

MESSAGES: list[Any] = [
    {"role": "system", "content": "sé breve"},
    {"role": "user", "content": "你好 🙂?"},
    {"role": "assistant", "content": SAID},
    {"role": "user", "content": "¿y?"},
]
PROMPT = f"<|system|>sé breve<|end|><|user|>你好 🙂?<|end|><|assistant|>{SAID}<|end|><|user|>¿y?<|end|><|assistant|>"
NUM_SAID = len(SAID.encode()) + 1
"""Tokens of an answer: a byte each, and the end of the turn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("chatting"))


# Over HTTP


@pytest.fixture(scope="module", params=["thread", "process"])
def client(folder: Path, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    tokenizer, model = FolderTokenizer(folder), load_folder(folder)
    with running(model, request.param, tokenizer=tokenizer, served_model_name="parrot") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
            yield client


def test_an_answer_ends_with_the_turn(client: openai.OpenAI, folder: Path) -> None:
    answer = client.chat.completions.create(model="parrot", messages=MESSAGES, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    num_prompt = len(FolderTokenizer(folder).encode(PROMPT))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, NUM_SAID)


def test_a_stream_has_whole_letters(client: openai.OpenAI) -> None:
    events = list(client.chat.completions.create(model="parrot", messages=MESSAGES, temperature=0, stream=True))
    pieces = [event.choices[0].delta.content for event in events]
    assert [piece for piece in pieces if piece] == [*SAID]
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]


def test_an_answer_that_is_cut_inside_a_letter(client: openai.OpenAI) -> None:
    """Two of the three bytes of 日: a letter that can no longer be completed."""
    wish: Any = {"model": "parrot", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 2}
    (choice,) = client.chat.completions.create(**wish).choices
    assert (choice.message.content, choice.finish_reason) == ("\N{REPLACEMENT CHARACTER}", "length")
    events = list(client.chat.completions.create(**wish, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content


def test_a_stop_string_of_several_tokens(client: openai.OpenAI) -> None:
    wish: Any = {"model": "parrot", "messages": MESSAGES, "temperature": 0, "stop": ["🙂é"]}
    (choice,) = client.chat.completions.create(**wish).choices
    assert (choice.message.content, choice.finish_reason) == ("日", "stop")
    events = list(client.chat.completions.create(**wish, stream=True))
    assert "".join(event.choices[0].delta.content or "" for event in events) == "日"


def test_a_model_without_a_chat_template_takes_prompts_only(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    with running(load_folder(tmp_path), "thread", tokenizer=FolderTokenizer(tmp_path)) as server:
        refused = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES})
        assert refused.status == 400
        assert refused.json["error"]["message"] == "this model has no chat template: give a prompt"
        assert server.complete("<|assistant|>").json["choices"][0]["text"] == SAID
