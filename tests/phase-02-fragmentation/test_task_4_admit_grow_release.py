"""Phase 2, task 4: admit a request, let it grow, release it."""

from __future__ import annotations

import pytest

from minicache.errors import CacheOverflowError, OutOfSlotsError
from minicache.memory.reservation import ContiguousReservation, Reservation
from minicache_course.checks import call, that

POLICIES = ["max", "pow2", "oracle"]


def state(memory):
    """The public state of a memory."""
    return memory.reservations(), memory.allocator.allocations(), memory.allocator.free_runs()


def test_a_new_memory_is_empty():
    """A new memory is empty, all slots are free, and its attributes are set."""
    memory = call(ContiguousReservation, 22, "pow2", 16).value
    that("num_slots, policy, max_model_len", (memory.num_slots, memory.policy, memory.max_model_len)).gives(
        (22, "pow2", 16)
    )
    call(memory.reservations).gives([])
    that("allocator.free_runs()", memory.allocator.free_runs()).gives([(0, 16), (16, 4), (20, 2)])


@pytest.mark.parametrize(
    ("policy", "reserved", "taken"), [("max", 20, 32), ("pow2", 3 + 8, 16), ("oracle", 3 + 5, 8)], ids=POLICIES
)
def test_each_policy_reserves_and_takes_its_own_number_of_slots(policy, reserved, taken):
    """Prompt 3, output 5, limit 20: Max reserves 20 and takes 32, Pow2 11 and 16, Oracle 8 and 8."""
    memory = ContiguousReservation(64, policy, 20)
    call(memory.admit, "a", 3, 5).gives(0)
    held = Reservation("a", 0, num_slots=taken, num_reserved=reserved, num_tokens=3, num_expected=8)
    call(memory.reservations).gives([held])
    that("allocator.allocations()", memory.allocator.allocations()).gives([(0, taken)])


def test_requests_lie_one_behind_the_other():
    """Three requests of 5, 9 and 2 tokens under Oracle: runs of 8, 16 and 2, at 0, 16 and 8."""
    memory = ContiguousReservation(32, "oracle", 32)
    for name, prompt, output, start in (("a", 4, 1, 0), ("b", 1, 8, 16), ("c", 1, 1, 8)):
        call(memory.admit, name, prompt, output).gives(start)
    that("requests by start", [held.request_id for held in memory.reservations()]).gives(["a", "c", "b"])


def test_a_request_grows_in_its_place():
    """Tokens come one at a time or several at once. Nothing moves and no slot is allocated."""
    memory = ContiguousReservation(32, "pow2", 32)
    memory.admit("a", 3, 6)
    before = state(memory)[1:]
    for count, num_tokens in ((1, 4), (3, 7), (1, 8)):
        call(memory.grow, "a", count).gives(None)
        that("num_tokens", memory.reservations()[0].num_tokens).gives(num_tokens)
    call(memory.grow, "a").gives(None)
    that("num_tokens after grow without a count", memory.reservations()[0].num_tokens).gives(9)
    that("allocations and free runs", state(memory)[1:]).gives(before)


def test_each_request_grows_alone():
    """Growing one request does not grow another."""
    memory = ContiguousReservation(64, "max", 16)
    for name in ("a", "b", 3):
        memory.admit(name, 2, 5)
    call(memory.grow, "b", 4).gives(None)
    call(memory.grow, 3).gives(None)
    tokens = {held.request_id: held.num_tokens for held in memory.reservations()}
    that("tokens of each", [tokens["a"], tokens["b"], tokens[3]]).gives([2, 6, 3])


def test_a_look_at_the_memory_stays_as_it_was():
    """What reservations() returned does not change when a request grows, and changing the list changes nothing."""
    memory = ContiguousReservation(16, "max", 16)
    memory.admit("a", 2, 5)
    seen = memory.reservations()
    memory.grow("a", 3)
    that("num_tokens seen before grow", seen[0].num_tokens).gives(2)
    memory.reservations().clear()
    that("requests", len(memory.reservations())).gives(1)


@pytest.mark.parametrize(("policy", "room"), [("max", 17), ("pow2", 8), ("oracle", 5)], ids=POLICIES)
def test_growing_ends_with_the_reservation(policy, room):
    """Prompt 3, output 5, limit 20: 17, 8 and 5 tokens can come. One more: CacheOverflowError, nothing has changed."""
    memory = ContiguousReservation(64, policy, 20)
    memory.admit("a", 3, 5)
    call(memory.grow, "a", room + 1).raises(CacheOverflowError)
    for _ in range(room):
        call(memory.grow, "a").gives(None)
    before = state(memory)
    call(memory.grow, "a").raises(CacheOverflowError)
    that("the memory after the refusal", state(memory)).gives(before)


def test_the_rounding_of_the_allocator_is_not_for_tokens():
    """Oracle, 9 tokens in a run of 16: the tenth does not fit, although the slot is there."""
    memory = ContiguousReservation(16, "oracle", 16)
    memory.admit("a", 8, 1)
    call(memory.grow, "a").gives(None)
    call(memory.grow, "a").raises(CacheOverflowError)


def test_release_gives_everything_back():
    """A released request frees its run, grown or not, and the holes merge."""
    memory = ContiguousReservation(32, "max", 8)
    for name in "abcd":
        memory.admit(name, 1, 7)
    memory.grow("b", 3)
    call(memory.release, "b").gives(None)
    that("free runs", memory.allocator.free_runs()).gives([(8, 8)])
    call(memory.release, "a").gives(None)
    that("free runs", memory.allocator.free_runs()).gives([(0, 16)])
    that("the remaining requests", [held.request_id for held in memory.reservations()]).gives(["c", "d"])


def test_a_name_can_come_back():
    """After its release a request's id can be admitted again, and starts from its new prompt."""
    memory = ContiguousReservation(16, "max", 16)
    memory.admit("a", 2, 5)
    memory.grow("a", 4)
    memory.release("a")
    call(memory.admit, "a", 3, 1).gives(0)
    that("num_tokens", memory.reservations()[0].num_tokens).gives(3)


def test_holes_are_too_small_for_the_next():
    """Oracle, 16 slots as four runs of 4. Two that are not buddies are released: 8 slots are free, and 5 do not fit."""
    memory = ContiguousReservation(16, "oracle", 16)
    for name in "abcd":
        memory.admit(name, 3, 1)
    memory.release("b")
    memory.release("c")
    before = state(memory)
    call(memory.admit, "e", 4, 1).raises(OutOfSlotsError)
    that("the memory after the refusal", state(memory)).gives(before)
    call(memory.admit, "e", 3, 1).gives(4)


def test_a_full_memory_refuses_and_keeps_the_name_free():
    """15,728 slots, limit 2,048: seven requests under Max. The eighth is refused, and admitted after a release."""
    memory = ContiguousReservation(15_728, "max", 2048)
    for name in range(7):
        call(memory.admit, name, 161, 338)
    call(memory.admit, 7, 161, 338).raises(OutOfSlotsError)
    call(memory.grow, 7).raises(ValueError)
    memory.release(0)
    call(memory.admit, 7, 161, 338)
    that("requests", sorted(held.request_id for held in memory.reservations())).gives([1, 2, 3, 4, 5, 6, 7])


def test_a_request_is_admitted_once():
    """An id that is already admitted raises ValueError, and the first request keeps its tokens and its slots."""
    memory = ContiguousReservation(32, "oracle", 16)
    memory.admit("a", 3, 5)
    before = state(memory)
    call(memory.admit, "a", 1, 1).raises(ValueError)
    that("the memory after the refusal", state(memory)).gives(before)


def test_nobody_else_grows_or_leaves():
    """An id that is not admitted, or no longer, raises ValueError."""
    memory = ContiguousReservation(32, "oracle", 16)
    memory.admit("a", 3, 5)
    memory.admit("b", 3, 5)
    memory.release("a")
    before = state(memory)
    for name in ("a", "c", None, 0):
        call(memory.grow, name).raises(ValueError)
        call(memory.release, name).raises(ValueError)
    that("the memory after the refusals", state(memory)).gives(before)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, 0), (-1, 5), (5, -1), (16, 1), (1, 16)])
def test_requests_that_cannot_be_are_refused(policy, prompt, output):
    """No prompt, no output, or more than the limit together: ValueError, and nothing was allocated."""
    memory = ContiguousReservation(64, policy, 16)
    call(memory.admit, "a", prompt, output).raises(ValueError)
    that("allocations", memory.allocator.allocations()).gives([])
    call(memory.admit, "a", 1, 1).gives(0)


@pytest.mark.parametrize("count", [0, -1])
def test_growing_by_nothing_is_refused(count):
    """A count below 1 raises ValueError."""
    memory = ContiguousReservation(16, "max", 16)
    memory.admit("a", 3, 5)
    call(memory.grow, "a", count).raises(ValueError)


@pytest.mark.parametrize("count", [1.0, "1", None, True], ids=repr)
def test_counts_that_are_no_int_are_refused(count):
    """A prompt, output, count, num_slots or limit that is not an int raises TypeError."""
    memory = ContiguousReservation(16, "max", 16)
    call(memory.admit, "b", count, 2).raises(TypeError)
    call(memory.admit, "b", 2, count).raises(TypeError)
    memory.admit("a", 3, 5)
    call(memory.grow, "a", count).raises(TypeError)
    call(ContiguousReservation, count, "max", 16).raises(TypeError)
    call(ContiguousReservation, 16, "max", count).raises(TypeError)


@pytest.mark.parametrize(
    ("num_slots", "policy", "limit"),
    [(16, "paged", 16), (16, "MAX", 16), (0, "max", 16), (16, "max", 0), (-4, "max", 4)],
)
def test_memories_that_cannot_be_are_refused(num_slots, policy, limit):
    """An unknown policy, no slots or no limit: ValueError at once, not at the first request."""
    call(ContiguousReservation, num_slots, policy, limit).raises(ValueError)
