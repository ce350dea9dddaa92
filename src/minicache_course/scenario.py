"""What a test has set up and done when it fails: told with the failure, above what was called and what came of it.

`minicache_course.follow` notes objects that are made and calls that return; a test may note more. The plugin wraps each
test, and each example of a Hypothesis test, in `telling`, which puts the notes on the error that leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minicache_course.language import combined, joined, labelled, said

_GIVEN, _AFTER = said("given"), said("after")

SETTING = (f"{_GIVEN:<10}", f"{_AFTER:<10}")
"""How notes begin that tell what was there, and what was done."""

_MAX_LINES, _MAX_ITEMS, _MAX_LENGTH = 8, 6, 160

_given: list[tuple[str, str]] = []
_done: list[tuple[str, str]] = []
_tensors: list[tuple[str, int, Any]] = []  # name, how often it was given before, copy


def given(what: str, item: str = "") -> None:
    """Note what is there: a scheduler with its options, a request. Notes that differ only in `item` share a line."""
    _given.append((what, item))


def done(what: str, item: str = "") -> None:
    """Note what has been done: a call that returned. Notes in a row that differ only in `item` share a line."""
    _done.append((what, item))


def num_done() -> int:
    """Notes of what has been done so far."""
    return len(_done)


def remember(name: str, tensor: Any) -> None:
    """Keep a copy of a tensor, to recognise its numbers in the wrong place."""
    _tensors.append((name, sum(each[0] == name for each in _tensors), tensor.detach().clone()))


def origin(number: float) -> str:
    """Where a remembered tensor has `number`: "v[0, 1, 2, 0] of append(0, k, v)"; "" unless in exactly one place."""
    if number == 0:  # as memory is that was never written
        return ""
    places = []
    for name, earlier, tensor in _tensors:
        near = (tensor.double() - number).abs() <= 1e-9 * abs(number)  # another batch rounds otherwise
        for index in near.nonzero().tolist():
            part, of, whole = name.partition(" of ")
            place = f"{part}{index} of {whole}" if of else f"{part}{index}"
            places.append(f"{place}, call {earlier + 1}" if earlier else place)
    return places[0] if len(places) == 1 else ""


@contextmanager
def telling() -> Iterator[None]:
    """Around a test: an error that leaves it has the notes; afterwards those that were made inside are gone."""
    kept = [(notes, len(notes)) for notes in (_given, _done, _tensors)]
    try:
        yield
    except BaseException as error:
        if not any(note.startswith(SETTING) for note in getattr(error, "__notes__", ())):
            for note in (*_told(_GIVEN, _given), *_told(_AFTER, _done[: getattr(error, "num_done", None)])):
                error.add_note(note)
        raise
    finally:
        for notes, length in kept:
            del notes[length:]


def _told(label: str, notes: list[tuple[str, str]]) -> list[str]:
    """The notes in lines, the first with its label; of many, the last."""
    merged: list[tuple[str, list[str]]] = []
    for what, item in notes:
        if item and merged and merged[-1][0] == what:
            merged[-1][1].append(item)
        else:
            merged.append((what, [item] if item else []))
    lines = [combined(_cut, f"{what} {joined(', ', _ends(items))}" if items else what) for what, items in merged]
    if left := len(lines) - _MAX_LINES:
        lines = lines if left < 0 else [f"… ({left} more before)", *lines[-_MAX_LINES:]]
    return [joined("\n", [labelled(label, lines[0]), *(labelled("", line) for line in lines[1:])])] if lines else []


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LENGTH else f"{line[: _MAX_LENGTH - 2]} …"


def _ends(items: list[str]) -> list[str]:
    """The items, without the middle of many."""
    return items if len(items) <= _MAX_ITEMS else [*items[: _MAX_ITEMS - 2], "…", items[-1]]
