"""Phase 12, task 3: incident 9, blocks freed while a step is in flight."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.async_broken import FreedInFlightScheduler
from minicache_course.incidents.case_9_freed import FixedFreedScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that frees all blocks at once."""
    room.exposes(expose, FreedInFlightScheduler, 9)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that hold back all blocks, or some, or let new requests wait."""
    room.passes(expose, 9)


def test_blocks_of_a_stopped_request_come_back_with_the_step_ahead(room, sky):
    """Fixed: a stop token comes while the step ahead computes the request: its blocks are free after that step."""
    create = room.fixed(expose, FixedFreedScheduler)
    flight = sky.flight(create(num_blocks=8, block_size=4), sky.request("a", 8, 9, stop=0), fetches=True)
    flight.schedule()
    flight.schedule()
    flight.commit()
    that("blocks in use after the stop token, with a step in flight", flight.scheduler.pool.num_used).gives(3)
    flight.schedule()
    that("blocks in use in the step after", flight.scheduler.pool.num_used).gives(3)
    flight.commit()
    that("blocks in use once the step in flight is committed", flight.scheduler.pool.num_used).gives(0)


def test_an_abort_waits_for_the_newest_step(room, sky):
    """Fixed: a client leaves while two steps compute its request: its blocks are free after the second."""
    create = room.fixed(expose, FixedFreedScheduler)
    a = sky.request("a")
    flight = sky.flight(create(num_blocks=8, block_size=4), a, sky.request("b"), fetches=True)
    flight.schedule()
    flight.schedule()
    flight.scheduler.abort_request("a")
    that("blocks and placeholders of the aborted request", (a.block_ids, a.num_placeholders)).gives(([], 0))
    that("blocks in use after the abort: two of each request", flight.scheduler.pool.num_used).gives(4)
    flight.commit()
    that("blocks in use after the first commit", flight.scheduler.pool.num_used).gives(4)
    flight.commit()
    that("blocks in use after the second commit", flight.scheduler.pool.num_used).gives(2)


def test_a_step_that_does_not_compute_it_is_not_waited_for(room, sky):
    """Fixed: the last token of a request is on its way, and the step ahead passes it over: it waits for one commit."""
    create = room.fixed(expose, FixedFreedScheduler)
    flight = sky.flight(create(num_blocks=8, block_size=4), sky.request("a", 4, 1), sky.request("b"), fetches=True)
    flight.schedule()
    flight.schedule()
    flight.scheduler.abort_request("a")
    that("blocks in use after the abort", flight.scheduler.pool.num_used).gives(3)
    flight.commit()
    that("blocks in use after the first commit", flight.scheduler.pool.num_used).gives(2)


def test_what_no_step_computes_is_free_at_once(room, sky):
    """Fixed: a request that ends with its last token, with the step ahead not computing it, holds nothing back."""
    create = room.fixed(expose, FixedFreedScheduler)
    flight = sky.flight(create(num_blocks=8, block_size=4), sky.request("a", 4, 1), sky.request("b"), fetches=True)
    flight.schedule()
    flight.schedule()
    flight.commit()
    that("blocks in use after the last token of a", flight.scheduler.pool.num_used).gives(2)


def test_a_victims_blocks_go_to_the_request_that_grows(room, sky):
    """Fixed: a preempted request holds nothing back, so the one that it was preempted for has its block at once."""
    create = room.fixed(expose, FixedFreedScheduler)
    flight = sky.flight(create(num_blocks=7, block_size=4), sky.request("a", 12), sky.request("b", 16), fetches=True)
    flight.schedule()
    output = flight.schedule()
    that("the requests preempted, and those of the step", (output.preempted, flight.rows[1])).gives((["b"], {"a": 1}))
    that("blocks in use: those of a", flight.scheduler.pool.num_used).gives(4)
    flight.commit()
    flight.land()


def test_a_failed_step_gives_all_back(room, sky):
    """Fixed: both steps are given up, so what was held for them is free."""
    create = room.fixed(expose, FixedFreedScheduler)
    flight = sky.flight(create(num_blocks=8, block_size=4), sky.request("a"), sky.request("b"), fetches=True)
    flight.schedule()
    flight.schedule()
    flight.scheduler.abort_request("a")
    flight.scheduler.recover()
    that("blocks in use after a failure", flight.scheduler.pool.num_used).gives(0)


def test_random_load(room, sky):
    """Fixed: any requests, stops and aborts: no request is admitted into a block that a step in flight writes."""
    sky.survives(room.fixed(expose, FixedFreedScheduler), fetches=True)
