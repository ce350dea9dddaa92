"""OpenAI's API as data: requests, refusals and responses.

Fields that are not named here are ignored, as OpenAI's clients expect of servers older than themselves. Fields that are
named here and not supported are refused, with their name: an answer that silently ignores one would be worse. No phase
builds this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from minicache import __version__
from minicache.engine.answers import Prompt
from minicache.engine.sampling import SamplingParams
from minicache.engine.stopping import Tokenizer
from minicache.serving.http.errors import ApiError

MAX_N = 128
MAX_PROMPTS = 256
MAX_STOP = 16
MAX_STOP_CHARS = 1024
MAX_PARTS = 1024
MAX_LOGPROBS = 20
MAX_SEED = 2**64
MAX_CONSTRAINT_CHARS = 2**15

ANY_OBJECT = '{"type": "object"}'

Conversation = list[dict[str, str]]
"""The messages of a chat, each with "role" and "content": a prompt, for a tokenizer with a chat template."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, Field(max_length=2**20)]

# A list is validated up to its first mistake. For a body with a million mistakes pydantic would make a million reports
# in the event loop: minutes for every client, and gigabytes.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


_SURROGATE = re.compile("[\ud800-\udfff]")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False


class JsonSchema(BaseModel):
    """What `response_format` says of a schema."""

    name: str | None = Field(None, description="Ignored.")
    json_schema: dict[str, Any] = Field(alias="schema", description="A JSON schema, as llguidance takes it.")
    strict: bool | None = Field(None, description="Ignored: the schema is always kept to.")


class ResponseFormat(BaseModel):
    """The form of the answers."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format: json_schema goes with the type json_schema, and only with it")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's field for the form of the answers: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: str | dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="The answer is one of these."
    )


class CommonRequest(BaseModel):
    """The fields of both kinds of request. None stands for a field's default, as everywhere in OpenAI's API."""

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, description="The served model's name (`GET /v1/models`).")
    stream: bool | None = Field(False, description="Send the answer as server-sent events, token by token.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_N, description="Number of answers per prompt.")
    temperature: float | None = Field(1.0, ge=0, le=100, description="0: greedy decoding.")
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=-1, lt=2**31, description="Sample from the k likeliest tokens; 0 or −1: from all.")
    seed: int | None = Field(None, ge=-(2**63), lt=MAX_SEED, description="Seed for a reproducible answer.")
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = Field(
        None, description="Strings before which the answer is cut."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool | None = Field(False, description="Continue after the end-of-sequence token.")
    priority: int | None = Field(
        0,
        ge=-(2**31),
        lt=2**31,
        description="Lower values are scheduled sooner; among equals, each client gets a fair share.",
    )
    cache_salt: str | None = Field(None, max_length=256, description="Share the prefix cache with equal salts only.")
    return_token_ids: bool | None = Field(False, description="Return the token ids of prompt and answer, as vLLM does.")
    response_format: ResponseFormat | None = Field(None, description="JSON, of a schema or of any.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A schema, a regular expression, or choices; as in vLLM."
    )
    presence_penalty: float | None = Field(0.0, description="Only 0.")
    frequency_penalty: float | None = Field(0.0, description="Only 0.")
    logit_bias: dict[str, Any] | None = Field(None, description="Only empty.")

    _constraint: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> CommonRequest:
        stops = self.stop_list()
        if len(stops) > MAX_STOP or not all(stops) or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise ValueError(
                f"stop: at most {MAX_STOP} strings, none of them empty, of {MAX_STOP_CHARS} characters together"
            )
        self._constraint = dict(given := list(self._constraints()))
        if len(given) > 1:
            raise ValueError(f"{self.constraint_field}: an answer has one constraint, and there are {len(given)}")
        text = "".join("".join(value) for _, value in given)
        if len(text) > MAX_CONSTRAINT_CHARS:
            raise ValueError(
                f"{self.constraint_field}: {len(text):,} characters, and at most {MAX_CONSTRAINT_CHARS:,} are taken"
            )
        if _SURROGATE.search(text):
            raise ValueError(f"{self.constraint_field}: half of a pair of UTF-16 is no letter")
        return self

    def _constraints(self) -> Iterator[tuple[str, str | list[str]]]:
        """The constraints that are given, by the names of `SamplingParams`."""
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            yield "json_schema", ANY_OBJECT
        if form is not None and form.json_schema is not None:
            yield "json_schema", json.dumps(form.json_schema.json_schema)
        if outputs is None:
            return
        if outputs.json_object:
            yield "json_schema", ANY_OBJECT
        if (schema := outputs.json_schema) is not None:
            yield "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
        if outputs.regex is not None:
            yield "regex", outputs.regex
        if outputs.choice is not None:
            yield "choice", outputs.choice

    @property
    def constraint_field(self) -> str:
        """The field that constrains the answers, for errors."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def stop_list(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for fields that this server knows and does not support."""
        self._refuse(
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty, logit_bias=self.logit_bias
        )

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """What the engine is asked for."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % MAX_SEED,
            stop=self.stop_list(),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            **self._constraint,
        )

    def wants_usage_chunk(self) -> bool:
        """Whether a stream is to end with a chunk that tells the tokens' number."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _refuse(self, **fields: object) -> None:
        for name, value in fields.items():
            if value:
                raise ApiError(
                    400, f"{name} is not supported by this server: leave it out", param=name, code="unsupported_value"
                )


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`."""

    prompt: (
        Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A string, a list of token ids, or a list of either.")
    max_tokens: int | None = Field(16, ge=1, le=2**31, description="Maximum number of tokens to generate.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Number of likeliest tokens to report at each position."
    )
    echo: bool | None = Field(False, description="Only false.")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Must equal n.")
    suffix: str | None = Field(None, description="Only empty.")

    prompt_field: ClassVar = "prompt"

    def prompts(self, tokenizer: Tokenizer | None) -> Sequence[Prompt | Conversation]:
        """The prompts, one or several."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]

    def token_limit(self) -> int | None:
        """The most tokens of an answer."""
        return 16 if self.max_tokens is None else self.max_tokens

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: nothing."""
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for fields that this server knows and does not support."""
        super().refuse_unsupported()
        self._refuse(echo=self.echo, suffix=self.suffix, best_of=self.best_of not in (None, self.n or 1))


class ContentPart(BaseModel):
    """A part of a message. Only text can be read."""

    type: str
    text: Text | None = None


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None

    def text(self) -> str:
        """Its text.

        Raises:
            ApiError: a part is no text.
        """
        if isinstance(self.content, str):
            return self.content
        parts = self.content or ()
        for part in parts:
            if part.type != "text" or part.text is None:
                raise ApiError(400, f"only parts of type text are supported, got {part.type!r}", param="messages")
        return "".join(part.text or "" for part in parts)


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31, description="Maximum number of tokens to generate.")
    max_tokens: int | None = Field(None, ge=1, le=2**31, description="The older name of max_completion_tokens.")
    logprobs: bool | None = Field(False, description="Return each token's log probability.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Number of likeliest tokens to report, too."
    )
    tools: list[Any] | None = Field(None, description="Only empty.")
    functions: list[Any] | None = Field(None, description="Only empty.")

    def refuse_unsupported(self) -> None:
        """Raise `ApiError` for fields that this server knows and does not support."""
        super().refuse_unsupported()
        self._refuse(tools=self.tools, functions=self.functions)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs to be true", param="top_logprobs")

    prompt_field: ClassVar = "messages"

    def prompts(self, tokenizer: Tokenizer | None) -> Sequence[Prompt | Conversation]:
        """The conversation as a prompt: for the model's chat template; without one, the messages' texts in a row.

        MiniGPT has no template: it knows no roles, and goes on from where the texts end.
        """
        conversation = [{"role": message.role, "content": message.text()} for message in self.messages]
        if hasattr(tokenizer, "apply_chat_template"):
            return [conversation]
        return [" ".join(message["content"] for message in conversation)]

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; None: nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self) -> int | None:
        """The most tokens of an answer; None: as many as there is room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Usage(BaseModel):
    """How many tokens a request was."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minicache"
    max_model_len: int
    has_chat_template: bool
    version: str = Field(default=__version__, description="Of minicache.")
    lab_files: Mapping[str, str] = Field(description="A learner's files that compute here: module → SHA-256.")


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: Sequence[ModelCard]
