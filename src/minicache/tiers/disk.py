"""A tier in a folder, which outlives the process. Phase 12 builds it. Standard library only.

Which files are in the folder, and what is in them, is up to the tier: no one else reads them.
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

_SPARED: Final = 0.05
"""When the folder is full, this part of its bound is freed at once: listing it for each block would be slow."""

_SUFFIX: Final = ".making"


class _Stored(NamedTuple):
    """A file of the folder. They sort by last use, the oldest first."""

    used_ns: int  # its modification time
    nbytes: int
    path: Path


class DiskTier:
    """A `Tier` in a folder, which outlives the process and may be used by several at once.

    **It survives.** A process may be killed at any moment, in the middle of any call, and others open the folder
    afterwards. They find every record whose `store` had returned and that was not evicted or discarded; and the order
    of use is that of the calls that had returned. A call that was cut short has done its work or not: no part of a
    record is there.

    **It is bounded.** When a call returns, the records have at most max_nbytes together. If there are more, the least
    recently used go: as few as possible, or up to a tenth of max_nbytes more. All files of the tier have at most half
    as much again, and 1 MB, for gaps and indexes; what killed processes have left counts an hour later.

    **It is shared.** What one process has stored or discarded, another sees in its next call. That a record goes while
    another process asks for it is no error. Together they may exceed max_nbytes by a tenth for each process beyond the
    first.

    **Damage costs records only.** Whatever is cut off, emptied or changed in any file while no one has the folder open,
    it can be opened again, no call raises because of it, and a record that has suffered is not there, or fails
    `unseal`. Once it was discarded it can be stored anew.

    A `store` that fails, on a full disk for instance, leaves no bytes behind. Files of others in the folder are neither
    counted nor touched.

    Args:
        folder: made if it is not there, with its parents.
        max_nbytes: the most bytes of all records, ≥ 1. If the folder has more, they are evicted at once.

    Raises:
        TypeError, ValueError: max_nbytes is no such number. Nothing is made.
        OSError: the folder cannot be made or read.
    """

    name = "disk"

    def __init__(self, folder: Path, max_nbytes: int) -> None:
        # One file a block, not an append-only segment with an index: the folder is the index. A block is evicted by
        # removing a file, where a segment would have to be compacted; nothing has to be read, repaired or written again
        # after a crash; and several processes use one folder without waiting for each other. It costs opening a file
        # a block, some 20 µs, against the milliseconds that computing one takes.
        #
        # A record is the file `ab/abcd…`, named by its key in hexadecimal. The time of its last use is its modification
        # time. It appears under its name only when it is complete (`os.replace`). A process holds a lock on the file
        # that it is making, and the system releases that when it dies: the next listing removes an unlocked one. What a
        # power failure does to a file that was not flushed, its checksum shows (`minicache.tiers.contract`).
        require_count("max_nbytes", max_nbytes)
        self.folder = folder
        self._max_nbytes = max_nbytes
        self._lock = Lock()
        self._process = token_hex(8)
        self._names = count()
        self._last_ns = 0
        self._room = -1  # bytes that may be stored before the folder is listed again; it was not listed yet
        self._num_making = 0  # bytes of records that have room, and no file yet
        folder.mkdir(parents=True, exist_ok=True)
        self._make_room(0)

    def lookup(self, keys: Sequence[Key]) -> int:
        """As `Tier.lookup`."""
        # The files are asked for, as other processes may have made or removed some.
        return next((index for index, key in enumerate(keys) if not self._path(key).exists()), len(keys))

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `Tier.load`. Their use counts as `touch` says."""
        records: list[bytes] = []
        with suppress(FileNotFoundError):
            records.extend(self._path(key).read_bytes() for key in keys)  # keeps those before the one that is missing
        self.touch(keys[: len(records)])
        return records

    def store(self, key: Key, record: bytes) -> None:
        """As `Tier.store`; and it counts as used now.

        Raises:
            Exception: the system's, when the disk is full for instance. The record is not there.
        """
        path = self._path(key)
        if len(record) > self._max_nbytes or path.exists():
            return
        making: Path | None = None
        try:
            self._make_room(len(record))
            path.parent.mkdir(exist_ok=True)
            making, file = self._begin()
            with file:
                file.write(record)
                file.flush()
                os.utime(making, ns=(self._now(),) * 2)
                making.replace(path)  # while it is locked
        except BaseException:
            if making is not None:
                making.unlink(missing_ok=True)
            raise
        finally:
            with self._lock:
                self._num_making -= len(record)

    def touch(self, keys: Sequence[Key]) -> None:
        """As `Tier.touch`."""
        for key in reversed(keys):
            with suppress(FileNotFoundError):
                os.utime(self._path(key), ns=(self._now(),) * 2)

    def discard(self, keys: Sequence[Key]) -> None:
        """As `Tier.discard`."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        """Where a key's record is, if it is here."""
        name = key.hex()
        return self.folder / name[:2] / name

    def _make_room(self, nbytes: int) -> None:
        """Reserve bytes for a record; if the bound might be exceeded, list the folder, and evict if it is.

        The least recently used records go, until `_SPARED` of the bound is free besides. Each process may store as much
        before it lists the folder again, as others store too.

        Args:
            nbytes: 0 … max_nbytes.
        """
        with self._lock:
            self._room -= nbytes
            self._num_making += nbytes
            if self._room >= 0:
                return
            files = sorted(self._stored())
            held = sum(each.nbytes for each in files) + self._num_making
            spared = int(self._max_nbytes * _SPARED)
            if held > self._max_nbytes:
                for each in files:
                    if held <= max(nbytes, self._max_nbytes - spared):
                        break
                    each.path.unlink(missing_ok=True)
                    held -= each.nbytes
            self._room = min(self._max_nbytes - held, spared)

    def _stored(self) -> Iterator[_Stored]:
        """The records that are here, in no order. Files that were left in the making are removed."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if len(entry.name) == 2 and entry.is_dir():
                    yield from _records(Path(entry.path))
                elif entry.name.endswith(_SUFFIX):
                    _remove_left_over(Path(entry.path))

    def _begin(self) -> tuple[Path, BufferedWriter]:
        """A new file for a record, locked."""
        while True:
            making = self.folder / f"{self._process}-{next(self._names)}{_SUFFIX}"
            file = making.open("xb")
            flock(file, LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return making, file
            file.close()  # another process has listed it before it was locked, and removed it

    def _now(self) -> int:
        """The time in nanoseconds, later than at every earlier call."""
        with self._lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns


def _remove_left_over(making: Path) -> None:
    """Remove a file in the making, unless a process has it locked, or it is not ours to remove."""
    with suppress(OSError), making.open("r+b") as file:
        flock(file, LOCK_EX | LOCK_NB)
        making.unlink()


def _records(folder: Path) -> Iterator[_Stored]:
    """The records in one of the folders of a tier's folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if len(entry.name) == 64 and entry.name.startswith(folder.name):
                with suppress(FileNotFoundError):  # another process has removed it
                    stat = entry.stat()
                    yield _Stored(stat.st_mtime_ns, stat.st_size, Path(entry.path))
