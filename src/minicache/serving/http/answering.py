"""One request to the API: its prompts become streams of the engine, and these one body, or events.

No phase builds this module.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard, cast

from fastapi import Request, Response

from minicache.engine.answers import Chunk, Prompt, check_prompt_length, prompt_token_ids
from minicache.engine.async_engine import AnswerStream
from minicache.errors import (
    ConstraintError,
    EngineDiedError,
    EngineNotReadyError,
    EngineStoppedError,
    MinicacheError,
    MissingExtraError,
    QueueFullError,
    RequestTooLargeError,
    StepFailedError,
)
from minicache.serving.events import DONE
from minicache.serving.http.backend import Served
from minicache.serving.http.errors import ApiError, as_api_error
from minicache.serving.http.keys import Admission, usage_of
from minicache.serving.http.logs import request_log
from minicache.serving.http.protocol import ChatRequest, CompletionRequest, Conversation
from minicache.serving.http.shapes import Shape
from minicache.serving.http.shares import MAX_DEADLINE
from minicache.serving.http.streaming import ClientLeftError, EventStream, sse_event, unless_client_leaves
from minicache.serving.replica.stream import TokenStream

logger = logging.getLogger("minicache")

MAX_COST = 2**18
"""Of a request: its answers' most tokens, each counted again for each log probability that it comes with."""

SMALL = 16
"""So many tokens and log probabilities are written at once, without a turn of their own."""

WRITE_NOW = "minicache.write_now"
"""An extension in a request's ASGI scope. Its "write" is given a call that makes some bytes of the body; if the
connection has room for more, it makes and writes them at once. It returns whether it has."""


def check_model(served: Served, model: str | None) -> None:
    """Raise an `ApiError` if this is not the model that is served."""
    if model is not None and model != served.model:
        message = f"there is no model {model!r} here: this server has {served.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class ApiCall:
    """A request for answers, from its body to the response.

    Args:
        served: the engine.
        body: what is asked for.
        request: whose body it is.
        shape: of the response.

    Raises:
        ApiError: there is no such model, or a field is not supported.
    """

    def __init__(
        self, served: Served, body: CompletionRequest | ChatRequest, request: Request, shape: type[Shape]
    ) -> None:
        check_model(served, body.model)
        body.refuse_unsupported()
        self._served, self._body, self._request = served, body, request
        self._wants_usage = body.wants_usage_chunk()
        logprobs = body.num_logprobs()
        self._width = 1 if logprobs is None else 2 + logprobs  # of a token: itself, and log probabilities
        self._shape = shape(
            served.model,
            served.decoder,
            usage=self._wants_usage,
            token_ids=bool(body.return_token_ids),
            num_logprobs=self._width - 1,
        )
        self._prompts = body.prompts(served.tokenizer)
        limit = body.token_limit()
        if limit is None:
            limit = min(served.info.max_model_len, MAX_COST // (len(self._prompts) * (body.n or 1) * self._width))
        self._params = body.sampling_params(limit)
        self._num_answers = len(self._prompts) * self._params.n
        self._log, self._usage = request_log(request.scope), usage_of(request.scope)
        self._streams: list[AnswerStream] = []

    async def answer(self) -> Response:
        """Begin it, and answer in one body or in events. If the client disconnects, it is aborted."""
        with ExitStack() as stack:  # if one of several prompts is refused, the others are aborted
            await self._begin(stack)
            self._log.num_prompt_tokens = self._num_prompt_tokens
            if self._body.stream:
                self._write_directly()
                close = stack.pop_all().close
                return EventStream(self._pieces(close), close)
            try:
                choices = await unless_client_leaves(self._request.receive, self._collect())
            except ClientLeftError:
                return Response(status_code=499)  # only for the log: the client is gone
        whole = await self._served.turns.run(self._shape.whole(choices, self._num_prompt_tokens))
        return Response(whole, media_type="application/json")

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(stream.num_prompt_tokens for stream in self._streams)

    # Its beginning and its end

    async def _begin(self, stack: ExitStack) -> None:
        """Submit all prompts at the same time: one after the other, each would wait a step to be taken.

        A request that finds no admission slots, or whose key has too many answers under way, is refused before its
        prompts are tokenized; one that its key has no tokens for, after.
        """
        served, body, params = self._served, self._body, self._params
        options: dict[str, Any] = {"cache_salt": self._usage.salted(body.cache_salt)}
        if (num_logprobs := body.num_logprobs()) is not None:
            options["num_logprobs"] = num_logprobs
        with self._refusals("n"):
            admission = self._usage.begin(self._num_answers)
            stack.callback(self._end, admission)
            self._count("minicache:key_answers_running", self._num_answers)
            served.engine.check_admission(self._num_answers)

        async def begin(token_ids: list[int]) -> AnswerStream:
            return stack.enter_context(await served.engine.add_request(token_ids, params, **options))

        with self._refusals(body.prompt_field):
            tokenized = await self._tokenize()
            self._check_cost(tokenized)
            if params.is_constrained:
                await served.compile(params)
            num_tokens = sum(map(self._most_tokens, tokenized))
            admission.reserve(num_tokens)
            deadline = stack.enter_context(served.shares.deadline(self._client, num_tokens))
            options["priority"] = (body.priority or 0) * (MAX_DEADLINE + 1) + deadline
            begun = await asyncio.gather(*map(begin, tokenized), return_exceptions=True)
            if refused := [each for each in begun if isinstance(each, BaseException)]:
                raise refused[0]
        self._streams += [each for each in begun if isinstance(each, AnswerStream)]
        self._shape.continue_prompts([token_ids for token_ids in tokenized for _ in range(params.n)])
        self._count("minicache:key_requests", 1)
        self._count("minicache:key_prompt_tokens", self._num_prompt_tokens)

    async def _tokenize(self) -> list[list[int]]:
        """The prompts as token ids. What cannot fit is refused before it is tokenised, the rest tokenised in a thread.

        Raises:
            Exception: as `new_answers` of the prompts; ValueError: a chat template refuses its messages.
        """
        info, tokenizer, prompts = self._served.info, self._served.tokenizer, self._prompts
        for prompt in prompts:
            text = "".join(each["content"] for each in prompt) if _is_conversation(prompt) else prompt
            check_prompt_length(cast(Prompt, text), info.max_model_len, tokenizer)

        def token_ids(prompt: Prompt | Conversation) -> list[int]:
            if _is_conversation(prompt):
                prompt = cast(Any, tokenizer).apply_chat_template(prompt)
            return prompt_token_ids(cast(Prompt, prompt), info.vocab_size, info.max_model_len, tokenizer)

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._served.tokenizing, lambda: [token_ids(prompt) for prompt in prompts])

    def _most_tokens(self, token_ids: Sequence[int]) -> int:
        """What a prompt and its answers may come to."""
        room = self._served.info.max_model_len - len(token_ids)
        return len(token_ids) + self._params.n * min(self._params.max_tokens, room)

    @property
    def _client(self) -> str:
        """Whose share it is: that of its key, or without keys of its address."""
        address = self._request.client
        return self._usage.key.name or (address.host if address else "")

    def _check_cost(self, tokenized: Sequence[Sequence[int]]) -> None:
        """Refuse what would take too much memory and time to write."""
        num_prompt = sum(map(len, tokenized))
        num_generated = sum(map(self._most_tokens, tokenized)) - num_prompt
        cost = num_generated * self._width
        if self._body.return_token_ids:
            cost += num_prompt * self._params.n
        if cost > MAX_COST:
            message = (
                f"n × max_tokens × (1 + log probabilities per token), over all prompts, comes to {cost:,}, and at most "
                f"{MAX_COST:,} is served: lower n, max_tokens or logprobs, or send fewer prompts at a time"
            )
            raise ApiError(400, message, param="max_tokens", code="request_too_costly")

    def _end(self, admission: Admission) -> None:
        """It is over, or was refused, in which case it has no streams: charge its key for what it was given.

        What was generated and not read counts: a client that leaves has had it computed. (The streams of an engine in
        this process do not know: there what was read counts.)
        """
        per_stream = [sum(each.num_tokens) for each in self._streams if isinstance(each, TokenStream)]
        num_generated = sum(per_stream) if per_stream else self._log.num_generated_tokens
        admission.end(self._num_prompt_tokens + num_generated)
        self._count("minicache:key_generation_tokens", num_generated)
        self._count("minicache:key_answers_running", -self._num_answers)

    def _count(self, name: str, value: int, *reason: str) -> None:
        """Count something of its key, if keys are asked for."""
        if self._usage.is_known:
            self._served.metrics.count_key(name, value, self._usage.key.name, *reason)

    @contextmanager
    def _refusals(self, param: str) -> Iterator[None]:
        """What is raised of it, counted, or with the field that is to blame."""
        try:
            yield
        except (ApiError, QueueFullError, EngineStoppedError, EngineNotReadyError) as error:
            reason = as_api_error(error).reason
            self._served.metrics.count_refused(reason)
            self._count("minicache:key_requests_refused", 1, reason)
            raise
        except (EngineDiedError, StepFailedError):
            raise
        except RequestTooLargeError as error:
            raise ApiError(400, str(error), param=param, code="context_length_exceeded") from error
        except (ConstraintError, MissingExtraError) as error:
            raise ApiError(400, str(error), param=self._body.constraint_field, code="invalid_constraint") from error
        except (MinicacheError, ValueError, TypeError, IndexError) as error:
            raise ApiError(400, str(error), param=param) from error

    # Its answers

    def _write_directly(self) -> None:
        """Have chunks written to the connection where they are made, if stream and connection can do that.

        `_pieces` gets what is left: a chunk that the connection has no room for now, errors, the end. At 64 streams,
        waking a task for each token would cost more than all else that a token costs here.
        """
        extension: Any = self._request.scope.get("extensions", {}).get(WRITE_NOW)
        if extension is None or self._width > 1:  # log probabilities are written in turns
            return
        write: Callable[[Callable[[], bytes]], bool] = extension["write"]

        def write_chunks(index: int, chunks: Sequence[Chunk]) -> bool:
            try:
                return write(partial(self._events, index, chunks))
            except Exception:  # `_pieces` meets it too, and tells the client
                return False

        for index, stream in enumerate(self._streams):
            if isinstance(stream, TokenStream):
                stream.write = partial(write_chunks, index)

    def _events(self, index: int, chunks: Sequence[Chunk]) -> bytes:
        """The events of some chunks of the stream with an index."""
        self._log.count(chunks)
        return self._shape.events(index * self._params.n, chunks)

    async def _pieces(self, close: Callable[[], object]) -> AsyncGenerator[bytes, None]:
        """The events of its streams. An error on the way is an event too, since the status was sent long ago.

        `close` is called before the last event: a client that has it may send its next request, and be at its limit.
        """
        if opening := self._shape.opening(self._num_answers):
            yield opening
        try:
            async for index, chunks in _merge(self._streams):
                for some in self._shape.slices(chunks):
                    size = len(some) * self._width
                    async with self._served.turns.slice(size) if size > SMALL else nullcontext():
                        events = self._events(index, some)
                    yield events
            if self._wants_usage:
                yield self._shape.usage_event(self._num_prompt_tokens)
        except Exception as error:
            if not isinstance(error, MinicacheError):
                logger.error("a stream has failed", exc_info=error)
            shown = self._served.as_api_error(error)
            self._log.error = shown.reason
            yield sse_event(json.dumps(shown.body))
        close()
        yield DONE

    async def _collect(self) -> list[list[Chunk]]:
        """All chunks of each choice."""
        choices: list[list[Chunk]] = [[] for _ in range(self._num_answers)]
        for index, stream in enumerate(self._streams):
            while chunks := await stream.take():
                self._log.count(chunks)
                for chunk in chunks:
                    choices[index * self._params.n + chunk.index].append(chunk)
        return choices


def _is_conversation(prompt: Prompt | Conversation) -> TypeGuard[Conversation]:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


async def _merge(streams: Sequence[AnswerStream]) -> AsyncGenerator[tuple[int, list[Chunk]], None]:
    """The chunks of several streams in order of arrival, with the index of their stream."""
    if len(streams) == 1:
        while chunks := await streams[0].take():
            yield 0, chunks
        return
    waiting = {asyncio.ensure_future(stream.take()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if chunks := task.result():
                    waiting[asyncio.ensure_future(streams[index].take())] = index
                    yield index, chunks
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
