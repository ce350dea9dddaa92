"""Phase 2, task 2: a buddy allocator that can only allocate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import OutOfSlotsError
from minicache.memory.reservation import BuddyAllocator
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

repeatable = settings(max_examples=80, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

TIMES = one_of(1, [2, 4, 8, 16])  # under a secret seed, memory and runs are so many times as long


@pytest.mark.parametrize(
    ("num_slots", "runs"),
    [
        (1, [(0, 1)]),
        (2, [(0, 2)]),
        (3, [(0, 2), (2, 1)]),
        (16, [(0, 16)]),
        (22, [(0, 16), (16, 4), (20, 2)]),
        (15, [(0, 8), (8, 4), (12, 2), (14, 1)]),
        (
            15_728,
            [
                (0, 8192),
                (8192, 4096),
                (12288, 2048),
                (14336, 1024),
                (15360, 256),
                (15616, 64),
                (15680, 32),
                (15712, 16),
            ],
        ),
    ],
    ids=str,
)
def test_a_new_memory_is_the_powers_of_two_that_it_is_made_of(num_slots, runs):
    """22 slots are runs of 16, 4 and 2, longest first, side by side; the same holds for any number of slots."""
    num_slots, runs = TIMES * num_slots, [(TIMES * start, TIMES * size) for start, size in runs]
    memory = call(BuddyAllocator, num_slots).value
    call(memory.free_runs).gives(runs)
    call(memory.allocations).gives([])
    that("num_slots", memory.num_slots).gives(num_slots)
    that("num_free", memory.num_free).gives(num_slots)
    that("num_used", memory.num_used).gives(0)
    that("largest_free", memory.largest_free).gives(runs[0][1])


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (16, 16)])
def test_a_count_is_rounded_up_to_a_power_of_two(count, size):
    """Of 16 slots, a run of the next power of two: 3 slots get 4, and 4 get 4."""
    memory, count, size = BuddyAllocator(16 * TIMES), count * TIMES, size * TIMES
    call(memory.allocate, count).gives(0)
    call(memory.allocated, 0).gives(size)
    that(f"num_used after allocate({count})", memory.num_used).gives(size)
    that(f"num_free after allocate({count})", memory.num_free).gives(16 * TIMES - size)


def test_a_run_is_halved_until_it_fits():
    """1 slot of 16: halves of 8, 4, 2 and 1 stay free, at 8, 4, 2 and 1."""
    memory = BuddyAllocator(16 * TIMES)
    call(memory.allocate, TIMES).gives(0)
    call(memory.free_runs).gives([(TIMES * size, TIMES * size) for size in (1, 2, 4, 8)])
    that("largest_free", memory.largest_free).gives(8 * TIMES)


def test_a_small_memory_filled_step_by_step():
    """16 slots: 3, 1, 2 and 5 slots take 4 at 0, 1 at 4, 2 at 6 and 8 at 8; one slot is left, at 5."""
    memory = BuddyAllocator(16)
    for count, start in ((3, 0), (1, 4), (2, 6), (5, 8)):
        call(memory.allocate, count).gives(start)
    call(memory.allocations).gives([(0, 4), (4, 1), (6, 2), (8, 8)])
    call(memory.free_runs).gives([(5, 1)])
    call(memory.allocate, 1).gives(5)
    that("num_free of a full memory", memory.num_free).gives(0)
    that("largest_free of a full memory", memory.largest_free).gives(0)


def test_the_shortest_run_that_fits_is_cut():
    """In 22 slots, 3 slots come from the run of 4 at 16, not from the 16 at 0; then 1 slot from the 2 at 20."""
    memory = BuddyAllocator(22)
    call(memory.allocate, 3).gives(16)
    call(memory.allocate, 1).gives(20)
    call(memory.allocate, 1).gives(21)
    call(memory.allocate, 1).gives(0)
    call(memory.free_runs).gives([(1, 1), (2, 2), (4, 4), (8, 8)])


def test_runs_are_handed_out_from_left_to_right():
    """Eight runs of 2 fill 16 slots from 0 upwards: of each split the lower half is used, the upper half stays free."""
    memory = BuddyAllocator(16 * TIMES)
    for start in range(0, 16 * TIMES, 2 * TIMES):
        call(memory.allocate, 2 * TIMES).gives(start)


def test_seven_requests_of_2048_fit_in_opt_13b():
    """15,728 slots hold seven runs of 2,048. 1,392 slots are left, without a run of 2,048."""
    memory = BuddyAllocator(15_728 * TIMES)
    starts = [call(memory.allocate, 2048 * TIMES).value for _ in range(7)]
    # The run of 2,048 is the shortest that fits, then the one of 4,096, then the one of 8,192.
    that("where they begin", starts).gives([TIMES * each for each in (12288, 8192, 10240, 0, 2048, 4096, 6144)])
    that("num_free", memory.num_free).gives(1392 * TIMES)
    that("largest_free", memory.largest_free).gives(1024 * TIMES)
    call(memory.allocate, 2048 * TIMES).raises(OutOfSlotsError)


def test_enough_slots_in_all_are_not_enough():
    """16 of 31 slots are taken and 15 are free, but no run of 9: a refused call changes nothing."""
    memory = BuddyAllocator(31)
    memory.allocate(16)
    for count in (9, 15, 16, 31, 1000):
        call(memory.allocate, count).raises(OutOfSlotsError)
    call(memory.allocations).gives([(0, 16)])
    call(memory.free_runs).gives([(16, 8), (24, 4), (28, 2), (30, 1)])
    call(memory.allocate, 8).gives(16)


def test_runs_side_by_side_are_not_one_run():
    """24 slots are 16 and 8 side by side: 17 slots do not fit, although 24 contiguous slots are free."""
    call(BuddyAllocator(24).allocate, 17).raises(OutOfSlotsError)


@repeatable
@given(num_slots=st.integers(1, 130), counts=st.lists(st.integers(1, 40), max_size=30))
def test_any_series_agrees_with_a_bitmap(bitmap, num_slots, counts):
    """For many memories and many counts, starts and free runs are those found by looking at every slot."""
    memory, model = BuddyAllocator(num_slots), bitmap(num_slots)
    for count in counts:
        expected = model.allocate(count)
        if expected is None:
            call(memory.allocate, count).raises(OutOfSlotsError)
        else:
            call(memory.allocate, count).gives(expected)
            call(memory.allocated, expected).gives(model.sizes[expected])
        call(memory.free_runs).gives(model.free_runs())
    call(memory.allocations).gives(sorted(model.sizes.items()))
    that("num_used", memory.num_used).gives(sum(model.taken))
    that("num_free", memory.num_free).gives(num_slots - sum(model.taken))
    that("largest_free", memory.largest_free).gives(max((size for _, size in model.free_runs()), default=0))


def test_the_work_does_not_grow_with_the_slots():
    """A memory of 2⁴⁰ slots, more than any list can hold, is as fast as one of 16."""
    memory = call(BuddyAllocator, 2**40).value
    call(memory.allocate, 1).gives(0)
    call(memory.allocate, 2**30 - 5).gives(2**30)
    that("num_free", memory.num_free).gives(2**40 - 2**30 - 1)
    that("largest_free", memory.largest_free).gives(2**39)
    that("how many free runs there are", len(memory.free_runs())).gives(39)


def test_large_counts_are_rounded_exactly():
    """2⁴⁹ + 1 of 2⁶⁰ slots get 2⁵⁰. As floats, the logarithms of 2⁴⁹ + 1 and of 2⁴⁹ are equal."""
    memory = call(BuddyAllocator, 2**60).value
    call(memory.allocate, 2**49 + 1).gives(0)
    call(memory.allocated, 0).gives(2**50)
    call(memory.allocate, 2**49).gives(2**50)
    call(memory.allocated, 2**50).gives(2**49)


def test_what_a_call_returned_is_the_callers():
    """Changing a list that free_runs or allocations returned changes nothing inside."""
    memory = BuddyAllocator(8)
    memory.allocate(2)
    memory.free_runs().clear()
    memory.allocations().clear()
    call(memory.free_runs).gives([(2, 2), (4, 4)])
    call(memory.allocations).gives([(0, 2)])


@pytest.mark.parametrize("start", [1, 2, 3, 4, 16, -1])
def test_only_the_start_of_an_allocation_has_a_size(start):
    """allocated() of a slot in the middle of an allocation, of a free slot or of no slot raises ValueError."""
    memory = BuddyAllocator(16)
    memory.allocate(4)
    call(memory.allocated, start).raises(ValueError)


@pytest.mark.parametrize("number", [0, -1, -16])
def test_numbers_below_one_are_refused(number):
    """A num_slots or count below 1: ValueError."""
    call(BuddyAllocator, number).raises(ValueError)
    memory = BuddyAllocator(16)
    call(memory.allocate, number).raises(ValueError)
    call(memory.free_runs).gives([(0, 16)])


@pytest.mark.parametrize("number", [2.0, "2", None, True], ids=repr)
def test_numbers_that_are_no_int_are_refused(number):
    """A value that is not an int raises TypeError: 2.0, "2", None, and True."""
    call(BuddyAllocator, number).raises(TypeError)
    memory = BuddyAllocator(16)
    call(memory.allocate, number).raises(TypeError)
    call(memory.allocated, number).raises(TypeError)
