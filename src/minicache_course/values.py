"""What a value is, whatever it says of itself: the checks ask this of what a learner's code returns.

A returned object may be a subclass of `int` whose `==` is always true, or may claim another class. So a value is judged
by its type alone, and compared by the expected value's own comparison. Functions are bound when this module is loaded,
which is before any learner's file is: what a file replaces in `builtins` changes nothing here.
"""

from __future__ import annotations

# ruff: noqa: UP029 - bound here on purpose
from builtins import all, any, bytes, dict, float, frozenset, int, isinstance, list, set, str, tuple, type
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from fractions import Fraction
from numbers import Real
from typing import Any

_HEAP_TYPE = 1 << 9  # a type's flag: it was made at run time, by a class statement for instance
_flags_of: Callable[[type], int] = vars(type)["__flags__"].__get__
_bases_of: Callable[[type], tuple[type, ...]] = vars(type)["__mro__"].__get__
_contents_of: Callable[[type], Mapping[str, object]] = vars(type)["__dict__"].__get__
_is_subclass: Callable[[type, type], bool] = type.__subclasscheck__  # a metaclass can have another one

_COMPUTING = (Fraction, Counter)  # the standard library's, in Python code
_ARITHMETIC = tuple(f"__{side}{name}__" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "floordiv"))

_BY_IDENTITY: tuple[object, ...] = (object.__eq__, Enum.__eq__)

# The value that an object of a subclass of a built-in type has, read by the built-in type's own method.
_READ: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def is_a(value: object, *classes: type) -> bool:
    """Whether the type of `value` is one of `classes` or a subclass: neither it nor a metaclass has a say."""
    kind = type(value)
    for each in classes:  # noqa: SIM110, every check asks this many times
        if _is_subclass(each, kind):
            return True
    return False


def is_built_in(value: object) -> bool:
    """Whether the type of `value` is written in C: Python code has no part in how it compares."""
    return not _flags_of(type(value)) & _HEAP_TYPE


def plain(value: Any) -> Any:
    """The number, text or container of a built-in type that an object of a subclass is; any other value as it is."""
    if is_built_in(value):
        return value
    for kind, read in _READ.items():
        if is_a(value, kind):
            return read(value)
    return value


def poses(value: Any) -> bool:
    """Whether `value` is an object of a class that claims to be another, or that decides itself what sums of it are.

    A test computes with what a call gave, and compares the outcome. With such an object any outcome can be had.
    """
    if is_built_in(value):
        return False
    if value.__class__ is not type(value):
        return True
    for base in _bases_of(type(value)):
        if any(base is each for each in _COMPUTING) or not _flags_of(base) & _HEAP_TYPE:
            return False
        if any(name in _contents_of(base) for name in _ARITHMETIC):
            return True
    return False


def is_number(value: object) -> bool:
    """Whether `value` is a real number, as Python, NumPy or `fractions` have them; a bool is none."""
    if is_a(value, int, float):
        return not is_a(value, bool)
    return type(value) is Fraction or (is_built_in(value) and isinstance(value, Real))


def equal(got: Any, expected: Any) -> bool:
    """Whether the two are equal, by the comparison of `expected`, or of `got` if its type is written in C."""
    verdict = _compare(type(expected), expected, got)
    if verdict is NotImplemented and is_built_in(got):
        verdict = _compare(type(got), got, expected)
    return verdict is True or got is expected


def are_data(values: Iterable[Any], known: Iterable[Any]) -> bool:
    """Whether Python code has no part in how `values` compare: built-in data, enum members, or some of `known`."""
    known = list(known)
    return all(_is_data(value, known) for value in values)


def _is_data(value: Any, known: list[Any]) -> bool:
    if is_a(value, tuple, frozenset):
        return is_built_in(value) and all(_is_data(each, known) for each in value)
    by_identity = any(type(value).__eq__ is each for each in _BY_IDENTITY)
    return is_built_in(value) or by_identity or any(value is each for each in known)


def _compare(kind: Any, one: Any, other: Any) -> Any:
    return kind.__eq__(one, other)
