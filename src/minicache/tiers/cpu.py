"""A tier in CPU memory: as phase 6's swap space, but for single blocks, which are found by their hash.

With it, a request that is preempted by recompute finds its blocks again. Standard library only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from minicache.errors import require_count
from minicache.tiers.contract import Key


class CPUTier:
    """A `Tier` in a dict. It ends with the process.

    Args:
        max_nbytes: the most bytes of all records, ≥ 1.

    Attributes:
        nbytes: bytes of the records that are here.

    Raises:
        TypeError, ValueError: max_nbytes is no such number.
    """

    name = "cpu"

    def __init__(self, max_nbytes: int) -> None:
        require_count("max_nbytes", max_nbytes)
        self.nbytes = 0
        self._max_nbytes = max_nbytes
        self._records: OrderedDict[Key, bytes] = OrderedDict()  # the least recently used first
        self._lock = Lock()

    def lookup(self, keys: Sequence[Key]) -> int:
        """As `Tier.lookup`."""
        return next((index for index, key in enumerate(keys) if key not in self._records), len(keys))

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `Tier.load`."""
        with self._lock:
            found = [self._records[key] for key in keys[: self.lookup(keys)]]
        self.touch(keys[: len(found)])
        return found

    def store(self, key: Key, record: bytes) -> None:
        """As `Tier.store`."""
        with self._lock:
            if key not in self._records and len(record) <= self._max_nbytes:
                self._records[key] = record
                self.nbytes += len(record)
                while self.nbytes > self._max_nbytes:
                    self.nbytes -= len(self._records.popitem(last=False)[1])

    def touch(self, keys: Sequence[Key]) -> None:
        """As `Tier.touch`."""
        with self._lock:
            for key in reversed(keys):
                if key in self._records:
                    self._records.move_to_end(key)

    def discard(self, keys: Sequence[Key]) -> None:
        """As `Tier.discard`."""
        with self._lock:
            for key in keys:
                self.nbytes -= len(self._records.pop(key, b""))
