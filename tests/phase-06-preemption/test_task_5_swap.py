"""Phase 6, task 5: a victim's blocks move to CPU swap space, and back."""

from __future__ import annotations

import random

import pytest

from minicache.request import RequestStatus
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def swapping(paged, requests=(), num_host_blocks=20, **options):
    return paged(requests, preemption="swap", num_host_blocks=num_host_blocks, **options)


def two_of_80(paged, a_request, **options):
    """Two prompts of 80 tokens in 10 blocks of 16, 20 tokens to generate each: in step 1 the second is preempted."""
    requests = [a_request(n, 80, 20) for n in range(2)]
    return requests, swapping(paged, requests, num_blocks=10, block_size=16, **options)


# Out


def test_swap_out_moves_blocks_and_gives_them_back(paged, a_request, a_step):
    """swap_out moves the first num_blocks blocks, and gives all of them back."""
    request = a_request("r", 8)
    scheduler = swapping(paged, [request], num_blocks=10)
    a_step(scheduler)
    scheduler.running.clear()
    request.block_ids += scheduler.pool.allocate(1)  # a third one, with nothing computed in it
    output = SchedulerOutput()
    call(scheduler.swap_out, request, 2, output).gives(None)
    that("swapped_out", output.swapped_out).gives({"r": [(0, 0), (1, 1)]})
    seen = request.block_ids, request.host_block_ids, request.status.name
    that("blocks, CPU blocks, status", seen).gives(([], [0, 1], "SWAPPED"))
    that("used blocks, used CPU blocks", (scheduler.pool.num_used, scheduler.host_pool.num_used)).gives((0, 2))


def test_swap_out_asks_release(paged, a_request, a_step):
    """A stage that gives blocks back in another way is called: release(request), once, with its blocks still there.

    `release` frees the last block first.
    """
    seen = []

    class Noting(PagedScheduler):
        def release(self, request):
            seen.append((request.request_id, list(request.block_ids)))
            super().release(request)

    request = a_request("r", 12)
    scheduler = swapping(paged, [request], cls=Noting, num_blocks=3)
    a_step(scheduler)
    scheduler.running.clear()
    call(scheduler.swap_out, request, 3, SchedulerOutput()).gives(None)
    that("calls of release: (id, blocks)", seen).gives([("r", [0, 1, 2])])
    that("the free blocks, in the order in which they are allocated", scheduler.pool.allocate(3)).gives([2, 1, 0])


def test_blocks_are_paired_with_host_blocks(paged, a_request, a_step):
    """Request 1 held blocks 5 … 9: each is paired with a CPU block, in the order of its tokens."""
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([1])
    that("swapped_out", output.swapped_out).gives({1: [(5, 0), (6, 1), (7, 2), (8, 3), (9, 4)]})
    that("swapped_in", output.swapped_in).gives({})
    that("its CPU blocks", requests[1].host_block_ids).gives([0, 1, 2, 3, 4])
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 1})


def test_a_swapped_request_keeps_its_computed_tokens(paged, a_request, a_step):
    """SWAPPED, at the head of the queue, without blocks; its computed and generated tokens stay."""
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    a_step(scheduler)
    request = requests[1]
    that("status", request.status.name).gives("SWAPPED")
    that("the queue", list(scheduler.waiting)).gives([1])
    that("its blocks", request.block_ids).gives([])
    that("num_computed_tokens", request.num_computed_tokens).gives(80)
    that("generated tokens", request.output_token_ids).gives([7])
    that("num_preemptions", request.num_preemptions).gives(1)
    that("free blocks, free CPU blocks", (scheduler.pool.num_free, scheduler.host_pool.num_free)).gives((4, 15))


@pytest.mark.parametrize(("num_prompt", "pairs"), [(5, 2), (7, 2), (8, 2), (9, 3), (12, 3)])
def test_unfinished_blocks_move_too(paged, a_request, a_step, num_prompt, pairs):
    """Blocks of 4: what is computed moves, in as many blocks as it takes, the unfinished last one too."""
    requests = [a_request("old", 4), a_request("young", num_prompt)]
    scheduler = swapping(paged, requests, num_blocks=1 + pairs)
    a_step(scheduler)
    output = a_step(scheduler)
    that("swapped_out", output.swapped_out).gives({"young": [(1 + n, n) for n in range(pairs)]})


def test_two_victims_in_one_step(paged, a_request, a_step):
    """Both are swapped out, and `swapped_out` has the pairs of both."""
    scheduler = swapping(paged, [a_request(n, 4) for n in range(4)], num_blocks=4)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([3, 2])
    that("swapped_out", output.swapped_out).gives({3: [(3, 0)], 2: [(2, 1)]})
    that("CPU blocks of 2 and 3", [each.host_block_ids for each in scheduler.waiting.values()]).gives([[1], [0]])


# In


def test_release_host_frees_the_last_block_first(paged, a_request):
    """The CPU blocks go back, the last one first, and the request has none."""
    scheduler, request = swapping(paged, num_blocks=4, num_host_blocks=3), a_request("r", 8)
    request.host_block_ids = scheduler.host_pool.allocate(3)
    call(scheduler.release_host, request).gives(None)
    that("its CPU blocks", request.host_block_ids).gives([])
    that("the free CPU blocks, in order", scheduler.host_pool.allocate(3)).gives([2, 1, 0])


def test_swap_in_pairs_and_gives_host_blocks_back(paged, a_request):
    """The pairs are CPU block to block, in order; blocks behind them get nothing; the CPU blocks are free."""
    scheduler, request, output = swapping(paged, num_blocks=10), a_request("r", 8), SchedulerOutput()
    scheduler.host_pool.allocate(3)
    request.host_block_ids = scheduler.host_pool.allocate(2)
    request.block_ids = scheduler.pool.allocate(4)[1:]
    call(scheduler.swap_in, request, output).gives(None)
    that("swapped_in", output.swapped_in).gives({"r": [(3, 1), (4, 2)]})
    that("its blocks", request.block_ids).gives([1, 2, 3])
    that("its CPU blocks, used ones", (request.host_block_ids, scheduler.host_pool.num_used)).gives(([], 3))


def test_two_that_come_back_in_one_step(paged, a_request, a_step):
    """When 0 and 1 have left, 2 and 3 are swapped in, and `swapped_in` has the pairs of both."""
    scheduler = swapping(paged, [a_request(n, 4) for n in range(4)], num_blocks=4)
    a_step(scheduler)
    a_step(scheduler)
    for request_id in (0, 1):
        scheduler.abort_request(request_id)
    output = a_step(scheduler)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({2: 1, 3: 1})
    blocks = [each.block_ids for each in scheduler.running]
    that("swapped_in", output.swapped_in).gives({2: [(1, blocks[0][0])], 3: [(0, blocks[1][0])]})


def test_a_swapped_request_resumes_with_one_token(paged, a_request, a_step):
    """At step 20 request 1 comes back: 6 blocks, 5 of them filled from the host, and one token to compute, not 81."""
    requests, scheduler = two_of_80(paged, a_request)
    for _ in range(20):
        a_step(scheduler)
    output = call(scheduler.schedule).value
    request = requests[1]
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({1: 1})
    that("its blocks", len(request.block_ids)).gives(6)
    that("swapped_in", output.swapped_in).gives({1: list(zip(range(5), request.block_ids[:5], strict=True))})
    that("swapped_out", output.swapped_out).gives({})
    that("status and CPU blocks", (request.status.name, request.host_block_ids)).gives(("RUNNING", []))
    that("used CPU blocks", scheduler.host_pool.num_used).gives(0)
    scheduler.update_from_output(output, {1: 7})
    that("num_computed_tokens", request.num_computed_tokens).gives(81)


def test_swap_in_asks_release_host(paged, a_request):
    """A stage that keeps its CPU blocks in another way is called when they come back: release_host(request), once."""
    seen = []

    class Noting(PagedScheduler):
        def release_host(self, request):
            seen.append(list(request.host_block_ids))
            super().release_host(request)

    scheduler, request = swapping(paged, cls=Noting, num_blocks=10), a_request("r", 8)
    request.host_block_ids = scheduler.host_pool.allocate(2)
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.swap_in, request, SchedulerOutput()).gives(None)
    that("calls of release_host: the request's CPU blocks", seen).gives([[0, 1]])


# Swap or recompute


@pytest.mark.parametrize(("num_host_blocks", "status"), [(5, "SWAPPED"), (4, "WAITING"), (1, "WAITING")])
def test_without_room_in_swap_space_it_is_recomputed(paged, a_request, a_step, num_host_blocks, status):
    """5 blocks to swap: with 5 CPU blocks it is swapped, with fewer it is recomputed. Never a part of it."""
    requests, scheduler = two_of_80(paged, a_request, num_host_blocks=num_host_blocks)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([1])
    that("status", requests[1].status.name).gives(status)
    swapped = status == "SWAPPED"
    that("num_computed_tokens", requests[1].num_computed_tokens).gives(80 if swapped else 0)
    that("whether it is in swapped_out", 1 in output.swapped_out).gives(swapped)
    that("used CPU blocks", scheduler.host_pool.num_used).gives(5 if swapped else 0)


def test_one_swapped_one_recomputed(paged, a_request, a_step):
    """Two victims, one CPU block: the first victim takes it, the other is recomputed. Their order stays."""
    requests = [a_request(n, 4, 5) for n in range(4)]
    scheduler = swapping(paged, requests, num_blocks=4, num_host_blocks=1)
    a_step(scheduler)
    output = a_step(scheduler)
    that("preempted", output.preempted).gives([3, 2])
    that("swapped_out", output.swapped_out).gives({3: [(3, 0)]})
    that("status of 2 and 3", [requests[2].status.name, requests[3].status.name]).gives(["WAITING", "SWAPPED"])
    that("the queue: a swapped-out request bypasses none", list(scheduler.waiting)).gives([2, 3])
    steps = [dict(a_step(scheduler).num_scheduled_tokens) for _ in range(4)]
    that("steps 2 … 5: 2 computes its 5 tokens again, 3 only its newest", steps[3]).gives({2: 5, 3: 1})


def test_a_request_without_computed_tokens_is_recomputed(paged, a_request):
    """A request whose first step is not committed yet has nothing in its blocks: it is recomputed."""
    request = a_request("r", 8)
    scheduler = swapping(paged, [request], num_blocks=4)
    scheduler.schedule()
    output = SchedulerOutput()
    call(scheduler.preempt, request, output).gives(None)
    seen = request.status.name, output.swapped_out, scheduler.host_pool.num_used
    that("status, swapped_out, used CPU blocks", seen).gives(("WAITING", {}, 0))


@pytest.mark.parametrize("num_computed", [1, 4, 7])
def test_what_is_computed_is_swapped_without_any_output(paged, a_request, num_computed):
    """A prompt of 8 of which a part is computed, and no token generated (phase 9's chunks): it is still swapped.

    What counts is whether it has computed tokens.
    """
    request = a_request("r", 8)
    scheduler = swapping(paged, [request], num_blocks=4)
    scheduler.schedule()
    request.num_computed_tokens = num_computed
    output = SchedulerOutput()
    call(scheduler.preempt, request, output).gives(None)
    num_blocks = -(-num_computed // 4)
    seen = request.status.name, output.swapped_out, request.num_computed_tokens
    pairs = [(n, n) for n in range(num_blocks)]
    that("status, swapped_out, computed tokens", seen).gives(("SWAPPED", {"r": pairs}, num_computed))


def test_recompute_swaps_nothing(paged, a_request, a_step):
    """With preemption="recompute" nothing is swapped, however large the swap space."""
    requests = [a_request(n, 80, 20) for n in range(2)]
    scheduler = paged(requests, num_blocks=10, block_size=16, preemption="recompute", num_host_blocks=50)
    tally = drive(scheduler, max_steps=100)
    that("preemptions, swapped blocks", (tally.num_preemptions, tally.num_swapped_blocks)).gives((1, 0))


def test_host_blocks_are_used_again_and_again(paged, a_request):
    """CPU blocks that were given back take the next victim's: two of them carry many more than two over and back."""
    requests = [a_request(n, 4, 9) for n in range(12)]
    scheduler = swapping(paged, requests, num_blocks=6, num_host_blocks=2)
    tally = drive(scheduler, max_steps=200)
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives([9] * 12)
    that("whether more than 4 blocks were swapped, out and in", tally.num_swapped_blocks > 2 * 2).gives(True)
    that("used CPU blocks", scheduler.host_pool.num_used).gives(0)


@pytest.mark.parametrize("seed", range(10))
def test_the_policy_changes_no_batch(paged, a_request, seed):
    """Where tokens are no limit, swap and recompute run the same requests in the same steps; only the costs differ."""
    runs = []
    for preemption in ("swap", "recompute"):
        rng = random.Random(fresh(seed))
        requests = [a_request(n, rng.randint(1, 12), rng.randint(1, 16)) for n in range(8)]
        scheduler = paged(requests, num_blocks=rng.randint(4, 8), preemption=preemption, num_host_blocks=99)
        runs.append(drive(scheduler, max_steps=500))
    swap, recompute = runs
    that("the requests of each step", swap.order).gives(recompute.order)
    that("tokens computed again by swap", swap.num_recomputed_tokens).gives(0)
    if recompute.num_preemptions:
        that("whether recompute computes tokens again", recompute.num_recomputed_tokens > 0).gives(True)
        that("whether swap swaps blocks", swap.num_swapped_blocks > 0).gives(True)


# Leaving


def test_a_swapped_request_that_is_aborted(paged, a_request, a_step):
    """Its client leaves: its CPU blocks are free, the batch's blocks are not touched, and the queue is empty."""
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    a_step(scheduler)
    call(scheduler.abort_request, 1).gives(True)
    seen = requests[1].finish_reason, requests[1].host_block_ids, list(scheduler.waiting)
    that("its finish reason and CPU blocks, the queue", seen).gives(("abort", [], []))
    counts = scheduler.pool.num_free, scheduler.host_pool.num_free
    that("free blocks, free CPU blocks", counts).gives((4, 20))


def test_it_may_be_aborted_in_the_step_that_brings_it_back(paged, a_request, a_step):
    """Between schedule and commit: its blocks are free, and the CPU blocks are not freed a second time."""
    requests, scheduler = two_of_80(paged, a_request)
    for _ in range(20):
        a_step(scheduler)
    output = scheduler.schedule()
    call(scheduler.abort_request, 1).gives(True)
    call(scheduler.update_from_output, output, {}).gives([])
    counts = scheduler.pool.num_used, scheduler.host_pool.num_used, scheduler.has_unfinished
    that("used blocks, used CPU blocks, has_unfinished", counts).gives((0, 0, False))
    that("tokens generated", len(requests[1].output_token_ids)).gives(1)


def test_a_step_that_failed_empties_the_swap_space(paged, a_request, a_step):
    """While 1 is swapped out, a step fails: what lies in swap space is given up, and both are computed again.

    `recover` is given, and frees CPU blocks by `release_host`.
    """
    requests, scheduler = two_of_80(paged, a_request)
    a_step(scheduler)
    a_step(scheduler)
    scheduler.schedule()
    call(scheduler.recover).gives(None)
    that("free blocks, free CPU blocks", (scheduler.pool.num_free, scheduler.host_pool.num_free)).gives((10, 20))
    that("their status", [each.status.name for each in requests]).gives(["WAITING", "WAITING"])
    that("their computed tokens", [each.num_computed_tokens for each in requests]).gives([0, 0])
    that("tokens generated", [len(each.output_token_ids) for each in requests]).gives([2, 1])
    output = call(scheduler.schedule).value
    that("the next step", (output.num_scheduled_tokens, output.swapped_in)).gives(({0: 82}, {}))


@pytest.mark.parametrize("seed", range(25))
def test_no_block_is_lost_in_small_pools(paged, a_request, a_step, seed):
    """Preempted, aborted, swapped, recomputed: no block is lost on either side, and what was computed stays so."""
    rng = random.Random(fresh(seed))
    block_size = rng.choice([1, 2, 4])
    requests = [a_request(n, rng.randint(1, 12), rng.randint(1, 16)) for n in range(8)]
    largest = max(-(-each.num_prompt_tokens // block_size) for each in requests)
    options = {"num_blocks": largest + rng.randint(0, 4), "num_host_blocks": rng.choice([1, 3, 12])}
    scheduler = swapping(paged, requests, block_size=block_size, max_num_batched_tokens=40, **options)
    for step in range(600):
        if not scheduler.has_unfinished:
            break
        if rng.random() < 0.1:
            scheduler.abort_request(rng.randrange(8))
        before = {
            each.request_id: each.num_computed_tokens for each in requests if each.status is RequestStatus.SWAPPED
        }
        output = a_step(scheduler)
        for request_id in output.swapped_in:
            that(f"new tokens of swapped-in {request_id!r}", output.num_scheduled_tokens[request_id]).gives(1)
            moved, fits = len(output.swapped_in[request_id]), -(-before[request_id] // block_size)
            that(f"blocks copied back for {request_id!r}", moved).gives(fits)
        hosted = [block for each in requests for block in each.host_block_ids]
        held = [block for each in requests for block in each.block_ids]
        that(f"used CPU blocks after step {step}", scheduler.host_pool.num_used).gives(len(hosted))
        that("and no CPU block twice", len(set(hosted))).gives(len(hosted))
        that(f"used blocks after step {step}", scheduler.pool.num_used).gives(len(held))
        swapped = [each.status is RequestStatus.SWAPPED for each in requests]
        that(
            "whether each has CPU blocks, exactly if it is SWAPPED", [bool(each.host_block_ids) for each in requests]
        ).gives(swapped)
    that("whether any request is unfinished at the end", scheduler.has_unfinished).gives(False)
