"""The reader's language: `--lang`, or LANGUAGE, LC_ALL, LC_MESSAGES or LANG; English where a text is missing.

What the command line prints is marked for gettext, `_("{count} left").format(count=…)`. What a test or the grader tells
is English when it is written, as reports for machines are, and `translated` when it is shown: its catalogue holds
templates, "{got}, expected a tensor", and what stands for a `{name}` is translated in turn.
"""

from __future__ import annotations

import gettext
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any

from minicache_course.errors import LanguageError

LOCALE = Path(__file__).parent / "locale"

_SURE = 6  # letters of a template that make it certain that a text was made from it
_LEARNERS = re.compile(r"(\w*(?:Error|Exception|Warning|Exit|Interrupt|Iteration))(: |  \(|$)")
"""How a line about an error that code has raised begins: its words belong to that code."""
_CODE = ("at", "from")
"""Labels of places in files, with code in the line below."""
_MARKS = re.compile(r"; |: | \(")
"""Between texts that stand together in a line."""

LABEL_WIDTH = 10
"""Columns of the word that a line of a failure may begin with: "called    f(2)"."""

_MAX_LENGTH = 500  # of a line: a longer one is data


def languages() -> list[str]:
    """The languages that there are. English has catalogues too, empty ones: LANGUAGE may name it before another."""
    return sorted(folder.name for folder in LOCALE.iterdir() if folder.is_dir())


def use(language: str) -> None:
    """Have this process, and those that it starts, speak a language.

    Raises:
        LanguageError: it is none of `languages`.
    """
    if language not in languages():
        raise LanguageError(f"no language {language!r}: there are {', '.join(languages())}")
    os.environ["LANGUAGE"] = language


def in_use() -> str:
    """The language that is spoken, such as "es"; "en" where none of those that are wanted is there."""
    found = gettext.find("course", LOCALE)
    return Path(found).parents[1].name if found else "en"


def bind() -> None:
    """Have `gettext.gettext` find the command line's own texts, and in the same catalogue those of its libraries."""
    gettext.bindtextdomain("minicache", str(LOCALE))
    gettext.textdomain("minicache")


def translated(text: str) -> str:
    """What a test or the grader tells, in the reader's language, line by line; what is not known stays as it is."""
    language = in_use()
    if language == "en":
        return text
    catalogue = gettext.translation("course", LOCALE, [language], class_=_Course)  # which reads it once
    # A page has the same name in each language.
    return "\n".join(catalogue.lines(text.split("\n"))).replace("docs/en/", f"docs/{language}/")


class _Course(gettext.GNUTranslations):
    """The catalogue of templates."""

    def _parse(self, fp: Any) -> None:  # documented for subclasses, as `_catalog` is not
        super()._parse(fp)
        known: dict[str, str] = {each: text for each, text in self._catalog.items() if each}  # type: ignore[attr-defined]
        # A hint may have braces of its own, {"float16": 2}: a whole text is looked up first.
        self._texts = known | {each.format(): text.format() for each, text in known.items() if places(each) == []}
        # What reads the same, such as a call, needs no template.
        templates = [_Template(each, text) for each, text in known.items() if places(each) and each != text]
        templates.sort(key=lambda template: template.length, reverse=True)
        self._certain = [each for each in templates if each.is_certain]
        self._templates = [each for each in templates if not each.is_certain]

    def lines(self, lines: list[str]) -> Iterator[str]:
        """Lines, of which some begin with a label; those below a place in a file are code."""
        label = ""
        for line in lines:
            begin, rest = line[:LABEL_WIDTH], line[LABEL_WIDTH:]
            if begin.endswith("  ") and begin.strip() in self._texts:
                label = begin.strip()
                yield f"{self._texts[label]:<{LABEL_WIDTH}}{self.text(rest)}"
            elif label in _CODE and not begin.strip():
                yield line
            else:
                yield self.text(line)

    def text(self, text: str) -> str:
        """A text, or the parts of one that is put together from several."""
        inside = text.strip()
        if inside != text:
            return text.replace(inside, self.text(inside), 1) if inside else text
        if text in self._texts:
            return self._texts[text]
        if not 1 < len(text) <= _MAX_LENGTH or _LEARNERS.match(text):
            return text
        if text.endswith(".") and text[:-1] in self._texts:  # the end of a sentence with a title in it
            return f"{self._texts[text[:-1]]}."
        title, _, case = text.partition(" [")
        if case.endswith("]") and " " in title and title in self._texts:  # a test, and which of its cases
            return f"{self._texts[title]} [{self._case(case[:-1])}]"
        if filled := self._filled(self._certain, text):
            return filled
        for found in _MARKS.finditer(text):
            first, rest = text[: found.start()], text[found.end() :]
            if first in self._texts or rest.removesuffix(")") in self._texts:
                return self._joined(first, found[0], rest)
        name, _, rest = text.partition(" ")
        if " " in rest and rest in self._texts:  # "num_free after free([1])"
            return f"{name} {self._texts[rest]}"
        if filled := self._filled(self._templates, text):
            return filled
        for mark in ("; ", ": ", " ("):
            if mark in text:
                first, _, rest = text.partition(mark)
                return self._joined(first, mark, rest)
        return text

    def _filled(self, templates: list[_Template], text: str) -> str:
        """The translation of the first template that `text`, and no more than one text, was made from; or ""."""
        for template in templates:
            if (values := template.values(text)) is not None and "; " not in "".join(values.values()):
                return template.filled({name: self.text(value) for name, value in values.items()})
        return ""

    def _joined(self, first: str, mark: str, rest: str) -> str:
        end = ")" if mark == " (" and rest.endswith(")") else ""
        return f"{self.text(first)}{mark}{self.text(rest.removesuffix(end))}{end}"

    def _case(self, case: str) -> str:
        """A case's id, which pytest joins from those of its parameters."""
        found = self.text(case)
        return found if found != case else "-".join(map(self.text, case.split("-")))


class _Template:
    """A message with places, and its translation."""

    def __init__(self, message: str, translation: str) -> None:
        self._parts = [(literal, name) for literal, name, *_ in Formatter().parse(message)]
        self._translation = translation
        self.length = sum(len(literal) for literal, _ in self._parts)
        self._is_sure = self.length >= _SURE
        self.is_certain = self._is_sure and self._parts[0][0] != ""

    def values(self, text: str) -> dict[str, str] | None:
        """What stands in the places of a text that was made from this template; None if it was not."""
        end = 0
        for literal, _ in self._parts:
            if (begin := text.find(literal, end)) < 0:
                return None
            end = begin + len(literal)
        found = self._pattern.fullmatch(text)
        return found.groupdict() if found else None

    def filled(self, values: dict[str, str]) -> str:
        """The translation with these values."""
        return self._translation.format_map(values)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        place = ".*?" if self._is_sure else r"\S*?"  # "a {name}" would fit too much else
        pattern, names = "", set()
        for literal, name in self._parts:
            pattern += re.escape(literal)
            if name is not None:
                pattern += f"(?P={name})" if name in names else f"(?P<{name}>{place})"
                names.add(name)
        return re.compile(pattern)


def places(message: str) -> list[str] | None:
    """The names of a template's places; None if it is none, and its braces mean something else."""
    try:
        names = [name for _, name, *_ in Formatter().parse(message) if name is not None]
    except ValueError:
        return None
    return names if all(map(str.isidentifier, names)) else None
