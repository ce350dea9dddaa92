"""Phase 12, task 4: incident 10, a stale placeholder is read as a token."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.async_broken import StalePlaceholderScheduler
from minicache_course.incidents.case_10_stale import FixedStaleScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that keeps a placeholder, and on one that keeps two."""
    room.exposes(expose, StalePlaceholderScheduler, 10)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that compute what is known or on its way, with a gap between or without."""
    room.passes(expose, 10)


def test_a_request_goes_on_after_a_gap(room, sky):
    """Fixed: a step for prompts comes between; then the request computes one token, the one that has come."""
    create = room.fixed(expose, FixedStaleScheduler)
    flight = sky.flight(create(num_blocks=16, block_size=4), first := sky.request("first"))
    flight.step()
    flight.step()
    flight.add(sky.request("second", 6))
    flight.step()
    that("placeholders of a request that was passed over, when its token has come", first.num_placeholders).gives(0)
    flight.step()
    that("the steps", flight.rows).gives([{"first": 4}, {"first": 1}, {"second": 6}, {"first": 1, "second": 1}])
    flight.land()


def test_a_gap_of_many_steps(room, sky):
    """Fixed: a long prompt in four chunks comes between."""
    create = room.fixed(expose, FixedStaleScheduler)
    scheduler = create(num_blocks=32, block_size=4, max_num_batched_tokens=8)
    flight = sky.flight(scheduler, sky.request("first"))
    flight.step()
    flight.step()
    flight.add(sky.request("long", 30))
    for _ in range(5):
        flight.step()
    chunks = [{"long": 8}, {"long": 8}, {"long": 8}, {"long": 6}, {"first": 1, "long": 1}]
    that("the steps from the gap on", flight.rows[2:]).gives(chunks)
    flight.land()


def test_what_comes_in_a_gap_may_finish_the_request(room, sky):
    """Fixed: the stop token of one request and the last token of another come while a prompt is computed."""
    create = room.fixed(expose, FixedStaleScheduler)
    stops, ends = sky.request("stops", 4, 9, stop=1), sky.request("ends", 4, 2)
    flight = sky.flight(create(num_blocks=32, block_size=4), stops, ends)
    flight.step()
    flight.step()
    flight.add(sky.request("second", 6))
    flight.schedule()
    that("the requests that finish in the gap", [each.request_id for each in flight.commit()]).gives(["stops", "ends"])
    flight.land()


def test_a_request_of_the_step_ahead_has_its_placeholder_filled(room, sky):
    """Fixed: without a gap, a request computes one token in each step."""
    create = room.fixed(expose, FixedStaleScheduler)
    flight = sky.flight(create(num_blocks=16, block_size=4), sky.request("only", 4, 4))
    flight.land()
    that("the steps that compute something", [row for row in flight.rows if row]).gives(
        [{"only": 4}, {"only": 1}, {"only": 1}, {"only": 1}]
    )


def test_a_stale_token_is_not_lost(room, sky):
    """Fixed: a request is preempted while its token is on its way: it gets it, and no placeholder."""
    create = room.fixed(expose, FixedStaleScheduler)
    a, b = sky.request("a", 12), sky.request("b", 16)
    flight = sky.flight(create(num_blocks=7, block_size=4), a, b)
    flight.schedule()
    flight.schedule()
    flight.commit()
    that("tokens and placeholders of the victim", (len(b.output_token_ids), b.num_placeholders)).gives((1, 0))
    flight.land()


def test_random_load(room, sky):
    """Fixed: any requests, stops and aborts: every step computes what is known or on its way, and all is served."""
    sky.survives(room.fixed(expose, FixedStaleScheduler))
