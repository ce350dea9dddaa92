"""Phase 9, task 4: what followed the last few tokens before follows them again."""

from __future__ import annotations

import random

import pytest

from minicache.course.checks import call, that
from minicache.engine.speculative import NgramDrafter


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "num_tokens", "guess"),
    [
        ([1, 2, 3, 1, 2], 3, 4, [3, 1, 2]),  # "1 2" stood at the beginning
        ([1, 2, 3, 1, 2], 3, 2, [3, 1]),
        ([1, 2, 3, 1, 2], 3, 1, [3]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3, 4, [4, 5, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3, 9, [4, 5, 6, 7, 1, 2, 3]),
    ],
)
def test_what_followed(tokens, max_ngram, num_tokens, guess):
    """The ending stood in one place before: as many tokens as are asked for, or as there are behind that place."""
    call(NgramDrafter(max_ngram).draft, tokens, num_tokens).gives(guess)


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "guess"),
    [
        ([5, 2, 8, 1, 2, 9, 3, 2, 4, 1, 2], 3, [9, 3]),  # "1 2" decides, though "2" stood later, before 4
        ([5, 2, 8, 1, 2, 9, 3, 2, 4, 1, 2], 1, [4, 1]),  # "2" alone: the latest place
        ([6, 1, 2, 7, 7, 1, 2, 8, 6, 1, 2], 3, [7, 7]),  # "6 1 2" decides, though "1 2" stood later
        ([6, 1, 2, 7, 7, 1, 2, 8, 6, 1, 2], 2, [8, 6]),
        ([6, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 4, [8, 5]),
    ],
)
def test_the_longest_ending_first(tokens, max_ngram, guess):
    """Endings of max_ngram tokens are looked for first, then shorter ones. A longer one is worth more than a later."""
    call(NgramDrafter(max_ngram).draft, tokens, 2).gives(guess)


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [([2, 8, 2, 9, 2], [9, 2]), ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]), ([1, 2, 0, 9, 1, 2, 5, 8, 1, 2], [5, 8, 1, 2])],
)
def test_the_latest_of_several_places(tokens, guess):
    """The ending stood in two places: what followed it last is likelier to follow again."""
    call(NgramDrafter().draft, tokens, 4).gives(guess)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_few_tokens_behind_the_place_are_few_guesses(num_tokens):
    """The latest place of "1 2" has two tokens behind it. That an earlier one has more does not count."""
    call(NgramDrafter(2).draft, [1, 2, 9, 9, 9, 9, 1, 2, 1, 2], num_tokens).gives([1, 2][:num_tokens])


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [([4, 4], [4]), ([4, 4, 4], [4]), ([4] * 9, [4]), ([1, 4, 1, 4, 1], [4, 1]), ([7, 1, 4, 1, 4, 1, 4], [1, 4])],
)
def test_a_place_may_overlap_the_ending(tokens, guess):
    """Of 4 4 4 the ending 4 4 stood one place before; but the ending itself is no earlier place."""
    call(NgramDrafter().draft, tokens, 5).gives(guess)


@pytest.mark.parametrize("tokens", [[1, 2, 3], [7], [], list(range(50))])
def test_no_idea(tokens):
    """The last token stands nowhere else: no guess. And none for a text of one token, or of none."""
    call(NgramDrafter().draft, tokens, 4).gives([])


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 4, 5, 50])
def test_a_short_text(max_ngram):
    """Two tokens have no earlier place for an ending of two. A text may be shorter than max_ngram."""
    call(NgramDrafter(max_ngram).draft, [3, 3], 4).gives([3])
    call(NgramDrafter(max_ngram).draft, [3, 5, 3], 4).gives([5, 3])
    call(NgramDrafter(max_ngram).draft, [3, 5], 4).gives([])


def test_the_first_token_counts():
    """The place may be the very beginning of the text, for an ending of every length."""
    for length in (1, 2, 3):
        start = list(range(length))
        call(NgramDrafter().draft, [*start, 9, *start], 1).gives([9])


def test_nothing_is_asked_for():
    """No more than 0 tokens."""
    call(NgramDrafter().draft, [1, 2, 3, 1, 2], 0).gives([])


def test_the_text_stays_as_it_is():
    """A tuple is a text too, and a list that is looked at has not changed; what comes back is a list of its own."""
    tokens = [1, 2, 3, 1, 2]
    call(NgramDrafter().draft, tuple(tokens), 4).gives([3, 1, 2])
    guess = call(NgramDrafter().draft, tokens, 4).value
    guess.append(5)
    that("the text", tokens).gives([1, 2, 3, 1, 2])


def test_asked_again():
    """The same drafter for several texts: it remembers none of them."""
    drafter = NgramDrafter()
    call(drafter.draft, [1, 2, 3, 1, 2], 1).gives([3])
    call(drafter.draft, [1, 2, 4, 1, 2], 1).gives([4])
    call(drafter.draft, [1, 2], 1).gives([])


def by_the_rule(tokens, max_ngram, num_tokens):
    """All places, for all lengths, and the best of them: longest, then latest."""
    places = [
        (length, start)
        for length in range(1, max_ngram + 1)
        for start in range(len(tokens) - length)
        if all(tokens[start + i] == tokens[len(tokens) - length + i] for i in range(length))
    ]
    if not places:
        return []
    length, start = max(places)
    return tokens[start + length :][:num_tokens]


@pytest.mark.parametrize("num_words", [1, 2, 4, 9])
def test_random_texts(num_words):
    """Texts of a few words, in all lengths: the rule, written in another way."""
    rng = random.Random(num_words)
    for _ in range(100):
        tokens = [rng.randrange(num_words) for _ in range(rng.randint(0, 30))]
        max_ngram, num_tokens = rng.randint(1, 5), rng.randint(0, 6)
        call(NgramDrafter(max_ngram).draft, tokens, num_tokens).gives(by_the_rule(tokens, max_ngram, num_tokens))


def test_a_long_text():
    """20,000 tokens are looked through in time in proportion to them: a fraction of a second."""
    tokens = [number % 9973 for number in range(20_000)]
    call(NgramDrafter().draft, tokens, 3).gives([54, 55, 56])
