"""Phase 6, task 4: when blocks run out, the newest request is preempted, and computed again later."""

from __future__ import annotations

import random

import pytest

from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def ids(requests):
    return [request.request_id for request in requests]


# Two prompts of 80 tokens in 10 blocks of 16


def two_of_80(paged, a_request, max_tokens=100):
    requests = [a_request(n, 80, max_tokens) for n in range(2)]
    return requests, paged(requests, num_blocks=10, block_size=16)


def test_the_last_block_is_freed_first(paged, a_request):
    """The victim's blocks 1, 2, 3 become free as 3, 2, 1, as `release` frees them; and `release` is asked to.

    The beginning of a sequence, which others may share, is then overwritten last (phase 8).
    """
    seen = []

    class Noting(PagedScheduler):
        def release(self, request):
            seen.append((request.request_id, list(request.block_ids)))
            super().release(request)

    scheduler = paged([a_request("old", 4), a_request("young", 12)], cls=Noting, num_blocks=4)
    scheduler.update_from_output(scheduler.schedule(), {"old": 7, "young": 7})
    call(scheduler.preempt, scheduler.running[-1], SchedulerOutput()).gives(None)
    that("calls of release: (id, blocks)", seen).gives([("young", [1, 2, 3])])
    that("the free blocks, in the order in which they are allocated", scheduler.pool.allocate(3)).gives([3, 2, 1])


def test_the_second_is_preempted(paged, a_request, a_step):
    """Step 0 computes 80 + 80 tokens and fills the pool. In step 1 request 0 needs a sixth block: 1 is preempted."""
    _, scheduler = two_of_80(paged, a_request)
    output = a_step(scheduler)
    told = "num_scheduled_tokens and preempted of step"
    that(f"{told} 0", (output.num_scheduled_tokens, output.preempted)).gives(({0: 80, 1: 80}, []))
    output = a_step(scheduler)
    that(f"{told} 1", (output.num_scheduled_tokens, output.preempted)).gives(({0: 1}, [1]))


def test_a_victim_waits_without_blocks_and_keeps_its_output(paged, a_request, a_step):
    """It waits, holds no block, has nothing computed, and keeps what it generated."""
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    a_step(scheduler)
    victim = requests[1]
    that("status", victim.status.name).gives("WAITING")
    that("blocks", victim.block_ids).gives([])
    that("num_computed_tokens", victim.num_computed_tokens).gives(0)
    that("num_preemptions of both", [each.num_preemptions for each in requests]).gives([0, 1])
    that("generated tokens", victim.output_token_ids).gives([7])
    that("the batch and the queue", (ids(scheduler.running), list(scheduler.waiting))).gives(([0], [1]))
    that("free blocks", scheduler.pool.num_free).gives(4)
    that("swapped_out", call(scheduler.schedule).value.swapped_out).gives({})


def test_a_victim_resumes_and_computes_81_tokens(paged, a_request, a_step):
    """With 20 tokens each, request 0 finishes in step 19, and 1 resumes in step 20: 81 tokens to compute."""
    requests, scheduler = two_of_80(paged, a_request, max_tokens=20)
    work = [dict(a_step(scheduler).num_scheduled_tokens) for _ in range(39)]
    that("steps 1 … 19", work[1:20]).gives([{0: 1}] * 19)
    that("steps 20 and 21", work[20:22]).gives([{1: 81}, {1: 1}])
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives([20, 20])
    that("finish reasons", [each.finish_reason for each in requests]).gives(["length", "length"])
    that("used blocks", scheduler.pool.num_used).gives(0)


# The victims


def test_the_newest_is_preempted(paged, a_request, a_step):
    """Four requests fill the pool. The first grows: the fourth is preempted, and no other."""
    scheduler = paged([a_request(n, size) for n, size in enumerate([4, 2, 2, 2])], num_blocks=4)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([3])
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 1, 1: 1, 2: 1})
    that("the batch", ids(scheduler.running)).gives([0, 1, 2])


def test_two_that_grow_cost_two(paged, a_request, a_step):
    """Four requests with full blocks, and none free: the first two grow, the last two go, the last one first."""
    scheduler = paged([a_request(n, 4) for n in range(4)], num_blocks=4)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([3, 2])
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 1, 1: 1})
    that("the queue", list(scheduler.waiting)).gives([2, 3])


def test_victims_stand_before_later_arrivals(paged, a_request, a_step):
    """A victim is older than every waiting request: it is the next, and no later arrival gets its blocks."""
    scheduler = paged([a_request(n, 4) for n in range(4)], num_blocks=4)
    a_step(scheduler)
    scheduler.add_request(a_request("new", 1))
    a_step(scheduler)
    that("the queue", list(scheduler.waiting)).gives([2, 3, "new"])
    scheduler.abort_request(1)
    output = a_step(scheduler)
    that("admitted when 2 of 4 blocks are free", output.num_scheduled_tokens).gives({0: 1, 2: 5})


def test_a_request_may_be_its_own_victim(paged, a_request, a_step):
    """The last of the batch needs a block and none is free: it is preempted, and the older one goes on."""
    requests = [a_request("old", 2), a_request("young", 4)]
    scheduler = paged(requests, num_blocks=2)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives(["young"])
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"old": 1})
    that("finished", output.finished).gives([])
    seen = requests[1].status.name, requests[1].block_ids, list(scheduler.waiting)
    that("its status and blocks, and the queue", seen).gives(("WAITING", [], ["young"]))


class Hungry(PagedScheduler):
    """A stage in which request 0 misses `missing` blocks."""

    missing = 0

    def blocks_missing(self, request):
        return self.missing if request.request_id == 0 else super().blocks_missing(request)


def hungry(paged, requests, missing, a_step, **options):
    """A scheduler that has run a step, and in which request 0 now misses so many blocks."""
    scheduler = paged(requests, cls=Hungry, **options)
    scheduler.missing = 1
    a_step(scheduler)
    scheduler.missing = missing
    return scheduler


@pytest.mark.parametrize(
    ("missing", "victims"), [(1, []), (2, []), (3, [4]), (4, [4, 3]), (6, [4, 3]), (7, [4, 3, 2])], ids=str
)
def test_make_room_takes_as_many_as_it_must(paged, a_request, a_step, missing, victims):
    """Two blocks are free; requests 1 … 4 hold 2, 1, 3 and 1. For so many blocks so many must go, and no more."""
    requests = [a_request(n, size) for n, size in zip(range(5), [4, 8, 4, 12, 4], strict=True)]
    scheduler = hungry(paged, requests, missing, a_step, num_blocks=10)
    output = SchedulerOutput()
    call(scheduler.make_room, requests[0], output).gives(True)
    that(f"preempted for {missing} blocks", output.preempted).gives(victims)
    that(f"whether at least {missing} blocks are free", scheduler.pool.num_free >= missing).gives(True)
    that("the batch", ids(scheduler.running)).gives([n for n in range(5) if n not in victims])
    that("the queue", list(scheduler.waiting)).gives(victims[::-1])


def test_make_room_asks_again_what_is_missing(paged, a_request, a_step):
    """A preemption may make fewer blocks missing, where they are shared (phase 8): then one victim is enough."""

    class Sharing(PagedScheduler):
        def blocks_missing(self, request):
            return 2 if request.request_id == 0 and len(self.running) == 3 else super().blocks_missing(request)

    scheduler = paged([a_request(n, 4) for n in range(3)], cls=Sharing, num_blocks=3)
    a_step(scheduler)
    output = SchedulerOutput()
    call(scheduler.make_room, scheduler.running[0], output).gives(True)
    that("preempted", output.preempted).gives([2])


def test_make_room_for_the_last_of_the_batch(paged, a_request, a_step):
    """It is its own victim: False, because it was preempted; the older one stays."""
    requests = [a_request("old", 4), a_request("young", 4)]
    scheduler = paged(requests, num_blocks=2)
    a_step(scheduler)
    output = SchedulerOutput()
    call(scheduler.make_room, requests[1], output).gives(False)
    seen = output.preempted, output.finished, ids(scheduler.running), list(scheduler.waiting)
    that("preempted, finished, batch, queue", seen).gives((["young"], [], ["old"], ["young"]))


def test_a_request_can_be_preempted_twice(paged, a_request):
    """Each time counts, and each time it is computed from its beginning; but no token is generated twice."""
    requests = [a_request(0, 3, 4), a_request(1, 4, 8), a_request(2, 4, 8)]
    scheduler = paged(requests, num_blocks=4)
    tally = drive(scheduler, requests=(), max_steps=100)
    that("num_preemptions", [each.num_preemptions for each in requests]).gives([0, 0, requests[2].num_preemptions])
    that("whether request 2 was preempted", requests[2].num_preemptions > 0).gives(True)
    that("preemptions in all", tally.num_preemptions).gives(requests[2].num_preemptions)
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives([4, 8, 8])


# The end of the pool


def test_alone_and_too_large_it_is_finished(paged, a_request, a_step):
    """3 blocks of 4, a prompt of 8 and a long answer: at its 13th token it is finished, as FINISHED_CAPACITY."""
    request = a_request("r", 8)
    scheduler = paged([request], num_blocks=3)
    for _ in range(5):
        that("finished", a_step(scheduler).finished).gives([])
    output = a_step(scheduler)
    seen = output.finished, output.preempted, output.num_scheduled_tokens
    that("finished, preempted, scheduled", seen).gives((["r"], [], {}))
    that("num_preemptions", request.num_preemptions).gives(0)
    that("status", request.status.name).gives("FINISHED_CAPACITY")
    that("finish_reason", request.finish_reason).gives("capacity")
    that("generated tokens", request.output_token_ids).gives([7] * 5)
    that("its blocks, and used ones", (request.block_ids, scheduler.pool.num_used)).gives(([], 0))
    that("has_unfinished", scheduler.has_unfinished).gives(False)


def test_a_prompt_as_large_as_the_pool_gets_one_token(paged, a_request, a_step):
    """It is computed, gets one token, and is finished: that token has no slot."""
    request = a_request("r", 12)
    scheduler = paged([request], num_blocks=3)
    a_step(scheduler)
    a_step(scheduler)
    seen = request.finish_reason, len(request.output_token_ids)
    that("finish_reason, and tokens generated", seen).gives(("capacity", 1))


def test_blocks_of_a_finished_request_admit_the_next(paged, a_request, a_step):
    """No request was preempted, so the same step admits the one that waited for the pool."""
    scheduler = paged([a_request("large", 12), a_request("next", 9)], num_blocks=3)
    a_step(scheduler)
    output = a_step(scheduler)
    seen = output.finished, output.preempted, output.num_scheduled_tokens
    that("finished, preempted, scheduled", seen).gives((["large"], [], {"next": 9}))


def test_all_others_are_preempted_before_it_is_finished(paged, a_request, a_step):
    """More blocks than the pool has: all later arrivals are preempted, and when it is alone it is finished."""
    requests = [a_request(n, 4) for n in range(3)]
    scheduler = hungry(paged, requests, 4, a_step, num_blocks=4)
    output = SchedulerOutput()
    call(scheduler.make_room, requests[0], output).gives(False)
    that("preempted, finished", (output.preempted, output.finished)).gives(([2, 1], [0]))
    that("the batch and the queue", (ids(scheduler.running), list(scheduler.waiting))).gives(([], [1, 2]))


def test_a_long_one_is_finished_and_the_queue_moves_on(paged, a_request):
    """One outgrows the pool, the others need little: all finish within 60 steps. No request waits forever."""
    requests = [a_request("small", 3, 5), a_request("endless", 6, 10**6), a_request("late", 2, 3)]
    tally = drive(paged(num_blocks=4), requests, max_steps=60)
    that("finish reasons", [each.finish_reason for each in requests]).gives(["length", "capacity", "length"])
    that("finished", sorted(tally.finished)).gives(["endless", "late", "small"])
    that("tokens of the endless one: 17 − 6", len(requests[1].output_token_ids)).gives(11)


# What holds for all


def test_one_batch_slot_serves_in_order(paged, a_request):
    """At most one request, three of 10 tokens with 3 new each: 9 steps, in the order of arrival."""
    requests = [a_request(n, 10, 3) for n in range(3)]
    tally = drive(paged(num_blocks=10, max_num_seqs=1), requests, max_steps=100)
    that("the request of each step", [step[0] for step in tally.order]).gives([0, 0, 0, 1, 1, 1, 2, 2, 2])
    that("steps", tally.num_steps).gives(9)


def test_a_victim_can_be_aborted(paged, a_request, a_step):
    """Aborted while it waits: it is gone, and the pool is as it was."""
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    a_step(scheduler)
    free = scheduler.pool.num_free
    call(scheduler.abort_request, 1).gives(True)
    that("free blocks before and after", [free, scheduler.pool.num_free]).gives([4, 4])
    seen = requests[1].finish_reason, list(scheduler.waiting), scheduler.has_unfinished
    that("its finish reason, the queue, has_unfinished", seen).gives(("abort", [], True))


def test_one_that_has_outgrown_the_step_comes_back(paged, a_request):
    """16 tokens a step, preempted with more than that: it is computed in one step, and all finish."""
    requests = [a_request(0, 12, 20), a_request(1, 12, 20)]
    scheduler = paged(requests, num_blocks=11, max_num_batched_tokens=16)
    tally = drive(scheduler, max_steps=200)
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives([20, 20])
    that("whether any request was preempted", tally.num_preemptions > 0).gives(True)
    that("whether more than 16 tokens were computed again", tally.num_prefill_tokens - 24 > 16).gives(True)


def workload(seed, a_request):
    rng = random.Random(fresh(seed))
    block_size = rng.choice([1, 2, 4])
    requests = [a_request(n, rng.randint(1, 12), rng.randint(1, 16)) for n in range(rng.randint(2, 8))]
    largest = max(-(-each.num_prompt_tokens // block_size) for each in requests)
    num_blocks = largest + rng.randint(0, 4)
    options = {"max_num_seqs": rng.choice([1, 2, 8]), "max_num_batched_tokens": rng.choice([12, 40])}
    return requests, {"num_blocks": num_blocks, "block_size": block_size, "watermark": rng.choice([0, 0.3]), **options}


@pytest.mark.parametrize("seed", range(25))
def test_every_request_finishes_in_small_pools(paged, a_request, a_step, seed):
    """Pools barely larger than one request: every step makes progress, in the order of arrival, and all finish.

    A request finishes with max_tokens tokens; or, if these and its prompt do not fit into the whole pool, with as many
    as do, and one more.
    """
    requests, options = workload(seed, a_request)
    scheduler = paged(requests, **options)
    slots = options["num_blocks"] * options["block_size"]
    for step in range(600):
        if not scheduler.has_unfinished:
            break
        output = a_step(scheduler)
        that(f"whether step {step} does something", bool(output.scheduled or output.finished)).gives(True)
        order = [each.arrival_index for each in (*scheduler.running, *scheduler.waiting.values())]
        that(f"arrivals in batch and queue, after step {step}", order).gives(sorted(order))
        used = sum(len(each.block_ids) for each in scheduler.running)
        that(f"used blocks after step {step}", scheduler.pool.num_used).gives(used)
    expected = [min(each.max_tokens, slots - each.num_prompt_tokens + 1) for each in requests]
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives(expected)
    that("used blocks at the end", scheduler.pool.num_used).gives(0)


def test_priority_key_decides_where_a_victim_waits(paged, a_request, a_step):
    """Phase 7's queue has another order: a victim stands where its `priority_key` puts it, not at the head."""

    class ShortPromptsFirst(PagedScheduler):
        def priority_key(self, request):
            return request.num_prompt_tokens, request.arrival_index

    scheduler = paged([a_request(n, size) for n, size in enumerate([4, 8])], cls=ShortPromptsFirst, num_blocks=3)
    a_step(scheduler)
    scheduler.add_request(a_request("short", 6))
    a_step(scheduler)
    that("the queue after the step that preempts 1", list(scheduler.waiting)).gives(["short", 1])
