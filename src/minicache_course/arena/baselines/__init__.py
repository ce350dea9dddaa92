"""Known policies, a file each, as a learner's `policy.py` would be."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ORACLES: Final = ("shortest_oracle", "shortest_noisy")
"""Those that know the length of every answer. No learner's policy is."""

BASELINES: Final = (
    "static",
    "continuous",
    "paged",
    "fair",
    "chunked",
    "multilevel",
    "least_slack",
    *ORACLES,
)
"""Schedulers, by their files' names."""

FLEETS: Final = ("fleet_round_robin", "fleet_affinity")
"""Those of the second league."""


def text_of(name: str) -> str:
    """The text of a baseline's file.

    Raises:
        ValueError: there is no such baseline.
    """
    if name not in BASELINES + FLEETS:
        raise ValueError(f"no baseline {name!r}: there are {', '.join(BASELINES + FLEETS)}")
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
