"""Find words that the course does not use, and pages that are too long: `python -m scripts.prose [PATH …]`.

The words are in `prose.toml`, each with what to write instead. Read are Markdown without code and targets of links,
comments and strings of Python, and the other files whole.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = Path(__file__).with_suffix(".toml")
_READ = ("*.md", "*.py", "*.toml", "*.html", "*.js", "*.yaml", "*.yml")
_NOT_READ = (
    "docs/es/*",
    "mkdocs.es.yml",
    "labs/phase-*",
    "scripts/prose.*",
    "tests/house/test_prose.py",
    "docs/shared/*",
    "tests/site/axe/*",
)
_MARKDOWN_CODE = re.compile(
    r"^(?P<fence>[ \t]*(?:```+|~~~+))[^\n]*\n.*?^(?P=fence)[ \t]*$|``.+?``|`[^`]+`|\]\([^)]*\)|https?://\S+",
    re.MULTILINE | re.DOTALL,
)
_FOLD = re.compile(r"^\?\?\?\+? .*\n(?:[ \t]+.*\n|[ \t]*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A phrase in a file, or a page that is too long."""

    path: str
    line: int
    found: str
    write: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: {self.write}"


@dataclass(frozen=True)
class Word:
    """One entry of the list."""

    find: re.Pattern[str]
    write: str
    but: tuple[re.Pattern[str], ...]
    not_in: tuple[str, ...]

    def findings(self, path: str, text: str) -> Iterator[Finding]:
        """Where `text` has it."""
        if any(fnmatch(path, pattern) for pattern in self.not_in):
            return
        for match in self.find.finditer(text):
            right = (each for phrase in self.but for each in phrase.finditer(text))
            if not any(each.start() < match.end() and match.start() < each.end() for each in right):
                start = match.start() + len(match[0]) - len(match[0].lstrip(" \n.;:*"))
                found = " ".join(match[0].split())
                yield Finding(path, text.count("\n", 0, start) + 1, found[:60], f"write {self.write}")


class Vocabulary:
    """The list, and the length of a page."""

    def __init__(self) -> None:
        table = tomllib.loads(WORDS.read_text(encoding="utf-8"))
        self._words = [
            Word(
                _pattern(entry["find"]),
                entry["write"],
                tuple(_pattern(re.escape(each).replace("\\ ", " ")) for each in entry.get("but", ())),
                tuple(entry.get("not_in", ())),
            )
            for entry in table["word"]
        ]
        self._num_words: int = table["pages"]
        self._long_pages: list[str] = table["long_pages"]

    def findings(self, path: str, content: str) -> list[Finding]:
        """What is wrong with a file.

        Args:
            path: relative to the root of the repository; decides how `content` is read.
            content: of the file.
        """
        text = prose(path, content)
        found = [each for word in self._words for each in word.findings(path, text)]
        if path.startswith("docs/en/") and path.endswith(".md") and path not in self._long_pages:
            count = num_words(content)
            if count > self._num_words:
                more = f"at most {self._num_words:,}: fold what only proves a claim, or make two pages of it"
                found.append(Finding(path, 1, f"{count:,} words", more))
        return sorted(found, key=lambda each: each.line)


def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(expression.replace(" ", r"\s+"), re.IGNORECASE)


def prose(path: str, content: str) -> str:
    """The text of a file: everything else is blank, so lines keep their numbers."""
    if path.endswith(".py"):
        return _blank(_MARKDOWN_CODE, _python(content))
    return _blank(_MARKDOWN_CODE, content)


def num_words(content: str) -> int:
    """The words of a page, without folded boxes."""
    return len(_blank(_FOLD, content).split())


def _blank(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def _python(content: str) -> str:
    """Comments and strings."""
    lines = [[" "] * len(line) for line in content.split("\n")]
    source = content.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type not in (tokenize.COMMENT, tokenize.STRING):
            continue
        (first, start), (last, end) = token.start, token.end
        for row in range(first, last + 1):
            left, right = (start if row == first else 0), (end if row == last else len(source[row - 1]))
            lines[row - 1][left:right] = source[row - 1][left:right]
    text = "\n".join("".join(line) for line in lines)
    return re.sub(r"^([ \t]*)#", r"\1 ", text, flags=re.MULTILINE)


def files(paths: list[str]) -> list[str]:
    """The files of the repository that have text, or those of them that are, or lie below, one of `paths`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if any(fnmatch(name, pattern) for pattern in _READ)]
    return [
        name for name in names if not any(fnmatch(name, pattern) for pattern in _NOT_READ) and (ROOT / name).is_file()
    ]


def main() -> None:
    """Print what was found; status 1 if anything was."""
    vocabulary = Vocabulary()
    names = files(sys.argv[1:])
    found = [each for name in names for each in vocabulary.findings(name, (ROOT / name).read_text(encoding="utf-8"))]
    for each in found:
        print(each)
    print(f"{len(names)} files, {len(found)} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
