"""Phase 12, task 10: a regular expression as an automaton over bytes. What it does is tested, and not how."""

from __future__ import annotations

import random
import re
import tracemalloc
from itertools import product

import pytest

from minicache.errors import ConstraintError
from minicache.structured.regex import Automaton
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.seeds import fresh


def an_automaton(pattern):
    """An automaton, noted for a failure."""
    automaton = call(Automaton, pattern).value
    scenario.given(f"automaton = Automaton({pattern!r})")
    return automaton


def state_behind(automaton, text):
    """The state behind some bytes, which have to be readable."""
    __tracebackhide__ = True
    state = call(automaton.read, automaton.start, text).value
    that(f"whether {text!r} can stand at the beginning", state is not None).gives(True)
    return state


def next_bytes(automaton, text):
    """The bytes that may follow a beginning, as one bytes object in ascending order."""
    __tracebackhide__ = True
    following = call(automaton.next_states, state_behind(automaton, text)).value
    return bytes(sorted(following))


# One kind of part at a time

MATCHES = [
    ("a", "a", ["", "b", "aa"]),
    ("", "", ["a"]),
    ("abc", "abc", ["ab", "abcd", "acb"]),
    ("[a-c_]", "b", ["d", "`", "ab"]),
    ("[^a-c]", "d", ["b", ""]),
    ("ab|c", "ab", ["abc", "a", "ac"]),
    ("ab|c", "c", ["bc"]),
    ("(a|b)c", "bc", ["a", "abc", "bcc"]),
    ("a|", "", ["aa"]),
    ("ab?c", "ac", ["abbc", "a"]),
    ("a*", "", ["b", "aab"]),
    ("a*", "aaaa", ["aaba"]),
    ("a+", "aaa", ["", "ab"]),
    ("a{3}", "aaa", ["aa", "aaaa"]),
    ("a{2,}", "aaaaa", ["", "a"]),
    ("a{1,3}", "aa", ["", "aaaa"]),
    ("a{0}b", "b", ["ab"]),
    ("(a{0,2}b){2}", "abaab", ["ab", "aab", "bbb"]),
    ("(ab){2,3}", "ababab", ["ab", "abababab"]),
    ("(ab)*", "abab", ["aba", "ba"]),
    ("(a|ab)(c|bcd)", "abcd", ["abccd", "abb"]),
]


@pytest.mark.parametrize(("pattern", "text", "others"), MATCHES, ids=[f"{p} on {t!r}" for p, t, _ in MATCHES])
def test_the_whole_text_is_matched(pattern, text, others):
    """The text matches, the others do not: not their beginnings, and not what goes on behind."""
    automaton = an_automaton(pattern)
    call(automaton.matches, text).gives(True)
    for other in others:
        call(automaton.matches, other).gives(False)


def test_the_bytes_that_may_come_next():
    """(0|[1-9][0-9]?)} after each of its beginnings: exactly these bytes, and no others."""
    automaton = an_automaton(r"(0|[1-9][0-9]?)\}")
    expected = {b"": b"0123456789", b"0": b"}", b"7": b"0123456789}", b"42": b"}", b"42}": b""}
    for text, following in expected.items():
        that(f"the bytes that may follow {text!r}", next_bytes(automaton, text)).gives(following)
        accepts = call(automaton.is_accepting, state_behind(automaton, text)).value
        that(f"whether {text!r} is accepted", accepts).gives(text == b"42}")
    call(automaton.read, automaton.start, b"00").gives(None)
    call(automaton.read, automaton.start, b"\xff").gives(None)


# Letters are bytes


LETTERS = [
    ("é", [b"\xc3", b"\xa9"]),
    ("[é-ü]", [b"\xc3", bytes(range(0xA9, 0xBD))]),
    ("[à-ĿŸ]", [b"\xc3\xc4\xc5", None]),
    ("😀", [b"\xf0", b"\x9f", b"\x98", b"\x80"]),
    ("[aé😀]", [b"a\xc3\xf0", None]),
]


@pytest.mark.parametrize(("pattern", "expected"), LETTERS, ids=[pattern for pattern, _ in LETTERS])
def test_a_letter_is_read_byte_by_byte(pattern, expected):
    """Behind a part of a letter only its other bytes may come, and the text may not end."""
    automaton, text = an_automaton(pattern), pattern.strip("[]")[-1].encode()
    for at, following in enumerate(expected):
        if following is not None:
            that(f"the bytes that may follow {text[:at]!r}", next_bytes(automaton, text[:at])).gives(following)
            call(automaton.is_accepting, state_behind(automaton, text[:at])).gives(False)
    call(automaton.is_accepting, state_behind(automaton, text)).gives(True)


def test_first_bytes_that_letters_share():
    """é is C3 A9 and à is C3 A0. After C3 both are possible, and what follows depends on the second byte."""
    automaton = an_automaton("éa|àb")
    for text, following in ((b"\xc3", b"\xa0\xa9"), (b"\xc3\xa9", b"a"), (b"\xc3\xa0", b"b")):
        that(f"the bytes that may follow {text!r}", next_bytes(automaton, text)).gives(following)


def test_any_letter_is_whole():
    """Three letters of any kind: the bytes C3 C3, A9 alone, or half of a pair of UTF-16 are no letters."""
    automaton = an_automaton(".{3}")
    for text, is_match in (
        ("aé😀", True),
        ("aé", False),
        ("aé😀b", False),
        ("a\nb", False),
        ("\U0010ffff\ud7ffa", True),
    ):
        call(automaton.matches, text).gives(is_match)
    for text in (b"\xa9", b"\xc3\xc3", b"\xed\xa0", b"\xf4\x90", b"\xc0", b"\xe0\x80"):
        call(automaton.read, automaton.start, text).gives(None)


# Repetitions within repetitions, which lead back to where they began


@pytest.mark.parametrize("pattern", ["(a*)*", "(a*|b)*", "((a|)b?){0,3}", "(a?){3}b", "(a+b*)+", "(a*b*){2}c", "(|a)+"])
def test_repetitions_of_what_may_be_empty(pattern):
    """All texts of up to five letters."""
    automaton, expected = an_automaton(pattern), re.compile(pattern)
    for length in range(6):
        for letters in product("abc"[: 3 if length < 4 else 2], repeat=length):
            text = "".join(letters)
            call(automaton.matches, text).gives(bool(expected.fullmatch(text)))


def test_an_option_that_repeats_lets_no_other_in():
    """a*|b: after a, no b; and (a|b*)c: after b, no a. A repetition leads back to its own beginning only."""
    for pattern, text, following in (("a*|b", b"a", b"a"), ("a*|b", b"b", b""), ("(a|b*)c", b"b", b"bc")):
        that(f"the bytes that may follow {text!r}", next_bytes(an_automaton(pattern), text)).gives(following)


# Against Python's re


def expression(rng, depth):
    """Any expression, and a function that draws a text which it matches."""
    if depth == 0:
        atoms = {
            "a": "a",
            "b": "b",
            "é": "é",
            r"\.": ".",
            r"\d": "07",
            "[a-c]": "abc",
            "[^a]": "bé\n",
            r"\w": "a_",
            ".": "b😀",
        }
        pattern = rng.choice(sorted(atoms))
        return pattern, lambda rng: rng.choice(atoms[pattern])
    parts = [expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    patterns = [pattern for pattern, _ in parts]
    match rng.randrange(3):
        case 0:
            return f"({'|'.join(patterns)})", lambda rng: rng.choice(parts)[1](rng)
        case 1:
            return f"(?:{''.join(patterns)})", lambda rng: "".join(draw(rng) for _, draw in parts)
        case _:
            least, more = rng.randint(0, 2), rng.randint(0, 2)
            counts = {"*": (0, 3), "+": (1, 3), "?": (0, 1), f"{{{least}}}": (least, least)}
            counts |= {f"{{{least},}}": (least, least + 2), f"{{{least},{least + more}}}": (least, least + more)}
            count = rng.choice(sorted(counts))
            return f"({patterns[0]}){count}", lambda rng: "".join(
                parts[0][1](rng) for _ in range(rng.randint(*counts[count]))
            )


@pytest.mark.parametrize("seed", range(12))
def test_it_matches_what_python_matches(seed):
    """Five random expressions, each on texts that match it and on the same ones with a letter changed."""
    rng = random.Random(fresh(seed))
    for _ in range(5):
        pattern, draw = expression(rng, rng.randint(1, 3))
        automaton, expected = an_automaton(pattern), re.compile(pattern, re.ASCII)
        for _ in range(12):
            text = draw(rng)[:12]
            at = rng.randint(0, len(text))
            changed = text[:at] + rng.choice(["", "a", "b", "é", "7", "."]) + text[at + rng.randint(0, 1) :]
            for each in (text, changed):
                call(automaton.matches, each).gives(bool(expected.fullmatch(each)))


@pytest.mark.parametrize("seed", range(6))
def test_no_byte_leads_to_a_dead_end(seed):
    """Random walks of 12 bytes through random expressions: from wherever they end, some text leads to acceptance."""
    rng = random.Random(fresh(seed))
    for _ in range(4):
        pattern, _ = expression(rng, rng.randint(1, 3))
        automaton = an_automaton(pattern)
        for _ in range(3):
            state, text = automaton.start, b""
            for _ in range(12):
                following = automaton.next_states(state)
                if not following:
                    break
                byte = rng.choice(sorted(following))
                state, text = following[byte], text + bytes([byte])
            that(f"whether some text leads on from {text!r} to acceptance", can_be_completed(automaton, state)).gives(
                True
            )


def can_be_completed(automaton, state):
    """Whether an accepting state can be reached, at most 300 states being looked at."""
    seen, left = {state}, [state]
    while left and len(seen) < 300:
        state = left.pop(0)
        if automaton.is_accepting(state):
            return True
        new = set(automaton.next_states(state).values()) - seen
        seen |= new
        left += new
    return False


# What it costs


@pytest.mark.parametrize(
    ("pattern", "piece", "most"),
    [("(ab|cd)*", "abcdcd", 12), ("a{2,}", "a", 8), (r'"[^"]*', '"', 8), ("(a*b?)*é*", "aab", 12)],
)
def test_states_come_back(pattern, piece, most):
    """Texts of 2,000 letters: the states come back, however long the text is. Masks are kept by their state."""
    automaton = an_automaton(pattern)
    text = (piece if piece != '"' else '"' + "ab é" * 2000).encode() * 2000
    states, state = set(), automaton.start
    for byte in text[:2000]:
        state = automaton.read(state, bytes([byte]))
        states.add(state)
    that(f"whether 2,000 bytes lead to at most {most} states: {len(states)}", len(states) <= most).gives(True)


def test_states_are_made_when_they_are_reached():
    """(a|b)*a(a|b){n} has 2ⁿ⁺¹ states, and a text of ten letters meets eleven: n = 11 needs little more than n = 7."""
    small, large = (memory(f"(a|b)*a(a|b){{{count}}}", "abbabaabba") for count in (7, 11))
    times = f"{large / small:.1f} times the memory"
    that(f"n = 11 takes {times} of n = 7: whether that is below 4 times", large < 4 * small).gives(True)


def memory(pattern, text):
    """The most bytes that an automaton holds while it is made and reads a text."""
    tracemalloc.start()
    try:
        Automaton(pattern).matches(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_state_is_worked_out_once():
    """Any text in quotes, read twice: the second time costs little a byte, though 190 bytes may come next."""
    automaton = an_automaton(r'"[^"]*"')
    text = '"{}"'.format("ab é 😀 " * 30).encode()
    automaton.read(automaton.start, text)
    a_byte = effort(automaton.read, automaton.start, text) // len(text)
    that(f"whether a byte costs at most 100 instructions the second time: {a_byte}", a_byte <= 100).gives(True)


def test_automata_are_independent():
    """Two expressions, read in turns; what the first learnt stays right when there is a second."""
    one, other = an_automaton("(ab)*"), an_automaton("(ac|b)+")
    for _ in range(2):
        for automaton, following in ((one, b"b"), (other, b"c")):
            that(f"the bytes that may follow {b'a'!r}", next_bytes(automaton, b"a")).gives(following)
        call(one.matches, "abab").gives(True)
        call(other.matches, "").gives(False)


@pytest.mark.parametrize("pattern", ["(a", "a(?=b)", "(a{100}){100}"])
def test_what_parse_refuses_is_refused(pattern):
    """Its error comes through."""
    call(Automaton, pattern).raises(ConstraintError, saying="regex: ")
