r"""What a regular expression says: read from its text, its letters as sequences of bytes.

No phase builds this module; phase 12's automaton is built from it. An expression is about letters, and a token is
bytes: it may end inside a letter (é is C3 A9, and a vocabulary has tokens for either byte). So the letters of a class
become sequences of bytes, as UTF-8 writes them.

The syntax is a part of Rust's and Python's. Letters stand for themselves; `.` is any letter but the line break;
`[a-z_]`, `[^a-z]` are classes; `\d`, `\w`, `\s` are ASCII digits, word letters and white space, `\D`, `\W`, `\S` all
other letters; `\n`, `\t`, `\r`, `\f`, `\v`, and a backslash before a mark for the mark itself; `(…)` and `(?:…)` are
groups; `a|b`, `a*`, `a+`, `a?`, `a{2}`, `a{2,}`, `a{2,5}`. The whole text is matched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from minicache.errors import ConstraintError

Range = tuple[int, int]
"""From a first to a last one, both included: of code points, or of bytes."""

MAX_PARTS: Final = 5_000
"""An expression with more parts, its repetitions written out, is refused."""

LAST_LETTER: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)


# What an expression says


@dataclass(frozen=True)
class Letter:
    """One letter of a class.

    Attributes:
        ranges: its code points: at least one range, in ascending order, and none touches the next.
    """

    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Sequenced:
    """One part after the other. Without parts: the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeated:
    """The same part several times: `least` to `most` times, without a `most` any number from `least` on."""

    part: Node
    least: int
    most: int | None


Node = Letter | Sequenced | Either | Repeated


def normalized(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same code points as sorted ranges that neither overlap nor touch.

    Args:
        ranges: in any order.
    """
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def complement(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """All other code points, the halves of UTF-16's pairs left out: they are no letters.

    Args:
        ranges: in any order.
    """
    found, begin = [], 0
    for first, last in normalized([*ranges, SURROGATES]):
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    if begin <= LAST_LETTER:
        found.append((begin, LAST_LETTER))
    return tuple(found)


_CLASSES: Final[dict[str, tuple[Range, ...]]] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
    "s": ((9, 13), (32, 32)),
}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}
_DOT: Final = complement([(10, 10)])
_MARKS: Final = frozenset("*+?{}()[]|.^$\\")


def parse(pattern: str) -> Node:
    r"""What an expression says.

        parse(r"\d{1,3}")  →  Repeated(Letter(((48, 57),)), 1, 3)
        parse("ab|c")      →  Either((Sequenced((Letter(((97, 97),)), Letter(((98, 98),)))), Letter(((99, 99),))))

    Args:
        pattern: as above.

    Raises:
        ConstraintError: it has something else; the message names that, and where it is. Or it has more than MAX_PARTS.
    """
    parser = _Parser(pattern)
    node = parser.either()
    if not parser.is_at_end:
        raise parser.error("a ) without its (")
    if _num_parts(node) > MAX_PARTS:
        raise ConstraintError(f"regex: written out it has more than {MAX_PARTS:,} parts: repeat less")
    return node


def _num_parts(node: Node) -> int:
    """How many parts a part has, its repetitions written out."""
    match node:
        case Letter():
            return 1
        case Sequenced(parts) | Either(parts):
            return 1 + sum(map(_num_parts, parts))
        case Repeated(part, least, most):
            return 1 + _num_parts(part) * (least + 1 if most is None else most)


class _Parser:
    """Reads an expression from left to right, a method for each level of binding."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._pattern)

    def error(self, what: str) -> ConstraintError:
        return ConstraintError(f"regex: {what}, at position {self._at}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        """Whether this comes next; then it is read."""
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def either(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequenced(tuple(parts))

    def _repeated(self) -> Node:
        part = self._atom()
        for mark, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(mark):
                part = Repeated(part, least, most)
                break
        else:
            if not self._take("{"):
                return part
            part = self._counted(part)
        if self._peek() in ("?", "+", "*", "{"):
            raise self.error(f"{self._peek()!r} after a repetition: put the repetition into a group")
        return part

    def _counted(self, part: Node) -> Node:
        least = self._number()
        most: int | None = least
        if self._take(","):
            most = None if self._peek() == "}" else self._number()
        if not self._take("}"):
            raise self.error("a { that is no repetition such as {2,5}: write \\{")
        if most is not None and most < least:
            raise self.error(f"{{{least},{most}}} repeats at least {least} times and at most {most}")
        return Repeated(part, least, most)

    def _number(self) -> int:
        begin = self._at
        while self._peek() in [*"0123456789"]:
            self._at += 1
        if not 0 < self._at - begin <= 9:
            raise self.error("a { without the number of repetitions: write \\{")
        return int(self._pattern[begin : self._at])

    def _atom(self) -> Node:
        if self._take("("):
            if self._peek() == "?" and not self._take("?:"):
                raise self.error(
                    f"(?{self._pattern[self._at + 1 : self._at + 2]} …) is not supported: only (…) and (?:…)"
                )
            node = self.either()
            if not self._take(")"):
                raise self.error("a ( without its )")
            return node
        if self._take("["):
            return Letter(self._class())
        if self._take("."):
            return Letter(_DOT)
        letter = self._peek()
        if letter in ("^", "$"):
            raise self.error(f"{letter} is not supported: the whole text is matched")
        if letter in _MARKS and letter != "\\":
            raise self.error(f"{letter!r} with nothing before it, or without its partner: write \\{letter}")
        return Letter(self._letters())

    def _letters(self) -> tuple[Range, ...]:
        """A letter, or what a backslash makes of it."""
        if not self._take("\\"):
            code = ord(self._peek())
            self._at += 1
            if SURROGATES[0] <= code <= SURROGATES[1]:
                raise self.error("half of a pair of UTF-16 is no letter")
            return ((code, code),)
        letter = self._peek()
        if letter.lower() in _CLASSES and letter:
            self._at += 1
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else complement(ranges)
        if not letter or (letter.isalnum() and letter not in _CONTROLS):
            raise self.error(f"\\{letter} is not supported")
        self._at += 1
        code = ord(_CONTROLS.get(letter, letter))
        return ((code, code),)

    def _class(self) -> tuple[Range, ...]:
        """The letters of a class, behind its [."""
        is_negated, ranges = self._take("^"), []
        while not self._take("]"):
            if self._peek() in ("", "["):
                raise self.error("a [ without its ], or in a class: write \\[")
            first = self._letters()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._letters()
                if len(first) > 1 or len(last) > 1 or last[0][0] < first[0][0]:
                    raise self.error("a range in a class that is none")
                ranges.append((first[0][0], last[0][0]))
            else:
                ranges += first
        found = complement(ranges) if is_negated else normalized(ranges)
        if not found or (is_negated and not ranges):
            raise self.error("a class without letters")
        return found


# Letters as bytes


def utf8_sequences(first: int, last: int) -> list[tuple[Range, ...]]:
    """The letters of a range of code points as sequences of byte ranges.

    Every combination of bytes of a sequence is one letter, and every letter is in exactly one sequence. 0 … 0x10FFFF:
    one byte, two, three (around the surrogates, which are left out) or four.

        utf8_sequences(0x61, 0x7A)  →  [((0x61, 0x7A),)]
        utf8_sequences(0xE0, 0x13F) →  [((0xC3, 0xC3), (0xA0, 0xBF)), ((0xC4, 0xC4), (0x80, 0xBF))]

    Args:
        first: the first code point.
        last: the last one.

    Returns:
        Sequences of one to four (first byte, last byte), in ascending order.
    """
    for end in (0x7F, 0x7FF, SURROGATES[0] - 1, 0xFFFF):  # where letters get longer, and before the surrogates
        if first <= end < last:
            return [*utf8_sequences(first, end), *utf8_sequences(end + 1, last)]
    if SURROGATES[0] <= first <= SURROGATES[1]:
        return [] if last <= SURROGATES[1] else utf8_sequences(SURROGATES[1] + 1, last)
    for num_bits in (6, 12, 18):  # of the bytes at the end: split where these do not run through all their values
        low = (1 << num_bits) - 1
        if last > 0x7F and first | low != last | low:
            if first & low:
                return [*utf8_sequences(first, first | low), *utf8_sequences((first | low) + 1, last)]
            if last & low != low:
                return [*utf8_sequences(first, (last & ~low) - 1), *utf8_sequences(last & ~low, last)]
    return [tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))]
