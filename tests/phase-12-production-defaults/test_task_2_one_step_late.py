"""Phase 12, task 2: what a step generated is committed when the next one has been scheduled."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from zlib import crc32

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.observe import observe
from minicache.scheduler.vllm_options import VllmOptionsScheduler
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.follow import following_schedulers
from minicache_course.seeds import fresh

GOLDEN = Path(__file__).parents[1] / "scheduler/golden"
TOKEN, STOP = 7, 9
SWAP = {"preemption": "swap", "num_host_blocks": 4}


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the scheduler and its requests, and the calls so far."""
    with scenario.telling(), following_schedulers(AsyncChunkedScheduler):
        yield


def overlapping(*requests, **options):
    """A scheduler with these requests; 8 blocks of 4 by default."""
    scheduler = AsyncChunkedScheduler(**{"num_blocks": 8, "block_size": 4} | options)
    for request in requests:
        scheduler.add_request(request)
    return scheduler


def a_request(request_id, num_prompt=4, max_tokens=9, **more):
    """A new request with a prompt of its own, and the stop token 9."""
    first = 100 + crc32(str(request_id).encode()) % 1000
    options = {"stop_token_ids": [STOP]} | more
    return Request(request_id, list(range(first, first + num_prompt)), max_tokens, **options)


def ids_of(requests):
    return [request.request_id for request in requests]


def two_steps(scheduler):
    """Two steps, neither of which is committed."""
    __tracebackhide__ = True
    return call(scheduler.schedule).value, call(scheduler.schedule).value


def commit(scheduler, output, token_ids):
    """Commit a step, check the books, and return the ids of those that have finished."""
    __tracebackhide__ = True
    finished = call(scheduler.update_from_output, output, token_ids).value
    scheduler.check()
    return ids_of(finished)


# The token takes the placeholder's place


def test_a_token_takes_the_place_of_its_placeholder():
    """The token is appended, and no more is counted: the step was, when the next one was scheduled."""
    scheduler = overlapping(request := a_request("a", 4))
    first, second = two_steps(scheduler)
    that("finished", commit(scheduler, first, {"a": 5})).gives([])
    that("tokens of output", request.output_token_ids).gives([5])
    that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives((4, 0))
    that("the second step is outstanding now", scheduler.outstanding is second).gives(True)
    that("none is ahead", scheduler.ahead).gives(None)
    third = call(scheduler.schedule).value
    that("finished", commit(scheduler, second, {"a": 6})).gives([])
    that("tokens of output", request.output_token_ids).gives([5, 6])
    that("the third step is outstanding now", scheduler.outstanding is third).gives(True)


def test_a_step_is_counted_where_none_was_scheduled_ahead():
    """Each step is committed before the next: it is counted by its commit."""
    scheduler = overlapping(request := a_request("a", 4, 3))
    for number, token in enumerate((5, 6, 8), start=1):
        output = call(scheduler.schedule).value
        finished = commit(scheduler, output, {"a": token})
        that("computed tokens, and placeholders", (request.num_computed_tokens, request.num_placeholders)).gives(
            (3 + number, 0)
        )
        that("outstanding, and ahead", (scheduler.outstanding, scheduler.ahead)).gives((None, None))
    that("tokens, and finished", (request.output_token_ids, finished)).gives(([5, 6, 8], ["a"]))


def test_a_chunk_gets_no_token():
    """The prompt of b goes on: what the model gave for its chunk is ignored."""
    scheduler = overlapping(a := a_request("a", 3), b := a_request("b", 20), max_num_batched_tokens=8)
    first, second = two_steps(scheduler)
    commit(scheduler, first, {"a": 5, "b": 6})
    call(scheduler.schedule)
    commit(scheduler, second, {"a": 8})
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([5, 8], []))


def test_each_request_gets_its_own():
    """Five answers of different lengths: a token goes to the request that it was generated for, whichever finish."""
    requests = [a_request(name, 3, number) for number, name in enumerate("abcde", start=1)]
    scheduler, flying, expected = overlapping(*requests, num_blocks=40), [], {name: [] for name in "abcde"}
    for step in range(7):
        flying.append(call(scheduler.schedule).value)
        if step:
            output = flying.pop(0)
            tokens = {name: 100 * step + ord(name) for name in output.num_scheduled_tokens}
            for name, token in tokens.items():
                expected[name].append(token)
            commit(scheduler, output, tokens)
    that("tokens of each", {each.request_id: each.output_token_ids for each in requests}).gives(expected)


# A stop is noticed one step late


def test_a_stop_token_is_noticed_one_step_late():
    """Step 2 computes a token of a behind its stop token. Blocks and id are free; the token is dropped."""
    scheduler = overlapping(old := a_request("a", 4))
    first, second = two_steps(scheduler)
    that("finished by the commit of step 1", commit(scheduler, first, {"a": STOP})).gives(["a"])
    that("why", old.finish_reason).gives("stop")
    that("its blocks, and used ones", (old.block_ids, scheduler.pool.num_used)).gives(([], 0))
    that("requests in the batch, unfinished", (scheduler.num_running, scheduler.has_unfinished)).gives((0, False))
    scheduler.add_request(new := a_request("a", 4))
    third = call(scheduler.schedule).value
    that("finished by the commit of step 2", commit(scheduler, second, {"a": 5})).gives([])
    that("tokens of the old, of the new", (old.output_token_ids, new.output_token_ids)).gives(([STOP], []))
    commit(scheduler, third, {"a": 6})
    that("tokens of the new", new.output_token_ids).gives([6])


REASONS = {
    "a stop token": ({}, {}, [STOP], "stop"),
    "a stop token that is the last": ({"max_tokens": 2}, {}, [TOKEN, STOP], "stop"),
    "a stop token that is ignored": ({"max_tokens": 2, "ignore_eos": True}, {}, [STOP, STOP], "length"),
    "max_tokens": ({"max_tokens": 2}, {}, [TOKEN, TOKEN], "length"),
    "max_model_len": ({}, {"max_model_len": 6}, [TOKEN, TOKEN], "length"),
    "the whole pool": ({}, {"num_blocks": 1}, [TOKEN], "capacity"),
    "the whole pool, and a stop token": ({}, {"num_blocks": 1}, [STOP], "stop"),
    "the whole pool, and max_tokens": ({"max_tokens": 1}, {"num_blocks": 1}, [TOKEN], "length"),
}


@pytest.mark.parametrize(("given", "options", "tokens", "reason"), REASONS.values(), ids=REASONS)
def test_why_a_request_has_finished(given, options, tokens, reason):
    """A prompt of 4 in blocks of 4. The last token decides, with a step scheduled ahead."""
    scheduler = overlapping(request := a_request("a", 4, **given), **options)
    output = call(scheduler.schedule).value
    for number, token in enumerate(tokens, start=1):
        before, output = output, call(scheduler.schedule).value
        finished = commit(scheduler, before, {"a": token})
        that(f"finished with token {number}", finished).gives(["a"] if number == len(tokens) else [])
    that("why", request.finish_reason).gives(reason)
    that("tokens of output", request.output_token_ids).gives(tokens)
    commit(scheduler, output, dict.fromkeys(output.num_scheduled_tokens, TOKEN))
    that("tokens of output in the end", request.output_token_ids).gives(tokens)


def test_without_a_step_ahead_the_pool_decides_in_the_next():
    """The pool is full, and no step has passed the request over: its next schedule() finishes it, as in phase 9."""
    scheduler = overlapping(request := a_request("a", 4), num_blocks=1)
    output = call(scheduler.schedule).value
    that("finished by the commit", commit(scheduler, output, {"a": TOKEN})).gives([])
    output = call(scheduler.schedule).value
    that("finished by schedule()", (output.finished, request.finish_reason)).gives((["a"], "capacity"))


def test_the_others_keep_their_order():
    """b and d finish, in the order of the batch; a and c stay."""
    requests = [a_request(name, 2) for name in "abcd"]
    scheduler = overlapping(*requests)
    first, second = two_steps(scheduler)
    that("finished", commit(scheduler, first, {"d": STOP, "c": 5, "b": STOP, "a": 5})).gives(["b", "d"])
    that("the batch", ids_of(scheduler.running)).gives(["a", "c"])
    that("the next step", call(scheduler.schedule).value.num_scheduled_tokens).gives({"a": 1, "c": 1})
    commit(scheduler, second, {"a": 5, "c": 6})
    that("tokens of each", [each.output_token_ids for each in requests]).gives([[5, 5], [STOP], [5, 6], [STOP]])


def test_freed_blocks_are_the_next_ones_prompt():
    """All blocks are a's. Its stop token comes while step 2 writes into them; step 3 has them for b already."""
    scheduler = overlapping(a_request("a", 7), b := a_request("b", 8), num_blocks=2)
    first, second = two_steps(scheduler)
    that("the second step", second.num_scheduled_tokens).gives({"a": 1})
    commit(scheduler, first, {"a": STOP})
    third = call(scheduler.schedule).value
    that("the third step", third.num_scheduled_tokens).gives({"b": 8})
    that("finished by the commit of step 2", commit(scheduler, second, {"a": 5})).gives([])
    commit(scheduler, third, {"b": 6})
    that("tokens of b", b.output_token_ids).gives([6])


# Stale tokens


def short_of_blocks(**options):
    """Prompts of 3 and 4 blocks, and all 7 are used. Step 2 preempts b, whose first token is on its way."""
    scheduler = overlapping(a := a_request("a", 12), b := a_request("b", 16), num_blocks=7, **options)
    first, second = two_steps(scheduler)
    that("preempted by the second step", second.preempted).gives(["b"])
    that("placeholders of a and b", (a.num_placeholders, b.num_placeholders)).gives((1, 0))
    return scheduler, a, b, first, second


@pytest.mark.parametrize("options", [{}, SWAP], ids=["recompute", "swap"])
def test_a_stale_token_is_appended(options):
    """b waits and gets its token. No counter of it changes, and it comes back with one token more."""
    scheduler, a, b, first, second = short_of_blocks(**options)
    computed, status = b.num_computed_tokens, b.status
    that("finished", commit(scheduler, first, {"a": 5, "b": 6})).gives([])
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([5], [6]))
    that("computed tokens, and placeholders of b", (b.num_computed_tokens, b.num_placeholders)).gives((computed, 0))
    that("its status", b.status).gives(status)
    scheduler.abort_request("a")
    third = call(scheduler.schedule).value
    that("the third step", third.num_scheduled_tokens).gives({"b": 17 - computed})
    commit(scheduler, second, {"a": 5})
    commit(scheduler, third, {"b": 8})
    that("tokens of b", b.output_token_ids).gives([6, 8])


@pytest.mark.parametrize("options", [{}, SWAP], ids=["recompute", "swap"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stale_token_may_finish_its_request(options, reason):
    """It leaves the waiting queue, and its CPU blocks are free."""
    b = a_request("b", 16, 1 if reason == "length" else 9)
    scheduler = overlapping(a_request("a", 12), b, num_blocks=7, **options)
    first, second = two_steps(scheduler)
    that("preempted by the second step", second.preempted).gives(["b"])
    that("finished", commit(scheduler, first, {"a": 5, "b": STOP if reason == "stop" else 6})).gives(["b"])
    that("why", b.finish_reason).gives(reason)
    that("waiting, and running", (scheduler.num_waiting, ids_of(scheduler.running))).gives((0, ["a"]))
    that("CPU blocks in use", scheduler.host_pool.num_used if scheduler.host_pool else 0).gives(0)
    scheduler.add_request(a_request("b", 4))
    that("the id is free, and waits", scheduler.num_waiting).gives(1)


def test_a_stale_chunk_has_no_token():
    """b is preempted in the middle of its prompt: there is no token on its way, and it gets none."""
    scheduler = overlapping(
        a_request("a", 7), b := a_request("b", 16), num_blocks=5, max_num_batched_tokens=11, reserve_full_prompt=False
    )
    before, output = None, call(scheduler.schedule).value
    while not output.preempted:
        before, output = output, call(scheduler.schedule).value
        commit(scheduler, before, dict.fromkeys(before.num_scheduled_tokens, TOKEN))
    that("the step before had both", sorted(before.num_scheduled_tokens)).gives(["a", "b"])
    that("tokens of b, and its status", (b.output_token_ids, b.status)).gives(([], RequestStatus.WAITING))


# Clients leave


@pytest.mark.parametrize("tokens", [{"b": 6}, {"a": 5, "b": 6}], ids=["no token for it", "a token for it"])
@pytest.mark.parametrize("when", ["before the next schedule()", "before the commit"])
def test_a_client_leaves_while_its_step_runs(when, tokens):
    """Its blocks are free at once; a token for it may come, and is ignored."""
    scheduler = overlapping(old := a_request("a"), other := a_request("b"))
    first = call(scheduler.schedule).value
    if when == "before the next schedule()":
        scheduler.abort_request("a")
    call(scheduler.schedule)
    scheduler.abort_request("a")
    that("why, blocks, placeholders", (old.finish_reason, old.block_ids, old.num_placeholders)).gives(("abort", [], 0))
    that("finished", commit(scheduler, first, tokens)).gives([])
    that("tokens of both", (old.output_token_ids, other.output_token_ids)).gives(([], [6]))


@pytest.mark.parametrize("when", ["before the next schedule()", "before the commit"])
def test_a_new_request_may_have_the_id_of_one_that_left(when):
    """The step computed the old one's token. The new one does not get it, waiting or admitted."""
    scheduler = overlapping(old := a_request("a"), a_request("b"))
    first = call(scheduler.schedule).value
    if when == "before the commit":
        second = call(scheduler.schedule).value
    scheduler.abort_request("a")
    scheduler.add_request(new := a_request("a", 5))
    if when == "before the next schedule()":
        second = call(scheduler.schedule).value
        that("the second step", second.num_scheduled_tokens).gives({"b": 1, "a": 5})
    commit(scheduler, first, {"a": 5, "b": 6})
    that("tokens of the old, of the new", (old.output_token_ids, new.output_token_ids)).gives(([], []))
    call(scheduler.schedule)
    commit(scheduler, second, {"a": 8, "b": 6})
    expected = [8] if new in second.scheduled else []
    that("tokens of the old, of the new", (old.output_token_ids, new.output_token_ids)).gives(([], expected))


def test_a_client_leaves_and_its_token_was_stale():
    """b was preempted, then aborted; its token comes."""
    scheduler, a, b, first, _ = short_of_blocks()
    scheduler.abort_request("b")
    that("finished", commit(scheduler, first, {"a": 5, "b": 6})).gives([])
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([5], []))


# Misuse and failures


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ({"a": TOKEN}, ValueError),
        ({"a": TOKEN, "b": TOKEN, "c": TOKEN}, ValueError),
        ({"a": TOKEN, "b": 7.0}, TypeError),
        ({"a": TOKEN, "b": -1}, ValueError),
    ],
    ids=["one is missing", "one too many", "not an int", "negative"],
)
@pytest.mark.parametrize("is_ahead", [True, False], ids=["a step ahead", "none ahead"])
def test_a_bad_commit_changes_nothing(tokens, error, is_ahead):
    """Neither tokens nor counters. Correct the tokens, and call again."""
    scheduler = overlapping(a := a_request("a", 12), b := a_request("b", 16), num_blocks=7)
    first = call(scheduler.schedule).value
    if is_ahead:
        call(scheduler.schedule)
    computed = a.num_computed_tokens, b.num_computed_tokens
    call(scheduler.update_from_output, first, tokens).raises(error)
    scheduler.check()
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([], []))
    that("computed tokens of both", (a.num_computed_tokens, b.num_computed_tokens)).gives(computed)
    commit(scheduler, first, {"a": 5, "b": 6})
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([5], [6]))


def test_steps_are_committed_in_order_and_once():
    """The step ahead first, or one a second time: ValueError, and nothing changes."""
    scheduler = overlapping(request := a_request("a"))
    first, second = two_steps(scheduler)
    call(scheduler.update_from_output, second, {"a": TOKEN}).raises(ValueError)
    that("tokens of output", request.output_token_ids).gives([])
    commit(scheduler, first, {"a": 5})
    call(scheduler.update_from_output, first, {"a": 5}).raises(ValueError)
    commit(scheduler, second, {"a": 6})
    call(scheduler.update_from_output, second, {"a": 6}).raises(ValueError)
    that("tokens of output", request.output_token_ids).gives([5, 6])


def test_recover_gives_up_both_steps():
    """a runs, b was preempted: both start over, and no token of the two steps is ever committed."""
    scheduler, a, b, first, second = short_of_blocks(prefix_caching=True)
    call(scheduler.recover).gives(None)
    scheduler.check()
    that("computed tokens, and placeholders of a", (a.num_computed_tokens, a.num_placeholders)).gives((0, 0))
    that("used blocks, and cached ones", (scheduler.pool.num_used, scheduler.pool.num_cached)).gives((0, 0))
    for output in (first, second):
        call(scheduler.update_from_output, output, dict.fromkeys(output.num_scheduled_tokens, TOKEN)).raises(ValueError)
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([], []))
    output = call(scheduler.schedule).value
    that("the next step", output.num_scheduled_tokens).gives({"a": 12, "b": 16})
    commit(scheduler, output, {"a": 5, "b": 6})
    that("tokens of both", (a.output_token_ids, b.output_token_ids)).gives(([5], [6]))


# The prefix cache


def num_found(scheduler, tokens):
    """How many full blocks of these tokens another request would find; one token more follows them."""
    return len(scheduler.find_prefix(Request("other", [*tokens, 1], 1)))


@pytest.mark.parametrize("last", [STOP, 5], ids=["stop", "length"])
def test_the_block_of_the_last_step_is_cached(last):
    """7 tokens in blocks of 4, and two more. Step 2 fills the second block, and no later step has the request."""
    scheduler = overlapping(a := a_request("a", 7, 2), prefix_caching=True)
    first, second = two_steps(scheduler)
    commit(scheduler, first, {"a": 6})
    that("cached blocks before the commit of step 2", scheduler.pool.num_cached).gives(1)
    call(scheduler.schedule)
    that("finished", commit(scheduler, second, {"a": last})).gives(["a"])
    that("used blocks", scheduler.pool.num_used).gives(0)
    that("blocks found of its prompt and first token", num_found(scheduler, [*a.prompt_token_ids, 6])).gives(2)


def test_a_block_is_cached_if_the_next_step_has_no_budget():
    """Two tokens a step, three requests in decode: c is not in the next step, and its full block is cached anyway."""
    scheduler = overlapping(*(a_request(name, 3) for name in "abc"), prefix_caching=True, max_num_batched_tokens=9)
    first = call(scheduler.schedule).value
    second = call(scheduler.schedule).value
    that("the second step", second.num_scheduled_tokens).gives({"a": 1, "b": 1, "c": 1})
    commit(scheduler, first, {"a": 5, "b": 6, "c": 8})
    scheduler.max_num_batched_tokens = 2
    that("the third step", call(scheduler.schedule).value.num_scheduled_tokens).gives({"a": 1, "b": 1})
    that("cached blocks, before the commit", scheduler.pool.num_cached).gives(2)
    commit(scheduler, second, {"a": 5, "b": 6, "c": 8})
    that("cached blocks", scheduler.pool.num_cached).gives(3)


def test_a_stop_token_is_in_no_cached_block():
    """3 tokens in blocks of 4; step 2 fills the block with the stop token, and no request may find it."""
    scheduler = overlapping(a := a_request("a", 3), prefix_caching=True)
    first, second = two_steps(scheduler)
    commit(scheduler, first, {"a": STOP})
    commit(scheduler, second, {"a": 5})
    that("cached blocks", scheduler.pool.num_cached).gives(0)
    that("blocks found", num_found(scheduler, [*a.prompt_token_ids, STOP])).gives(0)


def test_nothing_of_a_victim_is_cached():
    """b is preempted while its token is on its way, with which its last block would be full."""
    scheduler = overlapping(a_request("a", 12), b := a_request("b", 15), num_blocks=7, prefix_caching=True)
    first, second = two_steps(scheduler)
    that("preempted by the second step", second.preempted).gives(["b"])
    commit(scheduler, first, {"a": 5, "b": 6})
    that("blocks found of b and its token", num_found(scheduler, [*b.prompt_token_ids, 6])).gives(3)


# Whole runs: vLLM's schedules, the same answers as without overlap, and the auditor


def prompt_of(index, prefix, length):
    return [p % 500 if p < prefix else (index * 7919 + p * 31 + 1) % 30000 + 500 for p in range(length)]


@pytest.mark.parametrize("number", range(43))
def test_each_step_is_the_one_that_vllm_schedules(number):
    """Each step schedules what vLLM 0.33 schedules: `tests/scheduler/golden/README.md` describes the source."""
    workload = json.loads(gzip.decompress((GOLDEN / "async_short.json.gz").read_bytes()))[number]
    names = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching")
    for mode, expected in workload["steps"].items():
        options = {name: workload[name] for name in names} | {"reserve_full_prompt": mode == "full_prompt_must_fit"}
        scheduler, before = AsyncChunkedScheduler(**options), None
        coming = sorted((row[3], index) for index, row in enumerate(workload["requests"]))
        for step, row in enumerate(expected):
            while coming and coming[0][0] <= step:
                arrival, index = coming.pop(0)
                prefix, length, max_tokens, _, _ = workload["requests"][index]
                more = {"stop_token_ids": [3], "arrival_time": arrival + index * 1e-6}
                scheduler.add_request(Request(str(index), prompt_of(index, prefix, length), max_tokens, **more))
            output = call(scheduler.schedule).value
            num_free, finished = scheduler.pool.num_free, []
            if before is not None:
                stops = {str(index): entry[4] for index, entry in enumerate(workload["requests"])}
                tokens = {
                    each.request_id: 3 if len(each.output_token_ids) == stops[each.request_id] else 7
                    for each in before.scheduled
                }
                finished = ids_of(call(scheduler.update_from_output, before, tokens).value)
            got = dict(output.num_scheduled_tokens), sorted(output.preempted), finished
            that(f"tokens, preempted, finished in step {step}, {options}", got).gives(tuple(row[:3]))
            that(
                f"free blocks after schedule() {step}, and after the commit, {options}",
                [num_free, scheduler.pool.num_free],
            ).gives(row[3:])
            before = output


def answer(request):
    """What the model generates next for a request: it depends on the request and the position."""
    return crc32(repr((request.request_id, len(request.output_token_ids))).encode()) % 12


def random_options(rng):
    """A scheduler's options: pools, budgets and batches down to very small ones."""
    return {
        "num_blocks": rng.randint(7, 14),
        "block_size": 4,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([5, 9, 30]),
        "max_model_len": rng.choice([None, None, 28]),
        "prefix_caching": rng.random() < 0.6,
        "reserve_full_prompt": rng.random() < 0.5,
        "long_prefill_threshold": rng.choice([0, 0, 4]),
        "preemption": rng.choice(["recompute", "swap"]),
        "num_host_blocks": 5,
    }


def random_arrivals(rng):
    """Requests whose prompts begin alike, in the order of their arrival: (step, request)."""
    beginning = [rng.randrange(2) for _ in range(20)]
    arrivals = []
    for number in range(rng.randint(4, 14)):
        prompt = beginning[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        more = {"stop_token_ids": rng.choice([(), (1, 2)]), "priority": rng.choice([0, 0, 1])}
        arrivals.append((rng.randint(0, 20), Request(number, prompt, rng.randint(1, 14), **more)))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def serve(scheduler, arrivals, *, overlap, troubled=None):
    """Serve all, with so many steps in flight; `troubled` draws clients that leave and steps that fail."""
    __tracebackhide__ = True
    coming, flying, step = list(arrivals), [], 0
    try:
        while coming or flying or scheduler.has_unfinished:
            while coming and coming[0][0] <= step:
                scheduler.add_request(coming.pop(0)[1])
            unfinished = [*scheduler.running, *scheduler.waiting.values()]
            if troubled and unfinished and troubled.random() < 0.06:
                scheduler.abort_request(troubled.choice(unfinished).request_id)
            if scheduler.has_unfinished:
                flying.append(call(scheduler.schedule).value)
                scheduler.check()
            if troubled and troubled.random() < 0.04:
                call(scheduler.recover)
                flying.clear()
            elif len(flying) > overlap or (flying and not scheduler.has_unfinished):
                output = flying.pop(0)
                scheduler.update_from_output(output, {each.request_id: answer(each) for each in output.scheduled})
            scheduler.check()
            step += 1
            if step > 1000:
                that("steps until all have finished", step).gives("fewer than 1000")
    except InvariantError as error:
        that("the auditor", f"InvariantError: {error}").gives("no error")
    that("used blocks", scheduler.pool.num_used).gives(0)
    that("used CPU blocks", scheduler.host_pool.num_used if scheduler.host_pool else 0).gives(0)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_answers_as_without_overlap(seed):
    """Whatever the pool: each request gets the tokens that phase 9's scheduler gives it, and the same reason."""
    rng = random.Random(fresh(seed))
    options, arrive = random_options(rng), rng.getrandbits(32)
    answers = []
    for cls, overlap in ((VllmOptionsScheduler, 0), (AsyncChunkedScheduler, 0), (AsyncChunkedScheduler, 1)):
        arrivals, scheduler = random_arrivals(random.Random(arrive)), cls(**options)
        serve(observe(scheduler, AsyncAuditor()) if overlap else scheduler, arrivals, overlap=overlap)
        answers.append({each.request_id: (each.output_token_ids, each.finish_reason) for _, each in arrivals})
    that(f"tokens and reasons without overlap, {options}", answers[1]).gives(answers[0])
    that(f"tokens and reasons, {options}", answers[2]).gives(answers[0])


@pytest.mark.parametrize("seed", range(10))
def test_clients_leave_and_steps_fail(seed):
    """One step is always in flight: the auditor finds no error, and every request finishes."""
    rng = random.Random(fresh(200 + seed))
    scheduler = observe(AsyncChunkedScheduler(**random_options(rng)), AsyncAuditor())
    arrivals = random_arrivals(rng)
    serve(scheduler, arrivals, overlap=1, troubled=rng)
    that("requests that have not finished", [each for _, each in arrivals if not each.status.is_finished]).gives([])
