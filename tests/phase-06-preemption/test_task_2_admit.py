"""Phase 6, task 2: who is admitted, and what he gets."""

from __future__ import annotations

import pytest

from minicache.course.checks import call, that
from minicache.request import RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler


def ids(requests):
    return [request.request_id for request in requests]


def come_back(request, generated):
    """What `request`, waiting, would be after a preemption by recompute: some tokens generated, none computed."""
    request.output_token_ids += [7] * generated
    request.num_preemptions += 1
    return request


def busy(num_tokens):
    """A step in which somebody else computes so many tokens."""
    return SchedulerOutput(num_scheduled_tokens={"somebody": num_tokens}, scheduled=[None])


# What an admission is


def test_everybody_who_fits(paged, a_request, admit):
    """Three prompts of 4, 5 and 9 tokens: each gets its blocks, its place in the batch, and its prompt to compute."""
    requests = [a_request("a", 4), a_request("b", 5), a_request("c", 9)]
    scheduler = paged(requests, num_blocks=10)
    output = admit(scheduler)
    that("num_scheduled_tokens", list(output.num_scheduled_tokens.items())).gives([("a", 4), ("b", 5), ("c", 9)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b", "c"])
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c"])
    that("the line", list(scheduler.waiting)).gives([])
    that("their blocks", [request.block_ids for request in requests]).gives([[0], [1, 2], [3, 4, 5]])
    that("their status", {request.status for request in requests} == {RequestStatus.RUNNING}).gives(True)
    that("free blocks", scheduler.pool.num_free).gives(4)
    that("computed tokens, before the step is reported", [each.num_computed_tokens for each in requests]).gives([0] * 3)


def test_nobody_waits(paged, admit):
    """With an empty line nothing happens."""
    that("num_scheduled_tokens", admit(paged(num_blocks=10)).num_scheduled_tokens).gives({})


def test_newcomers_stand_behind_the_batch(paged, a_request, admit):
    """Who is admitted later stands behind those who are in the batch, and behind what the step has already."""
    scheduler = paged([a_request("a", 4)], num_blocks=10)
    admit(scheduler)
    scheduler.add_request(a_request("b", 4))
    output = SchedulerOutput(num_scheduled_tokens={"a": 1}, scheduled=list(scheduler.running))
    call(scheduler.admit, output).gives(None)
    that("the batch", ids(scheduler.running)).gives(["a", "b"])
    that("num_scheduled_tokens", list(output.num_scheduled_tokens.items())).gives([("a", 1), ("b", 4)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b"])


def test_enter_alone(paged, a_request):
    """enter gives one request its blocks, its place and its tokens; taking it out of the line is admit's."""
    scheduler, request, output = paged(num_blocks=10), a_request("r", 6), SchedulerOutput()
    call(scheduler.enter, request, output).gives(None)
    seen = request.block_ids, request.status.name, ids(scheduler.running), output.num_scheduled_tokens
    that("blocks, status, batch and step", seen).gives(([0, 1], "RUNNING", ["r"], {"r": 6}))
    that("the line", list(scheduler.waiting)).gives([])


# Who has to wait


def test_no_blocks(paged, a_request, admit):
    """Of 5 blocks two requests take 2 each. The third needs 2 and waits, and the fourth, which needs 1, waits too."""
    scheduler = paged([a_request(n, size) for n, size in enumerate([8, 8, 8, 4])], num_blocks=5)
    output = admit(scheduler)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 8, 1: 8})
    that("the line", list(scheduler.waiting)).gives([2, 3])
    that("free blocks", scheduler.pool.num_free).gives(1)
    that("blocks of those who wait", [each.block_ids for each in scheduler.waiting.values()]).gives([[], []])


def test_the_last_block(paged, a_request, admit):
    """Blocks that are needed and free to the last one are enough."""
    scheduler = paged([a_request(n, 8) for n in range(3)], num_blocks=6)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({0: 8, 1: 8, 2: 8})


def test_no_seat(paged, a_request, admit):
    """At most max_num_seqs run, whatever is free otherwise; 1 admits one."""
    for seats in (1, 2):
        scheduler = paged([a_request(n, 4) for n in range(4)], num_blocks=10, max_num_seqs=seats)
        admit(scheduler)
        that(f"the batch with max_num_seqs {seats}", ids(scheduler.running)).gives(list(range(seats)))
        that("admitted into a full batch", admit(scheduler).num_scheduled_tokens).gives({})


@pytest.mark.parametrize(("others", "admitted"), [(0, [0, 1]), (2, [0, 1]), (3, [0]), (11, [0]), (12, []), (20, [])])
def test_no_tokens_left(paged, a_request, others, admitted):
    """20 tokens a step, prompts of 9, 9 and 1: what the step has already counts, and nobody overtakes."""
    scheduler = paged([a_request(0, 9), a_request(1, 9), a_request(2, 9)], num_blocks=50, max_num_batched_tokens=20)
    output = busy(others)
    scheduler.admit(output)
    that(f"admitted beside {others} tokens", ids(scheduler.running)).gives(admitted)


def test_a_small_one_does_not_slip_past(paged, a_request):
    """12 tokens are left, the head has 13, the one behind it 1: both wait."""
    scheduler = paged([a_request(0, 13), a_request(1, 1)], num_blocks=50, max_num_batched_tokens=20)
    scheduler.admit(busy(8))
    that("the batch", ids(scheduler.running)).gives([])


def test_the_watermark_is_kept(paged, a_request, admit):
    """10 blocks, watermark 0.4. The first may take 8 blocks of an empty batch; the second, of 1, waits: 4 must be free.

    A batch that leaves 6 free takes 2 more, and no third.
    """
    scheduler = paged([a_request(0, 32), a_request(1, 4)], num_blocks=10, watermark=0.4)
    that("admitted after 8 blocks", admit(scheduler).num_scheduled_tokens).gives({0: 32})
    scheduler = paged([a_request(n, size) for n, size in enumerate([16, 4, 4, 4])], num_blocks=10, watermark=0.4)
    that("admitted after 4 blocks", admit(scheduler).num_scheduled_tokens).gives({0: 16, 1: 4, 2: 4})


# Who comes back


def test_prompt_and_answer_are_computed_again(paged, a_request, admit):
    """A prompt of 6 and 5 generated tokens, nothing computed: 3 blocks, and 11 tokens to compute."""
    request = a_request("r", 6)
    scheduler = paged([request], num_blocks=10)
    come_back(request, 5)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"r": 11})
    that("blocks", request.block_ids).gives([0, 1, 2])
    that("generated tokens", request.output_token_ids).gives([7] * 5)


def outgrown(paged, a_request, *before, **options):
    """20 tokens a step; in the line `before`, a request of 15 + 10 tokens, and one of 2."""
    grown = a_request("grown", 15)
    scheduler = paged([*before, grown, a_request("small", 2)], num_blocks=50, max_num_batched_tokens=20, **options)
    come_back(grown, 10)
    return scheduler


@pytest.mark.parametrize("others", [0, 1, 19])
def test_one_that_has_outgrown_every_step(paged, a_request, others):
    """25 tokens, 20 a step: it would wait for ever. So it is admitted, and nobody else in that step."""
    scheduler = outgrown(paged, a_request)
    output = busy(others)
    scheduler.admit(output)
    that("the batch", ids(scheduler.running)).gives(["grown"])
    that("its tokens", output.num_scheduled_tokens["grown"]).gives(25)


def test_where_no_token_is_left_it_waits(paged, a_request):
    """20 requests decode, 20 tokens a step: a 21st would make every step to come too large."""
    scheduler = outgrown(paged, a_request)
    scheduler.admit(busy(20))
    that("the batch", ids(scheduler.running)).gives([])


def test_it_is_the_only_one_admitted(paged, a_request, admit):
    """Behind one that was admitted in the same step it waits for the next."""
    scheduler = outgrown(paged, a_request, a_request("first", 3))
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"first": 3})
    that("num_scheduled_tokens, next", admit(scheduler).num_scheduled_tokens).gives({"grown": 25})


def test_it_needs_a_seat_and_blocks_as_others_do(paged, a_request, admit):
    """Having outgrown the step gives nobody blocks that are used, or a seat."""
    scheduler = outgrown(paged, a_request)
    taken = scheduler.pool.allocate(44)
    that("with 6 free blocks for 7", admit(scheduler).num_scheduled_tokens).gives({})
    scheduler.pool.free(taken[:1])
    that("with 7", admit(scheduler).num_scheduled_tokens).gives({"grown": 25})


def test_exactly_a_step(paged, a_request):
    """20 tokens of 20 are no exception: such a request fits into a step, and waits for one that is empty."""
    request = a_request("r", 15)
    scheduler = paged([request], num_blocks=50, max_num_batched_tokens=20)
    come_back(request, 5)
    scheduler.admit(busy(1))
    that("admitted beside 1 token", ids(scheduler.running)).gives([])
    scheduler.admit(busy(0))
    that("admitted alone", ids(scheduler.running)).gives(["r"])


class Copies(PagedScheduler):
    """Leaves out what task 5 is about."""

    def swap_in(self, request, output):
        output.swapped_in[request.request_id] = []


def swapped(request, generated):
    """What `request`, waiting, would be after a swap: all is computed but the newest token."""
    come_back(request, generated)
    request.num_computed_tokens = request.num_tokens - 1
    request.status = RequestStatus.SWAPPED
    return request


def test_one_that_was_swapped_out_computes_one_token(paged, a_request):
    """15 + 4 tokens, of which 18 are computed, and 20 a step: it fits beside 19 tokens of others, and not beside 20."""
    request = a_request("r", 15)
    scheduler = paged([request], cls=Copies, num_blocks=50, max_num_batched_tokens=20)
    swapped(request, 4)
    scheduler.admit(busy(20))
    that("admitted beside 20 tokens", ids(scheduler.running)).gives([])
    output = busy(19)
    scheduler.admit(output)
    that("admitted beside 19 tokens", ids(scheduler.running)).gives(["r"])
    that("its tokens", output.num_scheduled_tokens["r"]).gives(1)


def test_a_long_one_that_was_swapped_out_has_outgrown_nothing(paged, a_request, admit):
    """25 tokens, 24 of them computed, 20 a step: one to compute is no exception. Others are admitted beside it."""
    requests = [a_request("first", 3), a_request("long", 15), a_request("last", 3)]
    scheduler = paged(requests, cls=Copies, num_blocks=50, max_num_batched_tokens=20)
    swapped(requests[1], 10)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"first": 3, "long": 1, "last": 3})


# What later stages rely on


@pytest.mark.parametrize("status", [AllocStatus.LATER, AllocStatus.NEVER])
def test_can_allocate_has_to_say_ok(paged, a_request, admit, status):
    """A stage whose can_allocate says LATER, or NEVER, of request 1: it is not admitted, nor who stands behind it."""

    class Picky(PagedScheduler):
        def can_allocate(self, request):
            return status if request.request_id == 1 else super().can_allocate(request)

    scheduler = paged([a_request(n, 4) for n in range(3)], cls=Picky, num_blocks=10)
    that(f"num_scheduled_tokens where 1 is told {status.name}", admit(scheduler).num_scheduled_tokens).gives({0: 4})
    that("the line", list(scheduler.waiting)).gives([1, 2])


def test_head_says_who_is_next(paged, a_request, admit):
    """admit asks `head` whom to admit, wherever he stands in the line, and stops when it says None."""

    class EvenOnly(PagedScheduler):
        def head(self):
            return next((each for each in self.waiting.values() if each.request_id % 2 == 0), None)

    scheduler = paged([a_request(n, 4) for n in (1, 2, 3, 4)], cls=EvenOnly, num_blocks=10)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({2: 4, 4: 4})
    that("the line", list(scheduler.waiting)).gives([1, 3])


def test_enter_is_asked_once_for_each(paged, a_request, admit):
    """admit gives everybody over to `enter`, who has left the line by then."""
    seen = []

    class Noting(PagedScheduler):
        def enter(self, request, output):
            seen.append((request.request_id, request.request_id in self.waiting, request in self.running))
            super().enter(request, output)

    admit(paged([a_request(n, 4) for n in range(3)], cls=Noting, num_blocks=2))
    that("(id, in the line, in the batch) at enter", seen).gives([(0, False, False), (1, False, False)])


def test_blocks_to_admit_may_be_more(paged, a_request, admit):
    """A stage that wants a block more for everybody gets it."""

    class Generous(PagedScheduler):
        def blocks_to_admit(self, request):
            return super().blocks_to_admit(request) + 1

    requests = [a_request(n, 4) for n in range(3)]
    scheduler = paged(requests, cls=Generous, num_blocks=5)
    admit(scheduler)
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 1], [2, 3], []])


def test_num_new_tokens_may_be_fewer(paged, a_request, admit):
    """`num_new_tokens` says what a step has to compute: where it says 4 of 9, a step of 4 tokens has room."""

    class Knowing(PagedScheduler):
        def num_new_tokens(self, request):
            return 4

    scheduler = paged([], cls=Knowing, num_blocks=10, max_num_batched_tokens=9)
    scheduler.add_request(a_request("a", 9))
    output = busy(5)
    call(scheduler.admit, output).gives(None)
    that("the batch", ids(scheduler.running)).gives(["a"])


def test_blocks_that_it_has_already_stay_in_front(paged, a_request):
    """`enter` adds what is lacking: a request that was given 2 of its 3 blocks gets one more, behind them."""
    scheduler, request = paged(num_blocks=10), a_request("a", 9)
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.enter, request, SchedulerOutput()).gives(None)
    that("its blocks", request.block_ids).gives([0, 1, 2])
    that("free blocks", scheduler.pool.num_free).gives(7)
