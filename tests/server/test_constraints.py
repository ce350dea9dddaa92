"""Constrained answers over HTTP: OpenAI's `response_format`, vLLM's `structured_outputs`, and what is refused."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.test_replica import Served

from minicache.errors import ConstraintError

BODY = {"prompt": "Did she work yesterday?", "max_tokens": 20, "temperature": 1, "seed": 0}
CHOICE = ["Yes, she did.", "No, she did not."]


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    with serve_for_module() as server:
        yield server


def ask(server: Any, **fields: Any) -> Any:
    return server.ask("POST", "/v1/completions", BODY | fields)


def refusal(server: Any, **fields: Any) -> dict[str, Any]:
    answer = ask(server, **fields)
    assert answer.status == 400, answer.body
    error: dict[str, Any] = answer.json["error"]
    return error


def test_answers_are_one_of_the_choices(server: Any) -> None:
    answer = ask(server, structured_outputs={"choice": CHOICE}, n=5)
    assert {each["text"].strip() for each in answer.json["choices"]} <= {*CHOICE}
    assert {each["finish_reason"] for each in answer.json["choices"]} == {"stop"}
    messages = [{"role": "user", "content": "Did she work yesterday?"}]
    body = {"messages": messages, "structured_outputs": {"choice": CHOICE}}
    answer = server.ask("POST", "/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"].strip() in CHOICE


def test_answers_match_a_regular_expression_in_events_too(server: Any) -> None:
    pattern = r"Later (she|I)( \w+){2,4}\."
    answer = ask(server, structured_outputs={"regex": pattern}, stream=True, logprobs=2)
    text = "".join(each["choices"][0]["text"] for each in answer.events if each != "[DONE]")
    assert re.fullmatch(pattern, text.strip())
    assert ask(server, response_format={"type": "text"}, structured_outputs=None).status == 200


def test_where_nothing_is_allowed_the_request_fails_and_no_other(server: Any) -> None:
    """MiniGPT has no word xyz."""
    with ThreadPoolExecutor(2) as threads:
        fields: list[dict[str, Any]] = [{"structured_outputs": {"regex": "Yes, xyz"}}, {}]
        failed, free = threads.map(lambda its: ask(server, **its), fields)
    assert failed.status == 500
    assert failed.json["error"]["code"] == "step_failed"
    assert free.status == 200


def schema(**keywords: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": keywords}}
    }


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (schema(type="array", uniqueItems=True), "response_format", '"uniqueItems" is not supported'),
        (schema(oneOf=[{"type": "string"}, {"type": "string"}]), "response_format", "oneOf"),
        (schema(type="wrong"), "response_format", "wrong"),
        ({"response_format": {"type": "json_object"}}, "response_format", "no token can begin"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", '"not" is not supported'),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "EOF"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
    ],
)
def test_what_cannot_be_followed_is_a_400_that_names_it(server: Any, fields: Any, param: str, says: str) -> None:
    error = refusal(server, **fields)
    assert (error["param"], error["code"]) == (param, "invalid_constraint")
    assert says in error["message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "one constraint, and there are 2"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "one constraint"),
        ({"structured_outputs": {"regex": "a" * 40_000}}, "40,000 characters, and at most 32,768"),
        (schema(description="a" * 40_000), "and at most 32,768"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs: half of a pair"),
    ],
)
def test_fields_that_are_wrong_or_too_long_are_named(server: Any, fields: Any, says: str) -> None:
    assert says in refusal(server, **fields)["message"]


def test_a_schema_that_takes_for_ever_is_refused_and_holds_nobody_up(server: Any) -> None:
    patterns = {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(20)]}
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ask(server, **schema(**patterns))))
    thread.start()
    while thread.is_alive():
        assert ask(server, max_tokens=2).status == 200
        thread.join(0.2)
    assert "it takes more than 1 s of computing" in found[0].json["error"]["message"]


def test_the_engine_in_a_process_compiles_beside_its_steps() -> None:
    served = Served()
    try:
        with served.begin(max_tokens=100):
            status, body = served.ask("POST", "/v1/completions", BODY | {"structured_outputs": {"choice": CHOICE}})
            assert status == 200, body
            assert any(each.encode() in body for each in CHOICE)
            status, body = served.ask("POST", "/v1/completions", BODY | schema(uniqueItems=True))
            assert status == 400, body
            assert b"uniqueItems" in body
        began = time.monotonic()
        while served.client.num_unfinished:
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    finally:
        served.stop()


def test_an_error_of_the_other_process_is_of_the_same_class() -> None:
    from minicache.serving.replica.messages import error_of

    assert isinstance(error_of("ConstraintError", "x"), ConstraintError)
