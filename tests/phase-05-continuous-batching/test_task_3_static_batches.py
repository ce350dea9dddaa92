"""Phase 5, task 3: fill a batch, run it until it has drained, fill the next."""

from __future__ import annotations

import random

import pytest

from minicache.course.checks import call, that
from minicache.errors import RequestTooLargeError
from minicache.memory.blocks import blocks_for
from minicache.scheduler.drive import drive
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.static import StaticBatchScheduler


def static(**options):
    """A static scheduler with 100 blocks of 4 tokens, unless told otherwise."""
    return StaticBatchScheduler(**{"num_blocks": 100, "block_size": 4} | options)


def steps_of(scheduler, requests, max_steps=1000):
    """{id: tokens} of each step until all have ended: what schedule() ordered."""
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


def test_all_prompts_in_one_step(request_of):
    """Whoever is admitted computes its prompt in that step, in the order of arrival."""
    scheduler = static()
    for request in (request_of("b", 5), request_of("a", 2), request_of(0, 9)):
        scheduler.add_request(request)
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"b": 5, "a": 2, 0: 9})
    that("its order", list(output.num_scheduled_tokens)).gives(["b", "a", 0])
    that("total_num_scheduled_tokens", output.total_num_scheduled_tokens).gives(16)
    that("preempted, finished", (output.preempted, output.finished)).gives(([], []))


def test_who_is_admitted_runs(request_of):
    """An admitted request has left the line, is RUNNING at the end of the batch, and has its blocks."""
    scheduler = static()
    requests = [request_of("a", 5, 3), request_of("b", 1, 1)]
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    that("the line", list(scheduler.waiting)).gives([])
    that("the batch", [request.request_id for request in scheduler.running]).gives(["a", "b"])
    that("their status", [request.status.name for request in requests]).gives(["RUNNING", "RUNNING"])
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 1], [2]])
    same = [got is given for got, given in zip(output.scheduled, requests, strict=True)]
    that(".scheduled has the requests themselves", same).gives([True, True])
    call(scheduler.check).gives(None)


def test_what_is_computed_moves_with_the_report(request_of):
    """schedule() orders; num_computed_tokens changes when the step is reported."""
    scheduler = static()
    request = request_of("a", 5)
    scheduler.add_request(request)
    output = scheduler.schedule()
    that("num_computed_tokens after schedule()", request.num_computed_tokens).gives(0)
    scheduler.update_from_output(output, {"a": 7})
    that("num_computed_tokens after the report", request.num_computed_tokens).gives(5)


def test_nothing_to_do():
    """Without a request the step is empty, and can be reported."""
    scheduler = static()
    output = call(scheduler.schedule).value
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({})
    call(scheduler.update_from_output, output, {}).gives([])


def test_the_same_step_again(request_of):
    """schedule() twice, because the model failed: the same work, in the same blocks, and nobody else."""
    scheduler = static(max_num_seqs=2)
    requests = [request_of(request_id, 5) for request_id in "abc"]
    for request in requests:
        scheduler.add_request(request)
    first = call(scheduler.schedule).value
    blocks = [list(request.block_ids) for request in requests]
    second = call(scheduler.schedule).value
    that("what the second orders", second.num_scheduled_tokens).gives(first.num_scheduled_tokens)
    that("the blocks", [request.block_ids for request in requests]).gives(blocks)
    call(scheduler.update_from_output, second, {"a": 7, "b": 7}).gives([])


def test_order_adds_what_is_missing(request_of):
    """order() gives a request all tokens that it has and that are not computed, after those ordered before."""
    scheduler, output = static(), SchedulerOutput()
    new, decoding, half = request_of("new", 6), request_of("decoding", 6), request_of("half", 6)
    decoding.num_computed_tokens = 6
    decoding.output_token_ids.append(9)
    half.num_computed_tokens = 4
    for request in (new, decoding, half):
        call(scheduler.order, request, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"new": 6, "decoding": 1, "half": 2})
    that("ids of .scheduled", [request.request_id for request in output.scheduled]).gives(["new", "decoding", "half"])


# Until it has drained


def test_the_batch_drains_before_the_next(request_of):
    """2 seats; a has 2 tokens to generate, b 4, c 1: the seat that a leaves stays empty until b has ended."""
    requests = [request_of("a", 3, 2), request_of("b", 5, 4), request_of("c", 2, 1)]
    that("tokens of each step", steps_of(static(max_num_seqs=2), requests)).gives(
        [{"a": 3, "b": 5}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1}, {"c": 2}]
    )


def test_who_comes_late_waits(request_of):
    """A batch that runs takes nobody, with seats and memory for ten more."""
    scheduler = static(max_num_seqs=10)
    scheduler.add_request(request_of("a", 3, 3))
    for step in range(3):
        output = scheduler.schedule()
        that(f"the batch of step {step}", list(output.num_scheduled_tokens)).gives(["a"])
        scheduler.add_request(request_of(step, 3))
        that("num_waiting", scheduler.num_waiting).gives(step + 1)
        scheduler.update_from_output(output, {"a": 7})
    that("the batch after a has ended", list(scheduler.schedule().num_scheduled_tokens)).gives([0, 1, 2])


def test_may_admit(request_of):
    """While c waits: requests may join an empty batch only; it is empty again when a and b have ended."""
    scheduler = static(max_num_seqs=2)
    for request in (request_of("a", 3, 1), request_of("b", 3, 2), request_of("c", 3, 1)):
        scheduler.add_request(request)
    call(scheduler.may_admit).gives(True)
    output = scheduler.schedule()
    call(scheduler.may_admit).gives(False)
    scheduler.update_from_output(output, {"a": 7, "b": 7})
    call(scheduler.may_admit).gives(False)
    scheduler.update_from_output(scheduler.schedule(), {"b": 7})
    call(scheduler.may_admit).gives(True)


def test_an_aborted_batch_has_drained_too(request_of):
    """When the last of the batch is aborted, the next step takes a new batch."""
    scheduler = static(max_num_seqs=1)
    scheduler.add_request(request_of("a", 3, 50))
    scheduler.add_request(request_of("b", 2))
    scheduler.schedule()
    scheduler.abort_request("a")
    that("num_scheduled_tokens", call(scheduler.schedule).value.num_scheduled_tokens).gives({"b": 2})


# Seats


def test_one_at_a_time(request_of):
    """max_num_seqs 1, three requests of 10 tokens, 3 new each: 9 steps, 0 0 0 1 1 1 2 2 2."""
    scheduler = static(max_num_seqs=1)
    tally = call(drive, scheduler, [request_of(request_id, 10, 3) for request_id in range(3)]).value
    that("ids of each step", tally.order).gives([[0], [0], [0], [1], [1], [1], [2], [2], [2]])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_every_seat_is_used(request_of, max_num_seqs):
    """A batch has max_num_seqs seats: not one fewer, not one more."""
    scheduler = static(max_num_seqs=max_num_seqs)
    for request_id in range(10):
        scheduler.add_request(request_of(request_id))
    output = call(scheduler.schedule).value
    that("the batch", list(output.num_scheduled_tokens)).gives(list(range(max_num_seqs)))
    that("num_waiting", scheduler.num_waiting).gives(10 - max_num_seqs)


# Tokens of a step


@pytest.mark.parametrize(("budget", "admitted"), [(20, "ab"), (15, "ab"), (14, "a"), (10, "a")])
def test_the_prompts_share_the_steps_tokens(request_of, budget, admitted):
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


def test_tokens_that_are_ordered_already_are_spent(request_of):
    """admit() counts what the step has so far: 10 tokens in all, 3 of them ordered, leave 7."""
    for num_prompt_tokens, joined in [(7, ["a"]), (8, [])]:
        scheduler, output = static(max_num_batched_tokens=10), SchedulerOutput()
        scheduler.order(request_of("before", 3), output)
        scheduler.add_request(request_of("a", num_prompt_tokens))
        call(scheduler.admit, output).gives(None)
        that(f"the batch after a prompt of {num_prompt_tokens}", [each.request_id for each in scheduler.running]).gives(
            joined
        )


@pytest.mark.parametrize(("budget", "joined"), [(6, []), (7, ["back"]), (8, ["back"]), (9, ["back", "new"])])
def test_what_had_been_generated_is_computed_again(request_of, budget, joined):
    """One that lost its place and its cache has 5 + 2 tokens to compute, not 5; a prompt of 2 behind it needs 9."""
    scheduler, output = static(max_num_batched_tokens=budget), SchedulerOutput()
    back = request_of("back", 5)
    back.output_token_ids += [7, 8]
    scheduler.line_up(back)
    scheduler.line_up(request_of("new", 2))
    call(scheduler.admit, output).gives(None)
    that("the batch", [each.request_id for each in scheduler.running]).gives(joined)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives(
        {each: {"back": 7, "new": 2}[each] for each in joined}
    )


def test_nobody_overtakes_a_long_prompt(request_of):
    """The head does not fit into this step: the small one behind it does, and waits all the same."""
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
def test_blocks_for_the_longest_answer(request_of, num_prompt_tokens, max_tokens, max_model_len, blocks):
    """Prompt and max_tokens, or max_model_len if that is less, in blocks of 4, rounded up."""
    scheduler = static(max_model_len=max_model_len)
    request = request_of("a", num_prompt_tokens, max_tokens)
    call(scheduler.blocks_to_admit, request).gives(blocks)
    that("used blocks", scheduler.pool.num_used).gives(0)
    scheduler.add_request(request)
    scheduler.schedule()
    that("used blocks, once it is admitted", scheduler.pool.num_used).gives(blocks)
    that("its blocks", len(request.block_ids)).gives(blocks)


def test_memory_is_reserved_once(request_of):
    """A request holds the same blocks from admission to its end, and then none."""
    scheduler = static(num_blocks=6)
    request = request_of("a", 5, 7)
    scheduler.add_request(request)
    for step in range(7):
        output = scheduler.schedule()
        that(f"its blocks in step {step}", request.block_ids).gives([0, 1, 2])
        scheduler.update_from_output(output, {"a": 7})
    that("used blocks", scheduler.pool.num_used).gives(0)


@pytest.mark.parametrize(("num_blocks", "admitted"), [(5, "a"), (6, "ab"), (7, "ab")])
def test_memory_for_both(request_of, num_blocks, admitted):
    """Two requests of 3 blocks each take 6 blocks: with 5, the second waits for the next batch."""
    scheduler = static(num_blocks=num_blocks)
    for request_id in "ab":
        scheduler.add_request(request_of(request_id, 9, 3))
    that("the batch", list(call(scheduler.schedule).value.num_scheduled_tokens)).gives(list(admitted))
    call(scheduler.check).gives(None)


def test_nobody_overtakes_who_waits_for_memory(request_of):
    """The head needs more blocks than are free: the one behind it needs 1, and waits all the same."""
    scheduler = static(num_blocks=5)
    requests = [request_of("a", 9, 2), request_of("large", 9, 3), request_of("small", 1, 1)]
    that("tokens of each step", steps_of(scheduler, requests)).gives(
        [{"a": 9}, {"a": 1}, {"large": 9, "small": 1}, {"large": 1}, {"large": 1}]
    )


def test_who_could_never_be_admitted_is_refused(request_of):
    """5 blocks of 16: a prompt of 100 is refused when it comes, and a prompt of 10 behind it is served."""
    scheduler = static(num_blocks=5, block_size=16)
    call(scheduler.add_request, request_of("large", 100, 5)).raises(RequestTooLargeError)
    tally = call(drive, scheduler, [request_of("small", 10, 5)]).value
    that("who ended, and when", tally.finished).gives({"small": 4})


# Against a batch worked out by hand


def by_hand(requests, seats, budget, num_blocks):
    """{id: tokens} of each step, from the rule: fill a batch; its prompts, then a token each until the longest ends."""
    line, steps = list(requests), []
    while line:
        batch, tokens, blocks = [], 0, 0
        while line and len(batch) < seats:
            request = line[0]
            tokens += request.num_prompt_tokens
            blocks += blocks_for(request.num_prompt_tokens + request.max_tokens, 4)
            if tokens > budget or blocks > num_blocks:
                break
            batch.append(line.pop(0))
        steps.append({request.request_id: request.num_prompt_tokens for request in batch})
        longest = max(request.max_tokens for request in batch)
        steps += [{each.request_id: 1 for each in batch if each.max_tokens > turn} for turn in range(1, longest)]
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_many_requests(request_of, seed):
    """Whatever comes: the steps are those of batches that are filled in order and run until they have drained."""
    rng = random.Random(seed)
    requests = [request_of(each, rng.randint(1, 12), rng.randint(1, 9)) for each in range(rng.randint(1, 30))]
    seats, budget, num_blocks = rng.randint(1, 6), rng.randint(12, 40), rng.randint(6, 24)
    scheduler = static(max_num_seqs=seats, max_num_batched_tokens=budget, num_blocks=num_blocks)
    expected = by_hand(requests, seats, budget, num_blocks)
    that("tokens of each step", steps_of(scheduler, requests)).gives(expected)
    that("used blocks in the end", scheduler.pool.num_used).gives(0)
