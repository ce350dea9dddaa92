"""A tier in Redis, for a fleet: what one engine has computed, another one loads.

Redis bounds its memory itself: start it with "--maxmemory 2gb --maxmemory-policy allkeys-lru", for instance. Without a
bound it grows until the machine's memory ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

from minicache.errors import MissingExtraError
from minicache.tiers.contract import Key

if TYPE_CHECKING:
    from redis import Redis

SECONDS = 2.0
"""The most that one command may take: connecting, asking, or the answer."""


class RedisTier:
    """A `Tier` in a Redis server. It connects when it is first used, and again after an error.

    Args:
        url: as redis-py takes it: "redis://host:6379/0", "rediss://…" with TLS, "unix:///path".

    Raises:
        MissingExtraError: redis-py is not installed.
        ValueError: the URL is none.
    """

    name = "redis"

    def __init__(self, url: str) -> None:
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingExtraError("a tier in Redis needs redis-py: pip install 'minicache-course[redis]'") from error
        self._client: Redis = Redis.from_url(
            url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS, retry=Retry(NoBackoff(), 0)
        )

    def lookup(self, keys: Sequence[Key]) -> int:
        """As `Tier.lookup`, in one round trip."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(_name(key))
        return len(list(takewhile(bool, pipeline.execute())))

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `Tier.load`, in one round trip."""
        found = cast("list[bytes | None]", self._client.mget([_name(key) for key in keys]))
        return [record for record in takewhile(lambda record: record is not None, found) if record is not None]

    def store(self, key: Key, record: bytes) -> None:
        """As `Tier.store`."""
        self._client.set(_name(key), record, nx=True)

    def touch(self, keys: Sequence[Key]) -> None:
        """As `Tier.touch`. Redis counts uses in seconds or more, so within one prefix the order is not kept."""
        if keys:
            self._client.touch(*map(_name, reversed(keys)))

    def discard(self, keys: Sequence[Key]) -> None:
        """As `Tier.discard`."""
        if keys:
            self._client.delete(*map(_name, keys))


def _name(key: Key) -> Any:
    """A block's key in Redis, where others may have theirs."""
    return b"minicache:" + key
