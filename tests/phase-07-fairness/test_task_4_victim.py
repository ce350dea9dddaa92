"""Phase 7, task 4: incident 4, the victim in the head's slot."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.bases import WAITING_PASSES, EngineScheduler
from minicache_course.incidents.broken import VictimHeadScheduler
from minicache_course.incidents.case_4_victim import FixedVictimScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that gives the batch slot to the victim."""
    room.exposes(expose, VictimHeadScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that compute tokens only for requests with blocks, whatever else they do."""
    room.passes(expose, 4)


def test_the_slot_goes_to_the_head(room, request_of):
    """Fixed: after 64 passes the newest is evicted for the head of the queue, which runs in that same step."""
    create = room.fixed(expose, FixedVictimScheduler)
    requests = [request_of("newest", 10, 100), request_of("head", 112, 1)]
    tally = room.run(create(num_blocks=7), requests)
    that("steps of the run before the head's", tally.order.index(["head"])).gives(WAITING_PASSES)
    that("the order in which the requests finish", list(tally.finished)).gives(["head", "newest"])
    that("preemptions", tally.num_preemptions).gives(1)
    that("prefill tokens: 10, 112, and 74 again", tally.num_prefill_tokens).gives(196)


def test_two_victims_keep_their_order(room, request_of):
    """Fixed: two are evicted; the head runs, then the victims come back in their order, before one that came later."""
    create = room.fixed(expose, FixedVictimScheduler)
    requests = [request_of(0, 10, 90), request_of(1, 10, 90), request_of("head", 195, 3), request_of("later", 10, 90)]
    tally = room.run(create(num_blocks=14), requests)
    after = max(at for at, ids in enumerate(tally.order) if "head" in ids) + 1
    that("the batches of the head, and of the step after it", tally.order[after - 3 : after + 1]).gives(
        [["head"], ["head"], ["head"], [0, 1, "later"]]
    )


def test_an_admitted_one_waits_64_passes_anew(room, request_of):
    """Fixed: two that outgrow 25 blocks do not evict each other at every step: each waits 64 passes every time."""
    create = room.fixed(expose, FixedVictimScheduler)
    requests = [request_of(0, 195, 200), request_of(1, 200, 200)]
    tally = room.run(create(num_blocks=25), requests)
    unbroken = room.run(EngineScheduler(num_blocks=25), [request_of(0, 195, 200), request_of(1, 200, 200)])
    that("prefill tokens", tally.num_prefill_tokens).gives(unbroken.num_prefill_tokens)
    that("preemptions", tally.num_preemptions).gives(unbroken.num_preemptions)


def test_random_load(room):
    """Fixed: any requests, any pool: every request is served, and the books agree."""
    room.survives(room.fixed(expose, FixedVictimScheduler))
