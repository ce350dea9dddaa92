"""Phase 7, task 6: incident 6, a queue that is never empty."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.broken import LivelockScheduler
from minicache_course.incidents.case_6_livelock import FixedLivelockScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that loops forever."""
    room.exposes(expose, LivelockScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that get through both groups, whatever else they do."""
    room.passes(expose, 6)


def test_groups_take_turns(room, request_of):
    """Fixed: a text and an image request run one after the other, and never together."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of(0, group="text"), request_of(1, group="image")]
    tally = room.run(create(num_blocks=64), requests)
    that("each step's batch", tally.order).gives([[0]] * 5 + [[1]] * 5)


def test_the_deferred_keep_their_positions(room, request_of):
    """Fixed: text, image, text, image: the texts run together, then the images, in the order of arrival."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of(number, group=("text", "image")[number % 2]) for number in range(4)]
    tally = room.run(create(num_blocks=64), requests)
    that("each step's batch", tally.order).gives([[0, 2]] * 5 + [[1, 3]] * 5)


def test_the_deferred_is_first_when_the_batch_has_drained(room, request_of):
    """Fixed: two slots; text, image, and two texts more: once the first two texts have finished, the image is next."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of(number, group="image" if number == 1 else "text") for number in range(4)]
    tally = room.run(create(num_blocks=64, max_num_seqs=2), requests)
    that("each step's batch", tally.order).gives([[0, 2]] * 5 + [[1]] * 5 + [[3]] * 5)


def test_one_group_alone_is_first_come_first_served(room, request_of):
    """Fixed: requests of one group are admitted as ever: until slots, tokens or blocks run out, in order."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of(number, 30, 2) for number in range(5)]
    that("two slots", room.run(create(num_blocks=64, max_num_seqs=2), requests).order[0]).gives([0, 1])
    requests = [request_of(number, 30, 2) for number in range(5)]
    that("70 tokens", room.run(create(num_blocks=64, max_num_batched_tokens=70), requests).order[0]).gives([0, 1])
    requests = [request_of(number, 30, 2) for number in range(5)]
    that("7 blocks", room.run(create(num_blocks=7), requests).order[0]).gives([0, 1, 2])


def test_none_of_the_group_bypasses_a_large_one(room, request_of):
    """Fixed: a large request finds no blocks, or no tokens in the step: small ones of its group wait behind it."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of("first", 30, 5), request_of("large", 112, 5), request_of("small", 10, 5)]
    tally = room.run(create(num_blocks=8), requests)
    that("the first steps' batches, 8 blocks", tally.order[:6]).gives([["first"]] * 5 + [["large", "small"]])
    requests = [request_of("first", 30, 5), request_of("large", 50, 5), request_of("small", 10, 5)]
    tally = room.run(create(num_blocks=64, max_num_batched_tokens=60), requests)
    that("the first steps' batches, 60 tokens", tally.order[:2]).gives([["first"], ["first", "large"]])


def test_one_that_has_outgrown_the_budget_comes_back(room, request_of):
    """Fixed: steps of 16 tokens; a victim has 19 tokens by then: it comes back when the batch is empty."""
    create = room.fixed(expose, FixedLivelockScheduler)
    requests = [request_of(0, 12, 25), request_of(1, 12, 25)]
    tally = room.run(create(num_blocks=10, block_size=4, max_num_batched_tokens=16), requests, max_steps=200)
    that("the order in which they finish", list(tally.finished)).gives([0, 1])
    that("tokens of each", [len(request.output_token_ids) for request in requests]).gives([25, 25])


def test_random_load(room):
    """Fixed: any requests of three classes, any pool: every request is served, and the books agree."""
    room.survives(room.fixed(expose, FixedLivelockScheduler), groups=("text", "image", "audio"))
