"""Log probabilities over HTTP: the tokens' texts make up the answer, and each begins where its offset says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.server.conftest import parse_events

from minicache.engine.answers import PAIR, Chunk, TokenLogprobs
from minicache.engine.stopping import TextStream
from minicache.serving.http.shapes import ChatShape, CompletionShape, Shape


class Bytes:
    """A token is a byte."""

    end_token_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], /) -> str:
        return bytes(each for each in ids if each < 256).decode(errors="replace")


PROMPT = list("¿Qué".encode())


def chunks_of(token_ids: Sequence[int], stop: Sequence[str], reason: str, *, is_empty_end: bool = False) -> list[Chunk]:
    """What an engine makes of an answer's tokens."""
    text, chunks = TextStream(Bytes(), PROMPT, stop), []
    for number, token_id in enumerate(token_ids, start=1):
        is_last = number == len(token_ids) and not is_empty_end
        shown = text.push(token_id)
        finish = "stop" if text.is_stopped else reason if is_last else None
        shown += text.finish() if finish else ""
        others = [(token_id, -0.5), (33, -2.0), (0xC3, -3.0), (0xC4, -4.0), (256, -5.0)]
        packed = b"".join(PAIR.pack(*each) for each in dict(others).items())
        chunks.append(Chunk(0, token_id, shown, finish, 0, TokenLogprobs(token_id, -0.5, packed)))
        if finish:
            return chunks
    chunks.append(Chunk(0, None, text.finish(), reason, 0))
    return chunks


def whole(shape: Shape, choices: Sequence[Sequence[Chunk]], num_prompt_tokens: int) -> Any:
    """A whole answer, with all its slices done."""
    work = shape.whole(choices, num_prompt_tokens)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return json.loads(end.value)


def answer(kind: type[Shape], chunks: Sequence[Chunk], *, stream: bool) -> tuple[str, list[str], list[int]]:
    """Its text, its tokens and their offsets, as a client puts them together."""
    shape = kind("m", Bytes())
    shape.continue_prompts([PROMPT])
    if stream:
        choices = [event["choices"][0] for chunk in chunks for event in parse_events(shape.events(0, [chunk]))]
    else:
        choices = whole(shape, [chunks], len(PROMPT))["choices"]
    text, tokens, offsets = "", [], []
    for choice in choices:
        message = choice.get("delta", choice.get("message"))
        text += choice["text"] if message is None else message["content"]
        if choice["logprobs"] is None:
            continue
        if message is None:
            tokens += choice["logprobs"]["tokens"]
            offsets += choice["logprobs"]["text_offset"]
            told = choice["logprobs"]
            assert all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))
        else:
            told = choice["logprobs"]["content"]
            tokens += [each["token"] for each in told]
            assert all(each["bytes"] == list(each["token"].encode()) for each in told)
    return text, tokens, offsets


ANSWERS = {
    "letters": ("plain text", [], "length"),
    "letters of several bytes": (" és això: 漢字 🎉!", [], "length"),
    "a stop string": (" és això: 漢字 🎉 and more", ["🎉 and", "zzz"], "length"),
    "a beginning of a stop string": ("one STO two STO", ["STOP"], "length"),
    "cut in the middle of a token": ("one STOP", ["ne ST"], "length"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
@pytest.mark.parametrize(("text", "stop", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_the_tokens_make_up_the_text(text: str, stop: list[str], reason: str, kind: type[Shape], stream: bool) -> None:
    chunks = chunks_of(list(text.encode()), stop, reason)
    shown, tokens, offsets = answer(kind, chunks, stream=stream)
    assert shown == "".join(chunk.text for chunk in chunks)
    assert "".join(tokens) == shown
    assert len(tokens) == len(chunks)
    starts = [len("".join(tokens[:number])) for number in range(len(tokens))]
    assert kind is ChatShape or offsets == starts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_empty_end", [False, True], ids=["with a token", "without"])
@pytest.mark.parametrize("tail", [[0xF0, 0x9F], [0xFF] * 12, [256], [0xC3, 0xA9, 0xC3]], ids=str)
def test_an_answer_that_ends_within_a_letter(tail: list[int], is_empty_end: bool, stream: bool) -> None:
    chunks = chunks_of([*b"ab", *tail], [], "capacity", is_empty_end=is_empty_end)
    shown, tokens, offsets = answer(CompletionShape, chunks, stream=stream)
    assert "".join(tokens) == shown
    assert offsets == [len("".join(tokens[:number])) for number in range(len(tokens))]


def test_likely_tokens_have_names_of_their_own() -> None:
    shape = CompletionShape("m", Bytes())
    shape.continue_prompts([PROMPT])
    answer = whole(shape, [chunks_of(b"ab", [], "length")], 4)
    (first, *_rest) = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert first == {"a": -0.5, "!": -2.0, "\ufffd": -3.0, "token_id:196": -4.0, "token_id:256": -5.0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stop", [[], [" the"]], ids=["", "stop"])
def test_minigpts_spaces_belong_to_its_words(serve: Any, stop: list[str], stream: bool) -> None:
    server = serve()
    wish = {"n": 2, "max_tokens": 30, "logprobs": 2, "stop": stop, "seed": 1, "temperature": 1, "stream": stream}
    reply = server.complete(["Yesterday I", "The cat"], **wish)
    assert reply.status == 200
    choices = [each for event in reply.events[:-1] for each in event["choices"]] if stream else reply.json["choices"]
    for index in range(4):
        mine = [each for each in choices if each["index"] == index]
        told = [each["logprobs"] for each in mine if each["logprobs"]]
        text = "".join(each["text"] for each in mine)
        assert "".join(token for each in told for token in each["tokens"]) == text
        assert text.startswith(" ")
        assert not stop or " the" not in text
