"""Secret seeds: `minicache grade 3 --seed 42` draws the random cases of the tests anew.

What a test draws is the same in every run, so the same code gets the same grade. Answers to known cases can be
written down, though. Under a secret seed a test draws other cases, and an answer that was written down is wrong:

    rng = random.Random(fresh(5))  # 5 in a run without a seed
    count = one_of(4, range(3, 9))  # 4 in a run without a seed

Hypothesis's examples are drawn anew by the plugin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")

_secret: int | None = None


def use(seed: int | None) -> None:
    """Draw under this seed from now on; None: as in every run without one. To be called before tests are imported."""
    global _secret
    _secret = seed


def in_use() -> int | None:
    """The secret seed, None in a run without one."""
    return _secret


def fresh(usual: int) -> int:
    """The seed of a case: `usual`, or under a secret seed a number from 0 to 2³¹ − 1 that follows from both."""
    return usual if _secret is None else _number(str(usual))


def one_of(usual: Item, others: Sequence[Item]) -> Item:
    """A value of a case that is written by hand: `usual`, or under a secret seed one of `others`.

    The same arguments give the same value all through a run.
    """
    return usual if _secret is None else others[_number(f"{usual!r} of {others!r}") % len(others)]


def again(phase: int) -> str:
    """The command that repeats a grading with its random cases: `minicache grade 3 --seed 42`, "" without a seed."""
    return "" if _secret is None else f"minicache grade {phase} --seed {_secret}"


def _number(case: str) -> int:
    digest = hashlib.sha256(f"{_secret} {case}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
