# Phase 12, production-defaults: your file. It stands in for minicache.tiers.disk.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
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
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def lookup(self, keys: Sequence[Key]) -> int:
        """As `Tier.lookup`."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def load(self, keys: Sequence[Key]) -> list[bytes]:
        """As `Tier.load`. Their use counts as `touch` says."""
        raise NotImplementedError(
            "phase 12, task 8: A folder that survives; read docs/en/phase-12-production-defaults/lab/03-a-tier-below.md"
        )

    def store(self, key: Key, record: bytes) -> None:
        """As `Tier.store`; and it counts as used now.

        Raises:
            Exception: the system's, when the disk is full for instance. The record is not there.
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
