"""The engine's chunks in OpenAI's shapes: events of a stream, and whole answers. No phase builds this module.

An event is put together as text around the few fields that change from token to token: at 64 streams a `json.dumps` of
a whole event for each token would be a good part of what the server costs.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minicache.engine.answers import Chunk, TokenLogprobs
from minicache.engine.stopping import TextStream, Tokenizer
from minicache.serving.http.protocol import Usage
from minicache.serving.http.streaming import sse_event
from minicache.serving.http.turns import SLICE

MIN_LOGPROB = -9999.0
"""The log probability of an impossible token: JSON has no −∞. The number is vLLM's."""

FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", None: None}
"""The engine's finish reasons → OpenAI's. "capacity" is a limit on the length, too."""


@dataclass(slots=True)
class LogprobEntry:
    """The log probability of a token, as sent to clients.

    Attributes:
        text: what the token adds to the answer.
        offset: where in the answer that begins.
        logprob: at least MIN_LOGPROB.
        top: (name, log probability) of each of the likeliest tokens; the name is None for the token itself, whose text
            may still grow, or be cut.
    """

    text: str
    offset: int
    logprob: float
    top: list[tuple[str | None, float]]


class ChoiceLogprobs:
    """The log probabilities of one choice, each with the text that its token adds; together these are the answer.

    They are sent with their text: those of tokens that are held back (part of a letter, or a possible beginning of a
    stop string) when it is released. A token that only begins a letter adds nothing, and the one that completes it adds
    the letter. Text that a stop string cuts off is missing from the tokens' texts too.

    Args:
        tokenizer: None: texts are empty, and tokens are named by their ids.
        prompt_token_ids: what the choice continues.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._texts = None if tokenizer is None else TextStream(tokenizer, prompt_token_ids)
        self._num_decoded = self._num_shown = 0  # letters
        self._held: list[LogprobEntry] = []

    def take(self, chunk: Chunk) -> list[LogprobEntry]:
        """The entries to send with a chunk."""
        self._num_shown += len(chunk.text)
        if chunk.logprobs:
            self._add(chunk.logprobs)
        if self._texts is None or chunk.finish_reason:
            return self._rest()
        complete = [
            number
            for number, each in enumerate(self._held, start=1)
            if each.text and each.offset + len(each.text) <= self._num_shown
        ]
        num_sent = max(complete, default=0)
        entries, self._held = self._held[:num_sent], self._held[num_sent:]
        return entries

    def _add(self, logprobs: TokenLogprobs) -> None:
        token_id, texts = logprobs.token_id, self._texts
        would_add = ["" if texts is None else texts.would_add(likely) for likely, _ in logprobs.top]
        text = _by_id(token_id) if texts is None else texts.push(token_id)
        top: list[tuple[str | None, float]] = []
        names = {text}
        for (likely, likely_logprob), added in zip(logprobs.top, would_add, strict=True):
            name = None
            if likely != token_id:
                name = added if added and added not in names else _by_id(likely)  # it shows as nothing, or as another
                names.add(name)
            top.append((name, max(likely_logprob, MIN_LOGPROB)))
        self._held.append(LogprobEntry(text, self._num_decoded, max(logprobs.logprob, MIN_LOGPROB), top))
        self._num_decoded += 0 if texts is None else len(text)

    def _rest(self) -> list[LogprobEntry]:
        """All that is left, when the answer is complete: what was held back belongs to the last token."""
        entries, self._held = self._held, []
        if self._texts is not None and entries:
            entries[-1].text += self._texts.finish()
            for each in entries:
                each.offset = min(each.offset, self._num_shown)
                each.text = each.text[: self._num_shown - each.offset]
        return entries


class ChoiceTokens:
    """The token ids of one choice, sent when none of their text is held back.

    Each is sent with the event that completes the text of all tokens up to it. So a client that has read the events up
    to one with token ids can continue the answer from there, and gets the text that would have followed. (vLLM sends
    them at once; in total they are the same.)

    Args:
        tokenizer: None: there are no texts, and every token is sent at once.
        prompt_token_ids: what the choice continues.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._texts = None if tokenizer is None else TextStream(tokenizer, prompt_token_ids)
        self._num_held_letters = 0
        self._held: list[int] = []

    def take(self, chunk: Chunk) -> list[int]:
        """The entries to send with a chunk."""
        if chunk.token_id is not None:
            self._held.append(chunk.token_id)
        if self._texts is not None and not chunk.finish_reason:
            if chunk.token_id is not None:
                self._num_held_letters += len(self._texts.push(chunk.token_id))
            self._num_held_letters -= len(chunk.text)
            if self._num_held_letters or not self._texts.is_settled:
                return []
        entries, self._held = self._held, []
        return entries


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class Shape(ABC):
    """The response format of one HTTP request.

    Args:
        model: the served model's name.
        tokenizer: turns token ids into the texts of log probabilities; or None.
        usage: whether a stream ends with a usage event, in which case all others say `"usage": null`.
        token_ids: whether token ids are sent: of each choice `token_ids`, and of its prompt `prompt_token_ids`, where
            vLLM has them (`return_token_ids`).
        num_logprobs: how many log probabilities a token comes with, its own included.

    Attributes:
        num_completion_tokens: so many tokens were in the chunks so far.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    event_kind: ClassVar[str]
    after_logprobs: ClassVar = ""
    """What follows the lists of log probabilities in a whole answer, as fields of JSON."""
    has_prompts: ClassVar[bool]
    """Whether the ids of the prompt are in each choice, rather than once next to them."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        usage: bool = False,
        token_ids: bool = False,
        num_logprobs: int = 0,
    ) -> None:
        self.num_completion_tokens = 0
        self._slice = max(SLICE // (1 + num_logprobs), 1)
        self._tokenizer = tokenizer
        self._prompts: Sequence[Sequence[int]] = ()
        self._logprobs: dict[int, ChoiceLogprobs] = {}
        self._sends_token_ids = token_ids
        self._tokens: dict[int, ChoiceTokens] = {}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        head = json.dumps({**self._head, "object": self.event_kind})
        self._before = f'{head[:-1]}, "choices": [{{"index": '
        self._after = '}], "usage": null}' if usage else "}]}"

    def continue_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """To be called before anything else: the token ids that each choice continues."""
        self._prompts = prompts

    def slices(self, chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
        """Chunks, as many at a time as one slice of work may have (`minicache.serving.http.turns`)."""
        return (chunks[begin : begin + self._slice] for begin in range(0, len(chunks), self._slice))

    # Streams

    def opening(self, num_choices: int) -> bytes:
        """Events before the first token."""
        return b""

    def events(self, first_index: int, chunks: Sequence[Chunk]) -> bytes:
        """One event for each chunk; the chunk's index counts from first_index."""
        return b"".join(self._event(first_index + chunk.index, chunk) for chunk in chunks)

    def usage_event(self, num_prompt_tokens: int) -> bytes:
        """The event that tells how many tokens it were."""
        usage = self.usage(num_prompt_tokens).model_dump()
        return sse_event(json.dumps({**self._head, "object": self.event_kind, "choices": [], "usage": usage}))

    def _event(self, index: int, chunk: Chunk) -> bytes:
        self.num_completion_tokens += chunk.token_id is not None
        reason = FINISH_REASONS[chunk.finish_reason]
        finish = f'"{reason}"' if reason else "null"
        return (
            f"data: {self._before}{index}, {self._delta(index, chunk)}, "
            f'"finish_reason": {finish}{self._token_ids(index, chunk)}{self._after}\n\n'.encode()
        )

    def _token_ids(self, index: int, chunk: Chunk) -> str:
        """The token ids that a chunk tells of its choice, as fields of JSON with a comma before them."""
        if not self._sends_token_ids:
            return ""
        is_first = index not in self._tokens
        if is_first:
            self._tokens[index] = ChoiceTokens(self._tokenizer, self._prompts[index])
        fields = f', "token_ids": {self._tokens[index].take(chunk)}'
        return (
            f'{fields}, "prompt_token_ids": {list(self._prompts[index])}' if is_first and self.has_prompts else fields
        )

    @abstractmethod
    def _delta(self, index: int, chunk: Chunk) -> str:
        """What a chunk adds to its choice, as fields of JSON."""

    # Whole answers

    def whole(self, choices: Sequence[Sequence[Chunk]], num_prompt_tokens: int) -> Generator[None, None, bytes]:
        """All chunks of all choices as one body. Yields after each slice of work, and returns the body: JSON in ASCII.

        The log probabilities become JSON slice by slice: of a long answer, `json.dumps` alone would take a second.
        """
        self.num_completion_tokens = sum(chunk.token_id is not None for chunks in choices for chunk in chunks)
        written, num_left = [], self._slice
        for index, chunks in enumerate(choices):
            columns: dict[str, list[str]] = {}
            for some in self.slices(chunks):
                entries = [each for chunk in some for each in self._entries(index, chunk)]
                for name, column in self._columns(entries).items() if entries else ():
                    columns.setdefault(name, []).append(json.dumps(column)[1:-1])
                num_left -= len(some)
                if num_left <= 0:
                    yield
                    num_left = self._slice
            lists = ", ".join(f'"{name}": [{", ".join(column)}]' for name, column in columns.items())
            logprobs = f"{{{lists}{self.after_logprobs}}}" if columns else "null"
            fields = {
                "finish_reason": FINISH_REASONS[chunks[-1].finish_reason],
                **self._choice_token_ids(index, chunks),
            }
            choice = self._choice("".join(chunk.text for chunk in chunks))
            written.append(f'{{"index": {index}, {choice}, "logprobs": {logprobs}, {json.dumps(fields)[1:]}')
        head = json.dumps({**self._head, "object": self.kind})
        fields = {"usage": self.usage(num_prompt_tokens).model_dump()}
        if self._sends_token_ids and not self.has_prompts:
            fields["prompt_token_ids"] = self._prompts[0]
        return f'{head[:-1]}, "choices": [{", ".join(written)}], {json.dumps(fields)[1:]}'.encode()

    def _choice_token_ids(self, index: int, chunks: Sequence[Chunk]) -> dict[str, Any]:
        if not self._sends_token_ids:
            return {}
        fields: dict[str, Any] = {"token_ids": [each.token_id for each in chunks if each.token_id is not None]}
        return fields | {"prompt_token_ids": self._prompts[index]} if self.has_prompts else fields

    @abstractmethod
    def _choice(self, text: str) -> str:
        """The text of one choice, as fields of JSON."""

    @abstractmethod
    def _columns(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        """Log probabilities by the names of their lists, each of which goes on from part to part of an answer."""

    def usage(self, num_prompt_tokens: int) -> Usage:
        """How many tokens there were."""
        total = num_prompt_tokens + self.num_completion_tokens
        return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=self.num_completion_tokens, total_tokens=total)

    def _entries(self, index: int, chunk: Chunk) -> list[LogprobEntry]:
        """The log probabilities to tell with a chunk of a choice; none if the request has not asked for them."""
        if index not in self._logprobs:
            if not chunk.logprobs:
                return []
            self._logprobs[index] = ChoiceLogprobs(self._tokenizer, self._prompts[index])
        return self._logprobs[index].take(chunk)


class CompletionShape(Shape):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = event_kind = "text_completion"
    has_prompts = True

    def _delta(self, index: int, chunk: Chunk) -> str:
        entries = self._entries(index, chunk)
        logprobs = json.dumps(self._columns(entries)) if entries else "null"
        return f'"text": {json.dumps(chunk.text)}, "logprobs": {logprobs}'

    def _choice(self, text: str) -> str:
        return f'"text": {json.dumps(text)}'

    def _columns(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        return {
            "tokens": [each.text for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [
                {each.text if name is None else name: logprob for name, logprob in each.top} or None for each in entries
            ],
            "text_offset": [each.offset for each in entries],
        }


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    after_logprobs = ', "refusal": null'
    event_kind = "chat.completion.chunk"
    has_prompts = False

    def opening(self, num_choices: int) -> bytes:
        """Who speaks, in every choice."""
        delta = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
        after = self._after
        if self._sends_token_ids:  # before the closing brace
            after = f'{after[:-1]}, "prompt_token_ids": {list(self._prompts[0])}}}'
        return b"".join(sse_event(f"{self._before}{index}, {delta}{after}") for index in range(num_choices))

    def _delta(self, index: int, chunk: Chunk) -> str:
        entries = self._entries(index, chunk)
        logprobs = json.dumps(self._columns(entries)) if entries else "null"
        return f'"delta": {{"content": {json.dumps(chunk.text)}}}, "logprobs": {logprobs}'

    def _choice(self, text: str) -> str:
        return f'"message": {json.dumps({"role": "assistant", "content": text, "refusal": None})}'

    def _columns(self, entries: Sequence[LogprobEntry]) -> dict[str, list[Any]]:
        content = [
            {
                **self._one(each.text, each.logprob),
                "top_logprobs": [self._one(each.text if name is None else name, logprob) for name, logprob in each.top],
            }
            for each in entries
        ]
        return {"content": content}

    def _one(self, text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
