"""The words in figures and in the plots of notebooks, in Spanish: `docs/es/figures.po`, English to Spanish.

A number in a label is `{}` in the catalogue, so "7 blocks" and "12 blocks" are one entry. A figure's label without an
entry stays English; a plot's is an error (`scripts/notebook_pages.py`). `python -m scripts.figures` adds what is new,
untranslated, and removes what nothing has any longer.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING

from babel.messages import pofile
from babel.messages.catalog import Catalog

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CATALOGUE = Path(__file__).resolve().parents[2] / "docs" / "es" / "figures.po"

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_COMMA = re.compile(r"(?<=\d),(?=\d{3})")  # Spanish pages have spaces in large numbers
_WORDS = re.compile(r"[^\W\d_]{2}")
_IN_SVG = re.compile(r"(?<=>)[^<>]+(?=</text>)")

seen: set[str] = set()
"""The entries that the figures drawn so far need."""


@cache
def catalogue() -> Catalog:
    """The entries, by their English words."""
    with CATALOGUE.open("rb") as file:
        return pofile.read_po(file, locale="es")


def spanish(label: str) -> str:
    """A label's words in Spanish, or the label."""
    if not _WORDS.search(label):
        return label
    entry = _NUMBER.sub("{}", label)
    seen.add(entry)
    message = catalogue().get(entry)
    if message is None or not message.string:
        return label
    words = str(message.string).split("{}")
    numbers = [_COMMA.sub("\N{NARROW NO-BREAK SPACE}", number) for number in _NUMBER.findall(label)]
    if len(words) != len(numbers) + 1:
        raise ValueError(f"{CATALOGUE.name}: {entry!r} has {len(numbers)} numbers, and {message.string!r} does not")
    return words[0] + "".join(number + rest for number, rest in zip(numbers, words[1:], strict=True))


def translate(figure: Figure) -> bool:
    """Put Spanish words into a figure; whether any changed."""
    from matplotlib.axis import Axis  # which the pages of notebooks do not need
    from matplotlib.text import Text

    figure.draw_without_rendering()  # ticks have labels once they are laid out
    ticks = set()
    has_changed = False
    for axis in figure.findobj(Axis):
        assert isinstance(axis, Axis)
        shown = [label.get_text() for label in axis.get_ticklabels()]
        ticks |= set(axis.get_ticklabels(minor=False)) | set(axis.get_ticklabels(minor=True))
        if (translated := [spanish(label) for label in shown]) != shown:
            axis.set_ticks(axis.get_ticklocs(), translated)
            has_changed = True
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text not in ticks and (translated_text := spanish(text.get_text())) != text.get_text():
            text.set_text(translated_text)
            has_changed = True
    return has_changed


def in_svg(picture: str) -> str:
    """An SVG with Spanish words and numbers."""

    def translated(words: re.Match[str]) -> str:
        return escape(_COMMA.sub("\N{NARROW NO-BREAK SPACE}", spanish(unescape(words[0]))), quote=False)

    return _IN_SVG.sub(translated, picture)


def missing_in(picture: str) -> list[str]:
    """The entries that an SVG needs and the catalogue does not have."""
    labels = filter(_WORDS.search, map(unescape, _IN_SVG.findall(picture)))
    entries = dict.fromkeys(_NUMBER.sub("{}", label) for label in labels)
    return [entry for entry in entries if entry not in catalogue() or not catalogue()[entry].string]


def update() -> None:
    """Make the catalogue have the entries that all figures and plots, looked up just now, need."""
    old, new = catalogue(), Catalog(locale="es", fuzzy=False)
    for entry in sorted(seen):
        message = old.get(entry)
        new.add(entry, message.string if message else "")
    with CATALOGUE.open("wb") as file:
        pofile.write_po(file, new, omit_header=True, width=0, sort_output=True)
