"""Phase 5, task 4: requests join the batch at every step."""

from __future__ import annotations

import random

import pytest

from minicache.memory.blocks import blocks_for
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.static import StaticBatchScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def continuous(**options):
    """A continuous scheduler; by default it has 100 blocks of 4 tokens."""
    return ContinuousBatchScheduler(**{"num_blocks": 100, "block_size": 4} | options)


def steps_of(scheduler, arrivals, max_steps=1000):
    """{id: tokens} of each step until all have finished; `arrivals` is step → the requests that arrive before it."""
    steps, last = [], max(arrivals)
    while (scheduler.has_unfinished or len(steps) <= last) and len(steps) < max_steps:
        for request in arrivals.get(len(steps), []):
            scheduler.add_request(request)
        output = call(scheduler.schedule).value
        steps.append(dict(output.num_scheduled_tokens))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return steps


def test_may_admit_at_every_step(request_of):
    """Waiting requests may join an empty batch, and a running one."""
    scheduler, output = continuous(max_num_seqs=3), SchedulerOutput()
    scheduler.add_request(request_of("a", 3, 5))
    that("may_admit(…) while a waits and the batch is empty", bool(call(scheduler.may_admit, output).value)).gives(True)
    scheduler.update_from_output(scheduler.schedule(), {"a": 7})
    scheduler.add_request(request_of("b", 3, 5))
    that("may_admit(…) while b waits and a runs", bool(call(scheduler.may_admit, output).value)).gives(True)


def test_a_free_slot_is_taken_at_once(request_of):
    """2 batch slots; a has 2 tokens to generate, b 4, c 1: c's prompt is computed in the step of b's third token."""
    requests = [request_of("a", 3, 2), request_of("b", 5, 4), request_of("c", 2, 1)]
    that("tokens of each step", steps_of(continuous(max_num_seqs=2), {0: requests})).gives(
        [{"a": 3, "b": 5}, {"a": 1, "b": 1}, {"b": 1, "c": 2}, {"b": 1}]
    )


def test_later_arrivals_join_the_next_step(request_of):
    """A request that arrives while a batch runs is in its next step, after those that were in it."""
    arrivals = {0: [request_of("a", 3, 4)], 1: [request_of("b", 6, 2)], 2: [request_of("c", 2, 2)]}
    that("tokens of each step", steps_of(continuous(), arrivals)).gives(
        [{"a": 3}, {"a": 1, "b": 6}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "c": 1}]
    )
    scheduler = continuous()
    for step, request in enumerate((request_of("z", 3), request_of("a", 3))):
        scheduler.add_request(request)
        output = scheduler.schedule()
        that(f"the order of step {step}", list(output.num_scheduled_tokens)).gives(["z", "a"][: step + 1])
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))


def test_the_last_of_a_batch_does_not_run_alone(request_of):
    """2 batch slots, one answer of 6 tokens, six of 1: static batching takes 9 steps, this takes 6."""
    lengths = [6, 1, 1, 1, 1, 1, 1]
    counts = {}
    for create in (StaticBatchScheduler, ContinuousBatchScheduler):
        scheduler = create(num_blocks=100, block_size=4, max_num_seqs=2)
        requests = [request_of(each, 3, max_tokens) for each, max_tokens in enumerate(lengths)]
        counts[create.__name__] = call(drive, scheduler, requests).value.num_steps
    # Static: the batch of 0 and 1 takes 6 steps, 2 and 3 take 1, 4 and 5 take 1, 6 takes 1.
    that("steps", counts).gives({"StaticBatchScheduler": 9, "ContinuousBatchScheduler": 6})


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5])
def test_every_slot_is_used_at_every_step(request_of, max_num_seqs):
    """While more wait than there are slots, each step has max_num_seqs requests, whichever have just finished."""
    scheduler = continuous(max_num_seqs=max_num_seqs)
    tally = call(drive, scheduler, [request_of(each, 3, 1 + each % 4) for each in range(40)], max_steps=15).value
    that("requests of each step", tally.batch_sizes[:8]).gives([max_num_seqs] * 8)


def test_one_slot_serves_one_at_a_time(request_of):
    """max_num_seqs 1, three requests of 10 tokens, 3 new each: 9 steps, 0 0 0 1 1 1 2 2 2."""
    scheduler = continuous(max_num_seqs=1)
    tally = call(drive, scheduler, [request_of(request_id, 10, 3) for request_id in range(3)]).value
    that("ids of each step", tally.order).gives([[0], [0], [0], [1], [1], [1], [2], [2], [2]])


@pytest.mark.parametrize(("num_prompt_tokens", "joins_at"), [(8, 1), (9, 3)])
def test_decodes_and_prompts_share_the_step(request_of, num_prompt_tokens, joins_at):
    """10 tokens a step, two of them for decodes: a prompt of 8 joins at once, one of 9 when a decode has finished."""
    scheduler = continuous(max_num_batched_tokens=10)
    arrivals = {
        0: [request_of("a", 3, 3), request_of("b", 3, 5)],
        1: [request_of("c", num_prompt_tokens, 1)],
    }
    steps = steps_of(scheduler, arrivals)
    that("the step in which c computes its prompt", [step for step, each in enumerate(steps) if "c" in each]).gives(
        [joins_at]
    )


def test_the_head_is_not_bypassed(request_of):
    """The head waits for memory: the small request behind it waits too, though it would fit at every step."""
    scheduler = continuous(num_blocks=5)
    requests = [request_of("a", 9, 3), request_of("large", 9, 3), request_of("small", 1, 1)]
    that("tokens of each step", steps_of(scheduler, {0: requests})).gives(
        [{"a": 9}, {"a": 1}, {"a": 1}, {"large": 9, "small": 1}, {"large": 1}, {"large": 1}]
    )


def test_freed_memory_is_used_again(request_of):
    """6 blocks, requests of 3: as soon as one finishes, the next has its blocks, and no request ever lacks a block."""
    scheduler = continuous(num_blocks=6)
    requests = [request_of("a", 5, 7), request_of("b", 9, 2), request_of("c", 9, 3)]
    for request in requests:
        scheduler.add_request(request)
    for _ in range(7):
        output = call(scheduler.schedule).value
        call(scheduler.check).gives(None)
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("used blocks", scheduler.pool.num_used).gives(0)


def test_the_last_token_of_the_budget(request_of):
    """7 decodes of a budget of 8 leave one token: a prompt of 1 joins."""
    scheduler = continuous(max_num_batched_tokens=8)
    for request_id in range(7):
        scheduler.add_request(request_of(request_id, 1, 3))
    scheduler.update_from_output(scheduler.schedule(), dict.fromkeys(range(7), 7))
    scheduler.add_request(request_of("new", 1, 3))
    that("num_scheduled_tokens", call(scheduler.schedule).value.num_scheduled_tokens).gives(
        dict.fromkeys([*range(7), "new"], 1)
    )


def by_hand(arrivals, slots, budget, num_blocks):
    """{id: tokens} of each step, by the rule: a token for each in the batch, then prompts from the head that fit."""
    queue, batch, steps = [], {}, []  # batch: id → [tokens to generate, blocks]
    while queue or batch or len(steps) <= max(arrivals):
        queue += arrivals.get(len(steps), [])
        step = dict.fromkeys(batch, 1)
        while queue and len(batch) < slots:
            request = queue[0]
            blocks = blocks_for(request.num_prompt_tokens + request.max_tokens, 4)
            tokens = sum(step.values()) + request.num_prompt_tokens
            if tokens > budget or blocks + sum(held for _, held in batch.values()) > num_blocks:
                break
            batch[request.request_id] = [request.max_tokens, blocks]
            step[queue.pop(0).request_id] = request.num_prompt_tokens
        steps.append(step)
        batch = {each: [left - 1, held] for each, (left, held) in batch.items() if left > 1}
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_many_requests(request_of, seed):
    """For any requests and arrivals, the steps are those of the rule."""
    rng = random.Random(fresh(seed))
    arrivals = {0: []}
    for request_id in range(rng.randint(1, 40)):
        request = request_of(request_id, rng.randint(1, 12), rng.randint(1, 9))
        arrivals.setdefault(rng.randint(0, 30), []).append(request)
    slots, budget, num_blocks = rng.randint(1, 6), rng.randint(12, 40), rng.randint(6, 24)
    expected = by_hand(arrivals, slots, budget, num_blocks)
    scheduler = continuous(max_num_seqs=slots, max_num_batched_tokens=budget, num_blocks=num_blocks)
    that("tokens of each step", steps_of(scheduler, arrivals)).gives(expected)
    that("used blocks in the end", scheduler.pool.num_used).gives(0)
