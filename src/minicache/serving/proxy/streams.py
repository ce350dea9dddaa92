"""One client's stream over all its attempts: what the client gets of each event, and what is asked of the next worker.

`minicache.fleet.failover` decides. This module is between it and OpenAI's API: it asks workers for token ids
(`return_token_ids`, which minicache and vLLM know), counts them, makes the body of the next attempt, and has its events
look as if they came from the first worker. As long as nothing fails, events pass as they came, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from minicache.fleet.failover import MAX_SEED, Attempt, FailoverStream
from minicache.serving.events import DONE, event_data, event_json
from minicache.serving.http.streaming import sse_event
from minicache.serving.proxy.workers import Kind

MAX_TOKENS: Final = 2**31
"""Of a chat whose client has not said how many. (A minicache generates as many as there is room for.)"""

STATELESS: Final = frozenset(
    {
        *("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("logprobs", "priority", "cache_salt", "user", "metadata", "store", "return_token_ids"),
    }
)
"""Fields of a request that mean the same for the rest of an answer as for all of it. Others, such as a grammar or a
penalty for repetitions, depend on what was generated before, which a worker that continues takes for a prompt."""

DEFAULT_MAX_TOKENS: Final = 16
"""Of a completion, in OpenAI's API."""


NEUTRAL: Final = {"n": 1, "best_of": 1, "repetition_penalty": 1.0}
"""Values of other fields that change nothing. (So does every value that is false: 0, null, an empty list.)"""


class EventError(Exception):
    """A worker says in an event that it has failed.

    Attributes:
        event: its error event, for the client, if no worker can continue.
    """

    def __init__(self, event: bytes) -> None:
        super().__init__(event_data(event))
        self.event = event


class ClientStream:
    """What one client has asked for, and what it has got.

    Args:
        request_id: its name.
        body: as the client has sent it.
        is_chat: whether it is a chat.
        max_attempts: so many workers may break it off.

    Attributes:
        failover: decides.
        is_done: whether the client has got the last event, or a worker has sent it.
    """

    def __init__(self, request_id: str, body: Mapping[str, Any], *, is_chat: bool, max_attempts: int = 3) -> None:
        self._body, self._is_chat = body, is_chat
        self.failover = FailoverStream(
            request_id,
            (),  # a worker tells what the prompt's tokens are
            _limit(body, is_chat) or (MAX_TOKENS if is_chat else DEFAULT_MAX_TOKENS),
            stop_token_ids=_token_ids(body.get("stop_token_ids")) or (),
            seed=_seed(body.get("seed")),
            max_attempts=max_attempts,
        )
        self.is_done = False
        self._is_tracked = _is_tracked(body, is_chat)
        self._kind: Kind = "other"
        self._prompt: list[int] | None = None
        self._head: dict[str, Any] = {}  # what all events that the client has got say
        self._has_content = self._has_finish = self._has_usage = False
        self._num_letters = self._num_shown = self._num_before = 0  # of the text: come; shown; shown before the attempt
        # Of the attempt under way:
        self._num_received = 0
        self._held: list[bytes] = []
        self._held_ids: list[int] = []
        self._tells_tokens = False

    @property
    def can_continue(self) -> bool:
        """Whether another worker can go on from what the client has got. From nothing, any can."""
        if not self._has_content:
            return True
        # Only minicache tells when none of the text is held back for a stop string, and bounds a chat without a limit.
        has_limit = not self._is_chat or _limit(self._body, is_chat=True) is not None
        is_bounded = has_limit and not self._body.get("stop")
        return self._tells_tokens and self._prompt is not None and (is_bounded or self._kind == "minicache")

    def ask(self, attempt: Attempt, kind: Kind) -> dict[str, Any]:
        """The body for an attempt's worker: the client's own, or what is left of it as a completion, of a chat too.

        Args:
            attempt: which is about to begin.
            kind: of its worker.
        """
        self._kind, self._tells_tokens = kind, self._is_tracked and kind != "other"
        self._num_received = 0
        self._num_letters = self._num_before = self._num_shown
        self._held.clear()
        self._held_ids.clear()
        body = dict(self._body)
        if self._tells_tokens:
            body["return_token_ids"] = True
        if attempt.num_received:
            for name in ("messages", "max_completion_tokens"):
                body.pop(name, None)
            body["prompt"] = [*(self._prompt or ()), *attempt.prompt_token_ids]
            body["max_tokens"] = attempt.max_tokens
            if attempt.seed is not None:
                body["seed"] = attempt.seed
        return body

    def take(self, attempt: Attempt, event: bytes) -> list[bytes]:
        """What the client gets now that an event has come. As a rule that is just the event.

        An event whose tokens cannot be continued from is held until the next: some of their text is still to come, so
        it would be lost, or come twice, if the worker died now.

        Raises:
            EventError: the worker says that it has failed.
            BrokenStreamError: the tokens are not those that come next.
        """
        data = event_json(event)
        if data is None:
            if event_data(event).strip() != "[DONE]":
                return [event]  # a comment
            self.is_done = True
            self.failover.finish(attempt, "stop", self._num_received)
            return self._release(event)
        if data.get("error"):
            raise EventError(event)
        choice = _first_choice(data)
        if self._prompt is None:
            self._prompt = _token_ids(choice.get("prompt_token_ids") or data.get("prompt_token_ids"))
        text, is_plain = _content(choice)
        if self._is_chat and not text and "role" in (choice.get("delta") or {}) and self._head:
            return []  # another attempt has opened the answer already
        if self._head:
            event = event if attempt.number == 1 else self._rewritten(attempt, data, choice, text)
        else:
            self._head = {name: data[name] for name in ("id", "object", "created", "model") if name in data}
        reason = choice.get("finish_reason")
        if not reason and not text and is_plain and choice.get("token_ids") is None:
            self._has_usage = self._has_usage or bool(data.get("usage"))
            return self._release(event)  # the opening of a chat, or the usage
        self._num_letters += len(text)
        token_ids = _token_ids(choice.get("token_ids"))
        if token_ids is None or not is_plain:
            self._tells_tokens = False
        if self._tells_tokens:
            self._held_ids += token_ids or ()
            is_settled = bool(token_ids) if self._kind == "minicache" else bool(text)
            if not is_settled and not reason:
                self._held.append(event)
                return []
            self.failover.receive(attempt, self._num_received, self._held_ids)
            self._num_received += len(self._held_ids)
        self._has_content = True
        if reason and self._is_tracked:
            self._has_finish = True
            self.failover.finish(attempt, str(reason), self._num_received)
        return self._release(event)

    def closing_events(self) -> list[bytes]:
        """The end that was lost, of a stream of which the client has all tokens."""
        events = []
        if not self._has_finish:
            delta: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            choice = {"index": 0, **delta, "logprobs": None, "finish_reason": self.failover.finish_reason}
            events.append(self._event({"choices": [choice]}))
        options = self._body.get("stream_options")
        wants_usage = isinstance(options, dict) and options.get("include_usage") and not self._has_usage
        if wants_usage and self._prompt is not None:
            events.append(self._event({"choices": [], "usage": self._usage(len(self.failover.token_ids))}))
        self.is_done = True
        return [*events, DONE]

    def _release(self, event: bytes) -> list[bytes]:
        """The held events and this one."""
        events = [*self._held, event]
        self._num_shown = self._num_letters
        self._held.clear()
        self._held_ids.clear()
        return events

    def _rewritten(self, attempt: Attempt, data: dict[str, Any], choice: dict[str, Any], text: str) -> bytes:
        """An event of a later attempt, as the first worker would have sent it."""
        data.pop("prompt_token_ids", None)
        choice.pop("prompt_token_ids", None)
        if self._is_chat and "text" in choice:
            del choice["text"]
            choice["delta"] = {"content": text}
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [each + self._num_before for each in logprobs["text_offset"]]
        usage = data.get("usage")
        if isinstance(usage, dict) and self._prompt is not None:
            num_tokens = usage.get("completion_tokens")
            data["usage"] = self._usage(attempt.num_received + (num_tokens if isinstance(num_tokens, int) else 0))
        return self._event(data)

    def _event(self, data: Mapping[str, Any]) -> bytes:
        return sse_event(json.dumps({**data, **self._head}))

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        num_prompt_tokens = len(self._prompt or ())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


def _is_tracked(body: Mapping[str, Any], is_chat: bool) -> bool:
    """Whether there is one answer, and each of its tokens depends on those before it and on nothing else."""
    prompt = body.get("prompt")
    is_one = is_chat or isinstance(prompt, str) or _token_ids(prompt) is not None
    has_state = any(value and name not in STATELESS and value != NEUTRAL.get(name) for name, value in body.items())
    return is_one and not has_state and not (is_chat and body.get("logprobs"))


def _limit(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """How many tokens the client has asked for; None: it has not said."""
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    limits = [body[name] for name in names if _is_int(body.get(name)) and body[name] > 0]
    return limits[0] if limits else None


def _seed(seed: object) -> int | None:
    return seed % MAX_SEED if isinstance(seed, int) and _is_int(seed) else None


def _token_ids(found: object) -> list[int] | None:
    """A list of token ids; None if it is none."""
    return found if isinstance(found, list) and all(map(_is_int, found)) else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _first_choice(data: Mapping[str, Any]) -> dict[str, Any]:
    match data.get("choices"):
        case [dict(choice), *_]:
            return choice
    return {}


def _content(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """The text of a choice, and whether there is nothing else: no tool call, no reasoning."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or ""), True
    is_plain = not any(value for name, value in delta.items() if name not in ("role", "content"))
    return str(delta.get("content") or ""), is_plain
