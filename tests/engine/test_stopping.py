"""Text as it comes: word by word, byte by byte, and where a stop string ends it."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.engine.stopping import TextStream
from minicache.grammar import Tokenizer


class Letters:
    """A tokenizer of single letters; 0 is the end token."""

    end_token_id = 0

    def encode(self, text):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(chr(token_id) for token_id in ids if token_id)


class Bytes:
    """A tokenizer of UTF-8 bytes: a letter may take several tokens. 256 is the end token."""

    end_token_id = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")


class Pieces:
    """A tokenizer whose tokens are the pieces that a test has drawn."""

    end_token_id = -1

    def __init__(self, pieces):
        self.pieces = pieces

    def encode(self, text):
        raise NotImplementedError

    def decode(self, ids):
        return "".join(self.pieces[token_id] for token_id in ids)


def run(stream, token_ids):
    """Push tokens until the stream has stopped; what was shown, piece by piece."""
    shown = []
    for token_id in token_ids:
        shown.append(stream.push(token_id))
        if stream.is_stopped:
            break
    else:
        shown.append(stream.finish())
    assert stream.text == "".join(shown)
    return shown


# Tokens to text


PROMPT = "Did the children read the book yesterday?"


@pytest.mark.parametrize("prompt", [PROMPT, "Yesterday I", "I"])
def test_with_the_prompt_before_it_the_text_reads_as_decoded_at_once(prompt):
    tokenizer = Tokenizer()
    answer = [0, *tokenizer.encode("Yes, they did. She is coming."), 0, 0, *tokenizer.encode("The boy"), 0]
    prompt_ids = tokenizer.encode(prompt)
    shown = run(TextStream(tokenizer, prompt_ids), answer)
    assert prompt + "".join(shown) == tokenizer.decode(prompt_ids + answer)
    assert shown[:5] == ["", " Yes", ",", " they", " did"]


def test_a_prompt_of_end_tokens_only():
    tokenizer = Tokenizer()
    answer = tokenizer.encode("Yes, they did.")
    assert "".join(run(TextStream(tokenizer, [0] * 20), answer)) == "Yes, they did."


def test_end_tokens_after_the_prompts_words_do_not_hide_them():
    tokenizer = Tokenizer()
    prompt_ids = [*tokenizer.encode("They are"), *[0] * 20]
    assert "".join(run(TextStream(tokenizer, prompt_ids), tokenizer.encode("hungry."))) == " hungry."


@given(st.text("xé€😀", max_size=6), st.text("xé€😀", max_size=12))
def test_a_letter_is_shown_when_all_its_bytes_are_there(prompt, answer):
    tokenizer = Bytes()
    stream = TextStream(tokenizer, tokenizer.encode(prompt or "x"))
    for token_id in tokenizer.encode(answer):
        stream.push(token_id)
        assert answer.startswith(stream.text)
    stream.finish()
    assert stream.text == answer


class BytePieces:
    """A tokenizer whose tokens are pieces of a text's bytes: one may end a letter and begin the next."""

    end_token_id = -1

    def __init__(self, data, cuts):
        self.pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def encode(self, text):
        raise NotImplementedError

    def decode(self, ids):
        return b"".join(self.pieces[token_id] for token_id in ids).decode(errors="replace")


@given(st.text("xé€😀", min_size=12, max_size=40), st.data())
def test_tokens_that_straddle_letters_show_whole_letters(text, data):
    """As those of byte-level vocabularies do in Chinese, for more tokens in a row than are held back."""
    encoded = b"x" + text.encode()
    cuts = data.draw(st.sets(st.integers(2, len(encoded) - 1)))
    tokenizer = BytePieces(encoded, sorted({1, *cuts}))
    stream = TextStream(tokenizer, [0])
    for token_id in range(1, len(tokenizer.pieces)):
        stream.push(token_id)
        assert text.startswith(stream.text)
    stream.finish()
    assert stream.text == text


def test_a_long_run_of_tokens_that_straddle_letters_is_shown_as_it_comes():
    text = "€" * 40
    tokenizer = BytePieces(b"x" + text.encode(), [1, *range(3, 120, 3)])
    stream = TextStream(tokenizer, [0])
    for token_id in range(1, len(tokenizer.pieces) - 1):
        stream.push(token_id)
        assert text.startswith(stream.text)
    assert len(stream.text) > 20
    stream.push(len(tokenizer.pieces) - 1)
    assert stream.text == text


def test_bytes_that_never_become_a_letter_are_shown_at_the_end():
    stream = TextStream(Bytes(), [65])
    assert [stream.push(token) for token in (66, 0xE2, 0x82)] == ["B", "", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.text == "B\N{REPLACEMENT CHARACTER}"


class CountingBytes(Bytes):
    """Counts the tokens that it has decoded."""

    def __init__(self):
        self.num_decoded = 0

    def decode(self, ids):
        ids = list(ids)
        self.num_decoded += len(ids)
        return super().decode(ids)


@given(st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 256])))
def test_any_bytes_read_as_decoded_at_once(answer):
    stream = TextStream(Bytes(), [65])
    run(stream, answer)
    assert stream.text == Bytes().decode(answer)


@pytest.mark.parametrize(
    "tokens",
    [[0xFF], [0x80], [0xE2], [0xF0, 0x9F, 0x98], [0xC3, 300], [300]],
    ids=["FF", "80", "E2", "cut", "mix", "∅"],
)
@pytest.mark.parametrize("prompt", [[65], [300] * 3000], ids=["a letter", "nothing that shows"])
def test_bytes_that_never_become_a_letter_cost_the_same_each(tokens, prompt):
    """Tokens decoded for four times the tokens: four times as many. (300 shows as nothing.)"""
    counts = []
    for num_tokens in (1000, 4000):
        tokenizer = CountingBytes()
        stream = TextStream(tokenizer, prompt)
        tokenizer.num_decoded = 0
        run(stream, (tokens * num_tokens)[:num_tokens])
        counts.append(tokenizer.num_decoded)
    assert counts[1] < 4.1 * counts[0]


def test_most_of_the_bytes_that_never_become_a_letter_are_shown_as_they_come():
    stream = TextStream(Bytes(), [65])
    for _ in range(100):
        stream.push(0xFF)
    assert len(stream.text) > 80


# Stop strings


def test_a_stop_string_across_tokens_is_cut_off_and_never_shown():
    shown = run(TextStream(Letters(), [65], ["END"]), Letters().encode("so EEND and on"))
    assert shown == ["s", "o", " ", "", "E", "", "", ""][: len(shown)]
    assert "".join(shown) == "so E"


def test_what_was_no_stop_string_after_all_is_shown():
    stream = TextStream(Letters(), [65], ["END"])
    assert [stream.push(ord(letter)) for letter in "EN!E"] == ["", "", "EN!", ""]
    assert stream.finish() == "E"
    assert stream.finish() == ""


def test_nothing_comes_after_the_stop():
    stream = TextStream(Letters(), [65], ["b"])
    assert [stream.push(ord(letter)) for letter in "abcd"] == ["a", "", "", ""]
    assert stream.is_stopped
    assert stream.finish() == ""
    assert stream.text == "a"


def by_hand(text, stops):
    """Letter by letter: where the first stop string is complete, the text ends before the longest that is."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(
    pieces=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
)
def test_where_tokens_begin_and_end_does_not_matter(pieces, stops):
    text, is_stopped = by_hand("".join(pieces), stops)
    stream = TextStream(Pieces([*pieces, "^"]), [len(pieces)], stops)
    shown = run(stream, range(len(pieces)))
    assert ("".join(shown), stream.is_stopped) == (text, is_stopped)


@given(
    pieces=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=8),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), max_size=3),
)
def test_nothing_is_held_back_without_reason(pieces, stops):
    """What is held back is the beginning of a stop string, and of all such ends of the text the longest."""
    stream = TextStream(Pieces([*pieces, "^"]), [len(pieces)], stops)
    text = ""
    for token_id, piece in enumerate(pieces):
        text += piece
        stream.push(token_id)
        if stream.is_stopped:
            break
        suspect = [n for n in range(1, len(text) + 1) if any(stop.startswith(text[-n:]) for stop in stops)]
        assert stream.text == text[: len(text) - max(suspect, default=0)]


def test_what_nearly_is_one_of_many_stop_strings_costs_no_more_than_other_text():
    """Counted in calls: when a long beginning turns out to be none, all its ends are not compared with all strings."""
    stops = ["a" * (63 - length) + "b" * length + "." for length in range(16)]
    text = ("a" * 62 + "c") * 10
    num_calls = []
    for letters, strings in ((text, stops), (text, ["."])):
        stream = TextStream(Letters(), [97], strings)
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for letter in letters:
                stream.push(ord(letter))
        finally:
            sys.setprofile(None)
        num_calls.append(calls)
        assert stream.text + stream.finish() == letters
    near, plain = num_calls
    assert near < 1.5 * plain
