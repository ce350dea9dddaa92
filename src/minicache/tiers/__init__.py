"""Tiers below the prefix cache: where full blocks outlive their eviction, and the process.

`contract` is what each tier does, `cpu`, `disk` and `redis` are the tiers, and `stack` runs them in threads next to the
engine. They hold bytes by key, and know no tensor and no request: `minicache.scheduler.tiered` decides what is loaded
and stored, `minicache.engine.tiered` moves it. Standard library only, but for `redis`.
"""

from __future__ import annotations

from minicache.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    contract="Tier",
    cpu="CPUTier",
    disk="DiskTier",
    redis="RedisTier",
    specs="open_tier",
    stack="Load TierStack",
)
