"""API keys: access to the server, and its limits. No phase builds this module.

A TOML file has the keys, with optional limits:

    [keys.ada]
    key = "…"                    # or key_sha256 = "64 hexadecimal digits"
    max_concurrent = 4           # unfinished answers
    tokens_per_minute = 20000    # of prompts and answers

Each key has a token bucket, which holds a minute's tokens and is refilled evenly. A request is admitted if the bucket
holds all that it may use: its prompts, and the most tokens of each answer. Unused tokens are returned when it is over.
So a limit is never exceeded, and an admitted request is never cut.

The keys of a file share no block of the prefix cache: by its time, a prompt would tell one key what another has sent.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import math
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from starlette.types import Scope

from minicache.serving.http.errors import ApiError, rate_limited

UNKNOWN: Final = "unknown"
"""The name of every unknown key, in metrics."""

SINGLE: Final = "default"
"""The name of the key of `create_app(api_key=…)`."""

MAX_NAME: Final = 64
MAX_KEYS: Final = 1000
"""The most keys of a file: each request is compared with all of them, and each has its numbers in the metrics."""
MAX_FILE_NBYTES: Final = 2**20
MAX_LIMIT: Final = 10**9


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key.

    Attributes:
        name: for logs and metrics.
        digest: the key's SHA-256.
        max_concurrent: the most answers under way; None: any number.
        tokens_per_minute: the most tokens of prompts and answers; None: any number.
    """

    name: str
    digest: bytes
    max_concurrent: int | None = None
    tokens_per_minute: int | None = None


class Usage:
    """A key's unfinished answers and its token bucket. Used in the event loop only.

    Args:
        key: with its limits.
        clock: in seconds.
        is_separate: whether it shares no cached blocks with other keys.

    Attributes:
        key: as above; `update` gives it other limits.
        num_answers: answers under way.
        is_known: whether its numbers count: it has a name, and is in the file still.
    """

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic, *, is_separate: bool = False) -> None:
        self.key = key
        self.is_known = bool(key.name)
        self._is_separate = is_separate
        self.num_answers = 0
        self._clock = clock
        self._level = float(key.tokens_per_minute or 0)
        self._level_at = clock()

    @property
    def num_tokens_left(self) -> float:
        """The tokens in the bucket now; 0 without a limit."""
        now, rate = self._clock(), self.key.tokens_per_minute or 0
        self._level = min(self._level + (now - self._level_at) * rate / 60, float(rate))
        self._level_at = now
        return self._level

    def salted(self, cache_salt: str | None) -> str | None:
        """What separates a request's blocks in the prefix cache: the client's own salt, and its key."""
        if not self._is_separate:
            return cache_salt
        return self.key.digest.hex() + ("" if cache_salt is None else f":{cache_salt}")

    def update(self, key: ApiKey) -> None:
        """Change the limits. Tokens that were taken from the bucket stay taken."""
        taken = (self.key.tokens_per_minute or 0) - self.num_tokens_left
        self.key = key
        self._level = max((key.tokens_per_minute or 0) - taken, 0.0)

    def begin(self, num_answers: int) -> Admission:
        """Admit a request by its answers; `Admission.reserve` comes next.

        Raises:
            ApiError: 429: the key has too many under way; 400: the request alone has more than the key may have.
        """
        limit = self.key.max_concurrent
        if limit is not None and num_answers > limit:
            message = f"the request has {num_answers} answers, and the key {self.key.name!r} may have {limit} at a time"
            raise ApiError(400, f"{message}: ask for fewer", param="n", code="concurrency_limit")
        if limit is not None and self.num_answers + num_answers > limit:
            message = f"the key {self.key.name!r} has {self.num_answers} answers in progress, of {limit} at most"
            raise rate_limited(f"{message}: wait for one to finish", "concurrency_limit", 1)
        return Admission(self, num_answers)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of a response, as ASGI has them: how many tokens are left, and when the bucket is full."""
        limit = self.key.tokens_per_minute
        if limit is None:
            return []
        left = self.num_tokens_left
        shown = {
            "x-ratelimit-limit-tokens": f"{limit}",
            "x-ratelimit-remaining-tokens": f"{math.floor(max(left, 0))}",
            "x-ratelimit-reset-tokens": f"{(limit - left) * 60 / limit:.3f}s",
        }
        return [(name.encode(), value.encode()) for name, value in shown.items()]

    def take(self, num_tokens: float) -> None:
        """Take tokens from the bucket; negative: give some back."""
        self._level = min(self.num_tokens_left - num_tokens, float(self.key.tokens_per_minute or 0))


class Admission:
    """The part of its key's limits that a request holds until it is over. Made by `Usage.begin`."""

    def __init__(self, usage: Usage, num_answers: int) -> None:
        self._usage = usage
        self._num_answers = num_answers
        self._num_reserved = 0
        usage.num_answers += num_answers

    def reserve(self, num_tokens: int) -> None:
        """Take all tokens that the request may use.

        Raises:
            ApiError: 429: the bucket does not hold them now; 400: it never does.
        """
        key, left = self._usage.key, self._usage.num_tokens_left
        limit = key.tokens_per_minute
        if limit is None:
            return
        message = f"the request may use {num_tokens} tokens, prompt and answers"
        if num_tokens > limit:
            message += f", and the key {key.name!r} has {limit} a minute: shorten the prompt, or set max_tokens lower"
            raise ApiError(400, message, param="max_tokens", code="token_limit")
        if num_tokens > left:
            message += f", and the key {key.name!r} has {math.floor(max(left, 0))} left of {limit} a minute"
            seconds = (num_tokens - left) * 60 / limit
            raise rate_limited(f"{message}: wait, or set max_tokens lower", "token_limit", seconds)
        self._usage.take(num_tokens)
        self._num_reserved = num_tokens

    def end(self, num_used: int) -> None:
        """The request is over: free its answers, and return its unused tokens."""
        self._usage.num_answers -= self._num_answers
        if self._num_reserved:
            self._usage.take(num_used - self._num_reserved)


class ApiKeys:
    """The keys of a server. `reload` reads their file again.

    Args:
        keys: at least one; names and keys differ.
        path: where they were read; None: nowhere.
        share_prefix_cache: whether they share the prefix cache's blocks. Then each can learn, by the time of an answer,
            whether another has sent the same beginning of a prompt.

    Raises:
        ValueError: the file of `of_file` is not as it should be; the key of `of_single` is empty.
    """

    def __init__(self, keys: Sequence[ApiKey], path: Path | None = None, *, share_prefix_cache: bool = False) -> None:
        self.path = path
        self._new_usage = partial(Usage, is_separate=not share_prefix_cache)
        self._usages = list(map(self._new_usage, keys))

    @classmethod
    def of_single(cls, key: str) -> ApiKeys:
        """One key, without limits."""
        if not key:
            raise ValueError("the API key is empty")
        return cls([ApiKey(SINGLE, sha256(key.encode()).digest())], share_prefix_cache=True)

    @classmethod
    def of_file(cls, path: Path, *, share_prefix_cache: bool = False) -> ApiKeys:
        """The keys of a file."""
        return cls(read_api_keys(path), path, share_prefix_cache=share_prefix_cache)

    def __iter__(self) -> Iterator[Usage]:
        return iter(self._usages)

    def reload(self) -> None:
        """Read the file again. A key that stays keeps what it has under way, and its bucket.

        Raises:
            ValueError: it is not as it should be; the keys remain what they were.
        """
        assert self.path is not None, "these keys were not read from a file"
        before = {usage.key.name: usage for usage in self._usages}
        usages = []
        for key in read_api_keys(self.path):
            if (usage := before.pop(key.name, None)) is None:
                usage = self._new_usage(key)
            else:
                usage.update(key)
            usages.append(usage)
        for usage in before.values():
            usage.is_known = False
        self._usages = usages

    def find(self, authorization: bytes) -> Usage | None:
        """The usage of the client's key; None if it is unknown. Takes the same time in either case.

        Args:
            authorization: the header: `Bearer KEY`; or HTTP Basic, where the password is the key, for browsers.
        """
        scheme, _, credentials = authorization.partition(b" ")
        shown = _password(credentials) if scheme.lower() == b"basic" else credentials.strip()
        digest = sha256(shown).digest()
        found = [usage for usage in self._usages if hmac.compare_digest(usage.key.digest, digest)]
        return found[0] if found and scheme.lower() in (b"bearer", b"basic") else None


def _password(credentials: bytes) -> bytes:
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def usage_of(scope: Scope) -> Usage:
    """That of the key that a request has shown; one without limits, that nothing counts, if none was asked for."""
    usage: Usage | None = scope.get("state", {}).get("usage")
    return Usage(ApiKey("", b"")) if usage is None else usage


# The file


def read_api_keys(path: Path) -> list[ApiKey]:
    """The keys that a file names.

    Raises:
        ValueError: it cannot be read, or is not as it should be; says where.
    """
    try:
        is_too_long = path.stat().st_size > MAX_FILE_NBYTES
        if is_too_long or not (path.is_file() or path.is_dir()):  # a pipe or a device may never end
            raise ValueError(f"{path} must be a file of at most {MAX_FILE_NBYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    try:
        config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    tables = config.get("keys")
    if set(config) != {"keys"} or not isinstance(tables, dict) or not tables:
        raise ValueError(f'{path} must have a table [keys.NAME] for each key, with key = "…", and nothing else')
    try:
        if len(tables) > MAX_KEYS:
            raise ValueError(f"a server has at most {MAX_KEYS} keys; got {len(tables)}")
        keys = [_key(name, table) for name, table in tables.items()]
        _refuse_same(keys)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return keys


_FIELDS: Final = ("key", "key_sha256", *(each.name for each in fields(ApiKey)[2:]))


def _key(name: str, table: Any) -> ApiKey:
    if not (name.strip() and name.isprintable() and len(name) <= MAX_NAME) or name == UNKNOWN:
        raise ValueError(f"a key's name has 1 … {MAX_NAME} printable characters and is not {UNKNOWN!r}; got {name!r}")
    where = f"keys.{name}"
    if not isinstance(table, dict):
        raise ValueError(f'{where} must be a table: write [{where}], and key = "…" on the next line')
    if others := sorted(table.keys() - set(_FIELDS)):
        raise ValueError(f"{where}.{others[0]} is not a field of a key: the fields are {', '.join(_FIELDS)}")
    if ("key" in table) == ("key_sha256" in table):
        raise ValueError(f"{where} must have either key or key_sha256")
    limits = {}
    for field in _FIELDS[2:]:
        value = limits[field] = table.get(field)
        if field in table and not (type(value) is int and 1 <= value <= MAX_LIMIT):
            raise ValueError(f"{where}.{field} must be a whole number from 1 to {MAX_LIMIT}; got {value!r}")
    return ApiKey(name, _digest(where, table), **limits)


def _digest(where: str, table: dict[str, Any]) -> bytes:
    """The digest of a key. Errors do not quote the key: they are logged."""
    if "key" in table:
        key = table["key"]
        if not isinstance(key, str) or not key or not key.isprintable() or " " in key:
            raise ValueError(f"{where}.key must be a string of printable characters without spaces")
        return sha256(key.encode()).digest()
    digits = table["key_sha256"]
    if not isinstance(digits, str) or len(digits) != 64 or set(digits.lower()) - set("0123456789abcdef"):
        raise ValueError(f"{where}.key_sha256 must be 64 hexadecimal digits: printf %s KEY | sha256sum")
    return bytes.fromhex(digits)


def _refuse_same(keys: Sequence[ApiKey]) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if key.digest in names:
            raise ValueError(f"keys.{names[key.digest]} and keys.{key.name} have the same key: use different keys")
        names[key.digest] = key.name
