"""Phase 7, task 9: an order: priority, then arrival; the best is served first, and the worst is preempted first."""

from __future__ import annotations

import random

import pytest

from minicache.course.checks import call, that
from minicache.scheduler.fair import RankedScheduler


def step(scheduler):
    """One step, whose tokens are all 0. Its output."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    scheduler.check()
    return output


def one_at_a_time(requests, **options):
    """The order in which a scheduler with one seat serves them."""
    scheduler = RankedScheduler(num_blocks=64, max_num_seqs=1, **options)
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


def test_priority_arrival_and_who_was_added_first(request_of):
    """Lower priority first; among equals, the earlier arrival_time; among those, who was added first."""
    requests = [
        request_of("a", priority=1, arrival_time=0.0),
        request_of("b", priority=0, arrival_time=9.0),
        request_of("c", priority=0, arrival_time=3.5),
        request_of("d", priority=-2, arrival_time=100.0),
        request_of("e", priority=0, arrival_time=3.5),
        request_of("f", priority=1, arrival_time=-1.0),
    ]
    that("the order in which they are served", one_at_a_time(requests)).gives(list("dcebfa"))


def test_rank_is_comparable(request_of):
    """rank() orders any two requests of a scheduler, and never calls two of them equal."""
    scheduler = RankedScheduler(num_blocks=64)
    requests = [request_of(number, priority=number % 2, arrival_time=number // 4) for number in range(16)]
    for request in requests:
        scheduler.add_request(request)
    got = [request.request_id for request in sorted(requests, key=lambda each: call(scheduler.rank, each).value)]
    by_hand = [*range(0, 16, 2), *range(1, 16, 2)]
    that("ids, sorted by rank", got).gives(by_hand)
    that("ranks that are different", len({scheduler.rank(each) for each in requests})).gives(16)


def test_without_priorities_it_is_first_come_first_served(room, request_of):
    """Equal requests, memory for three: they end in the order in which they came, and the first is never preempted."""
    requests = [request_of(number, 30, 40) for number in range(8)]
    tally = room.run(RankedScheduler(num_blocks=12), requests)
    that("the order in which they end", list(tally.finished)).gives(list(range(8)))
    that("preemptions of request 0", requests[0].num_preemptions).gives(0)


def test_a_late_urgent_request_is_next(request_of):
    """A request of a lower priority goes before all that wait, but takes no running request's place."""
    scheduler = RankedScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(3):
        scheduler.add_request(request_of(number, 10, 3, priority=5))
    step(scheduler)
    scheduler.add_request(request_of("urgent", 10, 3, priority=0))
    got = [next(iter(step(scheduler).num_scheduled_tokens)) for _ in range(11)]
    that("who runs in steps 1 to 11", got).gives([0, 0, "urgent", "urgent", "urgent", 1, 1, 1, 2, 2, 2])


def test_the_worst_ranked_is_preempted(request_of):
    """10 blocks, two prompts of 80 tokens: the urgent one keeps its place, though it came second."""
    scheduler = RankedScheduler(num_blocks=10)
    scheduler.add_request(request_of("old", 80, 20, priority=1))
    scheduler.add_request(request_of("urgent", 80, 20, priority=0))
    that("who is admitted in step 0", set(step(scheduler).num_scheduled_tokens)).gives({"old", "urgent"})
    that("the batch, the best first", [each.request_id for each in scheduler.running]).gives(["urgent", "old"])
    output = step(scheduler)
    that("who is preempted in step 1", output.preempted).gives(["old"])
    that("who runs in step 1", output.num_scheduled_tokens).gives({"urgent": 1})


def test_an_urgent_one_that_comes_later_stands_before_the_others(request_of):
    """A batch of three, joined by a better-ranked one: the worst-ranked is preempted first, not the newest."""
    scheduler = RankedScheduler(num_blocks=9, block_size=4)
    for number in range(3):
        scheduler.add_request(request_of(number, 7, 30, priority=number))
    step(scheduler)
    scheduler.add_request(request_of("urgent", 8, 30, priority=-1))
    step(scheduler)
    that("the batch", [each.request_id for each in scheduler.running]).gives(["urgent", 0, 1, 2])
    preempted = [request_id for _ in range(8) for request_id in step(scheduler).preempted]
    that("who is preempted first", preempted[:2]).gives([2, 1])


def test_a_victim_comes_back_by_its_rank(request_of):
    """A preempted request waits where its rank puts it: behind a better-ranked one that came after it."""
    scheduler = RankedScheduler(num_blocks=10)
    scheduler.add_request(request_of("first", 80, 40, priority=0))
    scheduler.add_request(request_of("victim", 80, 40, priority=2))
    step(scheduler)
    scheduler.add_request(request_of("later", 80, 40, priority=1))
    that("who is preempted in step 1", step(scheduler).preempted).gives(["victim"])
    that("who is next", scheduler.head().request_id).gives("later")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_has_left_is_not_next(request_of, preemption):
    """Requests that are aborted while they wait, new or preempted, are never admitted; their ids may come again."""
    scheduler = RankedScheduler(num_blocks=10, preemption=preemption, num_host_blocks=10)
    for number in range(4):
        scheduler.add_request(request_of(number, 80, 20, priority=number))
    step(scheduler)
    step(scheduler)
    that("who waits after step 1", sorted(scheduler.waiting)).gives([1, 2, 3])
    call(scheduler.abort_request, 1).gives(True)
    that("who is next", scheduler.head().request_id).gives(2)
    scheduler.add_request(request_of(1, 80, 20, priority=9))
    call(scheduler.abort_request, 2).gives(True)
    that("who is next, now", scheduler.head().request_id).gives(3)
    call(scheduler.abort_request, 3).gives(True)
    that("who is next, now", scheduler.head().request_id).gives(1)
    call(scheduler.abort_request, 1).gives(True)
    that("who is next of nobody", scheduler.head()).gives(None)
    call(scheduler.abort_request, 1).gives(False)


def test_many_come_and_go_while_one_waits(request_of):
    """20,000 requests come and are aborted behind one that waits; after that, 3 more are served by rank."""
    scheduler = RankedScheduler(num_blocks=64, max_num_seqs=1)
    scheduler.add_request(request_of("running", 10, 50))
    scheduler.add_request(request_of("waiting", 10, 1))
    step(scheduler)
    for number in range(20_000):
        scheduler.add_request(request_of("guest", priority=number % 3, arrival_time=float(-number)))
        scheduler.abort_request("guest")
    for name in ("last", "middle", "urgent"):
        scheduler.add_request(request_of(name, 10, 1, priority={"last": 2, "middle": 1, "urgent": -1}[name]))
    order = []
    for _ in range(60):
        if scheduler.has_unfinished:
            order += [each for each in step(scheduler).num_scheduled_tokens if each not in order]
    that("the order in which they are served", order).gives(["running", "urgent", "waiting", "middle", "last"])


def test_random_requests_are_admitted_by_rank(request_of):
    """Any priorities and arrivals, preemptions in between: whoever is admitted ranks before all who wait."""
    for seed in range(20):
        rng = random.Random(seed)
        scheduler = RankedScheduler(num_blocks=rng.randint(6, 12), block_size=4, max_num_seqs=4)
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
            that(f"step {turn}: who is admitted ranks before all who wait", [by_hand(each) for each in new]).gives(
                sorted(by_hand(each) for each in new)
            )
            that("and nobody better waits", not new or not waiting or by_hand(new[-1]) < min(waiting)).gives(True)
            ranks = [by_hand(each) for each in scheduler.running]
            that("the batch is in the order of rank", ranks).gives(sorted(ranks))
        that("whether all were served", scheduler.has_unfinished).gives(False)


def by_hand(request):
    """The rank, worked out here."""
    return request.priority, request.arrival_time, request.arrival_index


def test_random_load(room):
    """Any requests, any pool, both preemptions: everybody is served, and the books agree."""
    room.survives(RankedScheduler)
