# Phase 12, production-defaults: your file. It stands in for minicache.structured.regex.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
r"""A regular expression as an automaton over bytes.

Phase 12 builds it. An expression is about letters, and a token is bytes: it may end inside a letter (é is C3 A9, and a
vocabulary has tokens for either byte). So the letters of a class become sequences of bytes, as UTF-8 writes them, and
the automaton reads bytes. It is determinised while it is used: a state is made when it is first reached.

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

MAX_STATES: Final = 20_000
"""An expression with more states, before they are determinised, is refused."""

LAST_LETTER: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)


# What an expression says


@dataclass(frozen=True)
class Letter:
    """One letter of a class: sorted ranges of code points that do not touch, at least one."""

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
    """What an expression says.

    Args:
        pattern: as above.

    Raises:
        ConstraintError: it has something else; the message names that, and where it is.
    """
    parser = _Parser(pattern)
    node = parser.either()
    if not parser.is_at_end:
        raise parser.error("a ) without its (")
    return node


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
    raise NotImplementedError(
        "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
    )


# The automaton


class ByteNFA:
    """An automaton that may be in several states at once (Thompson, CACM 1968). `add` fills it.

    Attributes:
        edges: state → its edges: a range of bytes, and the state behind it.
        free: state → the states that it is also in without reading anything.
    """

    def __init__(self) -> None:
        self.edges: list[list[tuple[Range, int]]] = []
        self.free: list[list[int]] = []

    def new_state(self) -> int:
        """A state without edges.

        Raises:
            ConstraintError: there are MAX_STATES already.
        """
        if len(self.edges) == MAX_STATES:
            raise ConstraintError(f"regex: it needs more than {MAX_STATES:,} states: repeat less")
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def add(self, node: Node, start: int) -> int:
        """Add what a part of an expression reads from a state on; returns the state behind it.

        A letter is a path for each of its byte sequences, from `start` to one common state. Options are added from
        `start`, and each is free to go on to a common state. A repetition is `least` copies one after the other; then,
        if there is a `most`, as many optional copies as are left, each free to be left out with all behind it; without
        a `most`, one more copy from a new state, free to begin again and free to be left out.

        Raises:
            ConstraintError: as `new_state`.
        """
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def closure(self, states: frozenset[int] | set[int]) -> frozenset[int]:
        """All states that these are also in without reading anything, these included."""
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )


class Automaton:
    """A deterministic automaton over bytes, whose states are made when they are first reached.

    A state is a number; behind it are the states of a `ByteNFA` that could be reached. Every part of an expression can
    be completed, so from every state some text leads to acceptance.

    Args:
        pattern: the expression.

    Attributes:
        start: the state before the first byte.

    Raises:
        ConstraintError: as `parse`; or it needs more than MAX_STATES states.
    """

    def __init__(self, pattern: str) -> None:
        self._nfa = ByteNFA()
        first = self._nfa.new_state()
        self._accepting = self._nfa.add(parse(pattern), first)
        self._sets: list[frozenset[int]] = []
        self._numbers: dict[frozenset[int], int] = {}
        self._next: list[dict[int, int] | None] = []  # state → byte → state, once it was asked for
        self.start = self._number(self._nfa.closure({first}))

    def next_states(self, state: int) -> dict[int, int]:
        """Byte → the state behind it, for every byte that may come next. The same dict every time: do not change it."""
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def read(self, state: int, text: bytes) -> int | None:
        """The state after some bytes; None if they cannot stand here.

        Args:
            state: before them.
            text: the bytes; they need not be whole letters.
        """
        raise NotImplementedError(
            "phase 12, task 10: From an expression to an automaton; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
        )

    def is_accepting(self, state: int) -> bool:
        """Whether the text that led here matches the expression."""
        return self._accepting in self._sets[state]

    def matches(self, text: str) -> bool:
        """Whether the whole text matches the expression."""
        state = self.read(self.start, text.encode())
        return state is not None and self.is_accepting(state)

    def _number(self, states: frozenset[int]) -> int:
        if states not in self._numbers:
            self._numbers[states] = len(self._sets)
            self._sets.append(states)
            self._next.append(None)
        return self._numbers[states]
