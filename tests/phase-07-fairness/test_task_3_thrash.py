"""Phase 7, task 3: incident 3, bucket thrash."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.broken import ThrashScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that runs the shortest bucket only, and on one that runs the longest only."""
    room.exposes(expose, ThrashScheduler, 3)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that throw nothing away, whatever else they do."""
    room.passes(expose, 3)


def test_two_lengths_share_every_step(room, request_of):
    """Fixed: prompts of 120 and 50 tokens, 100 new each: 100 steps, 170 prefill tokens, no preemption."""
    create = room.fixed(expose, FixedThrashScheduler)
    tally = room.run(create(num_blocks=64), [request_of(0, 120, 100), request_of(1, 50, 100)])
    that("steps", tally.num_steps).gives(100)
    that("prefill tokens", tally.num_prefill_tokens).gives(170)
    that("preemptions", tally.num_preemptions).gives(0)


def test_four_lengths_one_of_them_first(room, request_of):
    """Fixed: a prompt of 100 tokens, then three of 50, 51 and 52: none is preempted, nothing is computed twice."""
    create = room.fixed(expose, FixedThrashScheduler)
    arrivals = [(step, request_of(step, prompt, 40)) for step, prompt in enumerate([100, 50, 51, 52])]
    tally = room.run(create(num_blocks=64), arrivals=arrivals)
    that("prefill tokens", tally.num_prefill_tokens).gives(253)
    that("preemptions", tally.num_preemptions).gives(0)
    that("the largest batch", max(tally.batch_sizes)).gives(4)


def test_lengths_far_apart_share_every_step(room, request_of):
    """Fixed: prompts of 10 and 400 tokens are one batch too: none is preempted, nothing is computed twice."""
    create = room.fixed(expose, FixedThrashScheduler)
    tally = room.run(create(num_blocks=64), [request_of(0, 10, 40), request_of(1, 400, 40)])
    that("prefill tokens", tally.num_prefill_tokens).gives(410)
    that("preemptions", tally.num_preemptions).gives(0)
    that("steps", tally.num_steps).gives(40)


def test_twelve_lengths_share_every_step(room, request_of):
    """Fixed: twelve requests of twelve lengths share every step."""
    create = room.fixed(expose, FixedThrashScheduler)
    tally = room.run(create(num_blocks=64), [request_of(number, 10 + number, 40) for number in range(12)])
    that("requests in each step", tally.batch_sizes).gives([12] * 40)
    that("preemptions", tally.num_preemptions).gives(0)


def test_random_load(room):
    """Fixed: any requests, any pool: every request is served, and the books agree."""
    room.survives(room.fixed(expose, FixedThrashScheduler))
