"""Grids of parameters: `make test` runs a part of one that has everything in it, `make check` all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Choice = tuple[int, ...]


def grid(axes: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """`parametrize` with all combinations of the axes' values, of which most are `slow`.

    The others have every value of two axes, and of three or more axes every pair of values: most mistakes that depend
    on parameters depend on one or two of them. The axis `"a,b"` has pairs, for two parameters.
    """
    every = list(product(*(range(len(values)) for values in axes.values())))
    chosen = _covering(every, min(2, len(axes) - 1))
    params = []
    for choice in every:
        picked = [values[index] for values, index in zip(axes.values(), choice, strict=True)]
        flat = [each for name, value in zip(axes, picked, strict=True) for each in (value if "," in name else [value])]
        marks = () if choice in chosen else pytest.mark.slow
        params.append(pytest.param(*flat, marks=marks, id="-".join(map(str, flat))))
    return pytest.mark.parametrize(",".join(axes), params)


def _covering(every: Sequence[Choice], strength: int) -> set[Choice]:
    """A few choices in which all `strength` values that any choice has together come together."""

    def together(choice: Choice) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(choice), strength))

    missing = set().union(*map(together, every))
    chosen = set()
    while missing:
        best = max(every, key=lambda choice: len(missing & together(choice)))
        chosen.add(best)
        missing -= together(best)
    return chosen
