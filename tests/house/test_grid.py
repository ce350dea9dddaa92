"""The part of a grid of parameters that `make test` runs."""

from __future__ import annotations

from itertools import combinations, product

from tests.grid import grid


def unmarked(mark):
    return [param.values for param in mark.args[1] if not param.marks]


def test_of_three_axes_every_pair_of_values_is_run():
    axes = {"a": range(4), "b": "xyz", "c": [True, False]}
    mark = grid(axes)
    assert [param.values for param in mark.args[1]] == list(product(*axes.values()))
    run = unmarked(mark)
    assert len(run) == 12
    for i, j in combinations(range(3), 2):
        values = list(axes.values())
        assert {(each[i], each[j]) for each in run} == set(product(values[i], values[j]))


def test_of_two_axes_every_value_is_run():
    mark = grid({"a,b": [(1, 2), (3, 4), (5, 6)], "c": "xy"})
    assert mark.args[0] == "a,b,c"
    run = unmarked(mark)
    assert len(run) == 3
    assert {each[:2] for each in run} == {(1, 2), (3, 4), (5, 6)}
    assert {each[2] for each in run} == {"x", "y"}
