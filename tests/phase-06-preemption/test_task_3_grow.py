"""Phase 6, task 3: the batch grows, a block at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache_course import scenario
from minicache_course.checks import call, that


def ids(requests):
    return [request.request_id for request in requests]


def held(requests):
    return [len(request.block_ids) for request in requests]


# One request


@pytest.mark.parametrize(
    ("num_tokens", "has", "missing"),
    [(3, 1, 0), (4, 1, 0), (5, 1, 1), (5, 2, 0), (9, 2, 1), (12, 3, 0), (13, 3, 1), (1, 0, 1), (9, 1, 2)],
)
def test_grow_appends_the_missing_blocks(paged, a_request, num_tokens, has, missing):
    """grow adds the blocks that are missing for all its tokens, behind those that it has, and no others."""
    scheduler, request = paged(num_blocks=10), a_request("r", 1)
    request.output_token_ids += [7] * (num_tokens - 1)
    request.block_ids = scheduler.pool.allocate(has)
    scenario.given(f"the request has {num_tokens} tokens and {has} blocks of 4")
    call(scheduler.grow, request, SchedulerOutput()).gives(None)
    that("its blocks", request.block_ids).gives(list(range(has + missing)))
    that("free blocks", scheduler.pool.num_free).gives(10 - has - missing)


def test_every_request_gets_a_token(paged, a_request, a_step):
    """Requests of the batch compute one token each, in batch order; behind them stand those just admitted."""
    scheduler = paged([a_request("a", 3), a_request("b", 6)], num_blocks=20)
    that("step 0", list(a_step(scheduler).num_scheduled_tokens.items())).gives([("a", 3), ("b", 6)])
    scheduler.add_request(a_request("c", 5))
    output = a_step(scheduler)
    that("step 1", list(output.num_scheduled_tokens.items())).gives([("a", 1), ("b", 1), ("c", 5)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b", "c"])
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c"])
    that("preempted and finished", (output.preempted, output.finished)).gives(([], []))


def test_a_block_comes_with_the_token_that_begins_it(paged, a_request, a_step):
    """Blocks of 4: the fifth token needs the second block, the ninth the third. Not a step earlier, and not later."""
    request = a_request("r", 3)
    scheduler = paged([request], num_blocks=10)
    blocks = []
    for _ in range(8):
        a_step(scheduler)
        blocks.append(len(request.block_ids))
    that("blocks in steps 0 … 7, of 3 … 10 tokens", blocks).gives([1, 1, 2, 2, 2, 2, 3, 3])


def test_a_prompt_that_fills_its_block(paged, a_request, a_step):
    """A prompt of 4 fills a block of 4: the first generated token needs another, when it is computed."""
    request = a_request("r", 4)
    scheduler = paged([request], num_blocks=10)
    a_step(scheduler)
    that("blocks after the prompt", request.block_ids).gives([0])
    a_step(scheduler)
    that("blocks after the first generated token", request.block_ids).gives([0, 1])


@settings(max_examples=30)
@given(st.integers(1, 5), st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 15))
def test_a_finished_request_took_no_block_too_many(paged, a_request, a_step, block_size, prompts, steps):
    """At every step, each request has blocks for just the tokens that are computed then, in any block size."""
    requests = [a_request(n, size) for n, size in enumerate(prompts)]
    scheduler = paged(requests, num_blocks=200, block_size=block_size)
    for step in range(steps):
        a_step(scheduler)
        needed = [len(range(0, size + step, block_size)) for size in prompts]
        that(f"blocks in step {step}", held(requests)).gives(needed)
        that("used blocks", scheduler.pool.num_used).gives(sum(needed))
        that("different blocks", len({block for each in requests for block in each.block_ids})).gives(sum(needed))


# A batch


def test_new_blocks_go_behind_the_old(paged, a_request, a_step):
    """Two requests grow in turns: the blocks of each keep their order, and no block belongs to both."""
    requests = [a_request(n, 2) for n in range(2)]
    scheduler = paged(requests, num_blocks=10, block_size=2)
    for _ in range(5):
        a_step(scheduler)
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 2, 4], [1, 3, 5]])


def test_schedule_running_adds_to_the_step(paged, a_request, a_step):
    """schedule_running schedules the batch's tokens, and admits no request."""
    scheduler = paged([a_request("a", 4)], num_blocks=20)
    a_step(scheduler)
    scheduler.add_request(a_request("b", 4))
    output = SchedulerOutput()
    call(scheduler.schedule_running, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": 1})
    that("its blocks", scheduler.running[0].block_ids).gives([0, 1])
    that("the queue", list(scheduler.waiting)).gives(["b"])


def test_schedule_tokens_schedules_all_that_are_not_computed(paged, a_request, a_step):
    """A request of which 2 tokens are not computed computes both (`schedule_tokens`), and both are charged."""
    scheduler, output = paged([a_request("a", 4)], num_blocks=20, max_num_batched_tokens=8), SchedulerOutput()
    a_step(scheduler)
    scheduler.running[0].output_token_ids.append(7)
    scheduler.token_budget = 8
    call(scheduler.schedule_running, output).gives(None)
    that("num_scheduled_tokens, token_budget", (output.num_scheduled_tokens, scheduler.token_budget)).gives(
        ({"a": 2}, 6)
    )


def test_the_batch_comes_first(paged, a_request, a_step):
    """Two blocks are free. The batch takes one of them to grow, so a new request that needs two must wait."""
    scheduler = paged([a_request("old", 4)], num_blocks=3)
    a_step(scheduler)
    scheduler.add_request(a_request("new", 8))
    that("step 1", a_step(scheduler).num_scheduled_tokens).gives({"old": 1})
    that("the queue", list(scheduler.waiting)).gives(["new"])


def test_a_finished_request_makes_room(paged, a_request, a_step):
    """A request that has all its tokens gives its blocks back, and the next step admits one that waits for them."""
    scheduler = paged([a_request("a", 8, max_tokens=2), a_request("b", 8)], num_blocks=4)
    steps = [dict(a_step(scheduler).num_scheduled_tokens)]
    that("free blocks after step 0", scheduler.pool.num_free).gives(0)
    scheduler.abort_request("b")
    scheduler.add_request(a_request("c", 8))
    steps += [dict(a_step(scheduler).num_scheduled_tokens) for _ in range(2)]
    that("steps", steps).gives([{"a": 8, "b": 8}, {"a": 1}, {"c": 8}])


def test_a_step_that_failed_is_given_up(paged, a_request, a_step):
    """A step is never committed: the next one computes its requests from the beginning, in blocks for all they have."""
    scheduler = paged([a_request("a", 4), a_request("b", 3)], num_blocks=10)
    a_step(scheduler)
    failed = scheduler.schedule()
    that("the step that fails", failed.num_scheduled_tokens).gives({"a": 1, "b": 1})
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": 5, "b": 4})
    call(scheduler.update_from_output, failed, {"a": 7, "b": 7}).raises(ValueError)
    call(scheduler.update_from_output, output, {"a": 7, "b": 7}).gives([])
    that("blocks of a and b, and used ones", (held(scheduler.running), scheduler.pool.num_used)).gives(([2, 1], 3))


def test_an_empty_scheduler_schedules_nothing(paged, a_request, a_step):
    """Without requests a step is empty."""
    scheduler = paged(num_blocks=10)
    that("num_scheduled_tokens", call(scheduler.schedule).value.num_scheduled_tokens).gives({})


def test_a_batch_larger_than_reservation_allows(paged, a_request, a_step):
    """10 blocks of 4 hold 10 requests of 4 tokens that may grow to 40: with reservation it would be one."""
    scheduler = paged([a_request(n, 4, max_tokens=36) for n in range(12)], num_blocks=10)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(list(range(10)))


def test_blocks_missing_may_be_more(paged, a_request, a_step):
    """A stage in which more blocks are missing gets them: schedule_running and grow ask `blocks_missing`."""

    class Hungry(PagedScheduler):
        more = 0

        def blocks_missing(self, request):
            return super().blocks_missing(request) + self.more * (request.request_id == "hungry")

    requests = [a_request("modest", 3), a_request("hungry", 3)]
    scheduler = paged(requests, cls=Hungry, num_blocks=20)
    a_step(scheduler)
    that("blocks after step 0", held(requests)).gives([1, 1])
    scheduler.more = 2
    a_step(scheduler)
    that("blocks after step 1", held(requests)).gives([1, 3])


def test_a_step_that_preempts_admits_no_request(paged, a_request):
    """A step whose schedule_running names a request in `preempted` admits none; one that preempts none does."""

    class Preempts(PagedScheduler):
        def schedule_running(self, output):
            super().schedule_running(output)
            output.preempted += preempted

    preempted = ["victim"]
    scheduler = paged([a_request("r", 4)], cls=Preempts, num_blocks=10)
    output = call(scheduler.schedule).value
    seen = output.num_scheduled_tokens, list(scheduler.waiting)
    that("num_scheduled_tokens and the queue, after a preemption", seen).gives(({}, ["r"]))
    preempted.clear()
    that("num_scheduled_tokens without one", call(scheduler.schedule).value.num_scheduled_tokens).gives({"r": 4})


@pytest.mark.parametrize(
    ("step", "admits"),
    [
        ({}, True),
        ({"preempted": ["r"]}, False),
        ({"preempted": ["r"], "swapped_out": {"r": [(0, 0)]}}, False),
        ({"finished": ["r"]}, True),
    ],
    ids=["an empty step", "recompute", "swap", "FINISHED_CAPACITY"],
)
def test_may_admit(paged, step, admits):
    """Not in a step that preempted a request, in whatever way; one that was finished has made room for others."""
    call(paged(num_blocks=4).may_admit, SchedulerOutput(**step)).gives(admits)


def test_grow_is_asked_where_blocks_are_missing(paged, a_request, a_step):
    """A stage that allocates in another way (phase 8's copies) is called: grow(request, output), if any are missing."""
    seen = []

    class Noting(PagedScheduler):
        def grow(self, request, output):
            seen.append((request.request_id, list(output.num_scheduled_tokens)))
            super().grow(request, output)

    scheduler = paged([a_request(n, size) for n, size in enumerate([4, 3, 4])], cls=Noting, num_blocks=20)
    a_step(scheduler)
    seen.clear()
    a_step(scheduler)
    that("calls of grow in step 1: (id, scheduled before it)", seen).gives([(0, []), (2, [0, 1])])


def test_a_preempted_request_has_no_turn(paged, a_request, a_step):
    """While request 0 grows, make_room takes 2 out of the batch: 0 and 1 are scheduled, and nothing for 2."""

    class TakesTheLast(PagedScheduler):
        def make_room(self, request, output):
            victim = self.running.pop()
            self.restart(victim)
            self.waiting.add(victim)
            output.preempted.append(victim.request_id)
            return True

    scheduler = paged([a_request(n, size) for n, size in enumerate([4, 2, 2])], cls=TakesTheLast, num_blocks=3)
    a_step(scheduler)
    output = SchedulerOutput()
    call(scheduler.schedule_running, output).gives(None)
    that("num_scheduled_tokens: of those still in the batch", output.num_scheduled_tokens).gives({0: 1, 1: 1})
    that("the batch", ids(scheduler.running)).gives([0, 1])
    that("blocks of 0, 1 and 2", [*held(scheduler.running), *held(scheduler.waiting.values())]).gives([2, 1, 0])


@pytest.mark.parametrize(
    ("num_requests", "num_blocks", "more", "asked", "scheduled"),
    [(2, 3, 0, [1], {0: 1}), (1, 1, 0, [0], {}), (1, 2, 0, [], {0: 1}), (1, 2, 1, [0], {})],
)
def test_make_room_is_asked_only_for_lack_of_blocks(
    num_requests, num_blocks, more, asked, scheduled, paged, a_request, a_step
):
    """With the last block free nothing need be made free; where make_room gives False, nothing more is scheduled.

    A request that is alone asks like any other. One that misses 2 blocks (1 and `more`) asks where 1 is free.
    """
    seen = []

    class Refuses(PagedScheduler):
        def blocks_missing(self, request):
            return super().blocks_missing(request) + (more if request.block_ids else 0)

        def make_room(self, request, output):
            seen.append(request.request_id)
            self.restart(self.running.pop())
            self.waiting.add(request)
            return False

    scheduler = paged([a_request(n, 4) for n in range(num_requests)], cls=Refuses, num_blocks=num_blocks)
    a_step(scheduler)
    output = SchedulerOutput()
    call(scheduler.schedule_running, output).gives(None)
    that("calls of make_room", seen).gives(asked)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives(scheduled)


def test_requests_finish_as_they_should(paged, a_request, a_step):
    """max_tokens tokens each, and an empty pool at the end."""
    requests = [a_request(n, 3 + n, max_tokens=4 + n) for n in range(4)]
    scheduler = paged(requests, num_blocks=50)
    for _ in range(7):
        a_step(scheduler)
    that("their status", [each.status.name for each in requests]).gives(["FINISHED_LENGTH"] * 4)
    that("their tokens", [len(each.output_token_ids) for each in requests]).gives([4, 5, 6, 7])
    that("used blocks", scheduler.pool.num_used).gives(0)
