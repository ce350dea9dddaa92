"""Files handed in under another name than the course's: `Attention (1).py`, `attention.py.txt`, a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import PurePosixPath

_MIN_LIKENESS = 0.7  # of two names: `attention_final_v2.py` is meant for `attention.py`, `decoding.py` is not


def meant_for(wanted: PurePosixPath, others: Sequence[str]) -> str:
    """A note on the file among `others` that is perhaps `wanted`, "" if none is like it.

    Args:
        wanted: a lab file that was not handed in, such as `cache/attention.py`.
        others: the paths of the other files that were.
    """
    likeness = {other: _likeness(wanted.name, PurePosixPath(other).name) for other in others}
    best = max(likeness, key=likeness.__getitem__, default="")
    if not best or likeness[best] < _MIN_LIKENESS:
        return ""
    if best.lower().endswith(".ipynb"):
        return f"{best} is a notebook: its code must be in a file named {wanted.name}"
    return f"{best} may be the file: rename it to {wanted.name}"


def _likeness(wanted: str, other: str) -> float:
    """From 0 to 1; two names that differ in capitals only, or in the suffix, are the same."""
    one, two = wanted.lower(), other.lower()
    if two in (one, f"{one}.txt", one.replace(".py", ".ipynb"), one.removesuffix(".py")):
        return 1.0
    return SequenceMatcher(None, one, two).ratio()
