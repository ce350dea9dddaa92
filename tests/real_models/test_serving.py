"""A folder's model behind the HTTP API: its chat template makes the prompt, its tokens are those of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from fastapi.testclient import TestClient

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.serving.http.app import create_app

MESSAGES = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": [{"type": "text", "text": "on "}, {"type": "text", "text": "the mat ¿qué?"}]},
]
ASKED = {"max_completion_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(save, add_tokenizer) -> Iterator[tuple]:
    saved = save("llama", vocab_size=300, eos_token_id=1, fresh=True)
    theirs = add_tokenizer(saved.folder)
    llm = LLM(saved.folder, num_blocks=200, prefix_caching=True)
    with TestClient(create_app(AsyncEngine(llm), served_model_name="org/cat")) as client:
        yield client, saved.theirs, theirs
    assert llm.scheduler.num_running == 0


def expected(model, theirs) -> tuple[int, list[int]]:
    """The prompt's length, and the greedy tokens after it, both by `transformers`."""
    plain = [{"role": m["role"], "content": text_of(m["content"])} for m in MESSAGES]
    text = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    prompt = theirs.encode(text, add_special_tokens=False)
    row = torch.tensor([prompt])
    mask = torch.ones_like(row)
    out = model.generate(
        row, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return len(prompt), out[0, len(prompt) :].tolist()


def text_of(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def test_a_conversation_is_the_templates_prompt(served) -> None:
    client, model, theirs = served
    num_prompt, tokens = expected(model, theirs)
    for _ in range(2):  # the second finds its prompt in the prefix cache
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, **ASKED, "logprobs": True}).json()
        (choice,) = answer["choices"]
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 24,
            "total_tokens": num_prompt + 24,
        }
        assert choice["message"]["content"] == theirs.decode(tokens, skip_special_tokens=True)
        assert len(choice["logprobs"]["content"]) == 24


def test_letters_of_several_tokens_are_whole_in_a_stream(served) -> None:
    client, model, theirs = served
    _, tokens = expected(model, theirs)
    body = {"model": "org/cat", "messages": MESSAGES, **ASKED, "stream": True}
    lines = client.post("/v1/chat/completions", json=body).content.decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == theirs.decode(tokens, skip_special_tokens=True)


def test_what_the_template_refuses_is_the_clients_mistake(served) -> None:
    client, _, _ = served
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "system", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert "no role system" in answer.json()["error"]["message"]


def test_a_models_name_may_have_a_slash(served) -> None:
    client, _, _ = served
    assert client.get("/v1/models/org/cat").json()["id"] == "org/cat"
    assert client.get("/v1/models").json()["data"][0]["id"] == "org/cat"
