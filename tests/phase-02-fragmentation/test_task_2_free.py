"""Phase 2, task 2: free, merge, and check the invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import InvariantError, OutOfSlotsError
from minicache.memory.reservation import BuddyAllocator
from minicache_course.checks import call, that

repeatable = settings(max_examples=150, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


def test_freed_runs_merge_all_the_way_back():
    """1 slot of 16, freed: the five free runs merge into one of 16 again."""
    memory = BuddyAllocator(16)
    memory.allocate(1)
    call(memory.free, 0).gives(None)
    call(memory.free_runs).gives([(0, 16)])
    call(memory.allocations).gives([])
    that("num_free", memory.num_free).gives(16)


def test_merging_stops_at_a_buddy_that_is_taken():
    """Of four runs of 4, the second is freed, then the third: they are neighbours, but not buddies."""
    memory = BuddyAllocator(16)
    for _ in range(4):
        memory.allocate(4)
    call(memory.free, 4).gives(None)
    call(memory.free, 8).gives(None)
    call(memory.free_runs).gives([(4, 4), (8, 4)])
    call(memory.check).gives(None)
    that("largest_free with 8 contiguous slots free", memory.largest_free).gives(4)
    call(memory.allocate, 8).raises(OutOfSlotsError)
    call(memory.free, 0).gives(None)
    call(memory.free_runs).gives([(0, 8), (8, 4)])
    call(memory.free, 12).gives(None)
    call(memory.free_runs).gives([(0, 16)])


def test_a_buddy_that_is_cut_does_not_merge():
    """The lower 4 of 8 is free and the upper 4 is half taken: they stay apart until all of the upper 4 is free."""
    memory = BuddyAllocator(8)
    low, left, right = memory.allocate(4), memory.allocate(2), memory.allocate(2)
    call(memory.free, low).gives(None)
    call(memory.free, left).gives(None)
    call(memory.free_runs).gives([(0, 4), (4, 2)])
    call(memory.free, right).gives(None)
    call(memory.free_runs).gives([(0, 8)])


def test_the_first_runs_never_merge():
    """22 slots, all allocated and all freed, are 16, 4 and 2 again, not one run and not 16 and 6."""
    memory = BuddyAllocator(22)
    for count in (16, 4, 2):
        memory.allocate(count)
    for start in (20, 16, 0):
        call(memory.free, start).gives(None)
    call(memory.free_runs).gives([(0, 16), (16, 4), (20, 2)])


def test_the_hole_of_a_departure_is_used_again():
    """Three runs of 4; the middle one is freed; 1, 2 and 1 slots take its place."""
    memory = BuddyAllocator(12)
    for _ in range(3):
        memory.allocate(3)
    call(memory.free_runs).gives([])
    call(memory.free, 4).gives(None)
    call(memory.allocate, 1).gives(4)
    call(memory.allocate, 2).gives(6)
    call(memory.allocate, 1).gives(5)
    that("num_free", memory.num_free).gives(0)


def test_of_equal_holes_the_lowest_is_filled():
    """Runs are freed in any order, and holes are filled from left to right."""
    memory = BuddyAllocator(16)
    for _ in range(8):
        memory.allocate(2)
    for start in (12, 4, 8):
        memory.free(start)
    for start in (4, 8, 12):
        call(memory.allocate, 2).gives(start)


@pytest.mark.parametrize("start", [1, 2, 3, 8, 15, 16, -1, 1000])
def test_what_is_no_allocation_cannot_be_freed(start):
    """The middle of an allocation, a free slot, a slot outside: ValueError, and nothing has changed."""
    memory = BuddyAllocator(16)
    memory.allocate(4)
    call(memory.free, start).raises(ValueError)
    call(memory.allocations).gives([(0, 4)])
    call(memory.free_runs).gives([(4, 4), (8, 8)])


def test_nothing_is_freed_twice():
    """The second free of the same start raises ValueError, even if its slots have been allocated again."""
    memory = BuddyAllocator(8)
    memory.allocate(2)
    memory.allocate(2)
    memory.free(2)
    call(memory.free, 2).raises(ValueError)
    call(memory.free_runs).gives([(2, 2), (4, 4)])
    memory.free(0)
    call(memory.allocate, 8).gives(0)
    call(memory.free, 2).raises(ValueError)
    call(memory.allocations).gives([(0, 8)])


@pytest.mark.parametrize("start", [0.0, "0", None, False], ids=repr)
def test_a_start_that_is_no_int_is_refused(start):
    """A value that is not an int raises TypeError: 0.0, "0", None, and False."""
    memory = BuddyAllocator(16)
    memory.allocate(4)
    call(memory.free, start).raises(TypeError)
    call(memory.allocations).gives([(0, 4)])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 40)),
        st.tuples(st.just("free"), st.integers(0, 30)),
    ),
    max_size=60,
)


@repeatable
@given(num_slots=st.integers(1, 130), operations=operations)
def test_any_series_agrees_with_a_bitmap(bitmap, num_slots, operations):
    """For many series of allocate and free, the memory matches a bitmap, and check() passes."""
    memory, model = BuddyAllocator(num_slots), bitmap(num_slots)
    for operation, number in operations:
        if operation == "allocate":
            expected = model.allocate(number)
            if expected is None:
                call(memory.allocate, number).raises(OutOfSlotsError)
            else:
                call(memory.allocate, number).gives(expected)
        elif model.sizes:
            start = sorted(model.sizes)[number % len(model.sizes)]
            model.free(start)
            call(memory.free, start).gives(None)
        call(memory.free_runs).gives(model.free_runs())
        call(memory.allocations).gives(sorted(model.sizes.items()))
        call(memory.check).gives(None)
    for start in sorted(model.sizes):
        memory.free(start)
    call(memory.free_runs).gives(bitmap(num_slots).free_runs())


def test_the_work_does_not_grow_with_the_slots():
    """free and check in a memory of 2⁴⁰ slots are as fast as in one of 16."""
    memory = BuddyAllocator(2**40)
    starts = [memory.allocate(count) for count in (1, 2**30, 3, 2**20)]
    call(memory.check).gives(None)
    for start in starts:
        call(memory.free, start).gives(None)
    call(memory.free_runs).gives([(0, 2**40)])


class Liar(BuddyAllocator):
    """Eight slots, the first four taken, whose public methods can be made to return false values."""

    def __init__(self, **told):
        self.told = {}  # true values until the allocator is constructed
        super().__init__(8)
        super().allocate(4)
        self.told = told

    def free_runs(self):
        return self.told.get("free_runs", super().free_runs())

    def allocations(self):
        return self.told.get("allocations", super().allocations())

    @property
    def num_free(self):
        return self.told.get("num_free", super().num_free)

    @property
    def num_used(self):
        return self.told.get("num_used", super().num_used)

    @property
    def largest_free(self):
        return self.told.get("largest_free", super().largest_free)


def test_true_books_pass():
    """check() returns without an error if the invariants hold."""
    call(Liar().check).gives(None)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"free_runs": [], "num_free": 0, "largest_free": 0}, id="slots 4 to 7 are in no run"),
        pytest.param({"free_runs": [(4, 2)], "num_free": 2, "largest_free": 2}, id="slots 6 and 7 are in no run"),
        pytest.param({"free_runs": [(5, 1), (6, 2)], "num_free": 3, "largest_free": 2}, id="slot 4 is in no run"),
        pytest.param({"allocations": [], "num_used": 0}, id="slots 0 to 3 are in no run"),
        pytest.param({"free_runs": [(0, 8)], "num_free": 8, "largest_free": 8}, id="slots 0 to 3 are free and taken"),
        pytest.param({"allocations": [(0, 4), (2, 2)], "num_used": 6}, id="slots 2 and 3 are taken twice"),
        pytest.param(
            {"allocations": [(0, 4), (2, 2)], "free_runs": [(6, 2)], "num_used": 6, "num_free": 2, "largest_free": 2},
            id="slots 2 and 3 are taken twice, and 4 and 5 are in no run",
        ),
        pytest.param({"free_runs": [(4, 4), (8, 1)], "num_free": 5}, id="a run beyond the last slot"),
        pytest.param({"allocations": [(0, 3), (3, 1)]}, id="a run of 3"),
        pytest.param({"allocations": [(0, 1), (1, 2), (3, 1)]}, id="a run of 2 at slot 1"),
        pytest.param({"free_runs": [(4, 2), (6, 2)], "largest_free": 2}, id="two free buddies"),
        pytest.param({"num_free": 5}, id="num_free is wrong"),
        pytest.param({"num_used": 3}, id="num_used is wrong"),
        pytest.param({"num_used": 3, "num_free": 5}, id="num_used and num_free are wrong by the same number"),
        pytest.param({"largest_free": 2}, id="largest_free is wrong"),
    ],
)
def test_false_books_are_found(told):
    """check() uses the public methods, and raises InvariantError if their results are inconsistent."""
    call(Liar(**told).check).raises(InvariantError)
