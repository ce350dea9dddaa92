"""Phase 7, task 7: incident 7, given up after one victim."""

from __future__ import annotations

from minicache.request import RequestStatus
from minicache_course.checks import that
from minicache_course.incidents.broken import OneVictimScheduler
from minicache_course.incidents.case_7_feasible import FixedFeasibleScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that gives up after one victim."""
    room.exposes(expose, OneVictimScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that give up no request that fits, whatever else they do."""
    room.passes(expose, 7)


def test_as_many_victims_as_it_takes(room, request_of):
    """Fixed: two requests hold 5 of 10 blocks each; for one that needs all 10 both are evicted; all are served."""
    create = room.fixed(expose, FixedFeasibleScheduler)
    requests = [request_of(0, 10, 70), request_of(1, 10, 70), request_of("large", 150, 1)]
    tally = room.run(create(num_blocks=10), requests)
    that("how they finish", [request.status for request in requests]).gives([RequestStatus.FINISHED_LENGTH] * 3)
    that("preemptions", tally.num_preemptions).gives(2)
    that("the order in which they finish", list(tally.finished)).gives(["large", 0, 1])


def test_three_victims_are_evicted_where_it_takes_three(room, request_of):
    """Fixed: three requests hold 5 of 15 blocks each, and one needs all 15: all three are evicted, and come back."""
    create = room.fixed(expose, FixedFeasibleScheduler)
    requests = [*(request_of(number, 10, 70) for number in range(3)), request_of("large", 230, 1)]
    tally = room.run(create(num_blocks=15), requests)
    that("how they finish", [request.status for request in requests]).gives([RequestStatus.FINISHED_LENGTH] * 4)
    that("preemptions", tally.num_preemptions).gives(3)
    that("the order in which they finish", list(tally.finished)).gives(["large", 0, 1, 2])


def test_no_more_victims_than_it_takes(room, request_of):
    """Fixed: if one victim frees enough, only the newest is evicted."""
    scheduler = room.fixed(expose, FixedFeasibleScheduler)(num_blocks=4, block_size=256)
    for request in [*(request_of(number, 10, 200) for number in range(3)), request_of("large", 300, 1)]:
        scheduler.add_request(request)
    evicted = []
    for _ in range(65):
        output = scheduler.schedule()
        evicted += output.preempted
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    that("evicted in 65 steps", evicted).gives([2])
    that("step 64", output.num_scheduled_tokens).gives({0: 1, 1: 1, "large": 300})


def test_none_is_evicted_before_64_passes(room, request_of):
    """Fixed: the head of the queue waits 64 passes before another loses its slot for it."""
    scheduler = room.fixed(expose, FixedFeasibleScheduler)(num_blocks=10)
    for request in [request_of(0, 10, 100), request_of("large", 150, 1)]:
        scheduler.add_request(request)
    for _ in range(64):
        output = scheduler.schedule()
        that("preempted in the first 64 steps", output.preempted).gives([])
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    that("preempted in the next", scheduler.schedule().preempted).gives([0])


def test_random_load(room):
    """Fixed: any requests, any pool: every request is served, and the books agree."""
    room.survives(room.fixed(expose, FixedFeasibleScheduler))
