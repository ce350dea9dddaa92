"""`return_token_ids`: from every event that tells token ids, the answer can be continued without losing a letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.server.conftest import parse_events
from tests.server.test_logprobs_text import ANSWERS, PROMPT, Bytes, chunks_of, whole

from minicache.engine.answers import Chunk
from minicache.serving.http.shapes import ChatShape, CompletionShape


def events(kind: type[ChatShape] | type[CompletionShape], chunks: Sequence[Chunk]) -> list[Any]:
    shape = kind("m", Bytes(), token_ids=True)
    shape.continue_prompts([PROMPT])
    return parse_events(shape.opening(1) + b"".join(shape.events(0, [chunk]) for chunk in chunks))


def text_of(event: Any) -> str:
    choice = event["choices"][0]
    return choice["text"] if "text" in choice else choice["delta"]["content"]


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
@pytest.mark.parametrize(("text", "stop", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_can_be_continued_from_every_event_with_token_ids(
    kind: type[ChatShape] | type[CompletionShape], text: str, stop: list[str], reason: str
) -> None:
    token_ids = list(text.encode())
    chunks = chunks_of(token_ids, stop, reason)
    told = events(kind, chunks)
    whole = "".join(map(text_of, told))
    num_told = num_points = 0
    shown = ""
    for event in told:
        shown += text_of(event)
        new = event["choices"][0].get("token_ids") or []
        num_told += len(new)
        if new and not event["choices"][0]["finish_reason"]:
            num_points += 1
            rest = chunks_of_rest(token_ids, num_told, stop, reason)
            assert shown + "".join(chunk.text for chunk in rest) == whole
    assert num_points >= 1
    assert num_told == sum(chunk.token_id is not None for chunk in chunks)


def chunks_of_rest(token_ids: list[int], begin: int, stop: list[str], reason: str) -> list[Chunk]:
    """What another engine makes of the rest, whose prompt has the beginning at its end."""
    from minicache.engine.stopping import TextStream

    text, chunks = TextStream(Bytes(), [*PROMPT, *token_ids[:begin]], stop), []
    for number, token_id in enumerate(token_ids[begin:], start=begin + 1):
        shown = text.push(token_id)
        finish = "stop" if text.is_stopped else reason if number == len(token_ids) else None
        chunks.append(Chunk(0, token_id, shown + (text.finish() if finish else ""), finish, 0))
        if finish:
            break
    return chunks


def test_the_prompt_is_told_once() -> None:
    chunks = chunks_of(list(b"abc"), [], "length")
    completion = events(CompletionShape, chunks)
    assert [each["choices"][0].get("prompt_token_ids") for each in completion] == [PROMPT, None, None]
    chat = events(ChatShape, chunks)
    assert [each.get("prompt_token_ids") for each in chat] == [PROMPT, None, None, None]


def test_a_whole_answer_tells_all() -> None:
    chunks = chunks_of(list(b"abc"), [], "length")
    for kind in (CompletionShape, ChatShape):
        shape = kind("m", Bytes(), token_ids=True)
        shape.continue_prompts([PROMPT])
        body = whole(shape, [chunks], len(PROMPT))
        choice = body["choices"][0]
        assert choice["token_ids"] == list(b"abc")
        assert choice.get("prompt_token_ids", body.get("prompt_token_ids")) == PROMPT


def test_nobody_who_has_not_asked_is_told() -> None:
    shape = CompletionShape("m", Bytes())
    shape.continue_prompts([PROMPT])
    (event, *_) = parse_events(shape.events(0, chunks_of(list(b"abc"), [], "length")))
    assert "token_ids" not in event["choices"][0]
