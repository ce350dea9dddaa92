"""Phase 6, task 3: the batch grows, a block at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.course.checks import call, that
from minicache.request import RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler


def ids(requests):
    return [request.request_id for request in requests]


def held(requests):
    return [len(request.block_ids) for request in requests]


# How many are missing


@pytest.mark.parametrize(
    ("num_tokens", "has", "missing"),
    [(3, 1, 0), (4, 1, 0), (5, 1, 1), (5, 2, 0), (8, 2, 0), (9, 2, 1), (12, 3, 0), (13, 3, 1), (1, 0, 1), (9, 1, 2)],
)
def test_blocks_missing(paged, a_request, num_tokens, has, missing):
    """Blocks of 4 for all its tokens, the newest included, less those that it has."""
    scheduler, request = paged(num_blocks=10), a_request("r", 1)
    request.output_token_ids += [7] * (num_tokens - 1)
    request.block_ids = scheduler.pool.allocate(has)
    call(scheduler.blocks_missing, request).gives(missing)
    that("free blocks: asking takes none", scheduler.pool.num_free).gives(10 - has)


# One request


def test_a_prompt_of_three(paged, a_request, a_step):
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
def test_never_a_block_too_many(paged, a_request, a_step, block_size, prompts, steps):
    """At every step, everybody has blocks for just the tokens that are computed then, in any block size."""
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
    """Two requests grow in turns: what a request has keeps its order, and no block is anybody else's."""
    requests = [a_request(n, 2) for n in range(2)]
    scheduler = paged(requests, num_blocks=10, block_size=2)
    for _ in range(5):
        a_step(scheduler)
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 2, 4], [1, 3, 5]])


def test_everybody_gets_a_token(paged, a_request, a_step):
    """Who is in the batch computes one token, in batch order; behind them stand those just admitted."""
    scheduler = paged([a_request("a", 3), a_request("b", 6)], num_blocks=20)
    that("step 0", list(a_step(scheduler).num_scheduled_tokens.items())).gives([("a", 3), ("b", 6)])
    scheduler.add_request(a_request("c", 5))
    output = a_step(scheduler)
    that("step 1", list(output.num_scheduled_tokens.items())).gives([("a", 1), ("b", 1), ("c", 5)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b", "c"])
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c"])
    that("preempted and finished", (output.preempted, output.finished)).gives(([], []))


def test_grow_batch_alone(paged, a_request, a_step):
    """grow_batch orders the batch's tokens, and admits nobody."""
    scheduler = paged([a_request("a", 4)], num_blocks=20)
    a_step(scheduler)
    scheduler.add_request(a_request("b", 4))
    output = SchedulerOutput()
    call(scheduler.grow_batch, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": 1})
    that("its blocks", scheduler.running[0].block_ids).gives([0, 1])
    that("the line", list(scheduler.waiting)).gives(["b"])


def test_the_batch_comes_first(paged, a_request, a_step):
    """Two blocks are free. The batch takes one of them to grow, so a newcomer who needs two must wait."""
    scheduler = paged([a_request("old", 4)], num_blocks=3)
    a_step(scheduler)
    scheduler.add_request(a_request("new", 8))
    that("step 1", a_step(scheduler).num_scheduled_tokens).gives({"old": 1})
    that("the line", list(scheduler.waiting)).gives(["new"])


def test_who_ends_makes_room(paged, a_request, a_step):
    """A request that has all its tokens gives its blocks back, and the next step admits who waited for them."""
    scheduler = paged([a_request("a", 8, max_tokens=2), a_request("b", 8)], num_blocks=4)
    steps = [dict(a_step(scheduler).num_scheduled_tokens)]
    that("free blocks after step 0", scheduler.pool.num_free).gives(0)
    scheduler.abort_request("b")
    scheduler.add_request(a_request("c", 8))
    steps += [dict(a_step(scheduler).num_scheduled_tokens) for _ in range(2)]
    that("steps", steps).gives([{"a": 8, "b": 8}, {"a": 1}, {"c": 8}])


def test_the_step_is_the_one_to_report(paged, a_request):
    """schedule issues its output: the last one can be reported, once, and no other."""
    scheduler = paged([a_request("r", 4)], num_blocks=10)
    first, second = scheduler.schedule(), scheduler.schedule()
    call(scheduler.update_from_output, first, {"r": 7}).raises(ValueError)
    call(scheduler.update_from_output, second, {"r": 7}).gives([])
    call(scheduler.update_from_output, second, {"r": 7}).raises(ValueError)


def test_a_step_that_failed_is_ordered_again(paged, a_request, a_step):
    """Without a report, the next schedule orders the same work, and takes no further block."""
    scheduler = paged([a_request("a", 4), a_request("b", 3)], num_blocks=10)
    for expected in ({"a": 4, "b": 3}, {"a": 1, "b": 1}):
        for _ in range(3):
            output = call(scheduler.schedule).value
            that("num_scheduled_tokens", output.num_scheduled_tokens).gives(expected)
        used = scheduler.pool.num_used
        scheduler.update_from_output(output, {"a": 7, "b": 7})
        that("used blocks, after three tries", scheduler.pool.num_used).gives(used)
    that("their blocks", held(scheduler.running)).gives([2, 1])


def test_nothing_to_do(paged, a_request, a_step):
    """Without requests a step is empty."""
    scheduler = paged(num_blocks=10)
    that("num_scheduled_tokens", call(scheduler.schedule).value.num_scheduled_tokens).gives({})


def test_a_batch_larger_than_reservation_allows(paged, a_request, a_step):
    """10 blocks of 4 hold 10 requests of 4 tokens that may grow to 40: with reservation it would be one."""
    scheduler = paged([a_request(n, 4, max_tokens=36) for n in range(12)], num_blocks=10)
    a_step(scheduler)
    that("the batch", ids(scheduler.running)).gives(list(range(10)))


def test_blocks_missing_may_be_more(paged, a_request, a_step):
    """A stage that says that more blocks are missing gets them: grow_batch asks, and asks nobody else."""

    class Hungry(PagedScheduler):
        def blocks_missing(self, request):
            return super().blocks_missing(request) + 2 * (request.request_id == "hungry")

    requests = [a_request("modest", 3), a_request("hungry", 3)]
    scheduler = paged(requests, cls=Hungry, num_blocks=20)
    a_step(scheduler)
    that("blocks after step 0", held(requests)).gives([1, 1])
    a_step(scheduler)
    that("blocks after step 1", held(requests)).gives([1, 3])


def test_nobody_is_admitted_where_somebody_was_preempted(paged, a_request):
    """A step whose grow_batch names somebody in `preempted` admits nobody; one that preempts nobody does."""

    class Preempts(PagedScheduler):
        def grow_batch(self, output):
            super().grow_batch(output)
            output.preempted += told

    told = ["somebody"]
    scheduler = paged([a_request("r", 4)], cls=Preempts, num_blocks=10)
    output = call(scheduler.schedule).value
    seen = output.num_scheduled_tokens, list(scheduler.waiting)
    that("num_scheduled_tokens and the line, after a preemption", seen).gives(({}, ["r"]))
    told.clear()
    that("num_scheduled_tokens without one", call(scheduler.schedule).value.num_scheduled_tokens).gives({"r": 4})


def test_who_leaves_while_others_grow_has_no_turn(paged, a_request, a_step):
    """While request 0 grows, make_room takes 2 out of the batch: grow_batch orders 0 and 1, and nothing for 2."""

    class TakesTheLast(PagedScheduler):
        def make_room(self, request, missing, output):
            victim = self.running.pop()
            self.release(victim)
            victim.status = RequestStatus.WAITING
            self.line_up(victim, first=True)
            output.preempted.append(victim.request_id)
            return True

    scheduler = paged([a_request(n, size) for n, size in enumerate([4, 2, 2])], cls=TakesTheLast, num_blocks=3)
    a_step(scheduler)
    output = SchedulerOutput()
    call(scheduler.grow_batch, output).gives(None)
    that("num_scheduled_tokens: of those still in the batch", output.num_scheduled_tokens).gives({0: 1, 1: 1})
    that("the batch", ids(scheduler.running)).gives([0, 1])
    that("blocks of 0, 1 and 2", [*held(scheduler.running), *held(scheduler.waiting.values())]).gives([2, 1, 0])


def test_requests_end_as_they_should(paged, a_request, a_step):
    """max_tokens tokens each, and an empty pool at the end."""
    requests = [a_request(n, 3 + n, max_tokens=4 + n) for n in range(4)]
    scheduler = paged(requests, num_blocks=50)
    for _ in range(7):
        a_step(scheduler)
    that("their status", {each.status for each in requests} == {RequestStatus.FINISHED_LENGTH}).gives(True)
    that("their tokens", [len(each.output_token_ids) for each in requests]).gives([4, 5, 6, 7])
    that("used blocks", scheduler.pool.num_used).gives(0)
