"""Phase 9, task 2: a chunk takes its blocks, and a request is admitted when those of its whole prompt are free."""

from __future__ import annotations

import gzip
import json
import random
from collections import deque
from pathlib import Path

import pytest

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

GOLDEN = Path(__file__).parents[1] / "scheduler/golden"

# Blocks of a request in the batch


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
def test_blocks_missing_reach_to_the_end_of_the_chunk(
    unprotected, a_request, num_tokens, num_computed, held, budget, threshold, missing
):
    """Blocks of 4 up to the end of the next chunk, less those that it has."""
    scheduler, request = unprotected(budget, long_prefill_threshold=threshold), a_request("a", num_tokens - 1)
    request.output_token_ids.append(7)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_computed
    request.block_ids = scheduler.pool.allocate(held)
    for _ in range(2):
        call(scheduler.blocks_missing, request).gives(missing)
    that("blocks that it has", len(request.block_ids)).gives(held)


def test_a_request_of_the_batch_misses_blocks_whatever_is_cached(unprotected, serve, a_request):
    """The same 20 tokens are cached. A request of the batch has 2 blocks: for its 12 tokens it lacks 3."""
    scheduler, request = unprotected(100, prefix_caching=True), a_request("b", 20)
    serve(scheduler, a_request("a", 20, 1))
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.blocks_missing, request).gives(3)


def test_nothing_is_missing_where_no_token_is_left(unprotected, a_request):
    """The budget is spent: a request that computes nothing needs no block, though its last one is full."""
    scheduler, request = unprotected(8), a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    request.block_ids = scheduler.pool.allocate(2)
    call(scheduler.schedule_tokens, a_request("b", 20), SchedulerOutput()).gives(None)
    call(scheduler.blocks_missing, request).gives(0)


@pytest.mark.parametrize(("num_shared", "missing"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_a_block_for_each_copy(unprotected, a_request, num_shared, missing):
    """A request has blocks for all its tokens. It lacks one for each block that it writes and that others use too."""
    scheduler, request = unprotected(100), a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 6
    request.block_ids = scheduler.pool.allocate(5)
    scheduler.pool.share(request.block_ids[: 1 + num_shared])  # the first one is only read
    scheduler._may_share_tails = True
    call(scheduler.blocks_missing, request).gives(missing)


def test_copies_are_looked_for_after_a_fork_only(unprotected, serve, a_request):
    """`written_and_shared` takes time for every token: it is called only while `_may_share_tails` is True."""
    scheduler, asked = unprotected(8), []
    written_and_shared = scheduler.written_and_shared
    scheduler.written_and_shared = lambda request: asked.append(request.request_id) or written_and_shared(request)
    serve(scheduler, a_request("a", 20), steps=5)
    that("asked for which requests, in five steps without a fork", asked).gives([])
    scheduler.fork_request("a", "b")
    serve(scheduler, steps=1)
    that("asked for which requests, in a step after a fork", sorted({*asked})).gives(["a", "b"])


# Blocks of a request to admit

TO_TAKE = [
    # tokens, computed before a swap, found in use, found free, budget, cap: blocks of the prompt, of the first chunk
    (20, 0, 0, 0, 100, 0, 5, 5),
    (21, 0, 0, 0, 100, 0, 6, 6),
    (20, 0, 0, 0, 8, 0, 5, 2),
    (20, 0, 0, 0, 9, 0, 5, 3),
    (20, 0, 0, 0, 100, 3, 5, 1),
    (3, 0, 0, 0, 8, 0, 1, 1),
    (4, 0, 0, 0, 8, 0, 1, 1),
    (20, 10, 0, 0, 8, 0, 5, 5),
    (20, 10, 0, 0, 6, 0, 5, 4),
    (20, 10, 0, 0, 100, 2, 5, 3),
    (21, 20, 0, 0, 8, 0, 6, 6),
    (40, 0, 2, 0, 8, 0, 8, 2),
    (40, 0, 0, 2, 8, 0, 10, 4),
    (40, 0, 1, 2, 8, 0, 9, 4),
    (40, 0, 1, 2, 100, 5, 9, 4),
    (40, 0, 9, 0, 100, 0, 1, 1),
    (40, 0, 0, 9, 100, 0, 10, 10),
]


@pytest.mark.parametrize("reserve", [True, False], ids=["the whole prompt", "the first chunk"])
@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "in_use", "free", "budget", "threshold", "whole", "chunk"),
    TO_TAKE,
    ids=[
        f"{num_tokens} tokens, {num_computed} swapped out, {in_use} blocks found in use and {free} free, "
        f"{budget} a step, a cap of {cap}"
        for num_tokens, num_computed, in_use, free, budget, cap, _, _ in TO_TAKE
    ],
)
def test_blocks_to_take_are_those_of_prompt_or_first_chunk(
    unprotected, a_request, num_tokens, num_computed, in_use, free, budget, threshold, whole, chunk, reserve
):
    """Blocks of all tokens, or up to the end of the first chunk; less the found ones that another request uses."""
    scheduler = unprotected(budget, long_prefill_threshold=threshold, reserve_full_prompt=reserve, prefix_caching=True)
    request = a_request("a", num_tokens)
    if num_computed:
        request.status, request.num_computed_tokens = RequestStatus.SWAPPED, num_computed
        request.host_block_ids = list(range(-(-num_computed // 4)))
    found = scheduler.pool.allocate(in_use + free)
    scheduler.pool.free(found[in_use:])
    for _ in range(2):
        call(scheduler.blocks_to_take, request, found).gives(whole if reserve else chunk)
    that("its blocks", request.block_ids).gives([])


@pytest.mark.parametrize(("reserve", "blocks"), [(True, 6), (False, 1)], ids=["the whole prompt", "the first chunk"])
def test_blocks_to_take_late_in_a_step(unprotected, a_request, reserve, blocks):
    """3 tokens of the budget are left. The request has 20 tokens of prompt and was preempted with 3 of output."""
    scheduler, request = unprotected(8, reserve_full_prompt=reserve), a_request("a", 20)
    request.output_token_ids += [7, 7, 7]
    call(scheduler.schedule_tokens, a_request("b", 5), SchedulerOutput()).gives(None)
    call(scheduler.blocks_to_take, request).gives(blocks)


FREE = [
    (0, 8, 0.0, AllocStatus.OK, AllocStatus.OK),
    (3, 8, 0.0, AllocStatus.OK, AllocStatus.OK),
    (4, 8, 0.0, AllocStatus.LATER, AllocStatus.OK),
    (6, 8, 0.0, AllocStatus.LATER, AllocStatus.OK),
    (7, 8, 0.0, AllocStatus.LATER, AllocStatus.LATER),
    (7, 4, 0.0, AllocStatus.LATER, AllocStatus.OK),
    (1, 8, 0.25, AllocStatus.OK, AllocStatus.OK),
    (2, 8, 0.25, AllocStatus.LATER, AllocStatus.OK),
    (4, 8, 0.25, AllocStatus.LATER, AllocStatus.OK),
    (5, 8, 0.25, AllocStatus.LATER, AllocStatus.LATER),
    (5, 4, 0.25, AllocStatus.LATER, AllocStatus.OK),
    (8, 1, 0.0, AllocStatus.LATER, AllocStatus.LATER),
]


@pytest.mark.parametrize("reserve", [True, False], ids=["the whole prompt", "the first chunk"])
@pytest.mark.parametrize(
    ("num_used", "budget", "watermark", "whole", "chunk"),
    FREE,
    ids=[f"{num_used} used, {budget} a step, watermark {watermark}" for num_used, budget, watermark, _, _ in FREE],
)
def test_admission_needs_free_blocks_and_the_watermark(
    unprotected, a_request, num_used, budget, watermark, whole, chunk, reserve
):
    """A prompt of 20 and 8 blocks, some used: its blocks to take must be free, plus the watermark."""
    scheduler = unprotected(budget, num_blocks=8, watermark=watermark, reserve_full_prompt=reserve)
    other = a_request("b", 4 * num_used or 1)
    scheduler.running.append(other)
    other.status, other.block_ids = RequestStatus.RUNNING, scheduler.pool.allocate(num_used)
    call(scheduler.can_allocate, a_request("a", 20)).gives(whole if reserve else chunk)
    that("free blocks", scheduler.pool.num_free).gives(8 - num_used)


@pytest.mark.parametrize("reserve", [True, False], ids=["the whole prompt", "the first chunk"])
def test_a_request_that_has_outgrown_the_pool(unprotected, a_request, reserve):
    """16 tokens of prompt and one of output, and a pool of 4 blocks of 4: NEVER, though its first chunk would fit."""
    scheduler, request = unprotected(8, num_blocks=4, reserve_full_prompt=reserve), a_request("a", 16)
    request.output_token_ids.append(7)
    call(scheduler.blocks_to_take, request).gives(5 if reserve else 2)
    call(scheduler.can_allocate, request).gives(AllocStatus.NEVER)


# What is too large


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 15, 16])
def test_a_prompt_longer_than_a_step_is_admitted(unprotected, serve, a_request, num_tokens):
    """2 tokens a step, and a pool of 4 blocks of 4: a request that fits is served, up to the last slot."""
    scheduler, request = unprotected(2, num_blocks=4), a_request("a", num_tokens, 1)
    that("tokens computed", sum(step["a"] for step in serve(scheduler, request))).gives(num_tokens)


@pytest.mark.parametrize("reserve", [True, False], ids=["the whole prompt", "the first chunk"])
@pytest.mark.parametrize("budget", [2, 8192])
def test_a_prompt_larger_than_the_pool_is_refused(unprotected, a_request, budget, reserve):
    """One token more than 4 blocks of 4: refused at once, whatever the budget, and nothing changes. 16 would fit."""
    scheduler = unprotected(budget, num_blocks=4, reserve_full_prompt=reserve)
    call(scheduler.blocks_to_take, a_request("fits", 16)).gives(4 if reserve else -(-min(budget, 16) // 4))
    call(scheduler.add_request, a_request("a", 17)).raises(RequestTooLargeError, "num_blocks")
    that("waiting requests", scheduler.num_waiting).gives(0)


# Admission


def test_blocks_come_with_the_chunks(unprotected, serve, a_request):
    """20 tokens in blocks of 4, 6 a step: 2, 3, 5 and 5 blocks, and the sixth when the output needs it."""
    scheduler, request, held = unprotected(6), a_request("a", 20, 3), []
    scheduler.add_request(request)
    for _ in range(5):
        serve(scheduler, steps=1)
        held.append(len(request.block_ids))
    that("blocks after each step", held).gives([2, 3, 5, 5, 6])


def long_prompt_beside_another(scheduler, serve, a_request):
    """14 tokens of "b" are in 4 of 8 blocks when a prompt of 20 arrives, which needs 5. Returns its request."""
    serve(scheduler, a_request("b", 14, 3), steps=2)
    scheduler.add_request(long := a_request("long", 20, 1))
    return long


def test_admitted_when_the_whole_prompt_fits(unprotected, serve, a_request):
    """ "long" waits until "b" has finished; then it takes the blocks of its first chunk."""
    scheduler = unprotected(8, num_blocks=8)
    long = long_prompt_beside_another(scheduler, serve, a_request)
    that("the next three steps", serve(scheduler, steps=3)).gives([{"b": 1}, {"b": 1}, {"long": 8}])
    that("blocks of the long one", len(long.block_ids)).gives(2)


def test_admitted_when_the_first_chunk_fits(unprotected, serve, a_request):
    """With reserve_full_prompt=False "long" is admitted at once, with the blocks of its first 7 tokens."""
    scheduler = unprotected(8, num_blocks=8, reserve_full_prompt=False)
    long = long_prompt_beside_another(scheduler, serve, a_request)
    that("the next step", serve(scheduler, steps=1)).gives([{"b": 1, "long": 7}])
    that("blocks of the long one", len(long.block_ids)).gives(2)


A, B = {"a": 1, "b": 5}, {"b": 6}
THRASH = [
    (
        True,
        [{"a": 6}, {"a": 1, "b": 5}, A, {"a": 1}, {"a": 1}, {"a": 1}, {"a": 1}, B, B, {"b": 2}, {"b": 1}, {"b": 1}],
        1,
    ),
    (False, [{"a": 6}, {"a": 1, "b": 5}, A, {"a": 1}, A, A, {"a": 1}, B, B, {"b": 2}, {"b": 1}, {"b": 1}], 2),
]


@pytest.mark.parametrize(
    ("reserve", "expected", "num_preemptions"), THRASH, ids=["the whole prompt", "the first chunk"]
)
def test_a_prompt_preempted_in_its_middle_begins_again(
    unprotected, serve, a_request, reserve, expected, num_preemptions
):
    """6 blocks of 4, 6 tokens a step. "b" is preempted in the middle of its prompt, and must find its blocks again."""
    scheduler = unprotected(6, num_blocks=6, reserve_full_prompt=reserve)
    b = a_request("b", [2] * 14, 3)
    that("the steps", serve(scheduler, a_request("a", 7, 6), b)).gives(expected)
    that("preemptions of b", b.num_preemptions).gives(num_preemptions)


@pytest.mark.parametrize(
    ("length", "budget", "blocks"),
    [(20, 100, 5), (21, 100, 6), (40, 8, 7), (40, 2, 6), (40, 100, 10), (8, 8, 2), (9, 8, 3)],
)
def test_found_blocks_are_among_those_of_the_chunk(unprotected, serve, a_request, length, budget, blocks):
    """20 tokens are cached. A request takes blocks for the found tokens, and for the chunk after them."""
    scheduler = unprotected(budget, prefix_caching=True)
    serve(scheduler, a_request("a", 20, 1))
    request = a_request("b", length)
    serve(scheduler, request, steps=1)
    that("blocks after its first step", len(request.block_ids)).gives(blocks)


@pytest.mark.parametrize(("length", "admitted"), [(24, True), (25, False)])
def test_found_blocks_need_not_be_free(unprotected, serve, a_request, length, admitted):
    """5 of its blocks are found in use, and one is free: it fits with 24 tokens, and not with 25."""
    scheduler = unprotected(9, num_blocks=7, prefix_caching=True)
    serve(scheduler, a_request("a", 20), steps=4)
    that("free blocks", scheduler.pool.num_free).gives(1)
    step = {"a": 1, "b": length - 20} if admitted else {"a": 1}
    that("the next step", serve(scheduler, a_request("b", length), steps=1)).gives([step])


def test_no_block_without_a_token(unprotected, serve, a_request):
    """The first prompt takes the whole step: the second computes nothing, so it waits, and holds no block."""
    scheduler = unprotected(8)
    first, second = a_request("a", 20, 1), a_request("b", 20, 1)
    serve(scheduler, first, second, steps=2)
    that("blocks of both", (len(first.block_ids), len(second.block_ids))).gives((4, 0))
    that("status of the second", second.status).gives(RequestStatus.WAITING)
    serve(scheduler, steps=1)
    that("blocks of both a step later", (len(first.block_ids), len(second.block_ids))).gives((0, 1))


# Growth


def test_no_preemption_for_a_token_that_is_not_computed(unprotected, serve, a_request):
    """Pool and budget are used up: the request of lower priority skips the step, and keeps its slot and its blocks."""
    scheduler, young = unprotected(8, num_blocks=7), a_request("young", 12, 3)
    serve(scheduler, young, steps=1)
    work = serve(scheduler, a_request("urgent", 16, 1, priority=-1), steps=1)
    that("the second step", work).gives([{"young": 4, "urgent": 4}])
    output = call(scheduler.schedule).value
    that("the third step", output.num_scheduled_tokens).gives({"urgent": 8})
    that("preempted, and blocks of the young one", (output.preempted, len(young.block_ids))).gives(([], 3))


def test_a_request_of_the_batch_looks_for_no_blocks(unprotected, serve, a_request):
    """Two equal prompts in one batch, with a prefix cache. A request of the batch looks for no blocks."""
    scheduler = unprotected(16, long_prefill_threshold=8, prefix_caching=True)
    requests = a_request("a", 20, 3), a_request("b", 20, 3)
    that("the first step", serve(scheduler, *requests, steps=1)).gives([{"a": 8, "b": 8}])
    that("the second step", serve(scheduler, steps=1)).gives([{"a": 8, "b": 4}])
    that("blocks of both", [len(each.block_ids) for each in requests]).gives([4, 5])


def test_a_fork_pays_for_its_copy(unprotected, serve, a_request):
    """6 tokens in blocks of 4, forked: each would write into the second block, so each lacks a block for a copy."""
    scheduler, parent = unprotected(8), a_request("a", 5)
    serve(scheduler, parent, steps=2)
    child = call(scheduler.fork_request, "a", "b").value
    scheduler.schedule()  # it makes the copies
    that("blocks that both have", [block for block in child.block_ids if block in parent.block_ids]).gives(
        parent.block_ids[:1]
    )
    that("used blocks", scheduler.pool.num_used).gives(3)
    scheduler.check()


def test_no_copy_where_no_token_is_left(unprotected, serve, a_request):
    """Three share a block, with 1 token a step: one gets a copy, the other two write nothing and still share."""
    scheduler = unprotected(8)
    serve(scheduler, a_request("a", 5), steps=2)
    children = [call(scheduler.fork_request, "a", name).value for name in "bc"]
    scheduler.max_num_batched_tokens = 1
    output = call(scheduler.schedule).value
    that("the step", output.num_scheduled_tokens).gives({"a": 1})
    that("copies", len(output.blocks_to_copy)).gives(1)
    for child in children:
        call(scheduler.blocks_missing, child).gives(0)
    that("blocks that the two share", children[0].block_ids).gives(children[1].block_ids)
    that("used blocks", scheduler.pool.num_used).gives(3)


def test_a_chunk_may_lack_a_block_and_a_copy(unprotected, serve, a_request):
    """A child's chunk begins in a shared block and ends in the next: it lacks two, one is free, so one is preempted."""
    scheduler = unprotected(8, num_blocks=4)
    serve(scheduler, a_request("a", 5, 20), steps=2)
    child = call(scheduler.fork_request, "a", "b", [7, 9, 9, 9, 9]).value
    call(scheduler.fork_request, "a", "c")
    that("its tokens, and computed", (child.num_tokens, child.num_computed_tokens)).gives((10, 6))
    call(scheduler.blocks_missing, child).gives(2)
    output = call(scheduler.schedule).value
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1, "b": 4}, ["c"]))
    that("blocks of the child", len(child.block_ids)).gives(3)


def test_without_a_block_for_a_copy_one_is_preempted(unprotected, serve, a_request):
    """Two blocks, both used by a parent and its child: one is preempted before the other may write."""
    scheduler = unprotected(8, num_blocks=2)
    serve(scheduler, a_request("a", 5), steps=2)
    call(scheduler.fork_request, "a", "b")
    output = call(scheduler.schedule).value
    that("work and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1}, ["b"]))
    that("copies", output.blocks_to_copy).gives([])


# Against a model of the rule, vLLM's schedules, and under the auditor


class Model:
    """The rule in order of arrival, with counts instead of blocks: the tokens and the number of blocks of each request.

    A request is [id, tokens, tokens left to generate, computed, blocks].
    """

    def __init__(self, num_blocks, num_slots, budget, threshold, reserve):
        self.free, self.num_slots, self.budget, self.threshold = num_blocks, num_slots, budget, threshold
        self.reserve, self.waiting, self.running = reserve, deque(), []

    def step(self):
        """id → (tokens, blocks), and the preempted ids."""
        work, preempted, left, index = {}, [], self.budget, 0
        while index < len(self.running) and left:
            it = self.running[index]
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
            index += 1
        while self.waiting and not preempted and len(self.running) < self.num_slots and left:
            new, lacks = self.chunk(self.waiting[0], left)
            if (-(-self.waiting[0][1] // 4) if self.reserve else lacks) > self.free:
                break
            self.running.append(self.waiting.popleft())
            left -= self.give(self.running[-1], new, lacks, work)
        return work, preempted

    def chunk(self, it, left):
        new = min(it[1] - it[3], self.threshold or left, left)
        return new, -(-(it[3] + new) // 4) - it[4]

    def give(self, it, new, lacks, work):
        self.free -= lacks
        it[4] += lacks
        work[it[0]] = (new, it[4])
        return new

    def commit(self, work):
        for it in [each for each in self.running if each[0] in work]:
            it[3] += work[it[0]][0]
            if it[3] == it[1]:
                it[1] += 1
                it[2] -= 1
                if not it[2]:
                    self.running.remove(it)
                    self.free += it[4]


@pytest.mark.parametrize("seed", range(32))
def test_random_requests_against_the_model(unprotected, seed):
    """Random prompts in small pools: tokens, blocks and preemptions of every step are those of the rule."""
    rng = random.Random(fresh(seed))
    num_blocks, num_slots, budget = rng.randint(8, 16), rng.randint(1, 6), rng.choice([2, 3, 8, 13, 50])
    threshold, reserve = rng.choice([0, 0, 1, 5]), seed % 2 == 0
    model = Model(num_blocks, num_slots, budget, threshold, reserve)
    options = {"num_blocks": num_blocks, "max_num_seqs": num_slots, "reserve_full_prompt": reserve}
    scheduler = unprotected(budget, long_prefill_threshold=threshold, **options)
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
        model.commit(work)
        scheduler.check()
        if not scheduler.has_unfinished and not coming:
            break
    that("free blocks", scheduler.pool.num_free).gives(num_blocks)


@pytest.mark.parametrize("number", range(0, 100, 5))
def test_each_step_is_the_one_that_vllm_schedules(unprotected, number):
    """Each step schedules what vLLM 0.33 schedules: `tests/scheduler/golden/README.md` describes the source."""
    workload = json.loads(gzip.decompress((GOLDEN / "unusual.json.gz").read_bytes()))[number]
    names = ("num_blocks", "block_size", "max_num_seqs", "prefix_caching")
    for mode, expected in workload["steps"].items():
        options = {name: workload[name] for name in names} | {"reserve_full_prompt": mode == "full_prompt_must_fit"}
        scheduler = unprotected(workload["max_num_batched_tokens"], **options)
        coming = sorted((step, index) for index, (_, _, _, step) in enumerate(workload["requests"]))
        for step, (tokens, preempted) in enumerate(expected):
            while coming and coming[0][0] <= step:
                arrival, index = coming.pop(0)
                prefix, length, max_tokens, _ = workload["requests"][index]
                own = [(index * 7919 + p * 31 + 1) % 30000 + 500 for p in range(prefix, length)]
                prompt = [p % 500 for p in range(prefix)] + own
                scheduler.add_request(Request(str(index), prompt, max_tokens, arrival_time=arrival + index * 1e-6))
            output = call(scheduler.schedule).value
            got = dict(output.num_scheduled_tokens), output.preempted
            that(f"tokens and preempted of step {step}, {options}", got).gives((tokens, preempted))
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))


@pytest.mark.parametrize("seed", range(8))
def test_random_runs(unprotected, random_run, random_options, seed):
    """Small pools, preemption, prefix cache, forks, aborts, steps that fail: the auditor finds no error in any step."""
    rng = random.Random(fresh(seed))
    random_run(unprotected(rng.choice([2, 4, 9, 30]), **random_options(rng)), rng)
