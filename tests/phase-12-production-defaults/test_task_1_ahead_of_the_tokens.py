"""Phase 12, task 1: a step is scheduled while the one before runs, on tokens that are not known yet."""

from __future__ import annotations

import random

import pytest

from minicache.memory.prefix import CachingBlockPool
from minicache.request import Request, RequestStatus
from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.vllm_options import VllmOptionsScheduler
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.follow import following_schedulers
from minicache_course.seeds import fresh

TOKEN = 7
"""What the model answers."""


class AheadScheduler(AsyncChunkedScheduler):
    """`AsyncChunkedScheduler` without task 2: its commit knows no stop token, and loses the token of a victim."""

    def update_from_output(self, output, token_ids):
        if self.ahead is None:
            self.count(output)
        counted, self.outstanding, self.ahead = self.awaited, self.ahead, None
        present = [request for request in counted if request.status is RequestStatus.RUNNING]
        for request in present:
            request.output_token_ids.append(token_ids[request.request_id])
            request.num_placeholders = 0
        over = [each for each in present if self.max_model_len == each.num_tokens or not left(each)]
        for request in over:
            self.finish_request(request.request_id, RequestStatus.FINISHED_LENGTH)
        return over

    def release(self, request):
        VllmOptionsScheduler.release(self, request)
        request.num_placeholders = 0

    def recover(self):
        self.ahead = None
        VllmOptionsScheduler.recover(self)


def left(request):
    """How many tokens it may still generate."""
    return request.max_tokens - len(request.output_token_ids)


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the scheduler and its requests, and the calls so far."""
    with scenario.telling(), following_schedulers(AsyncChunkedScheduler, AheadScheduler):
        yield


def ahead(*requests, **options):
    """The scheduler without task 2, with these requests; 1,000 blocks of 4 by default."""
    scheduler = AheadScheduler(**{"num_blocks": 1000, "block_size": 4} | options)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def a_request(request_id, prompt, max_tokens=9, *, outputs=0, computed=0, placeholders=0, **more):
    """A new request; a number as prompt means that many different tokens. With the rest, one that runs already."""
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    request = Request(request_id, tokens, max_tokens, **more)
    if outputs or computed or placeholders:
        request.status = RequestStatus.RUNNING
    request.output_token_ids += [TOKEN] * outputs
    request.num_computed_tokens, request.num_placeholders = computed, placeholders
    return request


def commit(scheduler, output):
    """The model has run the step: it answers every request with the same token."""
    return scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))


def steps_of(scheduler, arrivals, *, overlap):
    """The tokens of each step, id → number, until all have finished; `arrivals`: (step, request), in order."""
    __tracebackhide__ = True
    work, flying, coming = [], [], list(arrivals)
    while coming or scheduler.has_unfinished:
        while coming and coming[0][0] <= len(work):
            scheduler.add_request(coming.pop(0)[1])
        flying.append(call(scheduler.schedule).value)
        work.append(dict(flying[-1].num_scheduled_tokens))
        if len(flying) > overlap:
            commit(scheduler, flying.pop(0))
        scheduler.check()
        if len(work) > 500:
            that("steps until all have finished", len(work)).gives("fewer than 500")
    return work


# A step is counted before its tokens are known


COUNTED = {
    "a whole prompt": ((4, 0, 0), 4, (4, 1)),
    "the first chunk of a prompt": ((9, 0, 0), 4, (4, 0)),
    "the last chunk of a prompt": ((9, 0, 4), 5, (9, 1)),
    "a decode": ((4, 2, 5), 1, (6, 1)),
    "prompt and output, after a preemption": ((4, 3, 0), 7, (7, 1)),
    "the prompt alone, after a preemption": ((4, 3, 0), 4, (4, 0)),
    "all but one, after a preemption": ((4, 3, 0), 6, (6, 0)),
}


@pytest.mark.parametrize(("given", "num_new", "expected"), COUNTED.values(), ids=COUNTED)
def test_a_step_is_counted(given, num_new, expected):
    """Tokens count as computed at once. Where none is left to compute, one is on its way: a placeholder."""
    scheduler = ahead()
    prompt, outputs, computed = given
    request = a_request("a", prompt, outputs=outputs, computed=computed)
    request.status = RequestStatus.RUNNING
    call(scheduler.count, SchedulerOutput({"a": num_new}, [request])).gives(None)
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives(expected)
    that("awaited", [each.request_id for each in scheduler.awaited]).gives(["a"] * expected[1])
    that("tokens of output", request.output_token_ids).gives([TOKEN] * outputs)


def test_a_step_is_counted_request_by_request():
    """One that its client has left is passed over. Those that get a token are noted, in the order of the batch."""
    scheduler = ahead()
    requests = [a_request(name, 8, computed=7) for name in "dbca"]
    requests[1].status = RequestStatus.FINISHED_ABORTED
    requests[2].num_computed_tokens = 2
    scheduler.awaited = [a_request("of an earlier step", 3)]
    call(scheduler.count, SchedulerOutput(dict.fromkeys("dbca", 1), requests)).gives(None)
    that("computed tokens", [each.num_computed_tokens for each in requests]).gives([8, 7, 3, 8])
    that("placeholders", [each.num_placeholders for each in requests]).gives([1, 0, 0, 1])
    that("awaited", [each.request_id for each in scheduler.awaited]).gives(["d", "a"])


# What is left to compute


LEFT = {
    "a prompt": ({"prompt": 20, "computed": 8}, {}, 12),
    "a token that is known": ({"prompt": 20, "outputs": 1, "computed": 20}, {}, 1),
    "a token that is not known": ({"prompt": 20, "computed": 20, "placeholders": 1}, {}, 1),
    "prompt and output, after a preemption": ({"prompt": 4, "outputs": 3}, {}, 7),
    "the last token is known": ({"prompt": 4, "outputs": 3, "computed": 6, "max_tokens": 4}, {}, 1),
    "the last but one is on its way": (
        {"prompt": 4, "outputs": 2, "computed": 6, "placeholders": 1, "max_tokens": 4},
        {},
        1,
    ),
    "the last one is on its way": (
        {"prompt": 4, "outputs": 3, "computed": 7, "placeholders": 1, "max_tokens": 4},
        {},
        0,
    ),
    "the only one is on its way": ({"prompt": 4, "computed": 4, "placeholders": 1, "max_tokens": 1}, {}, 0),
    "one token short of max_model_len": (
        {"prompt": 4, "outputs": 2, "computed": 6, "placeholders": 1},
        {"max_model_len": 8},
        1,
    ),
    "max_model_len is reached": (
        {"prompt": 4, "outputs": 3, "computed": 7, "placeholders": 1},
        {"max_model_len": 8},
        0,
    ),
    "the pool is full": ({"prompt": 4, "outputs": 3, "computed": 7, "placeholders": 1}, {"num_blocks": 2}, 1),
    "the pool is too small": ({"prompt": 4, "outputs": 4, "computed": 8, "placeholders": 1}, {"num_blocks": 2}, 0),
    "the pool is too small, and the token known": (
        {"prompt": 4, "outputs": 5, "computed": 8},
        {"num_blocks": 2},
        1,
    ),
}


@pytest.mark.parametrize(("given", "options", "expected"), LEFT.values(), ids=LEFT)
def test_what_is_left_to_compute(given, options, expected):
    """The placeholder counts like a token, unless the token in its stead is the request's last one."""
    scheduler, request = ahead(**options), a_request("a", **given)
    call(scheduler.num_uncomputed, request).gives(expected)
    that("placeholders", request.num_placeholders).gives(given.get("placeholders", 0))


# Steps with known outcomes


def test_a_step_is_scheduled_while_one_is_outstanding():
    """The prompt's step runs. The next one computes the token that it will give, in a block of its own."""
    scheduler = ahead(request := a_request("a", 4))
    first = call(scheduler.schedule).value
    that("the first step", first.num_scheduled_tokens).gives({"a": 4})
    that("it is outstanding, and none is ahead", (scheduler.outstanding is first, scheduler.ahead)).gives((True, None))
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives((0, 0))
    second = call(scheduler.schedule).value
    that("the second step", second.num_scheduled_tokens).gives({"a": 1})
    that("the first is outstanding", scheduler.outstanding is first).gives(True)
    that("the second is ahead", scheduler.ahead is second).gives(True)
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives((4, 1))
    that("blocks, and tokens of output", (len(request.block_ids), request.output_token_ids)).gives((2, []))
    commit(scheduler, first)
    third = call(scheduler.schedule).value
    that("the third step", third.num_scheduled_tokens).gives({"a": 1})
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives((5, 1))


def test_a_third_step_is_refused():
    """Two steps are outstanding, and the older one was not committed: nothing changes."""
    scheduler = ahead(request := a_request("a", 4), a_request("b", 3))
    first, second = call(scheduler.schedule).value, call(scheduler.schedule).value
    call(scheduler.schedule).raises(ValueError)
    that("the same two", (scheduler.outstanding is first, scheduler.ahead is second)).gives((True, True))
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives((4, 1))
    commit(scheduler, first)
    that("the next step", call(scheduler.schedule).value.num_scheduled_tokens).gives({"a": 1, "b": 1})


def test_chunks_go_on_beside_a_placeholder():
    """8 tokens a step: b's prompt of 20 gets what the placeholder of a leaves. A chunk gives no token."""
    scheduler = ahead(a_request("a", 3), b := a_request("b", 20), max_num_batched_tokens=8)
    work = []
    for _ in range(4):
        before, output = scheduler.outstanding, call(scheduler.schedule).value
        work.append((dict(output.num_scheduled_tokens), b.num_placeholders))
        if before is not None:
            commit(scheduler, before)
    expected = [({"a": 3, "b": 5}, 0), ({"a": 1, "b": 7}, 0), ({"a": 1, "b": 7}, 0), ({"a": 1, "b": 1}, 0)]
    that("tokens of each step, and placeholders of b", work).gives(expected)
    that("the next step", call(scheduler.schedule).value.num_scheduled_tokens).gives({"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("options", "max_tokens", "num_steps"),
    [({}, 3, 3), ({}, 1, 1), ({"max_model_len": 6}, 9, 2), ({"num_blocks": 2}, 20, 5)],
    ids=["max_tokens", "max_tokens is 1", "max_model_len", "the whole pool"],
)
def test_no_step_computes_behind_the_last_token(options, max_tokens, num_steps):
    """Its last token is on its way: the request is passed over, and keeps its slot and its blocks."""
    scheduler = ahead(request := a_request("a", 4, max_tokens), **options)
    output = call(scheduler.schedule).value
    for _ in range(num_steps - 1):
        before, output = output, call(scheduler.schedule).value
        that("the step", len(output.num_scheduled_tokens)).gives(1)
        commit(scheduler, before)
    num_blocks = len(request.block_ids)
    output = call(scheduler.schedule).value
    that(f"the step behind {num_steps} others", output.num_scheduled_tokens).gives({})
    that("finished by it, or preempted", (output.finished, output.preempted)).gives(([], []))
    that("requests in the batch", scheduler.num_running).gives(1)
    that("its blocks", len(request.block_ids)).gives(num_blocks)


def test_a_slot_is_free_one_step_later():
    """One slot. While the last token of a is on its way, b waits; it is admitted when the token has come."""
    scheduler = ahead(a_request("a", 4, 1), a_request("b", 4, 1), max_num_seqs=1)
    first = call(scheduler.schedule).value
    second = call(scheduler.schedule).value
    that("the first two steps", [first.num_scheduled_tokens, second.num_scheduled_tokens]).gives([{"a": 4}, {}])
    commit(scheduler, first)
    that("the third", call(scheduler.schedule).value.num_scheduled_tokens).gives({"b": 4})


def test_a_victim_may_have_a_token_on_its_way():
    """7 blocks, all used by prompts. Both placeholders need a block: b, the newest, is preempted, and a gets one."""
    scheduler = ahead(a := a_request("a", 12), b := a_request("b", 16), num_blocks=7)
    call(scheduler.schedule)
    output = call(scheduler.schedule).value
    that("the step, and preempted", (output.num_scheduled_tokens, output.preempted)).gives(({"a": 1}, ["b"]))
    that("blocks of both", (len(a.block_ids), len(b.block_ids))).gives((4, 0))
    that("computed tokens of both", (a.num_computed_tokens, b.num_computed_tokens)).gives((12, 0))


def test_a_client_leaves_before_the_next_step():
    """The step of a runs, and a has been aborted: it is not counted, and the next step is without it."""
    scheduler = ahead(a := a_request("a", 4), b := a_request("b", 4))
    call(scheduler.schedule)
    scheduler.abort_request("a")
    that("the next step", call(scheduler.schedule).value.num_scheduled_tokens).gives({"b": 1})
    that("computed tokens", (a.num_computed_tokens, b.num_computed_tokens)).gives((0, 4))
    that("placeholders", (a.num_placeholders, b.num_placeholders)).gives((0, 1))


# Against the scheduler of phase 9


def arrivals_of(rng, count=12):
    """Random requests in the order of their arrival: (step, request)."""
    steps = sorted(rng.randint(0, 12) for _ in range(count))
    return [(step, a_request(number, rng.randint(1, 24), rng.randint(1, 9))) for number, step in enumerate(steps)]


@pytest.mark.parametrize("seed", range(6))
def test_without_overlap_every_step_is_phase_9s(seed):
    """Each step is committed before the next, in a small pool: the same steps, preemptions and all."""
    rng = random.Random(fresh(seed))
    options = {"num_blocks": rng.randint(10, 14), "block_size": 4, "max_num_batched_tokens": rng.choice([3, 9, 40])}
    options |= {"max_num_seqs": rng.choice([2, 8]), "prefix_caching": rng.random() < 0.5}
    arrive = rng.getrandbits(32)
    ours, theirs = (
        steps_of(cls(**options), arrivals_of(random.Random(arrive)), overlap=0)
        for cls in (AheadScheduler, VllmOptionsScheduler)
    )
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=False)):
        that(f"tokens of step {step}", got).gives(expected)
    that("steps", len(ours)).gives(len(theirs))


@pytest.mark.parametrize("seed", range(6))
def test_with_blocks_for_all_every_step_is_phase_9s(seed):
    """One step is always in flight, and no request waits for memory: no step has a token more or less."""
    rng = random.Random(fresh(100 + seed))
    options = {"num_blocks": 500, "block_size": 4, "max_num_batched_tokens": rng.choice([5, 9, 40])}
    options |= {"max_model_len": rng.choice([None, 28]), "prefix_caching": rng.random() < 0.5}
    arrive = rng.getrandbits(32)
    ours, theirs = (
        steps_of(cls(**options), arrivals_of(random.Random(arrive)), overlap=overlap)
        for cls, overlap in ((AheadScheduler, 1), (VllmOptionsScheduler, 0))
    )
    for step, (got, expected) in enumerate(zip(ours, theirs, strict=False)):
        that(f"tokens of step {step}", got).gives(expected)
    that("the step in which the last token is on its way", ours[len(theirs) :]).gives([{}])


# No placeholder is hashed


def cached_prefix(scheduler, tokens):
    """How many full blocks of these tokens are found; one token more follows them."""
    return len(scheduler.find_prefix(Request("other", [*tokens, 1], 1)))


def test_a_prompts_blocks_are_cached_when_they_are_scheduled():
    """12 tokens, 8 a step: two blocks can be found after the first schedule(), the third after the second."""
    scheduler = ahead(request := a_request("a", 12), max_num_batched_tokens=8, prefix_caching=True)
    found = []
    for _ in range(2):
        call(scheduler.schedule)
        found.append(cached_prefix(scheduler, request.prompt_token_ids))
    that("blocks that another request finds, after each schedule()", found).gives([2, 3])


def test_a_placeholder_is_not_hashed():
    """7 tokens in blocks of 4: the second step fills a block with a placeholder. The third knows what it was."""
    scheduler = ahead(request := a_request("a", 7), prefix_caching=True)
    first = call(scheduler.schedule).value
    call(scheduler.schedule)
    that("blocks of the request", len(request.block_ids)).gives(2)
    that("cached blocks", scheduler.pool.num_cached).gives(1)
    commit(scheduler, first)
    that("cached blocks, once the token is known", scheduler.pool.num_cached).gives(1)
    call(scheduler.schedule)
    that("cached blocks, after the next schedule()", scheduler.pool.num_cached).gives(2)
    tokens = request.prompt_token_ids
    for token, num_found in ((TOKEN, 2), (0, 1), (tokens[-1], 1)):
        that(f"blocks found of the prompt and token {token}", cached_prefix(scheduler, [*tokens, token])).gives(
            num_found
        )


def test_each_block_is_cached_once_it_is_known():
    """A prompt of 2, and 15 tokens: after the schedule() of step n, n + 1 tokens are scheduled, and n are known."""
    scheduler = ahead(a_request("a", 2, 20), prefix_caching=True)
    cached, before = [], None
    for _ in range(16):
        output = call(scheduler.schedule).value
        cached.append(scheduler.pool.num_cached)
        if before is not None:
            commit(scheduler, before)
        before = output
    known = [2, *range(2, 17)]
    that("cached blocks after each schedule()", cached).gives([number // 4 for number in known])


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_blocks_of_a_step_are_cached(num_blocks):
    """cache_known alone: of two requests it caches the blocks before the end of the chunk, and before a placeholder."""
    scheduler = ahead(prefix_caching=True)
    prompt = a_request("a", 16, computed=4 * num_blocks)
    decoding = a_request("b", [5] * 7, computed=7, placeholders=1)
    for request, num_cached in ((prompt, num_blocks), (decoding, 1)):
        request.block_ids = scheduler.pool.allocate(num_cached + 2)
        scheduler.pool.cache(request.block_ids[:num_cached], scheduler.hashes(request, num_cached)[:num_cached])
    call(scheduler.cache_known, SchedulerOutput({"a": 4, "b": 1}, [prompt, decoding])).gives(None)
    that("blocks found of a", cached_prefix(scheduler, prompt.prompt_token_ids)).gives(num_blocks + 1)
    that("cached blocks", scheduler.pool.num_cached).gives(num_blocks + 2)
    decoding.output_token_ids.append(TOKEN)
    decoding.num_computed_tokens = 8
    call(scheduler.cache_known, SchedulerOutput({"b": 1}, [decoding])).gives(None)
    that("blocks found of b, once its token is known", cached_prefix(scheduler, [*[5] * 7, TOKEN])).gives(2)


def test_long_answers_cost_no_more():
    """A decode step of a request with 4,000 tokens is as much work as one with 40."""
    costs = []
    for num_tokens in (40, 4000):
        scheduler = ahead(a_request("a", num_tokens, 50), num_blocks=2000, prefix_caching=True)
        first = scheduler.schedule()
        scheduler.schedule()
        commit(scheduler, first)
        costs.append(effort(scheduler.schedule))
    more = costs[1] / costs[0]
    that("the work of a step behind 4,000 tokens is at most twice that behind 40", more <= 2 or costs).gives(True)


def test_without_a_prefix_cache_nothing_is_cached():
    """And nothing fails."""
    scheduler = ahead(a_request("a", 7))
    first = call(scheduler.schedule).value
    call(scheduler.schedule)
    commit(scheduler, first)
    call(scheduler.schedule)
    that("the pool", isinstance(scheduler.pool, CachingBlockPool)).gives(False)
