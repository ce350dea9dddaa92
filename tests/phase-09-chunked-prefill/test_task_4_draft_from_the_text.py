"""Phase 9, task 4: draft tokens from the text, those that followed its last few tokens before."""

from __future__ import annotations

import random

import pytest

from minicache.engine.speculative import NgramDrafter
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.follow import following
from minicache_course.seeds import fresh


@pytest.fixture(autouse=True)
def _followed():
    with following(NgramDrafter, "__init__"):
        yield


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "num_tokens", "drafts"),
    [
        ([1, 2, 3, 1, 2], 3, 4, [3, 1, 2]),  # "1 2" occurs at the beginning
        ([1, 2, 3, 1, 2], 3, 2, [3, 1]),
        ([1, 2, 3, 1, 2], 3, 1, [3]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3, 4, [4, 5, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], 3, 9, [4, 5, 6, 7, 1, 2, 3]),
    ],
    ids=str,
)
def test_what_followed_the_ending_is_proposed(tokens, max_ngram, num_tokens, drafts):
    """The ending occurs once before: as many tokens as requested, or as follow that occurrence."""
    call(NgramDrafter(max_ngram).draft, tokens, num_tokens).gives(drafts)


def test_an_occurrence_at_the_very_beginning_counts():
    """The occurrence may be at the very beginning of the text, for an ending of every length."""
    for length in (1, 2, 3):
        start = list(range(length))
        call(NgramDrafter().draft, [*start, 9, *start], 1).gives([9])


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [([2, 8, 2, 9, 2], [9, 2]), ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]), ([1, 2, 0, 9, 1, 2, 5, 8, 1, 2], [5, 8, 1, 2])],
    ids=str,
)
def test_the_latest_of_several_occurrences_counts(tokens, drafts):
    """The ending occurs twice: the tokens after its latest occurrence are likelier to follow again."""
    call(NgramDrafter().draft, tokens, 4).gives(drafts)


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "drafts"),
    [
        ([5, 2, 8, 1, 2, 9, 3, 2, 4, 1, 2], 3, [9, 3]),  # "1 2" decides, though "2" occurs later, before 4
        ([5, 2, 8, 1, 2, 9, 3, 2, 4, 1, 2], 1, [4, 1]),  # "2" alone: the latest occurrence
        ([6, 1, 2, 7, 7, 1, 2, 8, 6, 1, 2], 3, [7, 7]),  # "6 1 2" decides, though "1 2" occurs later
        ([6, 1, 2, 7, 7, 1, 2, 8, 6, 1, 2], 2, [8, 6]),
        ([6, 1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 4, [8, 5]),
    ],
    ids=str,
)
def test_the_longest_ending_comes_first(tokens, max_ngram, drafts):
    """Endings of max_ngram tokens are searched for first, then shorter ones. Longer is preferred to later."""
    call(NgramDrafter(max_ngram).draft, tokens, 2).gives(drafts)


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_few_tokens_behind_it_are_few_draft_tokens(num_tokens):
    """The latest occurrence of "1 2" has two tokens after it. An earlier one with more does not count."""
    call(NgramDrafter(2).draft, [1, 2, 9, 9, 9, 9, 1, 2, 1, 2], num_tokens).gives([1, 2][:num_tokens])


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [([4, 4], [4]), ([4, 4, 4], [4]), ([4] * 9, [4]), ([1, 4, 1, 4, 1], [4, 1]), ([7, 1, 4, 1, 4, 1, 4], [1, 4])],
    ids=str,
)
def test_an_occurrence_may_overlap_the_ending(tokens, drafts):
    """In 4 4 4 the ending 4 4 occurs one token earlier; the ending itself is no earlier occurrence."""
    call(NgramDrafter().draft, tokens, 5).gives(drafts)


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], [7], [], list(range(50))], ids=["1 2 3", "one token", "none", "50 tokens"]
)
def test_nothing_is_proposed_if_the_last_token_is_new(tokens):
    """The last token occurs nowhere else: nothing is proposed. The same for a text of one token, or of none."""
    call(NgramDrafter().draft, tokens, 4).gives([])


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 4, 5, 50])
def test_a_text_may_be_shorter_than_max_ngram(max_ngram):
    """Two tokens have no earlier occurrence of an ending of two. A text may be shorter than max_ngram."""
    call(NgramDrafter(max_ngram).draft, [3, 3], 4).gives([3])
    call(NgramDrafter(max_ngram).draft, [3, 5, 3], 4).gives([5, 3])
    call(NgramDrafter(max_ngram).draft, [3, 5], 4).gives([])


def test_no_more_is_proposed_than_asked_for():
    """At most 0 tokens: none."""
    call(NgramDrafter().draft, [1, 2, 3, 1, 2], 0).gives([])


def test_the_text_stays_as_it_is():
    """A tuple is accepted, and a searched list is not changed; the returned list is a new one."""
    tokens = [1, 2, 3, 1, 2]
    call(NgramDrafter().draft, tuple(tokens), 4).gives([3, 1, 2])
    drafts = call(NgramDrafter().draft, tokens, 4).value
    drafts.append(5)
    that("the text", tokens).gives([1, 2, 3, 1, 2])


def test_a_drafter_remembers_no_text():
    """The same drafter for several texts: it keeps no state."""
    drafter = NgramDrafter()
    call(drafter.draft, [7, 7], 1).gives([7])
    call(drafter.draft, [5, 2, 8, 1, 2, 9, 3, 2, 4, 1, 2], 2).gives([9, 3])
    that("max_ngram after a text of two tokens", drafter.max_ngram).gives(3)
    call(drafter.draft, [1, 2, 3, 1, 2], 1).gives([3])
    call(drafter.draft, [1, 2, 4, 1, 2], 1).gives([4])
    told = "draft([1, 2], 1) of a drafter that was given [1, 2, 4, 1, 2] and other texts before"
    that(told, drafter.draft([1, 2], 1)).gives([])


def by_the_rule(tokens, max_ngram, num_tokens):
    """All occurrences of all lengths, and the best of them: longest, then latest."""
    occurrences = [
        (length, start)
        for length in range(1, max_ngram + 1)
        for start in range(len(tokens) - length)
        if all(tokens[start + i] == tokens[len(tokens) - length + i] for i in range(length))
    ]
    if not occurrences:
        return []
    length, start = max(occurrences)
    return tokens[start + length :][:num_tokens]


@pytest.mark.parametrize("num_words", [1, 2, 4, 9])
def test_random_texts_by_the_rule(num_words):
    """Texts of a few different tokens, of all lengths, against the rule written in another way."""
    rng = random.Random(fresh(num_words))
    for _ in range(100):
        tokens = [rng.randrange(num_words) for _ in range(rng.randint(0, 30))]
        max_ngram, num_tokens = rng.randint(1, 5), rng.randint(0, 6)
        call(NgramDrafter(max_ngram).draft, tokens, num_tokens).gives(by_the_rule(tokens, max_ngram, num_tokens))


def test_all_of_a_long_text_is_searched():
    """All of 20,000 tokens is searched: the ending occurs at its beginning."""
    tokens = [*range(19_997), 0, 1, 2]
    call(NgramDrafter().draft, tokens, 3).gives([3, 4, 5])


@pytest.mark.parametrize("tokens", [[1, 23, 9, 12, 3], [23, 9, 3], [11, 9, 1], [1, 2, 9, 12]], ids=str)
def test_tokens_are_numbers_not_digits(tokens):
    """1 23 and 12 3 are written with the same digits, and are different tokens: nothing occurs twice here."""
    call(NgramDrafter().draft, tokens, 4).gives([])


def test_tokens_of_a_large_vocabulary():
    """Token ids beyond one byte, and beyond two: 65,543 is not 7. The returned tokens are ints."""
    call(NgramDrafter().draft, [65_543, 1, 7], 4).gives([])
    call(NgramDrafter().draft, [263, 1, 7], 4).gives([])
    drafts = call(NgramDrafter().draft, [200_000, 9, 200_000], 4).value
    that("the draft tokens, and their types", (drafts, [type(each) for each in drafts])).gives(
        ([9, 200_000], [int, int])
    )


class Token(int):
    """A token whose comparisons are counted by `effort`."""

    def __eq__(self, other):
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_work_in_proportion_to_the_text():
    """Nothing occurs twice. Eight times as many tokens take eight times the work; in quadratic time up to 64 times."""
    short, long = (effort(NgramDrafter().draft, [Token(each) for each in range(size)], 4) for size in (150, 1_200))
    times = f"{long / short:.0f} times the work"
    that(f"1,200 tokens take {times} of 150 tokens: whether that is below 12 times", long < 12 * short).gives(True)
