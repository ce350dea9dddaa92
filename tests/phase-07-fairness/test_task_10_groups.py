"""Phase 7, task 10: batches of one group; the others are deferred, and keep their places."""

from __future__ import annotations

import random

from minicache.course.checks import call, that
from minicache.scheduler.fair import GroupedScheduler


def test_a_batch_is_of_one_group(room, request_of):
    """Text, image, text, image: the texts run together, then the images. Nobody is preempted for it."""
    requests = [request_of(number, group=("text", "image")[number % 2]) for number in range(4)]
    tally = room.run(GroupedScheduler(num_blocks=64), requests)
    that("each step's batch", tally.order).gives([[0, 2]] * 5 + [[1, 3]] * 5)
    that("preemptions", tally.num_preemptions).gives(0)


def test_the_best_ranked_says_which_group_is_next(room, request_of):
    """When the batch has drained, the best-ranked of all that wait is admitted, and whoever is of its group."""
    requests = [
        request_of(0, 10, 2, group="a", priority=1),
        request_of(1, 10, 2, group="b", priority=2),
        request_of(2, 10, 2, group="c", priority=0),
        request_of(3, 10, 2, group="a", priority=3),
        request_of(4, 10, 2, group="b", priority=0),
    ]
    tally = room.run(GroupedScheduler(num_blocks=64), requests)
    batches = [sorted(ids) for ids in tally.order[::2]]
    that("the batches, one after the other", batches).gives([[2], [1, 4], [0, 3]])


def test_who_is_compatible(request_of):
    """is_compatible: anybody with an empty batch, then only the batch's group. head() is None if nobody may join."""
    scheduler = GroupedScheduler(num_blocks=64, max_num_seqs=2)
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
    that("head() when a better-ranked image waits too", scheduler.head() is texts[2]).gives(True)


def test_the_deferred_keep_their_places(room, request_of):
    """An image that came second is served right after the texts, before the images that came after it."""
    requests = [request_of(0, 10, 4, group="text"), *(request_of(number, 10, 2, group="image") for number in (1, 2, 3))]
    tally = room.run(GroupedScheduler(num_blocks=64, max_num_seqs=1), requests)
    that("who runs", [ids[0] for ids in tally.order]).gives([0] * 4 + [1, 1, 2, 2, 3, 3])


def test_rank_counts_within_a_group(request_of):
    """Three texts wait beside a batch of texts: the best-ranked is next, not the one that came first."""
    scheduler = GroupedScheduler(num_blocks=64, max_num_seqs=1)
    scheduler.add_request(request_of("running", 10, 5, group="text"))
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"running": 0})
    for name, priority, group in (("c", 2, "text"), ("x", -1, "image"), ("a", 0, "text"), ("b", 1, "text")):
        scheduler.add_request(request_of(name, 10, 5, priority=priority, group=group))
    order = []
    for _ in range(3):
        order.append(call(scheduler.head).value.request_id)
        scheduler.abort_request(order[-1])
    that("who is next, each aborted in turn", order).gives(["a", "b", "c"])


def test_lines_has_no_empty_ones(request_of):
    """`lines` knows the groups of those that wait, and no other: not of those that run, have ended, or were aborted."""
    scheduler = GroupedScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(4):
        scheduler.add_request(request_of(number, 10, 1, group=f"group {number}"))
    that("the groups in lines", sorted(scheduler.lines)).gives([f"group {number}" for number in range(4)])
    output = scheduler.schedule()
    that("once group 0 is admitted", sorted(scheduler.lines)).gives(["group 1", "group 2", "group 3"])
    scheduler.update_from_output(output, {0: 0})
    scheduler.abort_request(2)
    that("once the only one of group 2 is aborted", sorted(scheduler.lines)).gives(["group 1", "group 3"])


def test_who_has_left_is_not_next(request_of):
    """Requests that are aborted while they wait are never admitted, in no group; a group may come again."""
    scheduler = GroupedScheduler(num_blocks=64)
    for number in range(3):
        scheduler.add_request(request_of(number, group=f"group {number}"))
    call(scheduler.abort_request, 0).gives(True)
    that("who is next", scheduler.head().request_id).gives(1)
    call(scheduler.abort_request, 1).gives(True)
    scheduler.add_request(request_of(1, group="group 0"))
    that("who is next, now", scheduler.head().request_id).gives(2)
    call(scheduler.abort_request, 2).gives(True)
    that("who is next, now", scheduler.head().request_id).gives(1)
    call(scheduler.abort_request, 1).gives(True)
    that("who is next of nobody", scheduler.head()).gives(None)


def test_a_preempted_request_is_deferred_like_others(room, request_of):
    """Two texts outgrow the pool: the worse-ranked is preempted, and waits behind an image that ranks before it."""
    requests = [request_of(0, 80, 20, group="text"), request_of(1, 80, 20, group="text", priority=2)]
    image = request_of("image", 80, 20, group="image", priority=1)
    tally = room.run(GroupedScheduler(num_blocks=10), requests, arrivals=[(1, image)])
    that("preemptions", tally.num_preemptions).gives(1)
    that("the order in which they end", list(tally.finished)).gives([0, "image", 1])


def test_random_load_in_many_groups(room):
    """Any requests of four groups, any pool, both preemptions: everybody is served, and the books agree."""
    room.survives(GroupedScheduler, groups=("text", "image", "audio", "video"))


def test_no_batch_ever_mixes(request_of):
    """Random requests of three groups, with preemptions and aborts: in no step do two groups share the batch."""
    for seed in range(10):
        rng = random.Random(seed)
        scheduler = GroupedScheduler(num_blocks=8, block_size=4, max_num_seqs=4)
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
            that(f"groups in step {turn}", len(groups) <= 1).gives(True)
            scheduler.check()
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        that("whether all were served", scheduler.has_unfinished).gives(False)
