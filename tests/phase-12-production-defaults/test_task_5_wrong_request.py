"""Phase 12, task 5: incident 11, a token goes to the request that took its own one's slot."""

from __future__ import annotations

from minicache_course.checks import that
from minicache_course.incidents.async_broken import WrongReceiverScheduler
from minicache_course.incidents.case_11_receiver import FixedReceiverScheduler, expose


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that gives tokens to whichever request has the slot, or the row, by then."""
    room.exposes(expose, WrongReceiverScheduler, 11)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that give each token to its request, with preemptions or without."""
    room.passes(expose, 11)


def test_the_victim_gets_its_token(room, sky):
    """Fixed: an urgent request takes the slot; the token on its way goes to the victim, and to no other."""
    create = room.fixed(expose, FixedReceiverScheduler)
    slow, urgent = sky.request("slow", priority=1), sky.request("urgent")
    flight = sky.flight(create(num_blocks=16, block_size=4, max_num_seqs=1), slow)
    flight.step()
    flight.step()
    flight.add(urgent)
    flight.step()
    that("the step of the urgent request", flight.rows[2]).gives({"urgent": 4})
    that("tokens of the victim", len(slow.output_token_ids)).gives(2)
    that("tokens of the urgent one", urgent.output_token_ids).gives([])
    flight.land()


def test_two_slots_change_hands_at_once(room, sky):
    """Fixed: one slot changes hands in each of two steps, and the other requests keep theirs."""
    create = room.fixed(expose, FixedReceiverScheduler)
    scheduler = create(num_blocks=32, block_size=4, max_num_seqs=3)
    flight = sky.flight(scheduler, *(sky.request(number, priority=5) for number in range(3)))
    flight.step()
    flight.step()
    flight.add(sky.request("u", priority=1), sky.request("v", priority=1))
    flight.step()
    flight.step()
    that("the steps of the two urgent requests", [set(row) for row in flight.rows[2:4]]).gives(
        [{0, 1, "u"}, {0, "u", "v"}]
    )
    flight.land()


def test_a_token_may_finish_its_victim(room, sky):
    """Fixed: the token on its way is the victim's stop token: the victim leaves the queue."""
    create = room.fixed(expose, FixedReceiverScheduler)
    flight = sky.flight(create(num_blocks=16, block_size=4, max_num_seqs=1), sky.request("slow", stop=1, priority=1))
    flight.step()
    flight.step()
    flight.add(sky.request("urgent"))
    flight.schedule()
    that("the requests that finish", [each.request_id for each in flight.commit()]).gives(["slow"])
    that("requests that wait", flight.scheduler.num_waiting).gives(0)
    flight.land()


def test_an_id_may_be_used_again(room, sky):
    """Fixed: a client leaves and asks again with the same id: the new request does not get the old one's token."""
    create = room.fixed(expose, FixedReceiverScheduler)
    flight = sky.flight(create(num_blocks=16, block_size=4, max_num_seqs=2), sky.request("a"), sky.request("b"))
    flight.schedule()
    flight.schedule()
    flight.scheduler.abort_request("a")
    flight.add(again := sky.request("a"))
    flight.commit()
    that("tokens of the new request", again.output_token_ids).gives([])
    flight.land()


def test_the_receiver_is_found_by_the_slot_of_then(room, sky):
    """Fixed: slots are not places in the batch: the first request has left, and the others keep slots 1 and 2."""
    create = room.fixed(expose, FixedReceiverScheduler)
    requests = [sky.request("short", 4, 1), sky.request("b"), sky.request("c")]
    flight = sky.flight(create(num_blocks=16, block_size=4, max_num_seqs=3), *requests)
    for _ in range(4):
        flight.step()
    that("the slots in use", sorted(flight.scheduler.slots)).gives([1, 2])
    flight.land()


def test_random_load(room, sky):
    """Fixed: any requests, priorities, stops and aborts: every answer has its own tokens, and all of them."""
    sky.survives(room.fixed(expose, FixedReceiverScheduler))
