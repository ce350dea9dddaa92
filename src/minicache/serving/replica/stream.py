"""Streams that are made from tokens: the engine is elsewhere, and has no tokenizer.

`client` and `fleet` fill them with what engines in other processes generate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from minicache.engine.answers import Chunk, TokenLogprobs
from minicache.engine.async_engine import AnswerStream
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import TextStream, Tokenizer, end_token_ids
from minicache.serving.replica.messages import Update

__all__ = ["ShortTexts", "TokenStream"]

MAX_TEXTS: Final = 2**16
"""So many texts are remembered: some 10 MB."""


class ShortTexts:
    """A tokenizer for `TextStream`, which has every token decoded twice: with the one before it, and by itself.

    Args:
        tokenizer: what decodes; the texts of one and two tokens are remembered.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.end_token_id = tokenizer.end_token_id
        self.end_token_ids = end_token_ids(tokenizer)
        self._tokenizer = tokenizer
        self._remembered = lru_cache(MAX_TEXTS)(lambda *ids: tokenizer.decode(ids))

    def encode(self, text: str) -> list[int]:
        """As the tokenizer."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], /) -> str:
        """As the tokenizer."""
        return self._remembered(*ids) if len(ids) <= 2 else self._tokenizer.decode(ids)


class TokenStream(AnswerStream):
    """An `AnswerStream` that makes its chunks from tokens, and can write them where they are made.

    Args:
        request_id: as `AnswerStream`.
        prompt_token_ids: what the answers continue.
        params: of the request.
        tokenizer: None: answers have no text.
        leave: as `AnswerStream`.

    Attributes:
        request_id: as above.
        arrival_time: when it was made (time.monotonic()).
        num_tokens: of each answer, tokens that have come.
        num_open: answers that have not got their last token.
        write: is given chunks as soon as they are made, while a reader waits in `take` and has fetched all before them;
            if it returns True, that was all that there was to do, and the reader is not woken. None: the reader gets
            all.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        leave: Callable[[AnswerStream], None],
    ) -> None:
        super().__init__(request_id, params.n, leave)
        self.request_id: int = request_id
        self.arrival_time = time.monotonic()
        self.num_tokens = [0] * params.n
        self.num_open = params.n
        self.write: Callable[[Sequence[Chunk]], bool] | None = None
        self._length = len(prompt_token_ids)
        self._is_over = [False] * params.n
        self._texts = [
            None if tokenizer is None else TextStream(tokenizer, prompt_token_ids, params.stop) for _ in range(params.n)
        ]
        self._fresh: list[Chunk] = []  # made, and not flushed
        self._has_reader = False  # one waits for the next chunk

    def is_accepted(self) -> None:
        """The engine has taken the request."""
        self.accept(self._length)

    def push(
        self, index: int, token_id: int | None, finish_reason: str | None, logprobs: TokenLogprobs | None
    ) -> str | None:
        """Make the next chunk of an answer for `flush`, as `LLM.emit` would. What comes after a stop string is dropped.

        Returns:
            The chunk's finish_reason.

        Raises:
            Exception: what the tokenizer raises.
        """
        if self._is_over[index]:
            return None
        text, text_stream = "", self._texts[index]
        if token_id is not None:
            self.num_tokens[index] += 1
        if text_stream is not None:
            text, finish_reason = text_stream.take(token_id, finish_reason)
        if finish_reason:
            self._is_over[index] = True
            self.num_open -= 1
        self._fresh.append(Chunk(index, token_id, text, finish_reason, self.request_id, logprobs))
        return finish_reason

    def flush(self) -> None:
        """Give the chunks of `push` to the client: written at once, if that is possible, else by `put`."""
        chunks, self._fresh = self._fresh, []
        if not chunks:  # all that came was behind a stop string
            return
        if self.write is None or not self._has_reader or self._chunks or not self.write(chunks):
            for chunk in chunks:
                self.put(chunk)
        elif self.num_open < self.num_unfinished:
            self.num_unfinished = self.num_open
            self._news.set()

    def lost_stats(self) -> list[Update]:
        """What has changed in an engine's numbers if the engine dies now: its unfinished answers count as aborted."""
        now = time.monotonic()
        updates: list[Update] = []
        for num_tokens, is_over in zip(self.num_tokens, self._is_over, strict=True):
            if not is_over:
                updates += [
                    ("vllm:request_success", 1, "abort"),
                    ("vllm:e2e_request_latency_seconds", now - self.arrival_time, 1),
                    ("vllm:request_prompt_tokens", self._length, 1),
                    ("vllm:request_generation_tokens", num_tokens, 1),
                ]
        return updates

    async def _wait(self) -> None:
        self._has_reader = True
        try:
            await super()._wait()
        finally:
            self._has_reader = False
