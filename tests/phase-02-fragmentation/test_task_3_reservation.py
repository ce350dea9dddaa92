"""Phase 2, task 3: what a policy reserves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.memory.reservation import reservation
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

repeatable = settings(max_examples=100, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

MORE = one_of(0, range(1, 100))  # under a secret seed, prompts have so many tokens more


def test_the_three_policies_of_the_paper():
    """An output of 25 tokens: Pow2 reserves 32 for it, Oracle 25, Max the whole limit, each with the prompt of 100."""
    call(reservation, "pow2", 100 + MORE, 25, 2048).gives(132 + MORE)
    call(reservation, "oracle", 100 + MORE, 25, 2048).gives(125 + MORE)
    call(reservation, "max", 100 + MORE, 25, 2048).gives(2048)


@pytest.mark.parametrize(
    ("output", "reserved"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (31, 32), (32, 32), (33, 64), (1024, 1024)]
)
def test_pow2_is_exact_for_a_power_of_two(output, reserved):
    """The smallest power of two that is no less than the output: 32 for 32, and 64 for 33."""
    call(reservation, "pow2", 7 + MORE, output, 2048).gives(7 + MORE + reserved)


def test_pow2_leaves_the_prompt_as_it_is():
    """Only the output is rounded: its length alone is unknown."""
    call(reservation, "pow2", 33 + MORE, 33, 2048).gives(33 + MORE + 64)


def test_pow2_stops_at_the_models_limit():
    """A prompt of 500 and an output of 1025 would reserve 2,548; the model's limit is 2,048."""
    call(reservation, "pow2", 500, 1025, 2048).gives(2048)
    call(reservation, "pow2", 1024, 1024, 2048).gives(2048)
    call(reservation, "pow2", 1023, 1025, 2048).gives(2048)


def test_max_looks_at_nothing():
    """Max reserves the limit for the shortest request and for the longest."""
    for prompt, output in ((1, 1), (1000, 20), (2047, 1)):
        call(reservation, "max", prompt, output, 2048).gives(2048)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_a_request_may_fill_the_limit(policy):
    """Prompt and output that are max_model_len together are accepted, and get exactly that."""
    call(reservation, policy, 99, 1, 100).gives(100)


@repeatable
@given(prompt=st.integers(1, 300), output=st.integers(1, 300), spare=st.integers(0, 400))
def test_many_requests(prompt, output, spare):
    """Oracle ≤ Pow2 ≤ Max for every request, and Pow2 is the first power of two found by doubling."""
    limit = prompt + output + spare
    power = 1
    while power < output:
        power += power
    call(reservation, "oracle", prompt, output, limit).gives(prompt + output)
    call(reservation, "pow2", prompt, output, limit).gives(min(prompt + power, limit))
    call(reservation, "max", prompt, output, limit).gives(limit)
    sizes = [reservation(policy, prompt, output, limit) for policy in ("oracle", "pow2", "max")]
    that("Oracle, Pow2, Max in the order of their sizes", sizes).gives(sorted(sizes))


@pytest.mark.parametrize("policy", ["Max", "orca", "paged", "", "pow"], ids=repr)
def test_unknown_policies_are_refused(policy):
    """A policy that is none of the three raises ValueError, and the message repeats its name."""
    call(reservation, policy, 100, 25, 2048).raises(ValueError, saying=policy)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize(("prompt", "output", "limit"), [(2048, 1, 2048), (1000, 1049, 2048), (2, 2, 3), (9, 1, 1)])
def test_a_request_beyond_the_limit_is_refused(policy, prompt, output, limit):
    """Prompt and output together beyond max_model_len raise ValueError, under every policy."""
    call(reservation, policy, prompt, output, limit).raises(ValueError)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize(("prompt", "output", "limit"), [(0, 5, 10), (5, 0, 10), (-1, 5, 10), (5, -1, 10), (1, 1, 0)])
def test_counts_below_one_are_refused(policy, prompt, output, limit):
    """No prompt, no output or no limit: ValueError."""
    call(reservation, policy, prompt, output, limit).raises(ValueError)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("wrong", [2.0, "2", None, True], ids=repr)
def test_counts_that_are_no_int_are_refused(policy, wrong):
    """Any count that is not an int raises TypeError."""
    call(reservation, policy, wrong, 2, 8).raises(TypeError)
    call(reservation, policy, 2, wrong, 8).raises(TypeError)
    call(reservation, policy, 2, 2, wrong).raises(TypeError)
