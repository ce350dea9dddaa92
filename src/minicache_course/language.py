"""The reader's language: `--lang`, or LANGUAGE, LC_ALL, LC_MESSAGES or LANG; English where a text is missing.

What the command line prints is marked for gettext, `_("{count} left").format(count=…)`. What a test or the grader tells
is English, as reports for machines are, and `translated` when it is shown. A text with values in it is
`said("{got}, expected a tensor", got=…)`: its template is looked up, and each value that is a text is translated too.
"""

from __future__ import annotations

import gettext
import os

# Bound here, before a learner's file is loaded, which may replace them.
from builtins import isinstance, map, str  # noqa: UP029
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from minicache_course.errors import LanguageError

LOCALE = Path(__file__).parent / "locale"

_shown: dict[str, str] = {}
"""Text that this process has made of others → the same in the reader's language, where that differs."""


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
    in_use.cache_clear()
    prepare()


def prepare() -> None:
    """Have what the course's modules tell, those that are loaded from now on, be `said` where that is of use."""
    if in_use() != "en":
        from minicache_course.templates import install

        install()


@cache  # a test says thousands of texts; and a learner's file may replace what it takes to find out
def in_use() -> str:
    """The language that is spoken, such as "es"; "en" where none of those that are wanted is there."""
    found = gettext.find("course", LOCALE)
    return Path(found).parents[1].name if found else "en"


def bind() -> None:
    """Have `gettext.gettext` find the command line's own texts, and in the same catalogue those of its libraries."""
    gettext.bindtextdomain("minicache", str(LOCALE))
    gettext.textdomain("minicache")


def said(template: str, /, **values: object) -> str:
    """A text with values in it, in English: `said("{count} of {total} differ", count=3, total=8)`. Or a single word."""
    text = template.format(**values)
    if in_use() != "en":
        _note(text, translated(template).format(**{name: _part(value) for name, value in values.items()}))
    return text


def labelled(label: str, text: str) -> str:
    """A line of a failure, which begins with a word, in English: "called    f(2)"."""
    return said("{label:<10}{text}", label=said(label), text=text)


def joined(separator: str, texts: Iterable[str]) -> str:
    """Texts one after the other, in English."""
    return combined(lambda *each: separator.join(each), *texts)


def combined(make: Callable[..., str], *texts: str) -> str:
    """What `make` makes of texts, in English; in the reader's language, what it makes of them there."""
    text = make(*texts)
    if in_use() != "en":
        _note(text, make(*map(_part, texts)))
    return text


def _note(text: str, shown: str) -> None:
    if shown != text:
        _shown[text] = shown


def _part(value: Any) -> Any:
    """A part of a text, translated. A single word may be a name, and is none of ours unless it was `said`."""
    return translated(value) if isinstance(value, str) and (value in _shown or not value.isidentifier()) else value


def translated(text: str) -> str:
    """A text in the reader's language: one that this process has made, or that the catalogue has; else as it is."""
    language = in_use()
    if language == "en" or not text:
        return text
    shown = _shown.get(text) or _catalogue(language).gettext(text)
    return shown.replace("docs/en/", f"docs/{language}/")  # a page has the same name in each language


def translations(*texts: str) -> dict[str, str]:
    """What another process has to `remember` to show texts that this one has made."""
    return {text: _shown[text] for text in texts if text in _shown}


def remember(translations: Mapping[str, str]) -> None:
    """Take over the `translations` of another process."""
    _shown.update(translations)


@cache
def _catalogue(language: str) -> gettext.NullTranslations:
    return gettext.translation("course", LOCALE, [language])
