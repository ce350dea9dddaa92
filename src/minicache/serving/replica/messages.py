"""What the server's process and an engine's process say to each other: msgpack, by msgspec.

Each message is one frame of a ZeroMQ socket. They are encoded as arrays without field names: at 64 streams the tokens
of a step are one message of about a kilobyte, which takes some microseconds to write and to read.
"""

from __future__ import annotations

from typing import Final

import msgspec

from minicache import errors
from minicache.engine.sampling import SamplingParams
from minicache.errors import MinicacheError

Update = tuple[str, float, int | str]
"""A change of one metric: its name; a number; and of a counter the label, of a histogram how often the number was
observed (`minicache.serving.replica.stats`)."""

Token = tuple[int, int, int | None, str | None]
"""What a step gave one answer: request id, index of the answer, token id, finish_reason; as `Chunk`."""


class Message(msgspec.Struct, array_like=True):
    """Base of all messages."""


# To the engine


class AddRequest(Message, tag="add"):
    """Have a request served. Its stop strings stay behind: they are found where the text is.

    Attributes:
        request_id: of no other request, ever.
        prompt_token_ids: at least one.
        params: what to generate; stop_token_ids has the tokenizer's end tokens.
        num_logprobs, priority, cache_salt, arrival_time: as `LLM.add_request`.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    num_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0


class AbortRequest(Message, tag="abort"):
    """End all answers of a request whose client has left."""

    request_id: int


class StopAnswer(Message, tag="stop"):
    """End one answer: a stop string was found in its text."""

    request_id: int
    index: int


class AskPicture(Message, tag="ask"):
    """Send a `Picture`. `known` is the version that is here already."""

    known: int


class Caught(Message, tag="caught"):
    """The log probabilities of so many steps have been handled."""

    num_steps: int


class Shutdown(Message, tag="end"):
    """End the process."""


# From the engine


class CacheInfo(msgspec.Struct, frozen=True):
    """An engine's cache.

    Attributes:
        block_size, num_blocks, num_host_blocks: of the pools.
        prefix_caching: whether it finds beginnings of prompts again.
        max_model_len: the most tokens of a request, by the scheduler's limit or by what the cache holds.
        cache_dtype: "int8" or "fp8_e4m3" of a quantized cache; "auto": that of the weights.
    """

    block_size: int
    num_blocks: int
    num_host_blocks: int
    prefix_caching: bool
    max_model_len: int
    cache_dtype: str = "auto"


class EngineInfo(msgspec.Struct, frozen=True):
    """What the server must know of an engine.

    Attributes:
        max_model_len: the most tokens of a request.
        vocab_size: of the model.
        max_num_seqs: batch slots.
        cache: as above.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    cache: CacheInfo


class Progress(Message, tag="progress"):
    """The engine is starting; `doing` says what it is at."""

    doing: str


class Ready(Message, tag="ready"):
    """It takes requests from now on."""

    info: EngineInfo


class StartFailed(Message, tag="failed"):
    """It could not be made; the process ends. `kind` and `message` are those of the error (`error_of`)."""

    kind: str
    message: str


class Refused(msgspec.Struct, array_like=True):
    """A request that the engine did not take, and why; or some that have failed."""

    request_ids: list[int]
    kind: str
    message: str


class StepResult(Message, tag="step"):
    """What a step gave, and what has become of the requests that came before it.

    Attributes:
        tokens: of all answers that got one, or were finished without.
        accepted: requests that were taken.
        refused: requests that were not taken, or have failed.
        stats: what has changed in the engine's numbers.
        logprobs: position in `tokens` → the token's log probability, and the likeliest tokens with theirs, packed as
            those of `TokenLogprobs`.
    """

    tokens: list[Token] = []
    accepted: list[int] = []
    refused: list[Refused] = []
    stats: list[Update] = []
    logprobs: dict[int, tuple[float, bytes]] = {}


class Picture(Message, tag="picture"):
    """What the live page draws (`minicache.serving.replica.view`).

    Attributes:
        version: rises with each new one.
        json: UTF-8; empty if the other side has this version.
    """

    version: int
    json: bytes


ToEngine = AddRequest | AbortRequest | StopAnswer | AskPicture | Caught | Shutdown
FromEngine = Progress | Ready | StartFailed | StepResult | Picture

encode: Final = msgspec.msgpack.Encoder().encode
decode_to_engine: Final = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Final = msgspec.msgpack.Decoder(FromEngine).decode


# Errors


def error_of(kind: str, message: str) -> Exception:
    """An error that was raised in the other process: of the same class, if that is one that callers can catch by name.

    Args:
        kind: the class's name.
        message: its text.
    """
    builtin = {each.__name__: each for each in (ValueError, TypeError, IndexError)}
    own = getattr(errors, kind, None)
    if isinstance(own, type) and issubclass(own, MinicacheError) and own is not errors.QueueFullError:
        return own(message)
    return builtin.get(kind, MinicacheError)(message if kind in builtin else f"{kind}: {message}")
