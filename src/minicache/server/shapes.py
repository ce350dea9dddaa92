"""The engine's chunks in OpenAI's shapes: events of a stream, and whole answers. No phase builds this module.

An event is put together as text around the few fields that change from token to token: at 64 streams a `json.dumps` of
a whole event for each token would be a good part of what the server costs.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from minicache.engine.answers import Chunk
from minicache.engine.logprobs import TokenLogprobs
from minicache.engine.stopping import Tokenizer
from minicache.server.protocol import Usage
from minicache.server.streaming import sse_event

MIN_LOGPROB = -9999.0
"""What is told of a token that cannot be: JSON has no −∞. The number is vLLM's."""

DONE = sse_event("[DONE]")
"""The last event of every stream."""

FINISH_REASONS = {"stop": "stop", "length": "length", "capacity": "length", None: None}
"""The engine's words → OpenAI's. An answer that the cache had no room for was cut by a length, too."""


class Shape(ABC):
    """How one HTTP request is answered.

    Args:
        model: the served model's name.
        tokenizer: turns token ids into the texts of log probabilities; or None.
        usage: whether a stream ends with a usage event, in which case all others say `"usage": null`.

    Attributes:
        num_completion_tokens: so many tokens were in the chunks so far.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    event_kind: ClassVar[str]

    def __init__(self, model: str, tokenizer: Tokenizer | None, *, usage: bool = False) -> None:
        self.num_completion_tokens = 0
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        head = json.dumps({**self._head, "object": self.event_kind})
        self._before = f'{head[:-1]}, "choices": [{{"index": '
        self._after = '}], "usage": null}' if usage else "}]}"

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
            f'"finish_reason": {finish}{self._after}\n\n'.encode()
        )

    @abstractmethod
    def _delta(self, index: int, chunk: Chunk) -> str:
        """What a chunk adds to its choice, as fields of JSON."""

    # Whole answers

    def whole(self, choices: Sequence[Sequence[Chunk]], num_prompt_tokens: int) -> dict[str, Any]:
        """All chunks of all choices as one body."""
        self.num_completion_tokens = sum(chunk.token_id is not None for chunks in choices for chunk in chunks)
        return {
            **self._head,
            "object": self.kind,
            "choices": [
                {
                    "index": index,
                    **self._choice(chunks),
                    "finish_reason": FINISH_REASONS[chunks[-1].finish_reason],
                }
                for index, chunks in enumerate(choices)
            ],
            "usage": self.usage(num_prompt_tokens).model_dump(),
        }

    @abstractmethod
    def _choice(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The chunks of one choice, as one."""

    def usage(self, num_prompt_tokens: int) -> Usage:
        """How many tokens there were."""
        total = num_prompt_tokens + self.num_completion_tokens
        return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=self.num_completion_tokens, total_tokens=total)

    # Log probabilities

    def _token_text(self, token_id: int) -> str:
        """A token by itself. One that shows as nothing (an end token), or without a tokenizer, is told by its id."""
        text = "" if self._tokenizer is None else self._tokenizer.decode([token_id])
        return text or f"token_id:{token_id}"


class CompletionShape(Shape):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = event_kind = "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, *, usage: bool = False) -> None:
        super().__init__(model, tokenizer, usage=usage)
        self._num_letters: Counter[int] = Counter()  # of each choice, shown so far: where its next token's text begins

    def _delta(self, index: int, chunk: Chunk) -> str:
        logprobs = json.dumps(self._logprobs([chunk], self._num_letters[index])) if chunk.logprobs else "null"
        self._num_letters[index] += len(chunk.text)
        return f'"text": {json.dumps(chunk.text)}, "logprobs": {logprobs}'

    def _choice(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        return {"text": "".join(chunk.text for chunk in chunks), "logprobs": self._logprobs(chunks, 0)}

    def _logprobs(self, chunks: Sequence[Chunk], offset: int) -> dict[str, list[Any]] | None:
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for chunk in chunks:
            if chunk.logprobs:
                told["tokens"].append(self._token_text(chunk.logprobs.token_id))
                told["token_logprobs"].append(max(chunk.logprobs.logprob, MIN_LOGPROB))
                top = {
                    self._token_text(token_id): max(logprob, MIN_LOGPROB) for token_id, logprob in chunk.logprobs.top
                }
                told["top_logprobs"].append(top or None)
                told["text_offset"].append(offset)
            offset += len(chunk.text)
        return told if told["tokens"] else None


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def opening(self, num_choices: int) -> bytes:
        """Who speaks, in every choice."""
        delta = '"delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null'
        return b"".join(sse_event(f"{self._before}{index}, {delta}{self._after}") for index in range(num_choices))

    def _delta(self, index: int, chunk: Chunk) -> str:
        logprobs = json.dumps({"content": [self._logprob(chunk.logprobs)]}) if chunk.logprobs else "null"
        return f'"delta": {{"content": {json.dumps(chunk.text)}}}, "logprobs": {logprobs}'

    def _choice(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        content = [self._logprob(chunk.logprobs) for chunk in chunks if chunk.logprobs]
        text = "".join(chunk.text for chunk in chunks)
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": content, "refusal": None} if content else None,
        }

    def _logprob(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(token_id, logprob) for token_id, logprob in logprobs.top]
        return {**self._one(logprobs.token_id, logprobs.logprob), "top_logprobs": top}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token_text(token_id)
        return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(token.encode())}
