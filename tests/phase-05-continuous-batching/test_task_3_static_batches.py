"""Phase 5, task 3: fill a batch, run it until it has drained, and fill the next."""

from __future__ import annotations

import random

import pytest

from minicache.errors import RequestTooLargeError
from minicache.memory.blocks import blocks_for
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.static import StaticBatchScheduler
from minicache_course.checks import call, that
from minicache_course.seeds import fresh


def static(**options):
    """A static scheduler; by default it has 100 blocks of 4 tokens."""
    return StaticBatchScheduler(**{"num_blocks": 100, "block_size": 4} | options)


def steps_of(scheduler, requests, max_steps=1000):
    """{id: tokens} of each step until all have finished."""
    for request in requests:
        scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished and len(steps) < max_steps:
        output = call(scheduler.schedule).value
        steps.append(dict(output.num_scheduled_tokens))
        that(f"ids of .scheduled in step {len(steps) - 1}", [each.request_id for each in output.scheduled]).gives(
            list(output.num_scheduled_tokens)
        )
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return steps


# A batch


def test_a_prompt_then_token_by_token(request_of):
    """One request, 5 tokens of prompt, 3 to generate: 5, 1, 1."""
    that("tokens of each step", steps_of(static(), [request_of("a", 5, 3)])).gives([{"a": 5}, {"a": 1}, {"a": 1}])


def test_all_prompts_are_computed_in_one_step(request_of):
    """Every admitted request's prompt is scheduled in that step, in the order of arrival."""
    scheduler = static()
    for request in (request_of("b", 5), request_of("a", 2), request_of(0, 9)):
        scheduler.add_request(request)
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"b": 5, "a": 2, 0: 9})
    that("its order", list(output.num_scheduled_tokens)).gives(["b", "a", 0])
    that("total_num_scheduled_tokens", output.total_num_scheduled_tokens).gives(16)
    that("preempted, finished", (output.preempted, output.finished)).gives(([], []))


def test_admitted_requests_run(request_of):
    """An admitted request has left the queue, is RUNNING at the end of the batch, and has its blocks."""
    scheduler = static()
    requests = [request_of("a", 5, 3), request_of("b", 1, 1)]
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    that("the waiting queue", list(scheduler.waiting)).gives([])
    that("the batch", [request.request_id for request in scheduler.running]).gives(["a", "b"])
    that("their status", [request.status.name for request in requests]).gives(["RUNNING", "RUNNING"])
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 1], [2]])
    same = [got is given for got, given in zip(output.scheduled, requests, strict=True)]
    that(".scheduled has the requests themselves", same).gives([True, True])
    call(scheduler.check).gives(None)


def test_what_is_computed_changes_with_the_commit(request_of):
    """schedule() does not change num_computed_tokens; update_from_output does."""
    scheduler = static()
    request = request_of("a", 5)
    scheduler.add_request(request)
    output = scheduler.schedule()
    that("num_computed_tokens after schedule()", request.num_computed_tokens).gives(0)
    scheduler.update_from_output(output, {"a": 7})
    that("num_computed_tokens after the commit", request.num_computed_tokens).gives(5)


def test_without_requests_nothing_is_done():
    """Without a request the step is empty, and can be committed."""
    scheduler = static()
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({})
    call(scheduler.update_from_output, output, {}).gives([])


# Until it has drained


def test_the_batch_drains_before_the_next(request_of):
    """2 batch slots; a has 2 tokens to generate, b 4, c 1: the slot of a stays idle until b has finished."""
    requests = [request_of("a", 3, 2), request_of("b", 5, 4), request_of("c", 2, 1)]
    that("tokens of each step", steps_of(static(max_num_seqs=2), requests)).gives(
        [{"a": 3, "b": 5}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"c": 2}]
    )


def test_later_arrivals_wait(request_of):
    """A running batch admits no request, even with slots and memory for ten more."""
    scheduler = static(max_num_seqs=10)
    scheduler.add_request(request_of("a", 3, 3))
    for step in range(3):
        output = scheduler.schedule()
        that(f"the batch of step {step}", list(output.num_scheduled_tokens)).gives(["a"])
        scheduler.add_request(request_of(step, 3))
        that("num_waiting", scheduler.num_waiting).gives(step + 1)
        scheduler.update_from_output(output, {"a": 7})
    that("the batch after a has finished", list(scheduler.schedule().num_scheduled_tokens)).gives([0, 1, 2])


def test_only_an_empty_batch_may_be_joined(request_of):
    """While c waits: requests may join an empty batch only; it is empty again when a and b have finished."""
    scheduler, output = static(max_num_seqs=2), SchedulerOutput()
    for request in (request_of("a", 3, 1), request_of("b", 3, 2), request_of("c", 3, 1)):
        scheduler.add_request(request)
    call(scheduler.may_admit, output).gives(True)
    step = scheduler.schedule()
    call(scheduler.may_admit, output).gives(False)
    scheduler.update_from_output(step, {"a": 7, "b": 7})
    call(scheduler.may_admit, output).gives(False)
    scheduler.update_from_output(scheduler.schedule(), {"b": 7})
    call(scheduler.may_admit, output).gives(True)


def test_an_aborted_batch_has_drained_too(request_of):
    """When the last request of the batch is aborted, the next step fills a new batch."""
    scheduler = static(max_num_seqs=1)
    scheduler.add_request(request_of("a", 3, 50))
    scheduler.add_request(request_of("b", 2))
    scheduler.schedule()
    scheduler.abort_request("a")
    that("num_scheduled_tokens", call(scheduler.schedule).value.num_scheduled_tokens).gives({"b": 2})


# Batch slots


def test_one_slot_serves_one_at_a_time(request_of):
    """max_num_seqs 1, three requests of 10 tokens, 3 new each: 9 steps, 0 0 0 1 1 1 2 2 2."""
    scheduler = static(max_num_seqs=1)
    tally = call(drive, scheduler, [request_of(request_id, 10, 3) for request_id in range(3)]).value
    that("ids of each step", tally.order).gives([[0], [0], [0], [1], [1], [1], [2], [2], [2]])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_every_slot_is_used(request_of, max_num_seqs):
    """A batch has max_num_seqs slots: not one fewer, not one more."""
    scheduler = static(max_num_seqs=max_num_seqs)
    for request_id in range(10):
        scheduler.add_request(request_of(request_id))
    output = call(scheduler.schedule).value
    that("the batch", list(output.num_scheduled_tokens)).gives(list(range(max_num_seqs)))
    that("num_waiting", scheduler.num_waiting).gives(10 - max_num_seqs)


# The token budget


@pytest.mark.parametrize(("budget", "admitted"), [(20, "ab"), (15, "ab"), (14, "a"), (10, "a")])
def test_the_prompts_share_the_token_budget(request_of, budget, admitted):
    """Prompts of 10 and 5 tokens fit into a step of 15, and not into one of 14."""
    scheduler = static(max_num_batched_tokens=budget)
    for request in (request_of("a", 10), request_of("b", 5)):
        scheduler.add_request(request)
    that("the batch", list(call(scheduler.schedule).value.num_scheduled_tokens)).gives(list(admitted))


def test_each_prompt_takes_its_part(request_of):
    """Prompts of 4, 4, 4 and 4 tokens, 13 tokens in the step: three of them."""
    scheduler = static(max_num_batched_tokens=13)
    for request_id in range(4):
        scheduler.add_request(request_of(request_id, 4))
    that("the batch", list(call(scheduler.schedule).value.num_scheduled_tokens)).gives([0, 1, 2])


def test_tokens_that_are_scheduled_already_are_spent(request_of):
    """schedule_waiting() has what is left of the budget: 10 tokens, 3 of them scheduled, leave 7."""
    for num_prompt_tokens, joined in [(7, ["a"]), (8, [])]:
        scheduler, output = static(max_num_batched_tokens=10), SchedulerOutput()
        scheduler.schedule_tokens(request_of("before", 3), output)
        scheduler.add_request(request_of("a", num_prompt_tokens))
        call(scheduler.schedule_waiting, output).gives(None)
        that(f"the batch after a prompt of {num_prompt_tokens}", [each.request_id for each in scheduler.running]).gives(
            joined
        )


def test_a_long_prompt_is_not_bypassed(request_of):
    """The head does not fit into this step: the small request behind it does, and waits too."""
    scheduler = static(max_num_batched_tokens=12)
    requests = [request_of("a", 8, 2), request_of("long", 10, 1), request_of("small", 1, 1)]
    that("tokens of each step", steps_of(scheduler, requests)).gives([{"a": 8}, {"a": 1}, {"long": 10, "small": 1}])


# Memory


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "max_model_len", "blocks"),
    [
        pytest.param(5, 3, None, 2, id="8 tokens fill two blocks"),
        pytest.param(5, 4, None, 3, id="9 tokens begin a third"),
        pytest.param(1, 1, None, 1, id="2 tokens"),
        pytest.param(4, 100, None, 26, id="100 to generate"),
        pytest.param(4, 100, 12, 3, id="the model takes 12"),
        pytest.param(4, 100, 13, 4, id="the model takes 13"),
        pytest.param(4, 3, 12, 2, id="the model takes more than it may have"),
    ],
)
def test_blocks_are_reserved_for_the_longest_answer(request_of, num_prompt_tokens, max_tokens, max_model_len, blocks):
    """Prompt and max_tokens, or max_model_len if that is less, in blocks of 4, rounded up."""
    scheduler = static(max_model_len=max_model_len)
    request = request_of("a", num_prompt_tokens, max_tokens)
    call(scheduler.blocks_to_admit, request).gives(blocks)
    that("used blocks", scheduler.pool.num_used).gives(0)
    scheduler.add_request(request)
    scheduler.schedule()
    that("used blocks, once it is admitted", scheduler.pool.num_used).gives(blocks)
    that("its blocks", len(request.block_ids)).gives(blocks)


def test_what_was_generated_needs_no_more_memory(request_of):
    """A request of 5 tokens with max_tokens 7 has generated 3 and is restarted: still 12 tokens, 3 blocks."""
    scheduler, request = static(), request_of("a", 5, 7)
    request.output_token_ids += [7, 7, 7]
    call(scheduler.blocks_to_admit, request).gives(3)


def test_memory_is_reserved_once(request_of):
    """A request holds the same blocks from its admission until it has finished, and then none."""
    scheduler = static(num_blocks=6)
    request = request_of("a", 5, 7)
    scheduler.add_request(request)
    for step in range(7):
        output = scheduler.schedule()
        that(f"its blocks in step {step}", request.block_ids).gives([0, 1, 2])
        scheduler.update_from_output(output, {"a": 7})
    that("used blocks", scheduler.pool.num_used).gives(0)


@pytest.mark.parametrize(("num_blocks", "admitted"), [(5, "a"), (6, "ab"), (7, "ab")])
def test_a_request_waits_for_all_of_its_blocks(request_of, num_blocks, admitted):
    """Two requests of 4 + 8 tokens take 3 blocks of 4 each: with 5 blocks, the second waits for the next batch."""
    scheduler = static(num_blocks=num_blocks)
    for request_id in "ab":
        scheduler.add_request(request_of(request_id, 4, 8))
    that("the batch", list(call(scheduler.schedule).value.num_scheduled_tokens)).gives(list(admitted))
    call(scheduler.check).gives(None)


def test_a_request_that_waits_for_memory_is_not_bypassed(request_of):
    """The head needs more blocks than are free: the one behind it needs 1, and waits too."""
    scheduler = static(num_blocks=5)
    requests = [request_of("a", 9, 2), request_of("large", 9, 3), request_of("small", 1, 1)]
    that("tokens of each step", steps_of(scheduler, requests)).gives(
        [{"a": 9}, {"a": 1}, {"large": 9, "small": 1}, {"large": 1}, {"large": 1}]
    )


def test_a_request_that_can_never_be_admitted_is_refused(request_of):
    """5 blocks of 16: a prompt of 100 is refused when it arrives, and a prompt of 10 behind it is served."""
    scheduler = static(num_blocks=5, block_size=16)
    call(scheduler.add_request, request_of("large", 100, 5)).raises(RequestTooLargeError)
    tally = call(drive, scheduler, [request_of("small", 10, 5)]).value
    that("which finished, and when", tally.finished).gives({"small": 4})


# After a step that failed


def test_a_step_that_failed_is_scheduled_again(request_of):
    """schedule() again, because the model failed: the batch is filled again, with the same requests and tokens."""
    scheduler = static(max_num_seqs=2)
    requests = [request_of(request_id, 5) for request_id in "abc"]
    for request in requests:
        scheduler.add_request(request)
    first = call(scheduler.schedule).value
    second = call(scheduler.schedule).value
    that("tokens of the second step", second.num_scheduled_tokens).gives(first.num_scheduled_tokens)
    call(scheduler.check).gives(None)
    call(scheduler.update_from_output, second, {"a": 7, "b": 7}).gives([])
    scheduler.schedule()  # fails too: the tokens that were generated stay
    third = call(scheduler.schedule).value
    that("tokens of the step after another failure", third.num_scheduled_tokens).gives({"a": 6, "b": 6})


def recovered(scheduler, request, num_generated):
    """`request` in the queue, with so many generated tokens and nothing computed, as after a failed step."""
    scheduler.add_request(request)
    for _ in range(num_generated):
        scheduler.update_from_output(scheduler.schedule(), {request.request_id: 7})
    scheduler.recover()


@pytest.mark.parametrize(
    ("budget", "joined"), [(9, []), (10, ["back"]), (11, ["back"]), (12, ["back", "new"])], ids=str
)
def test_what_was_generated_is_computed_again(request_of, budget, joined):
    """After a failed step, 5 + 2 tokens are 7 to compute, not 5: with 3 scheduled already it takes a budget of 10."""
    scheduler, output = static(max_num_batched_tokens=budget), SchedulerOutput()
    recovered(scheduler, request_of("back", 5), 2)
    scheduler.add_request(request_of("new", 2))
    scheduler.token_budget = budget
    scheduler.schedule_tokens(request_of("before", 3), output)
    call(scheduler.schedule_waiting, output).gives(None)
    that("the batch", [each.request_id for each in scheduler.running]).gives(joined)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives(
        {"before": 3} | {each: {"back": 7, "new": 2}[each] for each in joined}
    )


def test_a_request_that_has_outgrown_the_budget_has_a_step_of_its_own(request_of):
    """After a failed step, 5 + 2 tokens are more than a budget of 6. They are computed in a separate step."""
    scheduler = static(max_num_batched_tokens=6)
    recovered(scheduler, request_of("back", 5), 2)
    scheduler.add_request(request_of("new", 1, 1))
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"back": 7})


# For later stages


def test_a_stage_may_override_the_small_methods(request_of):
    """schedule_running calls schedule_tokens; schedule_waiting calls head, blocks_to_admit and admit."""
    scheduler, seen = static(num_blocks=6), []
    for request_id in "ab":
        scheduler.add_request(request_of(request_id))
    scheduler.schedule_waiting(SchedulerOutput())
    scheduler.schedule_tokens = lambda request, output: seen.append(request.request_id)
    call(scheduler.schedule_running, SchedulerOutput()).gives(None)
    that("what schedule_running calls schedule_tokens with", seen).gives(["a", "b"])

    first, second, third = (request_of(request_id) for request_id in "cde")
    for request in (first, second, third):
        scheduler.add_request(request)
    asked, admitted, heads = [], [], [second, third]
    scheduler.head = lambda: heads[0] if heads else None
    scheduler.blocks_to_admit = lambda request: asked.append(request.request_id) or (3 if request is third else 1)
    scheduler.admit = lambda request, output: admitted.append(heads.pop(0).request_id)
    call(scheduler.schedule_waiting, SchedulerOutput()).gives(None)
    that("admitted: head() is d, then e, which needs 3 blocks; 2 are free", admitted).gives(["d"])
    that("what blocks_to_admit was asked for", list(dict.fromkeys(asked))).gives(["d", "e"])


# Against a batch worked out by hand


def by_hand(requests, slots, budget, num_blocks):
    """{id: tokens} of each step, by the rule: fill a batch; prompts, then a token each until the last is done."""
    queue, steps = list(requests), []
    while queue:
        batch, tokens, blocks = [], 0, 0
        while queue and len(batch) < slots:
            request = queue[0]
            tokens += request.num_prompt_tokens
            blocks += blocks_for(request.num_prompt_tokens + request.max_tokens, 4)
            if tokens > budget or blocks > num_blocks:
                break
            batch.append(queue.pop(0))
        steps.append({request.request_id: request.num_prompt_tokens for request in batch})
        longest = max(request.max_tokens for request in batch)
        steps += [{each.request_id: 1 for each in batch if each.max_tokens > step} for step in range(1, longest)]
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_many_requests(request_of, seed):
    """For any requests, batches are filled in order and run until they have drained."""
    rng = random.Random(fresh(seed))
    requests = [request_of(each, rng.randint(1, 12), rng.randint(1, 9)) for each in range(rng.randint(1, 30))]
    slots, budget, num_blocks = rng.randint(1, 6), rng.randint(12, 40), rng.randint(6, 24)
    scheduler = static(max_num_seqs=slots, max_num_batched_tokens=budget, num_blocks=num_blocks)
    expected = by_hand(requests, slots, budget, num_blocks)
    that("tokens of each step", steps_of(scheduler, requests)).gives(expected)
    that("used blocks in the end", scheduler.pool.num_used).gives(0)
