# Phase 12, production-defaults: your file. It stands in for minicache.tiers.disk.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
"""A tier in a folder: one file a block. Standard library only.

One file a block, not an append-only segment with an index: the folder is the index. A block is evicted by removing a
file, where a segment would have to be compacted; nothing has to be read, repaired or written again after a crash; and
several processes may use one folder at once, with no lock. It costs the opening of a file a block, some 20 µs, against
the milliseconds that computing one takes.

A file appears under its name only when it is complete (`os.replace`), so a process may be killed at any moment. It
holds a lock on the file that it is making, and the system releases that when it dies: an unlocked one is left over, and
the next listing removes it. What a power failure does to a file that was not flushed, its checksum shows
(`minicache.tiers.contract`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from io import BufferedWriter
from itertools import count
from pathlib import Path
from secrets import token_hex
from threading import Lock
from typing import Final, NamedTuple

from minicache.errors import require_count
from minicache.tiers.contract import Key

SPARED: Final = 0.05
"""When the folder is full, this part of its bound is freed at once: listing it for each block would be slow."""

_SUFFIX: Final = ".making"


class Stored(NamedTuple):
    """A file of the folder. They sort by last use, the oldest first.

    Attributes:
        used_ns: when it was used last, the file's modification time.
        nbytes: its size.
        path: its path.
    """

    used_ns: int
    nbytes: int
    path: Path


class DiskTier:
    """A `Tier` in a folder, which outlives the process and may be shared by several.

    A record is the file `ab/abcd…`, named by its key in hexadecimal. The time of its last use is its modification
    time. Other files in the folder are neither counted nor touched.

    Args:
        folder: made if it is not there.
        max_nbytes: the most bytes of all records, ≥ 1. Of several processes, each counts its own writes between two
            listings: together they may exceed it by up to `SPARED` for each process beyond the first.

    Attributes:
        folder: as given.
        nbytes: bytes of the records, at the last listing, and of those stored since.

    Raises:
        TypeError, ValueError: max_nbytes is no such number.
        OSError: the folder cannot be made or listed.
    """

    name = "disk"

    def __init__(self, folder: Path, max_nbytes: int) -> None:
        require_count("max_nbytes", max_nbytes)
        self.folder = folder
        self._max_nbytes = max_nbytes
        self._lock = Lock()
        self._process = token_hex(8)
        self._names = count()
        self._last_ns = 0
        self._num_making = 0  # bytes of records that have room, and no file yet
        folder.mkdir(parents=True, exist_ok=True)
        self.nbytes = sum(each.nbytes for each in self.stored())
        if self.nbytes > max_nbytes:
            self.make_room(0)

    def path(self, key: Key) -> Path:
        """Where a key's record is, if it is here."""
        name = key.hex()
        return self.folder / name[:2] / name

    def lookup(self, keys: Sequence[Key]) -> int:
        """As `Tier.lookup`: the files are asked for, as other processes may have made or removed some."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `Tier.load`."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def store(self, key: Key, record: bytes) -> None:
        """As `Tier.store`: written under another name, and renamed when it is complete.

        Raises:
            OSError: the disk is full, or whatever else it says. Nothing is left under either name.
        """
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def touch(self, keys: Sequence[Key]) -> None:
        """As `Tier.touch`."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def discard(self, keys: Sequence[Key]) -> None:
        """As `Tier.discard`."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def make_room(self, nbytes: int) -> None:
        """Reserve bytes for a record: count them, and evict if the bound would be exceeded.

        The least recently used records go, until `SPARED` of the bound is free besides. What the folder holds is
        counted anew then.

        Args:
            nbytes: 0 … max_nbytes.
        """
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def stored(self) -> Iterator[Stored]:
        """The records that are here, in no order. Files that killed processes have left in the making are removed."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if len(entry.name) == 2 and entry.is_dir():
                    yield from _records(Path(entry.path))
                elif entry.name.endswith(_SUFFIX):
                    _remove_left_over(Path(entry.path))


def _remove_left_over(making: Path) -> None:
    """Remove a file in the making, unless a process has it locked, or it is not ours to remove."""
    with suppress(OSError), making.open("r+b") as file:
        flock(file, LOCK_EX | LOCK_NB)
        making.unlink()


def _records(folder: Path) -> Iterator[Stored]:
    """The records in one of the folders of a tier's folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(entry.name) == 64 and entry.name.startswith(folder.name):
                with suppress(FileNotFoundError):  # another process has removed it
                    stat = entry.stat()
                    yield Stored(stat.st_mtime_ns, stat.st_size, Path(entry.path))
