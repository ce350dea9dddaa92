"""Phase 7, task 10: one order, of admission and of preemption, and batches of one compatibility class."""

from __future__ import annotations

import random

import pytest

from minicache.scheduler.fair import PriorityScheduler
from minicache_course.checks import call, that
from minicache_course.follow import following_schedulers
from minicache_course.seeds import fresh


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the schedulers, the requests and the steps so far."""
    with following_schedulers():
        yield


def step(scheduler):
    """One step, whose tokens are all 0. Its output."""
    output = scheduler.schedule()
    scheduler.check()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    scheduler.check()
    return output


def one_at_a_time(requests):
    """The order in which a scheduler with one batch slot serves them."""
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    for request in requests:
        scheduler.add_request(request)
    served = []
    for _ in range(1000):
        if not scheduler.has_unfinished:
            return served
        head = call(scheduler.head).value
        output = step(scheduler)
        for request_id in output.num_scheduled_tokens:
            if request_id not in served:
                that("head() before the step that admits", head and head.request_id).gives(request_id)
                served.append(request_id)
    return served


# --- the order ------------------------------------------------------------------------------------------------------


def test_priority_then_arrival_time_then_arrival_index(request_of):
    """Lower priority first; among equals, the earlier arrival_time; among those, the one that was added first."""
    requests = [
        request_of("a", priority=1, arrival_time=0.0),
        request_of("b", priority=0, arrival_time=9.0),
        request_of("c", priority=0, arrival_time=3.5),
        request_of("d", priority=-2, arrival_time=100.0),
        request_of("e", priority=0, arrival_time=3.5),
        request_of("f", priority=1, arrival_time=-1.0),
    ]
    that("the order in which they are served", one_at_a_time(requests)).gives(list("dcebfa"))


def test_arrival_times_are_seconds_with_all_their_digits(request_of):
    """Of two that arrive within a millisecond, the earlier is served first, though it was added last."""
    requests = [request_of("late", arrival_time=7.0002), request_of("early", arrival_time=7.0001)]
    that("the order in which they are served", one_at_a_time(requests)).gives(["early", "late"])


def test_no_two_keys_are_equal(request_of):
    """priority_key() orders any two requests of a scheduler, children of one parent (phase 8) included."""
    scheduler = PriorityScheduler(num_blocks=64)
    requests = [request_of(number, priority=number % 2, arrival_time=number // 4) for number in range(16)]
    for request in requests:
        scheduler.add_request(request)
    got = [
        request.request_id for request in sorted(requests, key=lambda each: call(scheduler.priority_key, each).value)
    ]
    by_hand = [*range(0, 16, 2), *range(1, 16, 2)]
    that("ids, sorted by priority_key", got).gives(by_hand)
    that("keys that are different", len({scheduler.priority_key(each) for each in requests})).gives(16)
    child = request_of("child")
    child.arrival_index, child.fork_index = 0, 1  # as a fork of request 0 has them
    behind = scheduler.priority_key(requests[0]) < scheduler.priority_key(child)
    that("whether a child comes behind its parent", behind).gives(True)


def test_without_priorities_it_is_first_come_first_served(room, request_of):
    """Equal requests, memory for three: they finish in the order of arrival, and the first is never preempted."""
    requests = [request_of(number, 30, 40) for number in range(8)]
    tally = room.run(PriorityScheduler(num_blocks=12), requests)
    that("the order in which they finish", list(tally.finished)).gives(list(range(8)))
    that("preemptions of request 0", requests[0].num_preemptions).gives(0)


def test_a_late_urgent_request_is_next(request_of):
    """A request of a lower priority goes before all that wait, but takes no running request's slot."""
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(3):
        scheduler.add_request(request_of(number, 10, 3, priority=5))
    step(scheduler)
    scheduler.add_request(request_of("urgent", 10, 3, priority=0))
    got = [next(iter(step(scheduler).num_scheduled_tokens)) for _ in range(11)]
    that("scheduled in steps 1 to 11", got).gives([0, 0, "urgent", "urgent", "urgent", 1, 1, 1, 2, 2, 2])


def test_the_lowest_priority_is_preempted(request_of):
    """10 blocks, two prompts of 80 tokens: the urgent one keeps its slot, though it came second."""
    scheduler = PriorityScheduler(num_blocks=10)
    scheduler.add_request(request_of("old", 80, 20, priority=1))
    scheduler.add_request(request_of("urgent", 80, 20, priority=0))
    that("admitted in step 0", set(step(scheduler).num_scheduled_tokens)).gives({"old", "urgent"})
    that("the batch, the best first", [each.request_id for each in scheduler.running]).gives(["urgent", "old"])
    output = step(scheduler)
    that("preempted in step 1", output.preempted).gives(["old"])
    that("scheduled in step 1", output.num_scheduled_tokens).gives({"urgent": 1})


def test_an_urgent_one_that_comes_later_stands_before_the_others(request_of):
    """A batch of three, joined by a more urgent one: the least urgent is preempted first, not the newest."""
    scheduler = PriorityScheduler(num_blocks=9, block_size=4)
    for number in range(3):
        scheduler.add_request(request_of(number, 7, 30, priority=number))
    step(scheduler)
    scheduler.add_request(request_of("urgent", 8, 30, priority=-1))
    step(scheduler)
    that("the batch", [each.request_id for each in scheduler.running]).gives(["urgent", 0, 1, 2])
    preempted = [request_id for _ in range(8) for request_id in step(scheduler).preempted]
    that("preempted first", preempted[:2]).gives([2, 1])


def test_a_victim_keeps_its_key(request_of):
    """A preempted request waits where its priority puts it: behind a more urgent one that came after it."""
    scheduler = PriorityScheduler(num_blocks=10)
    scheduler.add_request(request_of("first", 80, 40, priority=0))
    scheduler.add_request(request_of("victim", 80, 40, priority=2))
    step(scheduler)
    scheduler.add_request(request_of("later", 80, 40, priority=1))
    that("preempted in step 1", step(scheduler).preempted).gives(["victim"])
    that("head()", scheduler.head().request_id).gives("later")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_one_that_has_left_is_not_next(request_of, preemption):
    """Requests that are aborted while they wait, new or preempted, are never admitted; their ids may come again."""
    scheduler = PriorityScheduler(num_blocks=10, preemption=preemption, num_host_blocks=10)
    for number in range(4):
        scheduler.add_request(request_of(number, 80, 20, priority=number))
    step(scheduler)
    step(scheduler)
    that("waiting after step 1", sorted(scheduler.waiting)).gives([1, 2, 3])
    call(scheduler.abort_request, 1).gives(True)
    that("head()", scheduler.head().request_id).gives(2)
    scheduler.add_request(request_of(1, 80, 20, priority=9))
    call(scheduler.abort_request, 2).gives(True)
    that("head(), now", scheduler.head().request_id).gives(3)
    call(scheduler.abort_request, 3).gives(True)
    that("head(), now", scheduler.head().request_id).gives(1)
    call(scheduler.abort_request, 1).gives(True)
    that("head() of an empty queue", scheduler.head()).gives(None)
    call(scheduler.abort_request, 1).gives(False)


def test_random_requests_are_admitted_by_priority(request_of):
    """Any priorities and arrivals, preemptions in between: each admitted one comes before all that still wait."""
    for seed in range(20):
        rng = random.Random(fresh(seed))
        scheduler = PriorityScheduler(num_blocks=rng.randint(6, 12), block_size=4, max_num_seqs=4)
        number = 0
        for turn in range(500):
            while turn < 40 and rng.random() < 0.4:
                priority, arrival = rng.randint(0, 2), float(rng.randint(0, 9))
                request = request_of(
                    number, rng.randint(1, 12), rng.randint(1, 12), priority=priority, arrival_time=arrival
                )
                scheduler.add_request(request)
                number += 1
            if not scheduler.has_unfinished:
                continue
            before = {each.request_id for each in scheduler.running}
            output = step(scheduler)
            new = [each for each in output.scheduled if each.request_id not in before]
            waiting = [by_hand(each) for each in scheduler.waiting.values()]
            that(f"step {turn}: keys of the admitted", [by_hand(each) for each in new]).gives(
                sorted(by_hand(each) for each in new)
            )
            that("whether none better waits", not new or not waiting or by_hand(new[-1]) < min(waiting)).gives(True)
            keys = [by_hand(each) for each in scheduler.running]
            that("keys of the batch", keys).gives(sorted(keys))
        that("whether any is unfinished", scheduler.has_unfinished).gives(False)


def by_hand(request):
    """The key, worked out here."""
    return request.priority, request.arrival_time, request.arrival_index


# --- compatibility --------------------------------------------------------------------------------------------------


def test_a_batch_is_of_one_group(room, request_of):
    """Text, image, text, image: the texts run together, then the images. None is preempted for it."""
    requests = [request_of(number, group=("text", "image")[number % 2]) for number in range(4)]
    tally = room.run(PriorityScheduler(num_blocks=64), requests)
    that("each step's batch", tally.order).gives([[0, 2]] * 5 + [[1, 3]] * 5)
    that("preemptions", tally.num_preemptions).gives(0)


def test_the_best_of_all_decides_which_group_is_next(room, request_of):
    """When the batch has drained, the best of all that wait is admitted, and others of its class."""
    requests = [
        request_of(0, 10, 2, group="a", priority=1),
        request_of(1, 10, 2, group="b", priority=2),
        request_of(2, 10, 2, group="c", priority=0),
        request_of(3, 10, 2, group="a", priority=3),
        request_of(4, 10, 2, group="b", priority=0),
    ]
    tally = room.run(PriorityScheduler(num_blocks=64), requests)
    batches = [sorted(ids) for ids in tally.order[::2]]
    that("the batches, one after the other", batches).gives([[2], [1, 4], [0, 3]])


def test_which_requests_are_compatible(request_of):
    """is_compatible: any with an empty batch, then only the batch's class. head() is None if none may join."""
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=2)
    texts = [request_of(number, 10, 5, group="text") for number in range(3)]
    image = request_of("image", 10, 5, group="image", priority=-1)
    for request in (texts[0], texts[1]):
        scheduler.add_request(request)
    that("with an empty batch", [call(scheduler.is_compatible, each).value for each in (texts[0], image)]).gives(
        [True, True]
    )
    output = scheduler.schedule()
    scheduler.update_from_output(output, {0: 0, 1: 0})
    scheduler.add_request(image)
    that("head() when only an image waits, and texts run", scheduler.head()).gives(None)
    scheduler.add_request(texts[2])
    that("with texts in the batch", [call(scheduler.is_compatible, each).value for each in (texts[2], image)]).gives(
        [True, False]
    )
    that("whether head() is a text when a more urgent image waits too", scheduler.head() is texts[2]).gives(True)


@pytest.mark.parametrize("num_waiting", [10, 400])
def test_the_queue_is_asked_for_its_first(request_of, counting_queue, num_waiting):
    """A text runs, images wait, and a text behind them all: `head` finds it without going through the queue."""
    scheduler = PriorityScheduler(num_blocks=64)
    queue = counting_queue(scheduler)
    scheduler.add_request(request_of("running", group="text"))
    step(scheduler)
    for number in range(num_waiting):
        scheduler.add_request(request_of(number, group="image"))
    scheduler.add_request(request_of("next", group="text"))
    before = queue.num_seen
    that("head()", call(scheduler.head).value.request_id).gives("next")
    that(f"of {num_waiting + 1} requests, those met by going through `waiting`", queue.num_seen - before).gives(0)


def test_the_deferred_keep_their_positions(room, request_of):
    """An image that came second is served right after the texts, before the images that came after it."""
    requests = [request_of(0, 10, 4, group="text"), *(request_of(number, 10, 2, group="image") for number in (1, 2, 3))]
    tally = room.run(PriorityScheduler(num_blocks=64, max_num_seqs=1), requests)
    that("each step's request", [ids[0] for ids in tally.order]).gives([0] * 4 + [1, 1, 2, 2, 3, 3])


def test_priority_counts_within_a_group(request_of):
    """Three texts wait while a batch of texts runs: the most urgent is next, not the one that came first."""
    scheduler = PriorityScheduler(num_blocks=64, max_num_seqs=1)
    scheduler.add_request(request_of("running", 10, 5, group="text"))
    step(scheduler)
    for name, priority, group in (("c", 2, "text"), ("x", -1, "image"), ("a", 0, "text"), ("b", 1, "text")):
        scheduler.add_request(request_of(name, 10, 5, priority=priority, group=group))
    order = []
    for _ in range(3):
        order.append(call(scheduler.head).value.request_id)
        scheduler.abort_request(order[-1])
    that("head(), each aborted in turn", order).gives(["a", "b", "c"])


def test_a_preempted_request_is_deferred_like_others(room, request_of):
    """Two texts outgrow the pool: the less urgent is preempted, and waits behind an image that comes before it."""
    requests = [request_of(0, 80, 20, group="text"), request_of(1, 80, 20, group="text", priority=2)]
    image = request_of("image", 80, 20, group="image", priority=1)
    tally = room.run(PriorityScheduler(num_blocks=10), requests, arrivals=[(1, image)])
    that("preemptions", tally.num_preemptions).gives(1)
    that("the order in which they finish", list(tally.finished)).gives([0, "image", 1])


def test_no_batch_ever_mixes(request_of):
    """Random requests of three classes, with preemptions and aborts: in no step do two classes share the batch."""
    for seed in range(10):
        rng = random.Random(fresh(seed))
        scheduler = PriorityScheduler(num_blocks=8, block_size=4, max_num_seqs=4)
        number = 0
        for turn in range(200):
            while turn < 40 and rng.random() < 0.4:
                options = {"group": rng.choice("abc"), "priority": rng.randint(0, 2)}
                scheduler.add_request(request_of(number, rng.randint(1, 12), rng.randint(1, 12), **options))
                number += 1
            if number and rng.random() < 0.1:
                scheduler.abort_request(rng.randrange(number))
            if not scheduler.has_unfinished:
                continue
            output = scheduler.schedule()
            groups = {each.group for each in (*output.scheduled, *scheduler.running)}
            that(f"whether all requests of step {turn} are of one group", len(groups) <= 1).gives(True)
            scheduler.check()
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        that("whether any is unfinished", scheduler.has_unfinished).gives(False)


def test_random_load_in_many_groups(room):
    """Any requests of four classes, any pool, both preemptions: every request is served, and the books agree."""
    room.survives(PriorityScheduler, groups=("text", "image", "audio", "video"))
