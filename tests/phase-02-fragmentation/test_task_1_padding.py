"""Phase 2, task 1: what it costs to make a ragged batch rectangular."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.memory.reservation import padded_rows, padding_share
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

TIMES = one_of(1, range(2, 10))  # under a secret seed, sequences are so many times as long


def test_three_users_pad_to_the_longest():
    """Lengths 200, 1500 and 60: three times 1500 rows, 4500 in all, and 2740 of them hold no token."""
    lengths = [200 * TIMES, 1500 * TIMES, 60 * TIMES]
    call(padded_rows, lengths).gives(4500 * TIMES)
    call(padding_share, lengths).is_close(2740 / 4500)


def test_equal_lengths_need_no_padding():
    """Four sequences of 7 tokens take 28 rows, and none is padding."""
    call(padded_rows, [7 * TIMES] * 4).gives(28 * TIMES)
    call(padding_share, [7 * TIMES] * 4).gives(0.0)


def test_a_batch_of_one_needs_no_padding():
    """One sequence is already a rectangle."""
    call(padded_rows, [60 * TIMES]).gives(60 * TIMES)
    call(padding_share, [60 * TIMES]).gives(0.0)


def test_one_long_sequence_is_paid_for_by_all():
    """31 sequences of 1 token and one of 1000: 32,000 rows, 1,031 tokens, 97 % padding."""
    lengths = [TIMES] * 31 + [1000 * TIMES]
    call(padded_rows, lengths).gives(32_000 * TIMES)
    call(padding_share, lengths).is_close(30_969 / 32_000)


@repeatable
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_any_batch_agrees_with_a_rectangle_that_is_drawn(lengths):
    """For many batches, rows and share are those counted in a rectangle of dots."""
    drawn = ["x" * length + "." * (max(lengths) - length) for length in lengths]
    rows, padding = sum(map(len, drawn)), "".join(drawn).count(".")
    call(padded_rows, lengths).gives(rows)
    call(padding_share, lengths).is_close(padding / rows)


@pytest.mark.parametrize("fn", [padded_rows, padding_share])
def test_the_lengths_stay_as_they_are(fn):
    """The argument is not changed."""
    lengths = [5, 2, 9]
    call(fn, lengths)
    that(f"the lengths after {fn.__name__}", lengths).gives([5, 2, 9])


@pytest.mark.parametrize("lengths", [[], [0], [5, 0, 3], [-1, 4]], ids=str)
@pytest.mark.parametrize("fn", [padded_rows, padding_share])
def test_no_sequence_or_an_empty_one_is_refused(fn, lengths):
    """An empty list, or a length below 1, raises ValueError."""
    call(fn, lengths).raises(ValueError)


@pytest.mark.parametrize("lengths", [[2.0], [5, "3"], [True, 2], [None]], ids=str)
@pytest.mark.parametrize("fn", [padded_rows, padding_share])
def test_lengths_that_are_no_int_are_refused(fn, lengths):
    """A length that is not an int raises TypeError: 2.0, "3", None, and True."""
    call(fn, lengths).raises(TypeError)
