"""Phase 2, task 5: where the memory goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import CacheOverflowError, OutOfSlotsError
from minicache.memory.reservation import ContiguousReservation, MemoryUse
from minicache_course.checks import call, that

repeatable = settings(max_examples=80, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def use(used, reserved, internal, external, free):
    return MemoryUse(used=used, reserved=reserved, internal=internal, external=external, free=free)


def test_an_empty_memory_is_free_or_external():
    """All slots are free; while a request waits for a run, those in shorter runs are external."""
    memory = ContiguousReservation(22, "max", 16)
    call(memory.memory_use).gives(use(0, 0, 0, 0, 22))
    call(memory.memory_use, 1).gives(use(0, 0, 0, 0, 22))
    call(memory.memory_use, 3).gives(use(0, 0, 0, 2, 20))
    call(memory.memory_use, 16).gives(use(0, 0, 0, 6, 16))
    call(memory.memory_use, 17).gives(use(0, 0, 0, 22, 0))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("max", use(3, 5, 24, 0, 32)),  # reserves 20, gets 32: 12 of surplus and 12 of rounding
        ("pow2", use(3, 5, 8, 0, 48)),  # reserves 3 + 8, gets 16: 3 of surplus and 5 of rounding
        ("oracle", use(3, 5, 0, 0, 56)),  # reserves 8, gets 8
    ],
    ids=["max", "pow2", "oracle"],
)
def test_one_request_is_used_reserved_and_internal(policy, expected):
    """Prompt 3, output 5: 3 used, 5 reserved, and the surplus of the policy and of the rounding is internal."""
    memory = ContiguousReservation(64, policy, 20)
    memory.admit("a", 3, 5)
    call(memory.memory_use).gives(expected)


def test_a_token_turns_reserved_into_used():
    """Each new token moves one slot from reserved to used, and nothing else; at the end none is reserved."""
    memory = ContiguousReservation(64, "pow2", 20)
    memory.admit("a", 3, 5)
    for generated in range(1, 6):
        memory.grow("a")
        call(memory.memory_use).gives(use(3 + generated, 5 - generated, 8, 0, 48))


def test_a_request_that_says_more_than_it_announced():
    """Under Max a request may exceed its output. Its tokens are used, nothing is reserved, and internal shrinks."""
    memory = ContiguousReservation(64, "max", 20)
    memory.admit("a", 3, 5)
    memory.grow("a", 7)
    call(memory.memory_use).gives(use(10, 0, 22, 0, 32))


def test_one_request_exceeds_its_output_and_another_does_not():
    """Under Max, a has 2 tokens more than prompt + output, and b will have 5 more: all 5 are reserved."""
    memory = ContiguousReservation(64, "max", 20)
    memory.admit("a", 3, 5)
    memory.grow("a", 7)
    memory.admit("b", 3, 5)
    call(memory.memory_use).gives(use(13, 5, 46, 0, 0))


def test_a_refused_request_uses_nothing():
    """A request for which no run is free raises OutOfSlotsError, and its prompt is not counted as used."""
    memory = ContiguousReservation(8, "max", 8)
    memory.admit("a", 3, 5)
    call(memory.admit, "b", 2, 1).raises(OutOfSlotsError)
    call(memory.memory_use).gives(use(3, 5, 0, 0, 0))


def test_oracle_wastes_inside_only_by_rounding():
    """Oracle reserves what is needed: 9 tokens in a run of 16 leave 7 of rounding, 8 tokens in 8 leave none."""
    memory = ContiguousReservation(64, "oracle", 64)
    memory.admit("a", 4, 5)
    call(memory.memory_use).gives(use(4, 5, 7, 0, 48))
    memory.admit("b", 4, 4)
    call(memory.memory_use).gives(use(8, 9, 7, 0, 40))


def test_holes_left_by_departures():
    """Every other of eight requests is released: 16 of 32 slots are free, in holes of 4. For 5 they are external."""
    memory = ContiguousReservation(32, "oracle", 32)
    for name in range(8):
        memory.admit(name, 3, 1)
    for name in range(0, 8, 2):
        memory.release(name)
    call(memory.memory_use).gives(use(12, 4, 0, 0, 16))
    call(memory.memory_use, 4).gives(use(12, 4, 0, 0, 16))
    call(memory.memory_use, 5).gives(use(12, 4, 0, 16, 0))


def test_only_the_runs_that_are_too_short_are_external():
    """Free runs of 2 and 8: for a reservation of 3, the 2 are external and the 8 are free."""
    memory = ContiguousReservation(16, "oracle", 16)
    for name, output in (("a", 1), ("b", 1), ("c", 3)):
        memory.admit(name, 1, output)
    memory.release("b")
    that("free runs", memory.allocator.free_runs()).gives([(2, 2), (8, 8)])
    call(memory.memory_use, 3).gives(use(1 + 1, 1 + 3, 0, 2, 8))


def test_neighbours_that_are_no_buddies_are_two_runs():
    """Two free runs of 4 are neighbours but not buddies: for 8 slots, all 8 are external."""
    memory = ContiguousReservation(16, "oracle", 16)
    for name in "abcd":
        memory.admit(name, 3, 1)
    memory.release("b")
    memory.release("c")
    call(memory.memory_use, 8).gives(use(6, 2, 0, 8, 0))
    call(memory.memory_use, 4).gives(use(6, 2, 0, 0, 8))


def test_max_leaves_most_of_opt_13bs_memory_internal():
    """15,728 slots, seven requests of 161 + 338 tokens: 7 % used when they start, and 1,392 slots unusable."""
    memory = ContiguousReservation(15_728, "max", 2048)
    for name in range(7):
        memory.admit(name, 161, 338)
    call(memory.memory_use, 2048).gives(use(7 * 161, 7 * 338, 7 * (2048 - 499), 1392, 0))
    call(memory.memory_use).gives(use(7 * 161, 7 * 338, 7 * (2048 - 499), 0, 1392))
    for name in range(7):
        memory.grow(name, 338)
    call(memory.memory_use, 2048).gives(use(7 * 499, 0, 7 * (2048 - 499), 1392, 0))


def test_asking_changes_nothing():
    """memory_use changes nothing."""
    memory = ContiguousReservation(22, "oracle", 16)
    memory.admit("a", 3, 5)
    before = memory.reservations(), memory.allocator.free_runs()
    first = call(memory.memory_use, 9).value
    call(memory.memory_use, 9).gives(first)
    that("the memory afterwards", (memory.reservations(), memory.allocator.free_runs())).gives(before)


actions = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "grow", "grow", "release"]), st.integers(1, 20), st.integers(1, 20)),
    max_size=40,
)


@repeatable
@given(
    num_slots=st.integers(1, 200),
    policy=st.sampled_from(["max", "pow2", "oracle"]),
    actions=actions,
    waiting=st.integers(1, 64),
)
def test_every_slot_is_counted_once(num_slots, policy, actions, waiting):
    """For many histories the five parts are those of a memory painted slot by slot, and sum to all slots."""
    memory, requests = ContiguousReservation(num_slots, policy, 40), {}
    for step, (action, one, other) in enumerate(actions):
        chosen = sorted(requests)[one % len(requests)] if requests else None
        if action == "admit":
            try:
                start = memory.admit(step, one, other)
            except OutOfSlotsError:
                continue
            requests[step] = [start, one, one + other]
        elif action == "grow" and chosen is not None:
            try:
                memory.grow(chosen)
            except CacheOverflowError:
                continue
            requests[chosen][1] += 1
        elif action == "release" and chosen is not None:
            memory.release(chosen)
            del requests[chosen]
        paint = painted(memory, num_slots, requests, waiting)
        expected = use(*[paint.count(part) for part in ("used", "reserved", "internal", "external", "free")])
        call(memory.memory_use, waiting).gives(expected)
        that("the sum of the parts", memory.memory_use().total).gives(num_slots)


def painted(memory, num_slots, requests, waiting):
    """Every slot's part by name, from the requests' reservations and the free runs."""
    paint = ["internal"] * num_slots
    for start, size in memory.allocator.free_runs():
        paint[start : start + size] = ["external" if size < waiting else "free"] * size
    for start, num_tokens, num_expected in requests.values():
        paint[start : start + num_expected] = ["reserved"] * num_expected
        paint[start : start + num_tokens] = ["used"] * num_tokens
    return paint


@pytest.mark.parametrize("waiting", [0, -1])
def test_waiting_for_nothing_is_refused(waiting):
    """A waiting reservation below 1 is a ValueError. None means that no request waits."""
    call(ContiguousReservation(16, "max", 16).memory_use, waiting).raises(ValueError)


@pytest.mark.parametrize("waiting", [2.0, "2", True], ids=repr)
def test_waiting_has_to_be_an_int(waiting):
    """A value that is neither an int nor None raises TypeError."""
    call(ContiguousReservation(16, "max", 16).memory_use, waiting).raises(TypeError)
