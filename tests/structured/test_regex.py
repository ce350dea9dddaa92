"""The automaton of an expression: it matches what Python's `re` matches, and refuses by name what it does not know."""

from __future__ import annotations

import random
import re

import pytest

from minicache.errors import ConstraintError
from minicache.structured.expressions import LAST_LETTER, complement, utf8_sequences
from minicache.structured.regex import Automaton

EXPRESSIONS = (
    "",
    "a",
    "(a|b)*a(a|b){3}",
    "(a?b)*",
    "(a*|b)*c",
    "(?:ab?|c){2,4}",
    "a{0}b{2,}",
    "((a|)b?){0,3}",
    r"[^a]\d?\.\w*",
    r"[a\-b\]^]+",
    "[é-ü]+|😀.",
    r"\S\s\D\W",
    r"-?(0|[1-9]\d{0,2})(\.\d+)?",
)
LETTERS = "abc0.-]^é\n😀 _"


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_it_matches_what_python_matches(pattern: str) -> None:
    rng, automaton = random.Random(0), Automaton(pattern)
    expected = re.compile(pattern, re.ASCII)
    texts = ["".join(rng.choices(LETTERS, k=rng.randrange(7))) for _ in range(1500)]
    texts += [text + more for text in texts if automaton.matches(text) for more in ("", "a", "b")]
    for text in texts:
        assert automaton.matches(text) == bool(expected.fullmatch(text)), text


@pytest.mark.parametrize(
    ("first", "last"), [(0, LAST_LETTER), (0xE0, 0x13F), (0x7F, 0x80), (0x700, 0xE123), (0xFFFF, 0x10801), (0x61, 0x61)]
)
def test_every_letter_is_in_one_sequence_of_bytes(first: int, last: int) -> None:
    sequences = utf8_sequences(first, last)
    assert sequences == sorted(sequences, key=lambda each: (len(each), each))
    num_letters = 0
    for sequence in sequences:
        number = 1
        for low, high in sequence:
            number *= high - low + 1
        num_letters += number
        for ends in (min, max):
            code = ord(bytes(ends(each) for each in sequence).decode())
            assert first <= code <= last
    num_halves = max(0, min(last, 0xDFFF) - max(first, 0xD800) + 1)
    assert num_letters == last - first + 1 - num_halves


def test_a_letter_may_be_read_byte_by_byte() -> None:
    automaton = Automaton("é+")
    state = automaton.read(automaton.start, b"\xc3")
    assert state is not None
    assert not automaton.is_accepting(state)
    assert automaton.next_states(state).keys() == {0xA9}
    assert automaton.read(automaton.start, b"\xc2") is None


def test_complement() -> None:
    assert complement([(0x62, LAST_LETTER), (0, 0x60)]) == ((0x61, 0x61),)
    assert complement([]) == ((0, 0xD7FF), (0xE000, LAST_LETTER))


def test_states_are_made_when_they_are_reached() -> None:
    """Determinised at once, this one has a million states."""
    automaton = Automaton("(a|b)*a(a|b){20}")
    assert automaton.matches("abab" * 10 + "a" + "b" * 20)
    assert len({automaton.read(automaton.start, b"ab"[i : i + 1]) for i in (0, 1)}) == 2


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a(?=b)", "(?= …) is not supported"),
        ("(?P<x>a)", "(?P …)"),
        (r"(a)\1", r"\1 is not supported"),
        (r"\bword", r"\b is not supported"),
        (r"\p{L}", r"\p is not supported"),
        ("^a", "^ is not supported: the whole text is matched"),
        ("a$", "$ is not supported"),
        ("a*?", "'?' after a repetition"),
        ("a**", "'*' after a repetition"),
        ("*a", "'*' with nothing before it"),
        ("(a", "a ( without its )"),
        ("a)", "a ) without its ("),
        ("[a", "a [ without its ]"),
        ("[z-a]", "a range in a class that is none"),
        ("[]", "a class without letters"),
        (r"[^\d\D]", "a class without letters"),
        ("a{x}", "a { without the number"),
        ("a{2", "a { that is no repetition"),
        ("a{3,2}", "{3,2} repeats"),
        ("(a{200}){200}", "more than 5,000 parts"),
        ("a\\", "\\ is not supported"),
        ("\ud800", "half of a pair"),
    ],
)
def test_what_is_not_known_is_named(pattern: str, says: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(says)):
        Automaton(pattern)
