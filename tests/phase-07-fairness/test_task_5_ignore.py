"""Phase 7, task 5: incident 5, one ignored, all ignored."""

from __future__ import annotations

from minicache.request import RequestStatus
from minicache_course.checks import that
from minicache_course.incidents.broken import StickyIgnoreScheduler
from minicache_course.incidents.case_5_ignore import FixedIgnoreScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler whose flag sticks."""
    room.exposes(expose, StickyIgnoreScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that serve the request behind an impossible one, whatever else they do."""
    room.passes(expose, 5)


def test_only_the_impossible_one_is_given_up(room, request_of):
    """Fixed: an impossible request between two others: it is finished in step 0, and both others run in that step."""
    scheduler = room.fixed(expose, FixedIgnoreScheduler)(num_blocks=4)
    requests = [request_of("before"), request_of("impossible", 100), request_of("after")]
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    that("step 0", output.num_scheduled_tokens).gives({"before": 10, "after": 10})
    that("finished in step 0", output.finished).gives(["impossible"])
    that("blocks of the others", [len(requests[0].block_ids), len(requests[2].block_ids)]).gives([1, 1])
    scheduler.update_from_output(output, {"before": 0, "after": 0})
    room.run(scheduler)
    that("its end", requests[1].status).gives(RequestStatus.FINISHED_CAPACITY)
    that("the end of the one behind it", requests[2].status).gives(RequestStatus.FINISHED_LENGTH)


def test_the_others_are_admitted_as_ever(room, request_of):
    """Fixed: behind an impossible request the others are admitted until slots, tokens or blocks run out, in order."""
    create = room.fixed(expose, FixedIgnoreScheduler)
    for name, options in [("two slots", {"max_num_seqs": 2}), ("70 tokens", {"max_num_batched_tokens": 70})]:
        requests = [request_of("impossible", 200), *(request_of(number, 30, 2) for number in range(4))]
        that(name, room.run(create(num_blocks=9, **options), requests).order[0]).gives([0, 1])
    requests = [request_of("impossible", 200), *(request_of(number, 30, 2) for number in range(4))]
    that("7 blocks", room.run(create(num_blocks=7), requests).order[0]).gives([0, 1, 2])


def test_after_an_eviction_no_other_is_looked_at(room, request_of):
    """Fixed: in the step of an eviction the victim is not passed over yet: its 64 passes begin with the next."""
    scheduler = room.fixed(expose, FixedIgnoreScheduler)(num_blocks=21)
    for request in (request_of("first", 70, 200), request_of("large", 260, 70)):
        scheduler.add_request(request)
    evictions = []
    for number in range(140):
        output = scheduler.schedule()
        evictions += [(number, request_id) for request_id in output.preempted]
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    that("evictions, and the steps of them", evictions[:2]).gives([(64, "first"), (129, "large")])


def test_random_load(room):
    """Fixed: any requests, some impossible: those finish as FINISHED_CAPACITY, all others are served."""
    room.survives(room.fixed(expose, FixedIgnoreScheduler), too_large=True)
