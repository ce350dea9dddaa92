"""Phase 6, task 2: which requests are admitted, and what an admission is."""

from __future__ import annotations

import pytest

from minicache.request import RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler
from minicache_course.checks import call, that


def ids(requests):
    return [request.request_id for request in requests]


def come_back(request, generated):
    """What `request`, waiting, would be after a preemption by recompute: some tokens generated, none computed."""
    request.output_token_ids += [7] * generated
    request.num_preemptions += 1
    return request


# What an admission is


@pytest.mark.parametrize("status", ["WAITING", "SWAPPED"])
def test_admit_copies_the_blocks_of_a_swapped_request_back(paged, a_request, status):
    """Only for a request that was SWAPPED `swap_in` is called, once, when it is RUNNING and has its new blocks."""
    seen = []

    class Noting(PagedScheduler):
        def swap_in(self, request, output):
            seen.append((request.request_id, request.status.name, list(request.block_ids)))

    request = a_request("r", 6)
    scheduler = paged([request], cls=Noting, num_blocks=10)
    request.status = RequestStatus[status]
    call(scheduler.admit, request, SchedulerOutput()).gives(None)
    expected = [("r", "RUNNING", [0, 1])] if status == "SWAPPED" else []
    that(f"calls of swap_in for a request that is {status}: (id, status, blocks)", seen).gives(expected)


def test_all_that_fit_are_admitted(paged, a_request, admit):
    """Three prompts of 4, 5 and 9 tokens: each gets its blocks, a batch slot, and its prompt to compute."""
    requests = [a_request("a", 4), a_request("b", 5), a_request("c", 9)]
    scheduler = paged(requests, num_blocks=10)
    output = admit(scheduler)
    that("num_scheduled_tokens", list(output.num_scheduled_tokens.items())).gives([("a", 4), ("b", 5), ("c", 9)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b", "c"])
    that("the batch", ids(scheduler.running)).gives(["a", "b", "c"])
    that("the queue", list(scheduler.waiting)).gives([])
    that("their blocks", [request.block_ids for request in requests]).gives([[0], [1, 2], [3, 4, 5]])
    that("their status", [request.status.name for request in requests]).gives(["RUNNING"] * 3)
    that("free blocks", scheduler.pool.num_free).gives(4)
    that("computed tokens, before the step is committed", [each.num_computed_tokens for each in requests]).gives(
        [0] * 3
    )


def test_an_empty_queue_admits_nothing(paged, admit):
    """With an empty queue nothing happens."""
    that("num_scheduled_tokens", admit(paged(num_blocks=10)).num_scheduled_tokens).gives({})


def test_an_admitted_request_stands_behind_the_batch(paged, a_request, admit):
    """A request that is admitted later stands behind those in the batch, and behind what the step has already."""
    scheduler = paged([a_request("a", 4)], num_blocks=10)
    admit(scheduler)
    scheduler.add_request(a_request("b", 4))
    output = SchedulerOutput(num_scheduled_tokens={"a": 1}, scheduled=list(scheduler.running))
    call(scheduler.schedule_waiting, output).gives(None)
    that("the batch", ids(scheduler.running)).gives(["a", "b"])
    that("num_scheduled_tokens", list(output.num_scheduled_tokens.items())).gives([("a", 1), ("b", 4)])
    that("scheduled", ids(output.scheduled)).gives(["a", "b"])


def test_admit_allocates_and_charges(paged, a_request):
    """admit takes one request out of the queue, and gives it its blocks, a batch slot, and its tokens to compute."""
    request = a_request("r", 6)
    scheduler, output = paged([request], num_blocks=10), SchedulerOutput()
    call(scheduler.admit, request, output).gives(None)
    seen = request.block_ids, request.status.name, ids(scheduler.running), output.num_scheduled_tokens
    that("blocks, status, batch and step", seen).gives(([0, 1], "RUNNING", ["r"], {"r": 6}))
    that("the queue", list(scheduler.waiting)).gives([])


# Which have to wait


def test_without_blocks_the_head_waits(paged, a_request, admit):
    """Of 5 blocks two requests take 2 each. The third needs 2 and waits, and the fourth, which needs 1, waits too."""
    scheduler = paged([a_request(n, size) for n, size in enumerate([8, 8, 8, 4])], num_blocks=5)
    output = admit(scheduler)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 8, 1: 8})
    that("the queue", list(scheduler.waiting)).gives([2, 3])
    that("free blocks", scheduler.pool.num_free).gives(1)
    that("blocks of the waiting ones", [each.block_ids for each in scheduler.waiting.values()]).gives([[], []])


def test_the_last_block_can_be_used(paged, a_request, admit):
    """Blocks that are needed and free to the last one are enough."""
    scheduler = paged([a_request(n, 8) for n in range(3)], num_blocks=6)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({0: 8, 1: 8, 2: 8})


def test_without_a_batch_slot_the_head_waits(paged, a_request, admit):
    """At most max_num_seqs run, whatever is free otherwise; 1 admits one."""
    for slots in (1, 2):
        scheduler = paged([a_request(n, 4) for n in range(4)], num_blocks=10, max_num_seqs=slots)
        admit(scheduler)
        that(f"the batch with max_num_seqs {slots}", ids(scheduler.running)).gives(list(range(slots)))
        that("admitted into a full batch", admit(scheduler).num_scheduled_tokens).gives({})


@pytest.mark.parametrize(
    ("others", "admitted"), [(0, [0, 1]), (2, [0, 1]), (3, [0]), (11, [0]), (12, []), (20, [])], ids=str
)
def test_without_tokens_the_head_waits(paged, a_request, admit, others, admitted):
    """20 tokens a step, prompts of 9, 9 and 9: what the step has already counts, and none is bypassed."""
    scheduler = paged([a_request(0, 9), a_request(1, 9), a_request(2, 9)], num_blocks=50, max_num_batched_tokens=20)
    admit(scheduler, others)
    that(f"admitted next to {others} tokens", ids(scheduler.running)).gives(admitted)


def test_no_request_is_bypassed(paged, a_request, admit):
    """12 tokens are left, the head has 13, the one behind it 1: both wait."""
    scheduler = paged([a_request(0, 13), a_request(1, 1)], num_blocks=50, max_num_batched_tokens=20)
    admit(scheduler, 8)
    that("the batch", ids(scheduler.running)).gives([])


def test_an_admission_is_charged_to_the_budget(paged, a_request, admit):
    """20 tokens a step, of which 3 are spent: a prompt of 9 leaves 8."""
    scheduler = paged([a_request(0, 9), a_request(1, 9)], num_blocks=50, max_num_batched_tokens=20)
    admit(scheduler, 3)
    that("token_budget", scheduler.token_budget).gives(8)


def test_the_watermark_is_kept(paged, a_request, admit):
    """10 blocks, watermark 0.4. The first may take 8 blocks of an empty batch; the second, of 1, waits: 4 must be free.

    If the batch leaves 6 free, 2 more are admitted, and no third.
    """
    scheduler = paged([a_request(0, 32), a_request(1, 4)], num_blocks=10, watermark=0.4)
    that("admitted after 8 blocks", admit(scheduler).num_scheduled_tokens).gives({0: 32})
    scheduler = paged([a_request(n, size) for n, size in enumerate([16, 4, 4, 4])], num_blocks=10, watermark=0.4)
    that("admitted after 4 blocks", admit(scheduler).num_scheduled_tokens).gives({0: 16, 1: 4, 2: 4})


# A head that can never be admitted


@pytest.mark.parametrize("others", [0, 8])
def test_a_head_that_has_outgrown_the_pool_is_finished(paged, a_request, admit, others):
    """3 blocks of 4. While it waits, a request comes to have 13 tokens: no batch will ever have room for it.

    It is finished as FINISHED_CAPACITY, and `output.finished` names it. The next head is admitted in the same step.
    That the step has 8 tokens of 16 left, fewer than 13, is no reason to wait.
    """
    large = a_request("large", 8)
    scheduler = paged([large, a_request("next", 8)], num_blocks=3, max_num_batched_tokens=16)
    come_back(large, 5)
    output = admit(scheduler, others)
    output.num_scheduled_tokens.pop("others", None)
    that("finished", output.finished).gives(["large"])
    seen = large.status.name, large.output_token_ids, large.block_ids, scheduler.has_unfinished
    that("its status, output and blocks, and has_unfinished", seen).gives(("FINISHED_CAPACITY", [7] * 5, [], True))
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"next": 8})
    that("the queue", list(scheduler.waiting)).gives([])


def test_several_heads_that_have_outgrown_the_pool(paged, a_request, admit):
    """Two of them, before and behind one that fits: all three leave the queue in one step."""
    requests = [a_request(n, 8) for n in range(3)]
    scheduler = paged(requests, num_blocks=3)
    for request in (requests[0], requests[2]):
        come_back(request, 5)
    output = admit(scheduler)
    that("finished, and admitted", (output.finished, list(output.num_scheduled_tokens))).gives(([0, 2], [1]))
    that("the queue, and has_unfinished", (list(scheduler.waiting), scheduler.has_unfinished)).gives(([], True))


def test_a_head_as_large_as_the_pool_waits(paged, a_request, admit):
    """12 tokens fill 3 blocks of 4: LATER while a block is in use, and admitted when it is free."""
    request = a_request("r", 8)
    scheduler = paged([request], num_blocks=3)
    come_back(request, 4)
    taken = scheduler.pool.allocate(1)
    output = admit(scheduler)
    that("finished, admitted", (output.finished, output.num_scheduled_tokens)).gives(([], {}))
    scheduler.pool.free(taken)
    that("admitted when all are free", admit(scheduler).num_scheduled_tokens).gives({"r": 12})


# Requests that come back


def test_a_preempted_request_computes_prompt_and_output(paged, a_request, admit):
    """A prompt of 6 and 5 generated tokens, nothing computed: 3 blocks, and 11 tokens to compute."""
    request = a_request("r", 6)
    scheduler = paged([request], num_blocks=10)
    come_back(request, 5)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"r": 11})
    that("blocks", request.block_ids).gives([0, 1, 2])
    that("generated tokens", request.output_token_ids).gives([7] * 5)


def outgrown(paged, a_request, *before, **options):
    """20 tokens a step; in the queue `before`, a request of 15 + 10 tokens, and one of 2."""
    grown = a_request("grown", 15)
    scheduler = paged([*before, grown, a_request("small", 2)], num_blocks=50, max_num_batched_tokens=20, **options)
    come_back(grown, 10)
    return scheduler


@pytest.mark.parametrize("others", [0, 1, 19])
def test_a_request_that_has_outgrown_the_step_is_admitted(paged, a_request, admit, others):
    """25 tokens, 20 a step: it would wait forever. So it is admitted, and no other in that step."""
    scheduler = outgrown(paged, a_request)
    output = admit(scheduler, others)
    that("the batch", ids(scheduler.running)).gives(["grown"])
    that("its tokens", output.num_scheduled_tokens["grown"]).gives(25)


def test_an_outgrown_request_waits_without_budget(paged, a_request, admit):
    """20 requests decode, 20 tokens a step. A request that is admitted now would make every later step too large."""
    scheduler = outgrown(paged, a_request)
    admit(scheduler, 20)
    that("the batch", ids(scheduler.running)).gives([])


def test_an_outgrown_request_is_admitted_alone(paged, a_request, admit):
    """Behind one that was admitted in the same step it waits for the next."""
    scheduler = outgrown(paged, a_request, a_request("first", 3))
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"first": 3})
    that("num_scheduled_tokens, next", admit(scheduler).num_scheduled_tokens).gives({"grown": 25})


def test_an_outgrown_request_behind_one_that_is_finished(paged, a_request, admit):
    """3 blocks of 4, 10 tokens a step: one of 13 tokens is finished. No request was admitted: one of 11 is."""
    requests = [a_request("large", 8), a_request("grown", 8)]
    scheduler = paged(requests, num_blocks=3, max_num_batched_tokens=10)
    for request, generated in zip(requests, (5, 3), strict=True):
        come_back(request, generated)
    output = admit(scheduler)
    that("finished, and scheduled", (output.finished, output.num_scheduled_tokens)).gives((["large"], {"grown": 11}))


def test_an_outgrown_request_needs_its_blocks(paged, a_request, admit):
    """Having outgrown the step gives a request no blocks that are in use."""
    scheduler = outgrown(paged, a_request)
    taken = scheduler.pool.allocate(44)
    that("with 6 free blocks for 7", admit(scheduler).num_scheduled_tokens).gives({})
    scheduler.pool.free(taken[:1])
    that("with 7", admit(scheduler).num_scheduled_tokens).gives({"grown": 25})


def test_a_request_of_exactly_a_step_is_not_outgrown(paged, a_request, admit):
    """20 tokens of 20 are no exception: such a request fits into a step, and waits for one that is empty."""
    request = a_request("r", 15)
    scheduler = paged([request], num_blocks=50, max_num_batched_tokens=20)
    come_back(request, 5)
    admit(scheduler, 1)
    that("admitted next to 1 token", ids(scheduler.running)).gives([])
    admit(scheduler)
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


def test_a_swapped_request_computes_one_token(paged, a_request, admit):
    """15 + 4 tokens, of which 18 are computed, and 20 a step: it fits next to 19 tokens of others, not next to 20."""
    request = a_request("r", 15)
    scheduler = paged([request], cls=Copies, num_blocks=50, max_num_batched_tokens=20)
    swapped(request, 4)
    admit(scheduler, 20)
    that("admitted next to 20 tokens", ids(scheduler.running)).gives([])
    output = admit(scheduler, 19)
    that("admitted next to 19 tokens", ids(scheduler.running)).gives(["r"])
    that("its tokens", output.num_scheduled_tokens["r"]).gives(1)


def test_a_long_swapped_request_is_not_outgrown(paged, a_request, admit):
    """25 tokens, 24 of them computed, 20 a step: one to compute is no exception. Others are admitted with it."""
    requests = [a_request("first", 3), a_request("long", 15), a_request("last", 3)]
    scheduler = paged(requests, cls=Copies, num_blocks=50, max_num_batched_tokens=20)
    swapped(requests[1], 10)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({"first": 3, "long": 1, "last": 3})


# What later stages rely on


@pytest.mark.parametrize(
    ("status", "admitted", "queue"), [(AllocStatus.LATER, [0], [1, 2]), (AllocStatus.NEVER, [0, 2], [])]
)
def test_can_allocate_decides(paged, a_request, admit, status, admitted, queue):
    """A stage whose can_allocate gives LATER for request 1: it waits, and so does 2. NEVER: it is finished."""

    class Picky(PagedScheduler):
        def can_allocate(self, request, found=()):
            return status if request.request_id == 1 else super().can_allocate(request, found)

    scheduler = paged([a_request(n, 4) for n in range(3)], cls=Picky, num_blocks=10)
    output = admit(scheduler)
    seen = list(output.num_scheduled_tokens), list(scheduler.waiting), output.finished
    that(f"admitted, waiting and finished, where 1 gets {status.name}", seen).gives(
        (admitted, queue, [1] if status is AllocStatus.NEVER else [])
    )


def test_head_decides_which_is_next(paged, a_request, admit):
    """schedule_waiting admits what `head` gives, wherever that stands in the queue, and stops when it gives None."""

    class EvenOnly(PagedScheduler):
        def head(self):
            return next((each for each in self.waiting.values() if each.request_id % 2 == 0), None)

    scheduler = paged([a_request(n, 4) for n in (1, 2, 3, 4)], cls=EvenOnly, num_blocks=10)
    that("num_scheduled_tokens", admit(scheduler).num_scheduled_tokens).gives({2: 4, 4: 4})
    that("the queue", list(scheduler.waiting)).gives([1, 3])


def test_admit_is_called_once_for_each(paged, a_request, admit):
    """schedule_waiting gives every request to `admit`, which takes it out of the queue."""
    seen = []

    class Noting(PagedScheduler):
        def admit(self, request, output, found=()):
            seen.append((request.request_id, request.request_id in self.waiting, request in self.running))
            super().admit(request, output, found)

    admit(paged([a_request(n, 4) for n in range(3)], cls=Noting, num_blocks=2))
    that("(id, in the queue, in the batch) at admit", seen).gives([(0, True, False), (1, True, False)])


def test_a_prefix_is_looked_for_once_and_passed_on(paged, a_request, admit):
    """find_prefix is called once for each head; can_allocate, num_new_tokens and admit get what it has found."""
    seen = []

    class Finds(PagedScheduler):
        def find_prefix(self, request):
            seen.append(("find_prefix", request.request_id))
            return [f"found for {request.request_id}"]

        def can_allocate(self, request, found=()):
            seen.append(("can_allocate", *found))
            return super().can_allocate(request)

        def num_new_tokens(self, request, found=()):
            seen.append(("num_new_tokens", *found))
            return super().num_new_tokens(request)

        def admit(self, request, output, found=()):
            seen.append(("admit", *found))
            super().admit(request, output)

    admit(paged([a_request(n, 4) for n in range(2)], cls=Finds, num_blocks=2))
    that("requests in the calls of find_prefix", [what for name, *what in seen if name == "find_prefix"]).gives(
        [[0], [1]]
    )
    for name in ("can_allocate", "num_new_tokens", "admit"):
        got = [what for called, *what in seen if called == name]
        that(f"`found` in the calls of {name}", got).gives([["found for 0"], ["found for 1"]])


def test_blocks_to_admit_may_be_more(paged, a_request, admit):
    """A stage that allocates a block more for every request."""

    class Generous(PagedScheduler):
        def blocks_to_admit(self, request):
            return super().blocks_to_admit(request) + 1

        def blocks_missing(self, request):
            return super().blocks_missing(request) + (not request.block_ids)

    requests = [a_request(n, 4) for n in range(3)]
    scheduler = paged(requests, cls=Generous, num_blocks=5)
    admit(scheduler)
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 1], [2, 3], []])


def test_num_new_tokens_may_be_fewer(paged, a_request, admit):
    """`num_new_tokens` is what a step has to compute: in a stage where it is 4 of 9, 4 tokens of budget are enough."""

    class Knowing(PagedScheduler):
        def num_new_tokens(self, request, found=()):
            return 4

    scheduler = paged([a_request("a", 9)], cls=Knowing, num_blocks=10, max_num_batched_tokens=9)
    admit(scheduler, 5)
    that("the batch", ids(scheduler.running)).gives(["a"])


def test_blocks_that_it_has_already_stay_in_front(paged, a_request):
    """`admit` adds what is missing: a request that has 2 of its 3 blocks gets one more, behind them."""
    request = a_request("a", 9)
    scheduler = paged([request], num_blocks=10)
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.admit, request, SchedulerOutput()).gives(None)
    that("its blocks", request.block_ids).gives([0, 1, 2])
    that("free blocks", scheduler.pool.num_free).gives(7)


# What an admission costs


@pytest.mark.parametrize("num_waiting", [10, 400])
def test_an_admission_costs_no_look_at_the_queue(paged, a_request, admit, counting_queue, num_waiting):
    """Room for three of 10 or of 400: what an admission costs depends on who is admitted, not on who waits."""
    scheduler = paged(num_blocks=3)
    queue = counting_queue(scheduler)
    for n in range(num_waiting):
        scheduler.add_request(a_request(n, 4))
    output = admit(scheduler)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 4, 1: 4, 2: 4})
    that(f"of {num_waiting} requests, those met by going through `waiting`", queue.num_seen).gives(0)
