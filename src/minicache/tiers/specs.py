"""Tiers by what a user writes: "cpu:512MB", "disk:/var/cache/kv?max=20GB", "redis://host:6379"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

from minicache.tiers.contract import Tier

DISK_NBYTES: Final = 4 * 10**9
"""The bound of a folder that is given without one."""

_UNITS: Final = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class TierSpec(NamedTuple):
    """A tier that is asked for.

    Attributes:
        kind: which.
        place: the folder or the URL; "" of CPU memory.
        max_nbytes: its bound; None of Redis, which has its own.
    """

    kind: Literal["cpu", "disk", "redis"]
    place: str
    max_nbytes: int | None


def parse_tier(spec: str) -> TierSpec:
    """What a specification asks for.

    Args:
        spec: "cpu:SIZE"; "disk:PATH" or "disk:PATH?max=SIZE", 4GB if there is none; or a URL of Redis, "redis://…",
            "rediss://…" or "unix://…". A SIZE is a number and KB, MB, GB or TB, of 1,000 bytes and so on.

    Raises:
        TypeError: it is no string.
        ValueError: it is none of these.
    """
    if not isinstance(spec, str):
        raise TypeError(f'a tier is named by a string, "disk:PATH" for instance; got {spec!r}')
    kind, _, rest = spec.partition(":")
    if kind in ("redis", "rediss", "unix"):
        return TierSpec("redis", spec, None)
    if kind == "cpu" and rest:
        return TierSpec("cpu", "", parse_size(rest))
    path, is_bounded, size = rest.partition("?max=")
    if kind == "disk" and path:
        return TierSpec("disk", path, parse_size(size) if is_bounded else DISK_NBYTES)
    raise ValueError(f"no tier {spec!r}: write cpu:SIZE, disk:PATH, disk:PATH?max=SIZE or redis://HOST:PORT")


def open_tier(spec: str) -> Tier:
    """The tier that a specification names, as `parse_tier` takes it.

    Raises:
        TypeError, ValueError: as `parse_tier`.
        OSError: the folder cannot be made, or not read.
        MissingExtraError: redis-py is not installed.
    """
    kind, place, max_nbytes = parse_tier(spec)
    if max_nbytes is None:
        from minicache.tiers.redis import RedisTier

        return RedisTier(place)
    if kind == "cpu":
        from minicache.tiers.cpu import CPUTier

        return CPUTier(max_nbytes)
    from minicache.tiers.disk import DiskTier

    return DiskTier(Path(place).expanduser(), max_nbytes)


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
