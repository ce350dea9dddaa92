"""Phase 9, task 1: one budget of tokens a step, first for the batch, then for the waiting queue."""

from __future__ import annotations

import random

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

# Method by method: what it returns, and what it spends


MOST = [
    (0, 0, 0, 0),
    (0, 1, 1, 1),
    (0, 8, 8, 8),
    (0, 9, 9, 8),
    (0, 1000, 1000, 8),
    (3, 0, 0, 0),
    (3, 2, 2, 2),
    (3, 3, 3, 3),
    (3, 4, 3, 3),
    (3, 1000, 3, 3),
    (9, 1000, 9, 8),
    (1, 5, 1, 1),
]


@pytest.mark.parametrize(
    ("threshold", "num_tokens", "largest", "chunk"),
    MOST,
    ids=[f"{num_tokens} tokens, a cap of {threshold}" for threshold, num_tokens, _, _ in MOST],
)
def test_a_chunk_is_bounded_by_cap_and_budget(whole_blocks, threshold, num_tokens, largest, chunk):
    """largest_chunk applies only the threshold; chunk also the 8 tokens of the step. 0 is no threshold."""
    scheduler = whole_blocks(8, long_prefill_threshold=threshold)
    call(scheduler.largest_chunk, num_tokens).gives(largest)
    call(scheduler.chunk, num_tokens).gives(chunk)


def test_schedule_tokens_spends_and_chunk_does_not(whole_blocks, a_request):
    """Three prompts of 800, scheduled by hand: chunk spends nothing, and for the third nothing is left."""
    scheduler, output = whole_blocks(1024), SchedulerOutput()
    requests = [a_request(number, 800) for number in range(3)]
    for request, left in zip(requests, (1024, 224, 0), strict=True):
        for _ in range(2):
            call(scheduler.chunk, 2000).gives(left)
        call(scheduler.schedule_tokens, request, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({0: 800, 1: 224})
    that("scheduled", output.scheduled).gives(requests[:2])
    call(scheduler.chunk, 2000).gives(0)


LEFT = [(20, 0, 0, 8), (20, 0, 8, 8), (20, 0, 16, 4), (20, 0, 19, 1), (20, 3, 22, 1), (20, 3, 0, 8), (20, 3, 18, 5)]


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_computed", "scheduled"),
    LEFT,
    ids=[
        f"{num_prompt} + {num_output} tokens, {num_computed} computed"
        for num_prompt, num_output, num_computed, _ in LEFT
    ],
)
def test_schedule_tokens_schedules_what_is_left_to_compute(
    whole_blocks, a_request, num_prompt, num_output, num_computed, scheduled
):
    """Prompt and output are one sequence: its uncomputed tokens are scheduled, at most 8."""
    scheduler, output, request = whole_blocks(8), SchedulerOutput(), a_request("a", num_prompt)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_computed
    request.output_token_ids += [7] * num_output
    call(scheduler.schedule_tokens, request, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": scheduled})
    call(scheduler.chunk, 100).gives(8 - scheduled)


def test_a_request_of_the_batch_has_no_hits(whole_blocks, serve, a_request):
    """The same 20 tokens are cached. A request of the batch has its own blocks, with 8 tokens: it computes 12."""
    scheduler, output, request = whole_blocks(100, prefix_caching=True), SchedulerOutput(), a_request("b", 20)
    serve(scheduler, a_request("a", 20, 1))
    call(scheduler.num_new_tokens, request, scheduler.find_prefix(request)).gives(4)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    call(scheduler.schedule_tokens, request, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"b": 12})


def test_num_new_tokens_spends_nothing(whole_blocks, a_request):
    """num_new_tokens: the tokens that this step would compute; spends nothing. A preempted request has output too."""
    scheduler, request = whole_blocks(8, long_prefill_threshold=6), a_request("a", 3)
    for _ in range(2):
        call(scheduler.num_new_tokens, request).gives(3)
    request.output_token_ids += [7, 7]
    call(scheduler.num_new_tokens, request).gives(5)
    request.output_token_ids += [7, 7]
    call(scheduler.num_new_tokens, request).gives(6)
    call(scheduler.schedule_tokens, a_request("b", 4), SchedulerOutput()).gives(None)
    call(scheduler.num_new_tokens, request).gives(4)
    call(scheduler.schedule_tokens, a_request("c", 4), SchedulerOutput()).gives(None)
    call(scheduler.num_new_tokens, request).gives(0)
    call(scheduler.chunk, 7).gives(0)


@pytest.mark.parametrize(("found", "num_new"), [([], 8), ([5], 8), ([5, 3, 9], 8), ([5, 3, 9, 2], 4)])
def test_found_tokens_are_not_computed(whole_blocks, a_request, found, num_new):
    """Of 20 tokens those in the found blocks of 4 are not computed; of the others 8 fit into the step."""
    call(whole_blocks(8).num_new_tokens, a_request("a", 20), found).gives(num_new)


def test_tokens_in_swap_space_are_not_computed(whole_blocks, a_request):
    """17 of 20 tokens were swapped out: 3 are left."""
    request = a_request("a", 20)
    request.status, request.num_computed_tokens = RequestStatus.SWAPPED, 17
    call(whole_blocks(8).num_new_tokens, request).gives(3)


# Steps with known outcomes


def test_three_prompts_of_800(whole_blocks, serve, a_request):
    """1,024 tokens a step and three prompts of 800: the second gets what the first leaves, and so on."""
    work = serve(whole_blocks(1024), *(a_request(number, 800) for number in range(3)), steps=4)
    expected = [{0: 800, 1: 224}, {0: 1, 1: 576, 2: 447}, {0: 1, 1: 1, 2: 353}, {0: 1, 1: 1, 2: 1}]
    that("tokens of each step", work).gives(expected)


def test_a_prompt_longer_than_a_step_takes_several(whole_blocks, serve, a_request):
    """20 tokens, 8 a step: three steps for the prompt, and only the last yields a token."""
    request = a_request("a", 20, 2)
    that("tokens of each step", serve(whole_blocks(8), request)).gives([{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}])
    that("its answer", request.output_token_ids).gives([7, 7])


def test_a_prompt_that_fills_the_step_is_alone_in_it(whole_blocks, serve, a_request):
    """Exactly 8 tokens, 8 a step: no other request joins. With 7 tokens two join at once."""
    work = serve(whole_blocks(8), a_request("a", 8, 2), a_request("b", 8, 1))
    that("tokens of each step", work).gives([{"a": 8}, {"a": 1, "b": 7}, {"b": 1}])
    work = serve(whole_blocks(8), a_request("c", 7, 1), a_request("d", 2, 1))
    that("tokens of each step", work).gives([{"c": 7, "d": 1}, {"d": 1}])


def test_decodes_go_on_beside_a_long_prompt(whole_blocks, serve, a_request):
    """Three requests in decode, and a prompt of 30 arrives: each of the three gets a token in every step."""
    scheduler = whole_blocks(8)
    serve(scheduler, *(a_request(number, 2, 20) for number in range(3)), steps=1)
    work = serve(scheduler, a_request("long", 30), steps=7)
    that("tokens of each step", work).gives([{0: 1, 1: 1, 2: 1, "long": 5}] * 6 + [{0: 1, 1: 1, 2: 1, "long": 1}])


def test_a_budget_smaller_than_the_batch(whole_blocks, serve, a_request):
    """Three requests in decode, 2 tokens a step: the first two continue, the third when they have finished."""
    work = serve(whole_blocks(2), *(a_request(number, 1, 3) for number in range(3)))
    that("tokens of each step", work).gives([{0: 1, 1: 1}] * 3 + [{2: 1}] * 3)
    scheduler = whole_blocks(3)
    serve(scheduler, *(a_request(number, 1, 9) for number in range(3)), steps=1)
    scheduler.max_num_batched_tokens = 2
    that("requests of the step", list(serve(scheduler, steps=1)[0])).gives([0, 1])
    that("requests of the batch", [each.request_id for each in scheduler.running]).gives([0, 1, 2])


def test_the_batch_comes_first_then_waiting_requests(whole_blocks, serve, a_request):
    """An urgent prompt waits for a token of the budget; once admitted it precedes the other, and is served first."""
    scheduler = whole_blocks(8)
    work = serve(scheduler, a_request("old", 20, 3), steps=1)
    work += serve(scheduler, a_request("urgent", 20, 2, priority=-1))
    expected = [{"old": 8}, {"old": 8}, {"old": 4, "urgent": 4}, {"urgent": 8}, {"urgent": 8}]
    that("tokens of each step", work).gives([*expected, {"urgent": 1, "old": 1}, {"old": 1}])


def test_a_budget_of_one_token_serves_all(whole_blocks, serve, a_request):
    """A budget of 1: one token after the other, and both finish."""
    work = serve(whole_blocks(1), a_request("a", 3, 2), a_request("b", 2, 1))
    that("tokens of each step", work).gives([{"a": 1}] * 4 + [{"b": 1}] * 2)


def test_after_a_failed_step_the_budget_is_whole_again(whole_blocks, serve, a_request):
    """Two steps fail: the third has the whole budget again, and schedules the same work."""
    scheduler = whole_blocks(8, a_request("a", 5), a_request("b", 12))
    for _ in range(3):
        that("the step", dict(call(scheduler.schedule).value.num_scheduled_tokens)).gives({"a": 5, "b": 3})
    that("the next two", serve(scheduler, steps=2)).gives([{"a": 5, "b": 3}, {"a": 1, "b": 7}])


def test_an_aborted_request_leaves_its_share(whole_blocks, serve, a_request):
    """A request is aborted with half of its prompt computed: the next one gets its share of the budget."""
    scheduler = whole_blocks(8)
    serve(scheduler, a_request("a", 20), a_request("b", 20), steps=1)
    scheduler.abort_request("a")
    that("the step after it", serve(scheduler, steps=1)).gives([{"b": 8}])
    that("used blocks", scheduler.pool.num_used).gives(5)


@pytest.mark.parametrize(("length", "tokens"), [(20, 4), (21, 1), (24, 4), (8, 4), (40, 8)])
def test_a_hit_is_not_in_the_budget(whole_blocks, serve, a_request, length, tokens):
    """20 tokens of a prompt are cached, in blocks of 4: another prompt computes only the rest, 8 a step."""
    scheduler = whole_blocks(8, prefix_caching=True)
    serve(scheduler, a_request("a", 20, 1))
    that("its first step", serve(scheduler, a_request("b", length, 1), steps=1)).gives([{"b": tokens}])


def test_two_hits_in_one_step(whole_blocks, serve, a_request):
    """16 of the 20 tokens of each of two prompts are found: the remaining 4 of each fill one step of 8."""
    scheduler = whole_blocks(8, prefix_caching=True)
    serve(scheduler, a_request("a", 20, 1))
    work = serve(scheduler, a_request("b", 20, 1), a_request("c", 20, 1))
    that("tokens of each step", work).gives([{"b": 4, "c": 4}])


def test_swapped_out_in_the_middle_of_its_prompt(whole_blocks, serve, a_request):
    """A request swapped out in its prompt comes back and continues: its tokens in CPU swap space are not recomputed."""
    options = {"num_blocks": 8, "preemption": "swap", "num_host_blocks": 8}
    scheduler = whole_blocks(6, a_request("first", 11, 4), a_request("long", 20, 1, priority=1), **options)
    work = serve(scheduler)
    expected = [{"first": 6}, {"first": 5, "long": 1}, {"first": 1, "long": 5}]
    that("tokens of the first three steps", work[:3]).gives(expected)
    that("tokens of the long one, all together", sum(step.get("long", 0) for step in work)).gives(20)


# The most of one prompt


def test_three_prompts_side_by_side(whole_blocks, serve, a_request):
    """At most 100 tokens of one prompt in a step of 250: two advance together, with a part of the third."""
    scheduler = whole_blocks(250, long_prefill_threshold=100)
    work = serve(scheduler, *(a_request(number, 210) for number in range(3)), steps=4)
    that("tokens of each step", work).gives(
        [{0: 100, 1: 100, 2: 50}, {0: 100, 1: 100, 2: 50}, {0: 10, 1: 10, 2: 100}, {0: 1, 1: 1, 2: 10}]
    )


def test_the_threshold_leaves_room_unused(whole_blocks, serve, a_request):
    """A prompt alone, 4 of its tokens a step, though 100 would fit. A threshold above the budget changes nothing."""
    work = serve(whole_blocks(100, long_prefill_threshold=4), a_request("a", 10, 1))
    that("tokens of each step", work).gives([{"a": 4}, {"a": 4}, {"a": 2}])
    work = serve(whole_blocks(4, long_prefill_threshold=100), a_request("a", 10, 1))
    that("tokens of each step", work).gives([{"a": 4}, {"a": 4}, {"a": 2}])


# Against a model of the rule, and under the auditor


def by_the_rule(arrivals, budget, threshold, num_slots):
    """For each step, id → tokens, with blocks for all. `arrivals`: step → [priority, id, left to compute, output]."""
    waiting, running, work = [], [], []
    for step in range(2000):
        waiting = sorted(waiting + arrivals.get(step, []))
        left, done = budget, {}
        while waiting or running:
            fresh = [each for each in running if each[1] not in done]
            if not left or not (fresh or (waiting and len(running) < num_slots)):
                break
            if not fresh:
                running.append(waiting.pop(0))
                continue
            done[fresh[0][1]] = min(fresh[0][2], threshold or budget, left)
            left -= done[fresh[0][1]]
        work.append(done)
        for each in running:
            each[2] -= done.get(each[1], 0)
            if not each[2]:
                each[2:] = [1, each[3] - 1]
        running = sorted(each for each in running if each[3])
        if step > max(arrivals) and not waiting and not running:
            return work
    return work


@pytest.mark.parametrize("seed", range(10))
def test_budgets_of_random_requests(whole_blocks, a_step, seed):
    """Random prompts, priorities, slots, budgets and thresholds, with blocks for all: the rule, written with lists."""
    rng = random.Random(fresh(seed))
    budget, threshold, num_slots = rng.choice([1, 2, 5, 16, 50]), rng.choice([0, 0, 1, 4, 20]), rng.randint(1, 6)
    scheduler = whole_blocks(budget, long_prefill_threshold=threshold, max_num_seqs=num_slots)
    arrivals, requests = {}, {}
    for _ in range(rng.randint(1, 12)):
        step, prompt, answer = rng.randint(0, 10), rng.randint(1, 40), rng.randint(1, 6)
        requests.setdefault(step, []).append([rng.choice([0, 0, 1]), prompt, answer])
    for step in sorted(requests):  # numbered in the order of arrival
        for priority, prompt, answer in requests[step]:
            number = sum(map(len, arrivals.values()))
            arrivals.setdefault(step, []).append([priority, number, prompt, answer])
    coming = {
        step: [Request(number, [1] * prompt, answer, priority=priority) for priority, number, prompt, answer in some]
        for step, some in arrivals.items()
    }
    for step, expected in enumerate(by_the_rule(arrivals, budget, threshold, num_slots)):
        for request in coming.get(step, []):
            scheduler.add_request(request)
        that(f"tokens of step {step}", dict(a_step(scheduler).num_scheduled_tokens)).gives(expected)
    that("whether any request is left", scheduler.has_unfinished).gives(False)


@pytest.mark.parametrize("seed", range(8))
def test_random_runs(whole_blocks, random_run, random_options, seed):
    """Small pools, preemption, prefix cache, forks, aborts, steps that fail: the auditor finds no error in any step."""
    rng = random.Random(fresh(seed))
    random_run(whole_blocks(rng.choice([2, 4, 9, 30]), **random_options(rng)), rng)
