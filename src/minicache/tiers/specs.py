"""Tiers by what a user writes: "cpu:512MB", "disk:/var/cache/kv?max=20GB", "redis://host:6379"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from minicache.tiers.contract import Tier

DISK_NBYTES: Final = 4 * 10**9
"""The bound of a folder that is given without one."""

_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def open_tier(spec: str) -> Tier:
    """The tier that a specification names.

    Args:
        spec: "cpu:SIZE"; "disk:PATH" or "disk:PATH?max=SIZE", 4GB if there is none; or a URL of Redis, "redis://…",
            "rediss://…" or "unix://…". A SIZE is a number and KB, MB, GB or TB, of 1,000 bytes and so on.

    Raises:
        TypeError: it is no string.
        ValueError: it is none of these.
        OSError: the folder cannot be made, or not read.
        MissingExtraError: redis-py is not installed.
    """
    if not isinstance(spec, str):
        raise TypeError(f'a tier is named by a string, "disk:PATH" for instance; got {spec!r}')
    kind, _, rest = spec.partition(":")
    if kind in ("redis", "rediss", "unix"):
        from minicache.tiers.redis import RedisTier

        return RedisTier(spec)
    if kind == "cpu" and rest:
        from minicache.tiers.cpu import CPUTier

        return CPUTier(parse_size(rest))
    if kind == "disk" and rest:
        from minicache.tiers.disk import DiskTier

        path, is_bounded, size = rest.partition("?max=")
        if path:
            folder = Path(path).expanduser()
            return DiskTier(folder, parse_size(size) if is_bounded else DISK_NBYTES)
    raise ValueError(f"no tier {spec!r}: write cpu:SIZE, disk:PATH, disk:PATH?max=SIZE or redis://HOST:PORT")


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MB" or "1.5GB".

    Raises:
        ValueError: it is none, or less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]B)", text.strip())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < 1:
        raise ValueError(f"{text!r} is no size: write a number and KB, MB, GB or TB, 512MB for instance")
    return nbytes
