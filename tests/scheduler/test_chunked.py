"""Chunked prefill: cases with known outcomes, the bound, and random runs that an auditor watches."""

from __future__ import annotations

import random

import pytest

from minicache.errors import InvariantError, RequestTooLargeError
from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.observe import observe


def chunked(**options):
    return ChunkedPrefillScheduler(**{"num_blocks": 1000} | options)


def steps(scheduler, *requests, most=1000):
    """Serve these, and give what each step computed."""
    for request in requests:
        scheduler.add_request(request)
    work = []
    while scheduler.has_unfinished and len(work) < most:
        output = scheduler.schedule()
        work.append(dict(output.num_scheduled_tokens))
        scheduler.update_from_output(output, dict.fromkeys(work[-1], 7))
        scheduler.check()
    return work


def test_three_prompts_of_800_and_a_budget_of_1024():
    scheduler = chunked(max_num_batched_tokens=1024)
    work = steps(scheduler, *(Request(number, [number] * 800, 9) for number in range(3)), most=3)
    assert work == [{0: 800, 1: 224}, {0: 1, 1: 576, 2: 447}, {0: 1, 1: 1, 2: 353}]


def test_long_prefill_threshold():
    """No more than 100 of one prompt in a step: two long ones go on side by side, and decodes with them."""
    scheduler = chunked(max_num_batched_tokens=250, long_prefill_threshold=100)
    work = steps(scheduler, *(Request(number, [number] * 210, 9) for number in range(3)), most=4)
    assert work == [{0: 100, 1: 100, 2: 50}, {0: 100, 1: 100, 2: 50}, {0: 10, 1: 10, 2: 100}, {0: 1, 1: 1, 2: 10}]


def test_a_prompt_longer_than_a_step():
    scheduler, request = chunked(max_num_batched_tokens=8), Request("a", [1] * 20, 2)
    assert steps(scheduler, request) == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]
    assert request.output_token_ids == [7, 7]


def test_blocks_come_with_the_chunks():
    scheduler = chunked(block_size=4, max_num_batched_tokens=8)
    request = Request("a", [1] * 20, 2)
    steps(scheduler, request, most=1)
    assert len(request.block_ids) == 2
    steps(scheduler, most=1)
    assert len(request.block_ids) == 4


def test_a_budget_smaller_than_the_batch():
    """3 in decode and 2 tokens a step: the first two go on, the third when one has ended."""
    scheduler = chunked(max_num_batched_tokens=2)
    work = steps(scheduler, *(Request(number, [number], 3) for number in range(3)))
    assert work == [{0: 1, 1: 1}] * 3 + [{2: 1}] * 3


def test_a_hit_is_not_in_the_budget():
    scheduler = chunked(block_size=4, max_num_batched_tokens=8, prefix_caching=True)
    steps(scheduler, Request("a", [1] * 20, 1))
    assert steps(scheduler, Request("b", [1] * 20, 1)) == [{"b": 4}]


def test_what_is_too_large():
    scheduler = chunked(num_blocks=4, block_size=4, max_num_batched_tokens=2, max_model_len=12)
    with pytest.raises(RequestTooLargeError, match="max_model_len"):
        scheduler.add_request(Request("a", [1] * 12, 1))
    with pytest.raises(RequestTooLargeError, match="5 blocks"):
        chunked(num_blocks=4, block_size=4).add_request(Request("a", [1] * 17, 1))
    assert len(steps(scheduler, Request("a", [1] * 11, 1))) == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [({"long_prefill_threshold": -1}, ValueError), ({"long_prefill_threshold": 2.0}, TypeError)],
)
def test_options_that_are_refused(options, error):
    with pytest.raises(error, match="long_prefill_threshold"):
        chunked(**options)
    with pytest.raises(error, match="long_prefill_threshold"):
        create_scheduler("chunked", num_blocks=8, **options)
    with pytest.raises(ValueError, match='take "chunked"'):
        create_scheduler("fair", num_blocks=8, long_prefill_threshold=4)


def audited_step(scheduler, *requests):
    """The first step of these under an auditor."""
    watched = observe(scheduler, SharingAuditor())
    for request in requests:
        watched.add_request(request)
    return watched.schedule().num_scheduled_tokens


@pytest.mark.parametrize("threshold", [0, 4])
@pytest.mark.parametrize("less", [0, 1])
def test_a_budget_that_is_left_over(threshold, less):
    """With room for 30 tokens, one token less than could be computed is one too few, with a threshold and without."""

    class Sparing(ChunkedPrefillScheduler):
        def chunk(self, num_tokens):
            return max(super().chunk(num_tokens) - less, 1)

    scheduler = Sparing(num_blocks=20, max_num_batched_tokens=30, long_prefill_threshold=threshold)
    assert observe(scheduler, SharingAuditor()).largest_chunk(9) == (threshold or 9)
    requests = Request("a", [1] * 9, 9), Request("b", [2] * 9, 9)
    if less:
        with pytest.raises(InvariantError, match=rf"step 0, work: .* and could compute {threshold or 9}"):
            audited_step(scheduler, *requests)
    else:
        assert audited_step(scheduler, *requests) == {"a": threshold or 9, "b": threshold or 9}


def test_more_than_the_threshold():
    class Greedy(ChunkedPrefillScheduler):
        def chunk(self, num_tokens):
            return super().chunk(num_tokens) + 1

    scheduler = Greedy(num_blocks=20, max_num_batched_tokens=30, long_prefill_threshold=4)
    with pytest.raises(InvariantError, match=r"step 0, work: .* computes 5 tokens, and could compute 4"):
        audited_step(scheduler, Request("a", [1] * 9, 9))


def test_whoever_is_overtaken_in_the_middle_of_its_prompt_is_due():
    """A long prompt of low priority, and an endless stream that ranks before it and takes its blocks: it ends."""
    scheduler = chunked(num_blocks=20, block_size=4, max_num_seqs=8, max_num_batched_tokens=16)
    old = Request("old", [1] * 60, 10, priority=5)
    scheduler.add_request(old)
    number = num_preempted = 0
    while not old.status.is_finished:
        while scheduler.num_waiting < 4:
            scheduler.add_request(Request(number, [1] * 8, 20))
            number += 1
        output = scheduler.schedule()
        num_preempted += "old" in output.preempted
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 1))
        assert number < 10 * STARVATION_BOUND
    assert num_preempted > 0


def under_a_stream(scheduler, old, num_urgent, every=4):
    """Serve `old` while an urgent request of 8 + 4 tokens comes every few steps; whether it has ended by then."""
    scheduler.add_request(old)
    for step in range(every * num_urgent):
        if step % every == 0:
            scheduler.add_request(Request(step, [2] * 8, 4))
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        if old.status.is_finished:
            return True
    return False


@pytest.mark.parametrize("num_prompt", [24, 25])
def test_a_last_chunk_of_one_token(num_prompt):
    """24 of 25 tokens computed is not "caught up": no token came of that admission, and one was lost 400 times."""
    scheduler = chunked(num_blocks=9, block_size=4, max_num_batched_tokens=16, long_prefill_threshold=8)
    old = Request("old", [1] * num_prompt, 4, priority=1)
    assert under_a_stream(scheduler, old, 400)
    assert old.num_preemptions <= 5


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_blocks", [8, 9, 10])
def test_prompts_of_all_lengths_under_an_endless_stream(num_blocks, prefix_caching, preemption):
    options = {"num_blocks": num_blocks, "block_size": 4, "prefix_caching": prefix_caching, "preemption": preemption}
    options |= {"num_host_blocks": 8} if preemption == "swap" else {}
    for threshold, budget in [(0, 16), (4, 9), (8, 16)]:
        for num_prompt in range(1, 4 * num_blocks - 3):
            old = Request("old", [1] * num_prompt, 4, priority=1)
            scheduler = chunked(max_num_batched_tokens=budget, long_prefill_threshold=threshold, **options)
            assert under_a_stream(scheduler, old, 5 * STARVATION_BOUND), (threshold, num_prompt, old)


def test_who_is_due_overtakes_an_earlier_one_64_times_at_most():
    """ "due" is admitted and preempted over and over beside "urgent", while "first", which had caught up, waits."""
    scheduler = chunked(num_blocks=40, max_num_batched_tokens=64)
    coming = [Request("first", [1] * 20, 700, priority=1), Request("due", [2] * 620, 2, priority=2)]
    coming.append(Request("urgent", [3], 600))
    most, num_waited = 0, 0
    while scheduler.has_unfinished or coming:
        if coming:
            scheduler.add_request(coming.pop(0))
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        most = max(most, scheduler.num_overtakes)
        num_waited += scheduler.due is not None and "first" in scheduler.waiting
    assert most == STARVATION_BOUND
    assert num_waited > STARVATION_BOUND


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("seed", range(60))
def test_random_runs(preemption, seed):
    """Priorities, groups, forks, aborts, steps that fail, and pools and budgets of next to nothing."""
    rng = random.Random(seed)
    scheduler = observe(
        chunked(
            num_blocks=rng.randint(6, 20),
            block_size=4,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([2, 4, 9, 30]),
            long_prefill_threshold=rng.choice([0, 0, 1, 3, 8]),
            preemption=preemption,
            num_host_blocks=6 if preemption == "swap" else 0,
            prefix_caching=rng.random() < 0.6,
        ),
        SharingAuditor(),
    )
    names, requests, awaited = iter(range(10**6)), [], False
    for turn in range(4000):
        if turn < 80 and rng.random() < 0.3:
            prompt = [rng.randrange(2)] * rng.randint(1, 20)
            options = {"priority": rng.choice([0, 0, 1]), "group": rng.choice(["text", "text", "image"])}
            requests.append(Request(next(names), prompt, rng.randint(1, 9), **options))
            scheduler.add_request(requests[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        if turn < 80 and parents and not awaited and scheduler.num_running < scheduler.max_num_seqs:
            parent = rng.choice(parents)
            outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
            if rng.random() < 0.2 and len(outputs) < parent.max_tokens:
                requests.append(scheduler.fork_request(parent.request_id, next(names), outputs))
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < 0.04:
            scheduler.abort_request(rng.choice(unfinished).request_id)
        output = scheduler.schedule()
        scheduler.check()
        if awaited := rng.random() < 0.05:
            continue  # the step's tokens never come
        scheduler.update_from_output(output, {each: rng.randrange(3) for each in output.num_scheduled_tokens})
        scheduler.check()
        if turn >= 80 and not scheduler.has_unfinished:
            break
    assert {request.status.is_finished for request in requests} == {True}
    assert scheduler.pool.num_used == 0


def test_a_step_that_fails_and_is_scheduled_smaller():
    """An urgent one comes in the step that fails, and takes all of the next: what `a` did not compute is not found."""
    scheduler = ChunkedPrefillScheduler(num_blocks=60, block_size=4, max_num_batched_tokens=16, prefix_caching=True)
    a, prompt = Request("a", range(29), 4, priority=1), [60] * 40
    scheduler.add_request(a)
    scheduler.update_from_output(scheduler.schedule(), {})
    scheduler.add_request(Request("urgent", prompt, 4))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 13, "urgent": 3}
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == {"urgent": 16}
    scheduler.update_from_output(again, {})
    assert scheduler.find_prefix(Request("same", range(29), 4)) == a.block_ids[:4]  # 16 tokens are computed
    assert len(scheduler.find_prefix(Request("same as urgent", prompt, 4))) == 4


def found_in_a_lost_step(**options):
    """`late` has found three blocks that `early`, who stands behind it, was to fill in a step that failed.

    Both begin with the same 28 tokens. `early` has computed 16 of them, and was to compute 13 more; `late`, which goes
    first by its priority, had 3 tokens of the budget left. In the next step it has 16, and `early` none.
    """
    scheduler = ChunkedPrefillScheduler(
        **{"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 16, "prefix_caching": True} | options
    )
    watched = observe(scheduler, SharingAuditor())
    early = Request("early", range(29), 4, priority=1)
    late = Request("late", [*range(28), *[60] * 20], 4)
    watched.add_request(early)
    watched.update_from_output(watched.schedule(), {})
    watched.add_request(late)
    assert watched.schedule().num_scheduled_tokens == {"early": 13, "late": 3}
    assert (early.num_computed_tokens, late.num_computed_tokens) == (16, 28)
    return scheduler, watched, early, late


def test_who_found_what_a_lost_step_was_to_fill_does_not_read_it_before_it_is_filled():
    scheduler, watched, early, late = found_in_a_lost_step()
    again = watched.schedule()
    assert again.num_scheduled_tokens == {"late": 16}
    assert late.num_computed_tokens == 16  # the rest it computes itself, into blocks of its own
    assert not set(early.block_ids[4:]) & set(late.block_ids[4:])
    watched.update_from_output(again, {})
    steps(watched)
    assert scheduler.pool.num_used == 0


def test_a_lost_step_that_is_lost_again():
    _, watched, early, late = found_in_a_lost_step()
    for _ in range(3):
        assert watched.schedule().num_scheduled_tokens == {"late": 16}
        assert (early.num_computed_tokens, late.num_computed_tokens) == (16, 16)
    watched.abort_request("late")
    steps(watched)


def test_what_a_lost_step_was_to_fill_is_not_swapped_out():
    """Two steps fail. Then an urgent one, which had 2 tokens of the second, has the whole step, and needs the memory.

    `late` has found 8 blocks, of which 4 were computed: only these are saved.
    """
    scheduler = ChunkedPrefillScheduler(
        num_blocks=12,
        block_size=4,
        max_num_batched_tokens=18,
        prefix_caching=True,
        preemption="swap",
        num_host_blocks=20,
    )
    watched = observe(scheduler, SharingAuditor())
    watched.add_request(Request("early", range(33), 4, priority=1))
    watched.update_from_output(watched.schedule(), {})
    watched.add_request(Request("late", [*range(32), 60], 4, priority=2))
    assert watched.schedule().num_scheduled_tokens == {"early": 15, "late": 1}
    watched.add_request(Request("urgent", [70] * 40, 4))
    assert watched.schedule().num_scheduled_tokens == {"early": 15, "late": 1, "urgent": 2}
    output = watched.schedule()
    assert (output.num_scheduled_tokens, output.preempted) == ({"urgent": 18}, ["late", "early"])
    assert {name: len(pairs) for name, pairs in output.swapped_out.items()} == {"late": 4, "early": 5}
    watched.update_from_output(output, {})
    steps(watched)


def test_an_auditor_knows_what_was_taken_back_when_a_client_left():
    _, watched, _, late = found_in_a_lost_step()
    watched.abort_request("early")
    assert late.num_computed_tokens == 16
    steps(watched)
