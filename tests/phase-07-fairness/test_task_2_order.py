"""Phase 7, task 2: incident 2, first come, last served."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.broken import ReversedScheduler
from minicache_course.incidents.case_2_order import FixedOrderScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that preempts the oldest for the newest."""
    room.exposes(expose, ReversedScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that serve in the order of arrival, whatever else they do."""
    room.passes(expose, 2)


def test_the_newest_is_preempted(room, request_of):
    """Fixed: 10 blocks, two prompts of 80 tokens: step 0 runs both, step 1 runs request 0 and preempts request 1."""
    scheduler = room.fixed(expose, FixedOrderScheduler)(num_blocks=10)
    for number in range(2):
        scheduler.add_request(request_of(number, 80, 20))
    output = scheduler.schedule()
    that("step 0", output.num_scheduled_tokens).gives({0: 80, 1: 80})
    scheduler.update_from_output(output, {0: 0, 1: 0})
    output = scheduler.schedule()
    that("step 1", output.num_scheduled_tokens).gives({0: 1})
    that("preempted in step 1", output.preempted).gives([1])
    scheduler.update_from_output(output, {0: 0})
    tally = room.run(scheduler)
    that("the order in which the requests end", list(tally.finished)).gives([0, 1])


def test_six_requests_end_as_they_came(room, request_of):
    """Fixed: six equal requests, memory for three: they end as they came, and 0 is never preempted."""
    create = room.fixed(expose, FixedOrderScheduler)
    requests = [request_of(number, 30, 40) for number in range(6)]
    tally = room.run(create(num_blocks=12), requests, auditor=True)
    that("the order in which the requests end", list(tally.finished)).gives(list(range(6)))
    that("preemptions of request 0", requests[0].num_preemptions).gives(0)


def test_arrival_index_says_who_came_first(room, request_of):
    """Fixed: the one added first arrived first (`arrival_index`), whatever its arrival_time and its name say."""
    scheduler = room.fixed(expose, FixedOrderScheduler)(num_blocks=15)
    for name, time in (("b", 5.0), ("c", 9.0), ("a", 1.0)):
        scheduler.add_request(request_of(name, 80, 20, arrival_time=time))
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    output = scheduler.schedule()
    that("preempted in step 1", output.preempted).gives(["a"])
    that("scheduled in step 1", sorted(output.num_scheduled_tokens)).gives(["b", "c"])
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    that("the order in which they end", list(room.run(scheduler).finished)).gives(["b", "c", "a"])


def test_random_load(room):
    """Fixed: any requests, any pool: every request is served, and phase 6's auditor agrees at every step."""
    room.survives(room.fixed(expose, FixedOrderScheduler), auditor=True)
