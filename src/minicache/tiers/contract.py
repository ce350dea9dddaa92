"""What a tier does, and how a block looks in one. Pure standard library.

A tier is a store of *records* by *key*, both bytes. A record is a block's keys and values in all layers, sealed with
its key and a checksum (`seal`): whatever a disk or another process did to it, `unseal` returns what was sealed, or
raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, Protocol
from zlib import crc32

from minicache.errors import CorruptBlockError

Key = bytes
"""32 bytes: a block's hash, mixed with what else its bytes depend on (`minicache.tiers.stack`)."""

_HEADER: Final = Struct("<8s32sQI")  # magic, key, length of the payload, checksum
_MAGIC: Final = b"minikv\x00\x01"


class Tier(Protocol):
    """A store of records, with a bound on its size.

    All methods may block, and are called by threads of a `TierStack`, several at once. Any of them may raise any
    Exception: the tier has failed this time, which costs a computation and no answer. A call that raises leaves every
    record as it was, or gone.

    Attributes:
        name: its kind, the label of its metrics.
    """

    name: str

    def lookup(self, keys: Sequence[Key]) -> int:
        """How many of the first keys have a record here. It may be gone when it is loaded."""
        ...

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """The records of the first keys, up to the first that has none. They count as used now.

        Whether they are sound is for the caller to check (`unseal`).
        """
        ...

    def store(self, key: Key, record: bytes) -> None:
        """Keep a record; the least recently used ones make room for it.

        A key that has a record keeps it: a key's records are all equal. A record above the bound is not kept.
        """
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """These records were used, in the order of a prefix: the first counts as the most recently used.

        So the end of a prefix is evicted before its beginning, without which the end is of no use. Keys without a
        record are skipped.
        """
        ...

    def discard(self, keys: Sequence[Key]) -> None:
        """Drop these records. Keys without one are skipped."""
        ...


def seal(key: Key, payload: bytes) -> bytes:
    """The record of a block.

    Args:
        key: 32 bytes.
        payload: its keys and values.

    Returns:
        52 bytes, which begin with the format's name and version, and the payload.
    """
    checksum = crc32(payload, crc32(key))
    return b"".join((_HEADER.pack(_MAGIC, key, len(payload), checksum), payload))


def unseal(key: Key, record: bytes) -> bytes:
    """The payload that `seal` was given with this key.

    Raises:
        CorruptBlockError: the record is cut off, has another key or format, or a bit of it has changed.
    """
    if len(record) < _HEADER.size:
        raise CorruptBlockError(f"a stored block has {len(record)} bytes, fewer than its header")
    magic, its_key, length, checksum = _HEADER.unpack_from(record)
    payload = record[_HEADER.size :]
    if magic != _MAGIC or its_key != key:
        raise CorruptBlockError("a stored block has another block's key, or another version's format")
    if len(payload) != length or crc32(payload, crc32(key)) != checksum:
        raise CorruptBlockError("a stored block is cut off, or does not have its checksum")
    return payload
