"""Phase 9, task 2: blocks are taken for a chunk, and only what outgrows the whole memory is refused."""

from __future__ import annotations

import random
from collections import deque

import pytest

from minicache.course.checks import call, that
from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus

# Method by method


MISSING = [
    (20, 8, 2, 8, 0, 2),
    (20, 8, 2, 4, 0, 1),
    (20, 8, 2, 5, 0, 2),
    (20, 8, 2, 100, 0, 3),
    (20, 8, 2, 100, 3, 1),
    (20, 6, 2, 2, 0, 0),
    (20, 6, 2, 3, 0, 1),
    (20, 19, 5, 8, 0, 0),
    (21, 20, 5, 8, 0, 1),
    (22, 21, 6, 8, 0, 0),
    (20, 8, 5, 4, 0, 0),
    (20, 0, 5, 1, 0, 0),
    (20, 20, 5, 8, 0, 0),
]


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "held", "budget", "threshold", "missing"),
    MISSING,
    ids=[
        f"{num_tokens} tokens, {num_computed} computed, {held} blocks, {budget} a step, a cap of {threshold}"
        for num_tokens, num_computed, held, budget, threshold, _ in MISSING
    ],
)
def test_blocks_missing(undue, a_request, num_tokens, num_computed, held, budget, threshold, missing):
    """Blocks of 4 up to the end of the next chunk, less those that it has: never below 0."""
    scheduler, request = undue(budget, long_prefill_threshold=threshold), a_request("a", num_tokens - 1)
    request.output_token_ids.append(7)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_computed
    request.block_ids = scheduler.pool.allocate(held)
    for _ in range(2):
        call(scheduler.blocks_missing, request).gives(missing)
    that("blocks that it has", len(request.block_ids)).gives(held)


def test_nothing_is_missing_where_no_token_is_left(undue, a_request):
    """The step is full: who is not computed needs no block, though its last one is full."""
    scheduler, request = undue(8), a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.order, a_request("b", 20), SchedulerOutput()).gives(None)
    call(scheduler.blocks_missing, request).gives(0)


def test_copies_beside_more_blocks_than_the_chunk_needs(undue, a_request):
    """Two blocks more than the chunk needs, and a shared one: the copy needs a block of its own all the same."""
    scheduler, request = undue(2), a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 10
    request.block_ids = scheduler.pool.allocate(5)
    scheduler.pool.share(request.block_ids[2:3])
    scheduler._may_share_tails = True
    call(scheduler.written_and_shared, request).gives([2])
    call(scheduler.blocks_missing, request).gives(1)


TO_ADMIT = [
    (20, 0, 100, 0, 5),
    (21, 0, 100, 0, 6),
    (20, 0, 8, 0, 2),
    (20, 0, 9, 0, 3),
    (20, 0, 100, 3, 1),
    (20, 0, 2, 3, 1),
    (3, 0, 8, 0, 1),
    (4, 0, 8, 0, 1),
    (20, 10, 8, 0, 5),
    (20, 10, 6, 0, 4),
    (20, 10, 100, 2, 3),
    (20, 19, 8, 0, 5),
    (21, 20, 8, 0, 6),
]


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "budget", "threshold", "blocks"),
    TO_ADMIT,
    ids=[
        f"{num_tokens} tokens, {num_computed} computed, {budget} a step, a cap of {threshold}"
        for num_tokens, num_computed, budget, threshold, _ in TO_ADMIT
    ],
)
def test_blocks_to_the_end_of_the_chunk(undue, a_request, num_tokens, num_computed, budget, threshold, blocks):
    """One that is new, or comes back from the host: blocks of 4 for what is computed and the chunk behind it."""
    scheduler, request = undue(budget, long_prefill_threshold=threshold), a_request("a", num_tokens)
    if num_computed:
        request.status, request.num_computed_tokens = RequestStatus.SWAPPED, num_computed
    for _ in range(2):
        call(scheduler.blocks_to_admit, request).gives(blocks)
    that("its blocks", request.block_ids).gives([])


def test_now_or_later(undue, a_request):
    """OK while the step has a token left; then LATER, though all blocks are free."""
    scheduler, request = undue(8), a_request("a", 20)
    call(scheduler.can_allocate, request).gives(AllocStatus.OK)
    call(scheduler.order, a_request("b", 7), SchedulerOutput()).gives(None)
    call(scheduler.can_allocate, request).gives(AllocStatus.OK)
    call(scheduler.order, a_request("c", 7), SchedulerOutput()).gives(None)
    call(scheduler.can_allocate, request).gives(AllocStatus.LATER)


FREE = [
    (0, 8, 0.0, AllocStatus.OK),
    (6, 8, 0.0, AllocStatus.OK),
    (7, 8, 0.0, AllocStatus.LATER),
    (7, 4, 0.0, AllocStatus.OK),
    (4, 8, 0.25, AllocStatus.OK),
    (5, 8, 0.25, AllocStatus.LATER),
    (5, 4, 0.25, AllocStatus.OK),
    (8, 1, 0.0, AllocStatus.LATER),
]


@pytest.mark.parametrize(
    ("num_used", "budget", "watermark", "status"),
    FREE,
    ids=[f"{num_used} used, {budget} a step, watermark {watermark}" for num_used, budget, watermark, _ in FREE],
)
def test_blocks_for_the_first_chunk_are_enough(undue, a_request, num_used, budget, watermark, status):
    """A prompt of 20 and 8 blocks, of which some are used: its first chunk must fit, and the watermark beside it."""
    scheduler, other = undue(budget, num_blocks=8, watermark=watermark), a_request("b", 4 * num_used or 1)
    scheduler.running.append(other)
    other.status, other.block_ids = RequestStatus.RUNNING, scheduler.pool.allocate(num_used)
    call(scheduler.can_allocate, a_request("a", 20)).gives(status)
    that("free blocks", scheduler.pool.num_free).gives(8 - num_used)


def test_never(undue, a_request):
    """What is on the host and the next chunk are more than the whole pool: NEVER."""
    scheduler, request = undue(8, num_blocks=4), a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.SWAPPED, 16
    call(scheduler.can_allocate, request).gives(AllocStatus.NEVER)


# What is too large


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 15, 16])
def test_longer_than_a_step_is_no_reason(undue, serve, a_request, num_tokens):
    """2 tokens a step, and a pool of 4 blocks of 4: what fits into the pool is served, up to its last slot."""
    scheduler, request = undue(2, num_blocks=4), a_request("a", num_tokens, 1)
    call(scheduler.check_size, request).gives(None)
    that("tokens computed", sum(step["a"] for step in serve(scheduler, request))).gives(num_tokens)


@pytest.mark.parametrize("num_tokens", [17, 18, 100])
@pytest.mark.parametrize("budget", [2, 8192])
def test_larger_than_the_pool(undue, a_request, num_tokens, budget):
    """One token more than 4 blocks of 4: refused at once, whatever the budget, and nothing has changed."""
    scheduler, request = undue(budget, num_blocks=4), a_request("a", num_tokens)
    call(scheduler.check_size, request).raises(RequestTooLargeError, "num_blocks")
    call(scheduler.add_request, request).raises(RequestTooLargeError)
    that("requests that wait", scheduler.num_waiting).gives(0)
    scheduler.add_request(after := a_request("b", 3))
    that("arrival_index of the next one", after.arrival_index).gives(0)


def test_larger_than_the_pool_after_a_full_step(undue, serve, a_request):
    """The last step had no token left: that makes nothing fit that does not fit, and refuses nothing that does."""
    scheduler = undue(4, num_blocks=4)
    serve(scheduler, a_request("a", 8), steps=1)
    call(scheduler.add_request, a_request("b", 17)).raises(RequestTooLargeError)
    call(scheduler.add_request, a_request("c", 16)).gives(None)


def test_larger_than_the_pool_though_it_begins_alike(undue, serve, a_request):
    """12 of its 17 tokens are cached: all 17 must lie in memory all the same."""
    scheduler = undue(4, num_blocks=4, prefix_caching=True)
    serve(scheduler, a_request("a", 13, 1))
    call(scheduler.add_request, a_request("b", 17)).raises(RequestTooLargeError)


@pytest.mark.parametrize(("num_tokens", "fits"), [(10, True), (11, True), (12, False), (13, False)])
def test_room_for_an_answer(undue, serve, a_request, num_tokens, fits):
    """max_model_len 12: a prompt of 11 gets one token, a prompt of 12 is refused."""
    scheduler, request = undue(2, max_model_len=12), a_request("a", num_tokens, 9)
    if not fits:
        call(scheduler.add_request, request).raises(RequestTooLargeError, "max_model_len")
        return
    serve(scheduler, request)
    that("tokens of its answer", len(request.output_token_ids)).gives(12 - num_tokens)


# Who is admitted


def test_blocks_come_with_the_chunks(undue, serve, a_request):
    """20 tokens in blocks of 4, 6 a step: 2, 3, 5 and 5 blocks, and the sixth when the answer needs it."""
    scheduler, request, held = undue(6), a_request("a", 20, 3), []
    scheduler.add_request(request)
    for _ in range(5):
        serve(scheduler, steps=1)
        held.append(len(request.block_ids))
    that("blocks after each step", held).gives([2, 3, 5, 5, 6])


def test_admitted_where_only_the_chunk_fits(undue, serve, a_request):
    """4 of 8 blocks are free, and a prompt of 32 tokens comes: its first 8 tokens need 2 of them."""
    scheduler = undue(8, num_blocks=8)
    serve(scheduler, a_request("a", 16, 1), steps=2)
    serve(scheduler, a_request("b", 14, 9), steps=2)
    long = a_request("long", 32, 1)
    that("the step", serve(scheduler, long, steps=1)).gives([{"b": 1, "long": 7}])
    that("blocks of the long one", len(long.block_ids)).gives(2)


@pytest.mark.parametrize(
    ("length", "budget", "blocks"),
    [(20, 100, 5), (21, 100, 6), (40, 8, 7), (40, 2, 6), (40, 100, 10), (8, 8, 2), (9, 8, 3)],
)
def test_found_blocks_are_among_them(undue, serve, a_request, length, budget, blocks):
    """20 tokens are cached. Blocks for those that are found, and for the chunk behind them."""
    scheduler = undue(budget, prefix_caching=True)
    serve(scheduler, a_request("a", 20, 1))
    request = a_request("b", length)
    serve(scheduler, request, steps=1)
    that("blocks after its first step", len(request.block_ids)).gives(blocks)


def test_found_blocks_and_a_chunk_that_does_not_fit(undue, serve, a_request):
    """Of 28 tokens 20 are found, in 5 blocks that another uses. The chunk needs 2 more, and 1 is free: it waits."""
    scheduler = undue(9, num_blocks=7, prefix_caching=True)
    serve(scheduler, a_request("a", 20), steps=4)
    that("free blocks", scheduler.pool.num_free).gives(1)
    that("the next step", serve(scheduler, a_request("b", 28), steps=1)).gives([{"a": 1}])


def test_no_block_without_a_token(undue, serve, a_request):
    """The first prompt takes the whole step: of the second nothing is computed, so it waits, and holds nothing."""
    scheduler = undue(8)
    first, second = a_request("a", 20, 1), a_request("b", 20, 1)
    serve(scheduler, first, second, steps=2)
    that("blocks of both", (len(first.block_ids), len(second.block_ids))).gives((4, 0))
    that("status of the second", second.status).gives(RequestStatus.WAITING)
    serve(scheduler, steps=1)
    that("blocks of both a step later", (len(first.block_ids), len(second.block_ids))).gives((0, 1))


# Blocks for those in the batch


def test_nobody_is_preempted_for_a_token_that_is_not_computed(undue, serve, a_request):
    """Pool and step are full: the worse-ranked of two sits the step out, and keeps its place and its blocks."""
    scheduler, young = undue(8, num_blocks=6), a_request("young", 12, 3)
    serve(scheduler, young, steps=1)
    work = serve(scheduler, a_request("urgent", 16, 1, priority=-1), steps=1)
    that("the second step", work).gives([{"young": 4, "urgent": 4}])
    output = call(scheduler.schedule).value
    that("the third step", output.num_scheduled_tokens).gives({"urgent": 8})
    that("preempted, and blocks of the young one", (output.preempted, len(young.block_ids))).gives(([], 3))


def test_what_another_has_cached_since(undue, serve, a_request):
    """Two equal prompts side by side, with a prefix cache. Who is in the batch has its blocks, and looks for none."""
    scheduler = undue(16, long_prefill_threshold=8, prefix_caching=True)
    requests = a_request("a", 20, 3), a_request("b", 20, 3)
    that("the first step", serve(scheduler, *requests, steps=1)).gives([{"a": 8, "b": 8}])
    that("the second step", serve(scheduler, steps=1)).gives([{"a": 8, "b": 4}])
    that("blocks of both", [len(each.block_ids) for each in requests]).gives([4, 5])


def test_a_fork_pays_for_its_copy(undue, serve, a_request):
    """6 tokens in blocks of 4, forked: each would write into the second block, so each lacks a block for a copy."""
    scheduler, parent = undue(8), a_request("a", 5)
    serve(scheduler, parent, steps=2)
    child = call(scheduler.fork_request, "a", "b").value
    scheduler.schedule()  # a step whose tokens never come; it made the copies
    that("blocks that both have", [block for block in child.block_ids if block in parent.block_ids]).gives(
        parent.block_ids[:1]
    )
    that("used blocks", scheduler.pool.num_used).gives(3)
    scheduler.check()


def test_no_copy_where_no_token_is_left(undue, serve, a_request):
    """Three of a family, and 1 token a step: one gets its copy, the other two share on, for they write nothing."""
    scheduler = undue(8)
    serve(scheduler, a_request("a", 5), steps=2)
    twins = [call(scheduler.fork_request, "a", name).value for name in "bc"]
    scheduler.max_num_batched_tokens = 1
    output = call(scheduler.schedule).value
    that("the step", output.num_scheduled_tokens).gives({"a": 1})
    that("copies", len(output.blocks_to_copy)).gives(1)
    for twin in twins:
        call(scheduler.blocks_missing, twin).gives(0)
    that("blocks that the two share", twins[0].block_ids).gives(twins[1].block_ids)
    that("used blocks", scheduler.pool.num_used).gives(3)


def test_a_block_and_a_copy(undue, serve, a_request):
    """A twin's chunk begins in a shared block and ends in the next: it lacks two, and one is free. Another must go."""
    scheduler = undue(8, num_blocks=4)
    serve(scheduler, a_request("a", 5, 20), steps=2)
    twin = call(scheduler.fork_request, "a", "b", [7, 9, 9, 9, 9]).value
    call(scheduler.fork_request, "a", "c")
    that("its tokens, and computed", (twin.num_tokens, twin.num_computed_tokens)).gives((10, 6))
    call(scheduler.blocks_missing, twin).gives(2)
    output = call(scheduler.schedule).value
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1, "b": 4}, ["c"]))
    that("blocks of the twin", len(twin.block_ids)).gives(3)


def test_nothing_is_copied_where_nobody_was_forked(undue, a_request):
    """Two equal prompts join in one step, whose tokens never come. What both have is written again, and not copied."""
    requests = a_request("a", 8), a_request("b", 8)
    scheduler = undue(20, *requests, prefix_caching=True)
    for _ in range(3):
        output = call(scheduler.schedule).value
        that("copies", output.blocks_to_copy).gives([])
        that("blocks of both", [len(each.block_ids) for each in requests]).gives([2, 2])


def test_a_copy_for_which_there_is_no_block(undue, serve, a_request):
    """Two blocks, and both are used by a family of two: one must go before the other may write."""
    scheduler = undue(8, num_blocks=2)
    serve(scheduler, a_request("a", 5), steps=2)
    call(scheduler.fork_request, "a", "b")
    output = call(scheduler.schedule).value
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1}, ["b"]))
    that("copies", output.blocks_to_copy).gives([])


# Against a model of the rule, and under the auditor


class Model:
    """The rule once more, in order of arrival, with counts instead of blocks: who computes, who has how many blocks."""

    def __init__(self, num_blocks, seats, budget, threshold):
        self.free, self.seats, self.budget, self.threshold = num_blocks, seats, budget, threshold
        self.waiting, self.running = deque(), []

    def step(self):
        """id → (tokens, blocks), and who is preempted. A request: [id, tokens, left of its answer, computed, held]."""
        work, preempted, left, turn = {}, [], self.budget, 0
        while turn < len(self.running) and left:
            it = self.running[turn]
            new, lacks = self.chunk(it, left)
            while lacks > self.free and it in self.running:
                victim = self.running.pop()
                self.free += victim[4]
                victim[3:] = [0, 0]
                self.waiting.appendleft(victim)
                preempted.append(victim[0])
            if it not in self.running:
                break
            left -= self.give(it, new, lacks, work)
            turn += 1
        while self.waiting and not preempted and len(self.running) < self.seats and left:
            new, lacks = self.chunk(self.waiting[0], left)
            if lacks > self.free:
                break
            self.running.append(self.waiting.popleft())
            left -= self.give(self.running[-1], new, lacks, work)
        return work, preempted

    def chunk(self, it, left):
        new = min(it[1] - it[3], self.threshold or left, left)
        return new, max(0, -(-(it[3] + new) // 4) - it[4])

    def give(self, it, new, lacks, work):
        self.free -= lacks
        it[4] += lacks
        work[it[0]] = (new, it[4])
        return new

    def report(self, work):
        for it in [each for each in self.running if each[0] in work]:
            it[3] += work[it[0]][0]
            if it[3] == it[1]:
                it[1] += 1
                it[2] -= 1
                if not it[2]:
                    self.running.remove(it)
                    self.free += it[4]


@pytest.mark.parametrize("seed", range(24))
def test_chunks_blocks_and_victims_of_random_requests(undue, seed):
    """Random prompts in small pools: tokens, blocks and preemptions of every step are those of the rule."""
    rng = random.Random(seed)
    num_blocks, seats, budget = rng.randint(8, 16), rng.randint(1, 6), rng.choice([2, 3, 8, 13, 50])
    threshold = rng.choice([0, 0, 1, 5])
    model = Model(num_blocks, seats, budget, threshold)
    scheduler = undue(budget, num_blocks=num_blocks, max_num_seqs=seats, long_prefill_threshold=threshold)
    coming = sorted((rng.randint(0, 10), rng.randint(1, 24), rng.randint(1, 8)) for _ in range(rng.randint(2, 10)))
    for step in range(1000):
        while coming and coming[0][0] <= step:
            number, (_, prompt, answer) = len(coming), coming.pop(0)
            scheduler.add_request(Request(number, [1] * prompt, answer))
            model.waiting.append([number, prompt, answer, 0, 0])
        output, (work, preempted) = call(scheduler.schedule).value, model.step()
        got = {
            each.request_id: (output.num_scheduled_tokens[each.request_id], len(each.block_ids))
            for each in output.scheduled
        }
        that(f"tokens and blocks in step {step}, and preempted", (got, output.preempted)).gives((work, preempted))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        model.report(work)
        scheduler.check()
        if not scheduler.has_unfinished and not coming:
            break
    that("free blocks", scheduler.pool.num_free).gives(num_blocks)


@pytest.mark.parametrize("seed", range(8))
def test_random_runs(undue, random_run, random_options, seed):
    """Small pools, preemption, prefix cache, forks, aborts, steps that fail: the auditor likes every step."""
    rng = random.Random(seed)
    random_run(undue(rng.choice([2, 4, 9, 30]), **random_options(rng)), rng)
