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
    """At most 100 tokens of one prompt in a step: two long ones advance side by side, and decodes with them."""
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


def test_a_prompt_is_admitted_when_all_of_it_fits():
    """6 blocks of 4, 6 tokens a step: A has 7 tokens and generates 6, B has 14 and generates 3."""
    for options, num_preemptions in [({}, 1), ({"reserve_full_prompt": False}, 2)]:
        scheduler = chunked(num_blocks=6, block_size=4, max_num_batched_tokens=6, **options)
        b = Request("b", [2] * 14, 3)
        work = steps(scheduler, Request("a", [1] * 7, 6), b)
        assert [len(each) == 2 for each in work[3:6]] == [False, *[bool(options)] * 2]
        assert b.num_preemptions == num_preemptions


def test_full_prompts_are_no_matter_where_prompts_are_computed_whole():
    """The option is for chunks: other stages compute a prompt in one step, and take all of its blocks with it."""
    for stage in ("static", "continuous", "paged", "fair"):
        create_scheduler(stage, num_blocks=8, reserve_full_prompt=True)
        with pytest.raises(ValueError, match='take "chunked"'):
            create_scheduler(stage, num_blocks=8, reserve_full_prompt=False)
    for create in (chunked, lambda **options: create_scheduler("chunked", num_blocks=8, **options)):
        with pytest.raises(TypeError, match="reserve_full_prompt"):
            create(reserve_full_prompt=1)


def test_a_budget_smaller_than_the_batch():
    """3 in decode and 2 tokens a step: the first two go on, the third when they have finished."""
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
        def schedule_tokens(self, request, output):
            super().schedule_tokens(request, output)
            if output.num_scheduled_tokens[request.request_id] > 1:
                output.num_scheduled_tokens[request.request_id] -= less

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
        def schedule_tokens(self, request, output):
            super().schedule_tokens(request, output)
            output.num_scheduled_tokens[request.request_id] += 1

    scheduler = Greedy(num_blocks=20, max_num_batched_tokens=30, long_prefill_threshold=4)
    with pytest.raises(InvariantError, match=r"step 0, work: .* computes 5 tokens, and could compute 4"):
        audited_step(scheduler, Request("a", [1] * 9, 9))


def test_a_request_that_is_bypassed_in_the_middle_of_its_prompt_is_protected():
    """A long prompt of low priority, and an endless stream of higher priority that takes its blocks: it finishes."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "reserve_full_prompt": False}
    scheduler = chunked(num_blocks=20, block_size=4, **options)
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
    """Serve `old` while an urgent request of 8 + 4 tokens comes every few steps; whether it has finished by then."""
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
    """24 of 25 tokens computed is not enough: that admission has yielded no token."""
    options = {"max_num_batched_tokens": 16, "long_prefill_threshold": 8, "reserve_full_prompt": False}
    scheduler = chunked(num_blocks=9, block_size=4, **options)
    old = Request("old", [1] * num_prompt, 4, priority=1)
    assert under_a_stream(scheduler, old, 400)
    assert old.num_preemptions <= 5


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_blocks", [8, 9, 10])
@pytest.mark.parametrize("reserve", [True, False])
def test_prompts_of_all_lengths_under_an_endless_stream(num_blocks, prefix_caching, preemption, reserve):
    options = {"num_blocks": num_blocks, "block_size": 4, "prefix_caching": prefix_caching, "preemption": preemption}
    options["reserve_full_prompt"] = reserve
    options |= {"num_host_blocks": 8} if preemption == "swap" else {}
    for threshold, budget in [(0, 16), (4, 9), (8, 16)]:
        for num_prompt in range(1, 4 * num_blocks - 3):
            old = Request("old", [1] * num_prompt, 4, priority=1)
            scheduler = chunked(max_num_batched_tokens=budget, long_prefill_threshold=threshold, **options)
            assert under_a_stream(scheduler, old, 5 * STARVATION_BOUND), (threshold, num_prompt, old)


def test_the_protected_request_bypasses_an_earlier_one_64_times_at_most():
    """It is admitted and preempted over and over next to "urgent", while "first", which has gained a token, waits."""
    scheduler = chunked(num_blocks=40, max_num_batched_tokens=64, reserve_full_prompt=False)
    coming = [Request("first", [1] * 20, 700, priority=1), Request("protected", [2] * 620, 2, priority=2)]
    coming.append(Request("urgent", [3], 600))
    most, num_waited = 0, 0
    while scheduler.has_unfinished or coming:
        if coming:
            scheduler.add_request(coming.pop(0))
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        most = max(most, scheduler.num_bypasses)
        num_waited += scheduler.protected is not None and "first" in scheduler.waiting
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
            reserve_full_prompt=rng.random() < 0.5,
        ),
        SharingAuditor(),
    )
    names, requests, awaited = iter(range(10**6)), [], False
    for step in range(4000):
        if step < 80 and rng.random() < 0.3:
            prompt = [rng.randrange(2)] * rng.randint(1, 20)
            options = {"priority": rng.choice([0, 0, 1]), "group": rng.choice(["text", "text", "image"])}
            requests.append(Request(next(names), prompt, rng.randint(1, 9), **options))
            scheduler.add_request(requests[-1])
        parents = [each for each in scheduler.running if each.output_token_ids]
        if step < 80 and parents and not awaited and scheduler.num_running < scheduler.max_num_seqs:
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
        if step >= 80 and not scheduler.has_unfinished:
            break
    assert {request.status.is_finished for request in requests} == {True}
    assert scheduler.pool.num_used == 0


def test_a_step_that_fails_in_the_middle_of_a_prompt():
    """16 of 29 tokens are computed when a step fails: all are computed again, and what was cached is not found."""
    scheduler = chunked(block_size=4, max_num_batched_tokens=16, prefix_caching=True)
    watched = observe(scheduler, SharingAuditor())
    early, urgent = Request("early", range(29), 4, priority=1), Request("urgent", [60] * 40, 4)
    watched.add_request(early)
    watched.update_from_output(watched.schedule(), {})
    watched.add_request(urgent)
    assert watched.schedule().num_scheduled_tokens == {"early": 13, "urgent": 3}
    watched.recover()
    assert (early.num_computed_tokens, early.block_ids, early.num_preemptions) == (0, [], 1)
    assert scheduler.find_prefix(Request("same", range(29), 4)) == []
    assert watched.schedule().num_scheduled_tokens == {"urgent": 16}
    watched.update_from_output(scheduler.outstanding, {})
    steps(watched)
    assert scheduler.pool.num_used == 0
