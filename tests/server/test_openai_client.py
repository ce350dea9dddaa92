"""The `openai` package as a client: each field is where it looks for it, and errors are its own exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from minicache.engine.sampling import SamplingParams

openai = pytest.importorskip("openai")

PROMPT = "Yesterday I"
KEY = "a key"


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    with serve_for_module(api_key=KEY, max_num_seqs=8, max_waiting=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def alone(minigpt: Any) -> Any:
    """What the `LLM` itself gives."""
    from minicache.engine.llm import LLM
    from minicache.grammar import Tokenizer

    llm = LLM(minigpt, num_blocks=64, tokenizer=Tokenizer())
    return lambda prompt=PROMPT, **fields: llm.generate([prompt], SamplingParams(**fields))


def test_models(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("minigpt", "model", "minicache")
    assert client.models.retrieve("minigpt").id == "minigpt"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("org/another")
    assert error.value.code == "model_not_found"


def test_a_completion(client: Any, alone: Any) -> None:
    (expected,) = alone(max_tokens=12)
    answer = client.completions.create(model="minigpt", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.choices[0].logprobs is None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 12, 14)


def test_a_completion_in_events(client: Any, alone: Any) -> None:
    (expected,) = alone(max_tokens=12, temperature=1.0, seed=5)
    events = list(
        client.completions.create(
            model="minigpt",
            prompt=PROMPT,
            max_tokens=12,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *others, last = events
    assert "".join(event.choices[0].text for event in others) == expected.text
    assert [event.choices[0].finish_reason for event in others] == [None] * (len(others) - 1) + [expected.finish_reason]
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in others)
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)


def test_several_answers_to_several_prompts(client: Any, alone: Any) -> None:
    prompts = [PROMPT, "The cat"]
    wish: Any = {"max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2}
    expected = [each.text for prompt in prompts for each in alone(prompt, **wish)]
    answer = client.completions.create(model="minigpt", prompt=prompts, **wish)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 4
    for event in client.completions.create(model="minigpt", prompt=prompts, stream=True, **wish):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == expected


def test_token_ids_and_what_ends_a_text(client: Any, alone: Any) -> None:
    (long,) = alone(max_tokens=40, ignore_eos=True)
    words = long.text.split()
    stop = f" {words[5]}"
    answer = client.completions.create(
        model="minigpt",
        prompt=[2, 3, 4],
        max_tokens=3,
        temperature=0,
        extra_body={"ignore_eos": True, "nobody_knows_this": {"deep": [1]}},
    )
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 3
    answer = client.completions.create(model="minigpt", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop, "zzz"])
    assert answer.choices[0].text == long.text[: long.text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_completion(client: Any) -> None:
    wish: Any = {"model": "minigpt", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 3}
    (choice,) = client.completions.create(**wish).choices
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 6
    for token, logprob, top, offset in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        assert logprob == max(top.values()) <= 0
        assert len(top) == 3
        assert choice.text[offset:].startswith(token)
    assert "".join(told.tokens) == choice.text
    events = [event.choices[0].logprobs for event in client.completions.create(stream=True, **wish)]
    assert [each.tokens[0] for each in events] == told.tokens
    assert [each.text_offset[0] for each in events] == told.text_offset


def test_a_conversation(client: Any, alone: Any) -> None:
    (expected,) = alone("The cat and", max_tokens=8)
    messages = [
        {"role": "system", "content": "The cat"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]
    wish: Any = {"model": "minigpt", "messages": messages, "max_completion_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **wish)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.message.tool_calls is None
    assert answer.usage.completion_tokens == len(choice.logprobs.content) == len(expected.token_ids)
    for token in choice.logprobs.content:
        assert token.bytes == list(token.token.encode())
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob
    events = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **wish))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content for event in events[:-1]) == expected.text
    assert events[-2].choices[0].finish_reason == expected.finish_reason
    assert events[-1].usage == answer.usage
    word = expected.text.split()[3]
    with client.chat.completions.stream(stop=word, **wish) as stream:  # puts the events together, and checks them
        assert stream.get_final_completion().choices[0].message.content == expected.text.split(word)[0]


def test_errors_are_the_clients_own_exceptions(client: Any, server: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="minigpt", prompt=PROMPT, temperature=-1)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="minigpt", prompt=[1] * 600)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model="minigpt", prompt=PROMPT, logit_bias={"5": 1})
    with pytest.raises(openai.BadRequestError, match="at most 16"):
        client.completions.create(model="minigpt", prompt=[PROMPT] * 17)
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key="wrong").models.list()
    assert error.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="minigpt", prompt="a" * 5_000_000)
    assert error.value.status_code == 413


def test_a_full_server_is_a_rate_limit_error(client: Any) -> None:
    held = [
        client.completions.create(
            model="minigpt", prompt=PROMPT, n=8, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    ]
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model="minigpt", prompt=PROMPT)
    assert int(error.value.response.headers["retry-after"]) >= 1
    for stream in held:
        stream.close()
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(model="minigpt", prompt=PROMPT, max_tokens=1).choices


def test_the_asynchronous_client(server: Any, alone: Any) -> None:
    """Six streams at once over one pool of connections; half of them are left after three events."""
    expected = [alone(max_tokens=15, temperature=1.0, seed=seed)[0].text for seed in range(6)]

    async def ask(client: Any, seed: int) -> str:
        stream = await client.completions.create(model="minigpt", prompt=PROMPT, max_tokens=15, seed=seed, stream=True)
        text, num_events = "", 0
        async for event in stream:
            text += event.choices[0].text
            num_events += 1
            if seed % 2 and num_events == 3:
                await stream.close()
                break
        return text

    async def ask_all() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(6)))

    texts = asyncio.run(ask_all())
    for seed, (text, whole) in enumerate(zip(texts, expected, strict=True)):
        assert whole.startswith(text) if seed % 2 else whole == text
    server.wait_until_idle()
    server.assert_all_is_given_back()


def test_a_failing_model_is_an_exception_in_the_middle_of_a_stream(serve: Any, model: Any) -> None:
    server = serve()
    url = f"http://127.0.0.1:{server.port}/v1"

    def fail(token_ids: Any) -> None:
        raise RuntimeError("broken")

    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
        stream = client.completions.create(
            model="minigpt", prompt=PROMPT, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(stream).choices
        model.before = fail
        with pytest.raises(openai.APIError, match="broken"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="broken"):
            client.completions.create(model="minigpt", prompt=PROMPT)
