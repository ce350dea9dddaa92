"""Phase 7, task 1: incident 1, a batch of at most N − 1."""

from __future__ import annotations

import pytest

from minicache_course.checks import that
from minicache_course.incidents.broken import CapScheduler
from minicache_course.incidents.case_1_cap import FixedCapScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that leaves a slot empty, on one that leaves half empty, and on one of N + 1."""
    room.exposes(expose, CapScheduler, 1)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that fill all batch slots, whatever else they do."""
    room.passes(expose, 1)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_batch_is_full_and_no_fuller(room, request_of, num_slots):
    """Fixed: seven requests and memory for all; the batch has max_num_seqs of them, not one fewer, not one more."""
    create = room.fixed(expose, FixedCapScheduler)
    requests = [request_of(number, 10, 6) for number in range(7)]
    tally = room.run(create(num_blocks=64, max_num_seqs=num_slots), requests, auditor=True)
    that(f"the largest batch, with max_num_seqs {num_slots}", max(tally.batch_sizes)).gives(num_slots)
    that("the order in which the requests end", list(tally.finished)).gives(list(range(7)))


def test_more_slots_than_requests(room, request_of):
    """Fixed: with slots for more requests than there are, all run at once."""
    create = room.fixed(expose, FixedCapScheduler)
    tally = room.run(create(num_blocks=64, max_num_seqs=4), [request_of(number) for number in range(3)])
    that("requests in each step", tally.batch_sizes).gives([3] * 5)


def test_random_load(room):
    """Fixed: any requests, any pool, any number of slots: every request is served, and the books agree."""
    room.survives(room.fixed(expose, FixedCapScheduler))
