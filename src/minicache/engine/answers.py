"""The engine's state of each request that it serves, from the prompt to the answer. No phase builds this module."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from minicache.engine.constraints import Constraint
from minicache.engine.kv import ModelConfig
from minicache.engine.sampling import SamplingParams, TokenSampler
from minicache.engine.stopping import TextStream, Tokenizer, end_token_ids
from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestId

Prompt = str | Sequence[int]
"""A text, or token ids."""


class AnswerId(NamedTuple):
    """The scheduler's id for a further answer to a prompt, if a request asks for several. The first has its id.

    Attributes:
        name: the request's id.
        turn: which answer it is, 1 … n − 1.
    """

    name: RequestId
    turn: int


def request_of(answer_id: RequestId) -> RequestId:
    """The id of the request that an answer belongs to: what `add_request` has returned."""
    return answer_id.name if isinstance(answer_id, AnswerId) else answer_id


PAIR: Final = struct.Struct("<If")
"""A token id, and a log probability in float32."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities of a token and of the likeliest ones, before temperature, top-k and top-p.

    Attributes:
        token_id: the token that was picked.
        logprob: its log probability.
        packed: the likeliest tokens and their log probabilities, as `PAIR`s: they may wait for a client in large
            numbers, and twenty tuples each would cost ten times the memory, and a second to free.
    """

    token_id: int
    logprob: float
    packed: bytes

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """The likeliest tokens and their log probabilities, the likeliest first; as many as were requested."""
        return tuple(PAIR.iter_unpack(self.packed))


@dataclass(slots=True)  # not frozen: a frozen one takes four times as long to make, once for each token
class Chunk:
    """The output of one step for one request. It is not changed after it is made.

    Attributes:
        index: of its answer in the list that `generate` would return. For a request of `add_request`: which of its n
            answers, 0 … n − 1.
        token_id: the token that was generated; None if the request was finished without one (capacity, error).
        text: the part of the answer that can be shown now and could not before. "" without a tokenizer, and while
            all new text may begin a stop string.
        finish_reason: "stop", "length", "capacity" or "error" in the answer's last chunk; None before.
        request_id: of its request; all n answers have the same.
        logprobs: of the token, if the request asked for them (`minicache.engine.logprobs`).
    """

    index: int
    token_id: int | None
    text: str
    finish_reason: str | None
    request_id: RequestId
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to one prompt.

    Attributes:
        token_ids: the generated tokens, including the one that finished it.
        text: the same as text, cut before a stop string. It continues the prompt: a space that belongs between the two
            is its first letter. "" without a tokenizer.
        finish_reason: "stop", "length", "capacity", "abort" or "error".
    """

    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass(slots=True, eq=False)
class Answer:
    """A request that the engine serves, with the engine's state for it.

    Attributes:
        request: the scheduler's state of it.
        sampler: picks its tokens.
        text: its text so far; None without a tokenizer.
        chunks: the list to which its chunks go.
        index: of its chunks.
        first: the request of the first answer to the same prompt, if this is another; else None.
        num_chunks: how many chunks were emitted.
        num_logprobs: how many of the likeliest tokens each chunk is to have; None: no log probabilities.
        logprobs: those of tokens that have no chunk yet.
        drawn: tokens that were picked in steps that were given up before their commit, by their index in the output: to
            be taken when it is reached again (`minicache.engine.overlap`).
        constraint: which tokens it may have; None: all.
    """

    request: Request
    sampler: TokenSampler
    text: TextStream | None
    chunks: list[Chunk]
    index: int = 0
    first: Request | None = None
    num_chunks: int = 0
    num_logprobs: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drawn: dict[int, int] = field(default_factory=dict)
    constraint: Constraint | None = None

    @property
    def finish_reason(self) -> str | None:
        """Why it is finished; None while it is not. A stop string goes before a limit that is reached with it."""
        return "stop" if self.text is not None and self.text.is_stopped else self.request.finish_reason

    def completion(self) -> Completion:
        """All of it, once it is finished."""
        assert self.finish_reason is not None, "the request is not finished"
        text = "" if self.text is None else self.text.text
        return Completion(self.request.output_token_ids, text, self.finish_reason)


def new_answers(
    prompt: Prompt,
    params: SamplingParams,
    request_id: RequestId,
    chunks: list[Chunk],
    config: ModelConfig,
    max_model_len: int,
    tokenizer: Tokenizer | None,
    *,
    index: int = 0,
    priority: int = 0,
    group: str = "text",
    cache_salt: str | None = None,
    arrival_time: float = 0.0,
) -> list[Answer]:
    """One prompt as n answers, each with its request and all that it needs, if they can be served.

    Their stop tokens are those of the params, and those that end a text (`all_end_token_ids`): a constraint lets these
    come only where its text may end. Their max_tokens is at most what max_model_len leaves room for after the prompt.

    Args:
        prompt: a text, or token ids.
        params: what to generate.
        request_id: the first one's id, from which those of the others are made (`AnswerId`).
        chunks: the list to which their chunks are to go.
        config: the model's.
        max_model_len: the most tokens of a request, prompt and answer.
        tokenizer: the engine's, or None.
        index: of the first one's chunks; the others' follow.
        priority: as `Request`.
        group: as `Request`.
        cache_salt: as `Request`.
        arrival_time: as `Request`.

    Raises:
        TypeError: the prompt is neither, or `params` are no SamplingParams.
        ValueError: an empty prompt, or a text or a stop string without a tokenizer.
        IndexError: a token id is outside the model's vocabulary.
        UnknownWordError: the tokenizer does not know a word.
        RequestTooLargeError: the prompt leaves no room for an answer within max_model_len.
    """
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams; got {params!r}")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: give the engine one, or use stop_token_ids")
    token_ids = prompt_token_ids(prompt, config.vocab_size, max_model_len, tokenizer)
    end = () if params.ignore_eos and not params.is_constrained else all_end_token_ids(config, tokenizer)
    first = Request(
        request_id,
        token_ids,
        min(params.max_tokens, max_model_len - len(token_ids)),
        stop_token_ids=(*params.stop_token_ids, *end),
        priority=priority,
        arrival_time=arrival_time,
        group=group,
        cache_salt=cache_salt,
    )
    answers = []
    for turn in range(params.n):
        text = None if tokenizer is None else TextStream(tokenizer, token_ids, params.stop)
        request = first.child(AnswerId(request_id, turn)) if turn else first
        sampler = TokenSampler(params.of_answer(turn))
        answers.append(Answer(request, sampler, text, chunks, index + turn, first if turn else None))
    return answers


def all_end_token_ids(config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens that end a text by themselves: the tokenizer's, and those that a model's config names."""
    named: tuple[int, ...] = getattr(config, "end_token_ids", ())
    return named if tokenizer is None else tuple(dict.fromkeys((*end_token_ids(tokenizer), *named)))


def prompt_token_ids(prompt: Prompt, vocab_size: int, max_model_len: int, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's tokens, at least one, all of them in the model's vocabulary.

    Raises:
        Exception: as `new_answers` of a prompt.
    """
    if isinstance(prompt, str) and tokenizer is None:
        raise ValueError("a text needs a tokenizer: give the engine one, or give token ids")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt must be a text or a list of token ids; got {prompt!r}")
    check_prompt_length(prompt, max_model_len, tokenizer)
    if isinstance(prompt, str):
        assert tokenizer is not None
        token_ids = tokenizer.encode(prompt)
        check_prompt_length(token_ids, max_model_len, tokenizer)
    elif all(type(each) is int for each in prompt):
        token_ids = [*prompt]
    else:
        raise TypeError(f"a prompt must be a text or a list of token ids; got {prompt!r}")
    if not token_ids:
        raise ValueError("a prompt is empty: it needs at least one token")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise IndexError(f"token id {outside} is outside the model's vocabulary, 0 … {vocab_size - 1}")
    return token_ids


def check_prompt_length(prompt: Prompt, max_model_len: int, tokenizer: Tokenizer | None) -> None:
    """Raise if a prompt is too long by its mere length. Takes no longer for a longer one: nothing is tokenised.

    A token stands for at most `tokenizer.max_token_chars` characters, so a text of more than max_model_len times as
    many has more than max_model_len tokens. (Unless the tokenizer drops characters: of spaces in a row most do. Such a
    text is refused as well; a bound that looked at every character would not be one.) A tokenizer without
    max_token_chars gives no bound, and a text is as long as its tokens turn out to be.

    Args:
        prompt: a text, or token ids.
        max_model_len: the most tokens of a request, prompt and answer.
        tokenizer: of the text.

    Raises:
        RequestTooLargeError: it has max_model_len tokens or more, or more characters than these could have.
    """
    if not isinstance(prompt, str):
        if len(prompt) >= max_model_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer within max_model_len {max_model_len}: "
                f"shorten the prompt"
            )
        return
    max_token_chars: int | None = getattr(tokenizer, "max_token_chars", None)
    if max_token_chars is not None and len(prompt) > max_model_len * max_token_chars:
        raise RequestTooLargeError(
            f"a prompt of {len(prompt)} characters cannot fit: max_model_len is {max_model_len} tokens, of at most "
            f"{max_token_chars} characters each: shorten the prompt"
        )
