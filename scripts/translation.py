"""The Spanish pages: which are missing, which are out of date, and what they take from the English ones.

A page of `docs/es` has the path of its source in `docs/en`, and in its front matter `english:`, a hash of the source
that it was made from. Its headings get the ids of the source's, in order, so a section has one address in both
languages. The source of a `notebook.md` is the notebook of that phase, as `notebook_pages.py` says.

    python -m scripts.translation                     list what is missing or out of date
    python -m scripts.translation --accept PAGE …     note that these pages say what their sources say now
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from markdown import Markdown
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, SPANISH, NOTEBOOKS = ROOT / "docs" / "en", ROOT / "docs" / "es", ROOT / "notebooks"

MOST_BEHIND = 0.05
"""The share of the pages whose Spanish may be missing or out of date."""

_FRONT_MATTER = re.compile(r"\A---\n(.*?)^---\n", re.MULTILINE | re.DOTALL)
_HASH = re.compile(r"^english: *(\S+)\n", re.MULTILINE)
_HEADING = re.compile(r"^(#{1,6}) +(.*?)(?: *\{([^}]*)\})? *$")
_INCLUDED = re.compile(r'^--8<-- "([^":]+)', re.MULTILINE)
_FENCE = re.compile(r"^\s*(```+|~~~+)")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+\.md)(#[^)\s]*)?\)")
_DOCSTRINGS = re.compile(r"^::: .*\n?(?:(?: +.*)?\n)*", re.MULTILINE)
_TAG = re.compile(r"(</?(?:code|pre|script|style)\b[^>]*>)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)")
_BANNER = """
!!! warning "Esta página no está al día"
    Su original en inglés ha cambiado desde que se tradujo. [Léelo en inglés]({page}).

"""


class TranslationError(Exception):
    """A Spanish page does not fit its English source."""


def source(page: str) -> Path:
    """The file from which a Spanish page is made.

    Args:
        page: its path below docs/es, which is also that below docs/en.

    Raises:
        TranslationError: there is no such file.
    """
    file = ENGLISH / page
    if page.endswith("/notebook.md"):
        file = NOTEBOOKS / f"{page.removesuffix('/notebook.md')}.py"
    if not file.is_file():
        raise TranslationError(f"docs/es/{page} has no source: there is no {file}")
    return file


def source_hash(page: str) -> str:
    """Twelve digits that change with the source of a Spanish page, and with the files that it includes."""
    text = source(page).read_text(encoding="utf-8")
    included = (ROOT / name for name in _INCLUDED.findall(text))
    whole = "".join([text, *(file.read_text(encoding="utf-8") for file in included)])
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def translated() -> set[str]:
    """The pages that exist in Spanish."""
    return {path.relative_to(SPANISH).as_posix() for path in SPANISH.rglob("*.md")}


def missing() -> list[str]:
    """The pages that exist in English only."""
    english = {path.relative_to(ENGLISH).as_posix() for path in ENGLISH.rglob("*.md")}
    return sorted((english | {f"{path.stem}/notebook.md" for path in NOTEBOOKS.glob("*.py")}) - translated())


def stale() -> list[str]:
    """The Spanish pages whose source has changed."""
    return sorted(page for page in translated() if is_stale(page, (SPANISH / page).read_text(encoding="utf-8")))


def is_stale(page: str, content: str) -> bool:
    """Whether a Spanish page was made from another state of its source."""
    now, front = source_hash(page), _FRONT_MATTER.match(content)
    made_from = _HASH.search(front[1]) if front else None
    return made_from is None or made_from[1] != now


def accept(page: str) -> None:
    """Note that a Spanish page says what its source says now."""
    path = SPANISH / page
    if not path.is_file():
        raise TranslationError(f"there is no docs/es/{page}")
    content, line = path.read_text(encoding="utf-8"), f"english: {source_hash(page)}\n"
    front = _FRONT_MATTER.match(content)
    kept, body = (_HASH.sub("", front[1]), content[front.end() :]) if front else ("", f"\n{content}")
    path.write_text(f"---\n{kept}{line}---\n{body}", encoding="utf-8")


def prepare(page: str, content: str, english: str, markdown: Markdown, *, is_stale: bool) -> str:
    """The source of a Spanish page as it is built.

    Args:
        page: its path below docs/es.
        content: its Markdown.
        english: that of the English page.
        markdown: of the site's extensions: it finds the ids of the English headings.
        is_stale: whether the page gets a banner.

    Returns:
        The content with ids at its headings, and links to the English site where a page is not translated.

    Raises:
        TranslationError: it has other headings than its source, or links to a page that is in neither language.
    """
    front = _FRONT_MATTER.match(content)
    head, body = (front[0], content[front.end() :]) if front else ("", content)
    body = _with_links(page, body)
    body = _with_ids(page, body, _ids(_written(english), markdown))
    if is_stale:
        title, _, rest = body.lstrip().partition("\n")
        body = f"{title}\n{_BANNER.format(page=english_url(page, page))}{rest}"
    return head + body


def with_spanish_numbers(html: str) -> str:
    """A page's HTML with spaces in its large numbers: 12,288 is 12 288, as a comma would be read as a decimal one.

    Decimals keep their point, as in code and figures. Code stays as it is.
    """
    parts, code = _TAG.split(html), 0
    for place, part in enumerate(parts):
        if place % 2:
            code += 0 if part[-2:] == "/>" else -1 if part[1] == "/" else 1
        elif not code:
            parts[place] = _THOUSANDS.sub(_with_spaces, part)
    return "".join(parts)


def _with_spaces(number: re.Match[str]) -> str:
    in_formula = "{,}" in number[0]
    return number[0].replace("{,}", r"\,") if in_formula else number[0].replace(",", "\N{NARROW NO-BREAK SPACE}")


def english_url(page: str, here: str) -> str:
    """From a Spanish page to a page of the English site, once built.

    Args:
        page: the path below docs/en of the one that is linked to.
        here: the path below docs/es of the one that links.
    """
    return get_relative_url(_url(page), f"es/{_url(here)}")


def _url(page: str) -> str:
    return page.removesuffix(".md").removesuffix("index") + ("" if page.endswith("index.md") else "/")


def _with_links(page: str, body: str) -> str:
    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))
        if (SPANISH / target).is_file():
            return match[0]
        if not (ENGLISH / target).is_file() and not target.endswith("/notebook.md"):
            raise TranslationError(f"docs/es/{page} links to {match[2]}, which is in neither language")
        return f'<a href="{english_url(target, page)}{match[3] or ""}" hreflang="en">{match[1]}</a>'

    return _LINK.sub(link, body)


def _with_ids(page: str, body: str, ids: list[str]) -> str:
    lines, places = body.split("\n"), list(_headings(body))
    if len(places) != len(ids):
        raise TranslationError(f"docs/es/{page} has {len(places)} headings, and its source {len(ids)}")
    for place, name in zip(places, ids, strict=True):
        level, text, attributes = _HEADING.match(lines[place]).groups()  # type: ignore[union-attr]
        others = [each for each in (attributes or "").split() if not each.startswith("#")]
        lines[place] = f"{level} {text} {{ {' '.join([f'#{name}', *others])} }}"
    return "\n".join(lines)


def _headings(body: str) -> Iterator[int]:
    """The lines that are headings: not those in code."""
    fence = ""
    for place, line in enumerate(body.split("\n")):
        if match := _FENCE.match(line):
            fence = "" if fence and match[1].startswith(fence) else fence or match[1]
        elif not fence and _HEADING.match(line):
            yield place


def _written(english: str) -> str:
    """A page without its front matter, and without the docstrings that it includes: their headings are not its own."""
    return _DOCSTRINGS.sub("", _FRONT_MATTER.sub("", english))


def _ids(source: str, markdown: Markdown) -> list[str]:
    markdown.reset()
    markdown.convert(source)
    return list(_flat(markdown.toc_tokens))


def _flat(tokens: Iterable[Any]) -> Iterator[str]:
    for token in tokens:
        yield str(token["id"])
        yield from _flat(token["children"])


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    if arguments[:1] == ["--accept"]:
        for name in arguments[1:]:
            accept(name.removeprefix("docs/es/"))
        return 0
    for heading, names in (("missing", missing()), ("out of date", stale())):
        print(f"{len(names)} {heading}")
        for name in names:
            print(f"  {name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TranslationError as error:
        sys.exit(f"scripts.translation: {error}")
