"""Phase 6, task 1: can a request's blocks be allocated now, later, or never?"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import RequestTooLargeError
from minicache.request import RequestStatus
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.paged import AllocStatus, PagedScheduler
from minicache_course import scenario
from minicache_course.checks import call, that

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def put_into_batch(scheduler, request):
    """Put a request into the batch by hand, without blocks."""
    request.status = RequestStatus.RUNNING
    scheduler.running.append(request)


# How many


@pytest.mark.parametrize(
    ("num_prompt", "generated", "blocks"),
    [(1, 0, 1), (3, 0, 1), (4, 0, 1), (5, 0, 2), (8, 0, 2), (3, 1, 1), (4, 1, 2), (3, 5, 2), (3, 6, 3), (1, 19, 5)],
)
def test_blocks_to_admit_are_for_the_tokens_that_it_has(paged, a_request, num_prompt, generated, blocks):
    """Blocks of 4 for prompt and generated tokens together: a request that was preempted comes back with both."""
    request = a_request("r", num_prompt)
    request.output_token_ids += [7] * generated
    call(paged(num_blocks=50).blocks_to_admit, request).gives(blocks)


@pytest.mark.parametrize("max_tokens", [1, 100, 10**6])
def test_max_tokens_reserve_nothing(paged, a_request, max_tokens):
    """max_tokens does not matter: no block is allocated for tokens that may come later."""
    call(paged(num_blocks=50).blocks_to_admit, a_request("r", 9, max_tokens)).gives(3)


def test_add_request_accepts_what_a_reservation_refused(paged, a_request):
    """A prompt of 8 with up to 1000 generated tokens in 10 blocks: reservation refuses it, paging does not."""
    options = {"num_blocks": 10, "block_size": 4}
    call(ContinuousBatchScheduler(**options).add_request, a_request("r", 8, 1000)).raises(RequestTooLargeError)
    call(paged(**options).add_request, a_request("r", 8, 1000)).gives(None)


def test_what_can_never_fit_is_refused_by_add_request(paged, a_request):
    """5 blocks of 16: a prompt of 100 tokens is refused with RequestTooLargeError, the next one, of 10, is not."""
    scheduler = paged(num_blocks=5, block_size=16)
    call(scheduler.add_request, a_request(0, 100)).raises(RequestTooLargeError)
    call(scheduler.add_request, a_request(1, 10)).gives(None)
    call(scheduler.add_request, a_request(2, 80)).gives(None)
    that("num_waiting", scheduler.num_waiting).gives(2)


# When


@pytest.mark.parametrize(
    ("used", "num_prompt", "status"),
    [(0, 40, OK), (0, 41, NEVER), (6, 16, OK), (6, 17, LATER), (6, 40, LATER), (6, 41, NEVER), (10, 1, LATER)],
)
def test_now_later_and_never_in_ten_blocks(paged, a_request, used, num_prompt, status):
    """Of 10 blocks of 4 some are used. Enough free: OK. Enough in all: LATER. Not enough in all: NEVER."""
    scheduler = paged(num_blocks=10)
    scheduler.pool.allocate(used)
    scenario.given(f"{used} blocks are in use")
    call(scheduler.can_allocate, a_request("r", num_prompt)).gives(status)


def test_a_preempted_request_needs_blocks_for_its_output_too(paged, a_request):
    """A prompt of 8 fits into 2 free blocks; with one token generated it needs a third."""
    scheduler, request = paged(num_blocks=10), a_request("r", 8)
    scheduler.pool.allocate(8)
    call(scheduler.can_allocate, request).gives(OK)
    request.output_token_ids.append(7)
    call(scheduler.can_allocate, request).gives(LATER)


def test_a_swapped_request_needs_blocks_for_its_computed_tokens_too(paged, a_request):
    """SWAPPED, with 8 of 9 tokens computed: it has no block left, so it needs 3 again."""
    request = a_request("r", 8)
    request.output_token_ids.append(7)
    request.num_computed_tokens, request.status = 8, RequestStatus.SWAPPED
    call(paged(num_blocks=10).blocks_to_admit, request).gives(3)


def test_can_allocate_takes_nothing(paged, a_request):
    """can_allocate and blocks_to_admit change neither the pool, nor the queues, nor the request."""
    request = a_request("r", 20)
    scheduler = paged([request], num_blocks=10)
    for _ in range(3):
        call(scheduler.can_allocate, request).gives(OK)
        call(scheduler.blocks_to_admit, request).gives(5)
    seen = scheduler.pool.num_free, scheduler.num_waiting, scheduler.num_running, request.block_ids
    that("free blocks, waiting, running, and the request's blocks", seen).gives((10, 1, 0, []))


# The watermark


@pytest.mark.parametrize(
    ("watermark", "num_prompt", "status"),
    [
        (0.0, 32, OK),
        (0.25, 24, OK),  # ⌊2.5⌋ = 2 of the 8 free blocks are spared
        (0.25, 25, LATER),
        (0.29, 24, OK),
        (0.3, 24, LATER),
        (0.99, 1, LATER),
        (0.09, 32, OK),
    ],
)
def test_an_admission_leaves_the_watermark_free(paged, a_request, watermark, num_prompt, status):
    """With a request in the batch, an admission leaves ⌊watermark · 10⌋ blocks free for it to grow into."""
    scheduler = paged(num_blocks=10, watermark=watermark)
    put_into_batch(scheduler, a_request("in the batch", 8))
    scheduler.pool.allocate(2)
    call(scheduler.can_allocate, a_request("r", num_prompt)).gives(status)


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_the_watermark_asks_whether_the_batch_is_empty(paged, a_request, num_waiting):
    """The batch is empty, and requests wait: the watermark needs nothing, whatever their number."""
    requests = [a_request(n, 40) for n in range(num_waiting)]
    scheduler = paged(requests, num_blocks=10, watermark=0.5)
    that(f"can_allocate of the first of {num_waiting}", scheduler.can_allocate(requests[0]).name).gives("OK")


@pytest.mark.parametrize("watermark", [0.1, 0.5, 0.99])
def test_the_watermark_delays_no_admission_into_an_empty_batch(paged, a_request, watermark):
    """A request as large as the pool must run at some point. With an empty batch the watermark needs nothing."""
    scheduler, request = paged(num_blocks=10, watermark=watermark), a_request("r", 40)
    call(scheduler.can_allocate, request).gives(OK)
    put_into_batch(scheduler, a_request("in the batch", 1))
    scheduler.pool.allocate(1)
    call(scheduler.can_allocate, request).gives(LATER)


@pytest.mark.parametrize("running", [False, True], ids=["empty batch", "batch of one"])
def test_the_watermark_makes_nothing_never(paged, a_request, running):
    """NEVER is about the whole pool, whatever the watermark: 40 tokens fit into 10 blocks of 4, 41 do not."""
    scheduler = paged(num_blocks=10, watermark=0.5)
    if running:
        put_into_batch(scheduler, a_request("in the batch", 1))
    call(scheduler.can_allocate, a_request("r", 41)).gives(NEVER)
    call(scheduler.can_allocate, a_request("r", 40)).gives(LATER if running else OK)


@settings(max_examples=60)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    used=st.integers(0, 12),
    num_tokens=st.tuples(st.integers(1, 40), st.integers(0, 20)),
    percent=st.integers(0, 99),
    running=st.booleans(),
)
def test_can_allocate_in_any_pool(paged, a_request, num_blocks, block_size, used, num_tokens, percent, running):
    """Whatever the sizes: count the blocks one by one, and compare."""
    scheduler = paged(num_blocks=num_blocks, block_size=block_size, watermark=percent / 100)
    scheduler.pool.allocate(min(used, num_blocks))
    if running:
        put_into_batch(scheduler, a_request("in the batch", 1))
    request = a_request("r", num_tokens[0])
    request.output_token_ids += [7] * num_tokens[1]
    needed = len(range(0, sum(num_tokens), block_size))
    left_free = scheduler.pool.num_free - needed
    spared = int(percent / 100 * num_blocks) if running else 0
    status = NEVER if needed > num_blocks else OK if left_free >= spared else LATER
    call(scheduler.blocks_to_admit, request).gives(needed)
    call(scheduler.can_allocate, request).gives(status)


def test_blocks_to_take_may_be_fewer(paged, a_request):
    """`blocks_to_take` is how many must be free: in a stage where it gives 2 of 3, two free ones are enough."""

    class Sharing(PagedScheduler):
        def blocks_to_take(self, request, found=()):
            return self.blocks_to_admit(request) - 1

    scheduler = paged(cls=Sharing, num_blocks=5)
    scheduler.pool.allocate(3)
    call(scheduler.can_allocate, a_request("r", 12)).gives(OK)
    call(scheduler.can_allocate, a_request("r", 13)).gives(LATER)
    call(scheduler.can_allocate, a_request("r", 21)).gives(NEVER)


def test_found_blocks_that_are_in_use_are_not_taken(paged, a_request):
    """Of 5 blocks, 3 are in use. A request of 3 blocks has found one of these: it needs 2 more, and 2 are free.

    A found block that is free does not help: it is one of the free ones.
    """
    scheduler = paged(num_blocks=5)
    used, request = scheduler.pool.allocate(3), a_request("r", 12)
    call(scheduler.can_allocate, request).gives(LATER)
    call(scheduler.can_allocate, request, used[:1]).gives(OK)
    call(scheduler.can_allocate, request, [4]).gives(LATER)
    call(scheduler.can_allocate, a_request("large", 21), used).gives(NEVER)
