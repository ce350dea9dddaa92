"""vLLM's threshold, watermark and priorities, and where ours differ: the shortest workloads of each.

`test_golden_traces.py` has vLLM's schedules; the page is `docs/en/reference/vllm-differences.md`.
"""

from __future__ import annotations

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler import ChunkedPrefillScheduler, VllmPriorityScheduler, create_scheduler
from minicache.scheduler.audit_priority import PriorityAuditor
from minicache.scheduler.observe import observe


def chunked(**options):
    return create_scheduler("chunked", **{"num_blocks": 9, "block_size": 2} | options)


def priority(**options):
    return chunked(policy="priority", **options)


def steps_of(scheduler, requests, num_steps):
    """The tokens of each step. Requests are (id, prompt, max_tokens, priority, step of arrival)."""
    steps = []
    for step in range(num_steps):
        for name, num_prompt, max_tokens, urgency, arrival in requests:
            if arrival == step:
                prompt = [ord(name[0]) * 10 + place for place in range(num_prompt)]
                scheduler.add_request(Request(name, prompt, max_tokens, priority=urgency, arrival_time=arrival))
        output = scheduler.schedule()
        steps.append(dict(output.num_scheduled_tokens))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        scheduler.check()
    return steps


# Options


@pytest.mark.parametrize("stage", ["chunked", "async"])
def test_the_threshold_is_for_requests_that_are_not_alone(stage):
    """b waits for the only batch slot, and is alone once a has finished."""
    scheduler = create_scheduler(stage, num_blocks=20, max_num_seqs=1, long_prefill_threshold=2)
    requests = [("a", 5, 1, 0, 0), ("b", 5, 1, 0, 0)]
    assert steps_of(scheduler, requests, 4) == [{"a": 2}, {"a": 2}, {"a": 1}, {"b": 5}]
    assert steps_of(create_scheduler(stage, num_blocks=20, long_prefill_threshold=2), requests[:1], 1) == [{"a": 5}]


def test_phase_9_has_one_threshold_for_all():
    """Its own class, which `create_scheduler` makes if neither option is given, has no exception."""
    scheduler = ChunkedPrefillScheduler(num_blocks=20, long_prefill_threshold=2)
    assert steps_of(scheduler, [("a", 5, 1, 0, 0)], 3) == [{"a": 2}, {"a": 2}, {"a": 1}]
    assert type(chunked()) is ChunkedPrefillScheduler


@pytest.mark.parametrize(("stage", "admitted"), [("fair", ["a", "b"]), ("chunked", ["a"]), ("async", ["a"])])
def test_the_watermark_counts_the_null_block(stage, admitted):
    """⌊0.25 · 3⌋ is 0, ⌊0.25 · (3 + 1)⌋ is 1: of 3 blocks two are for the requests, or all."""
    scheduler = create_scheduler(stage, num_blocks=3, block_size=2, watermark=0.25)
    [step] = steps_of(scheduler, [("a", 3, 1, 0, 0), ("b", 1, 1, 0, 0)], 1)
    assert list(step) == admitted


def test_options_that_are_refused():
    with pytest.raises(ValueError, match='policy must be "fair" or "priority"; got \'fcfs\''):
        chunked(policy="fcfs")
    with pytest.raises(TypeError, match="policy must be of type str"):
        chunked(policy=1)
    with pytest.raises(ValueError, match='policy: "fair" has an order of its own; take "chunked"'):
        create_scheduler("fair", num_blocks=9, policy="priority")
    with pytest.raises(ValueError, match="num_speculative_tokens and policy together"):
        chunked(policy="priority", num_speculative_tokens=2)


# Priorities: ours, "fair", and vLLM's


def test_who_has_the_budget_first():
    """b is more urgent, and was admitted second. In step 2 both could go on, and there are 2 tokens."""
    requests, options = [("a", 1, 9, 1, 0), ("b", 4, 9, 0, 1)], {"max_num_batched_tokens": 2}
    assert steps_of(chunked(**options), requests, 3) == [{"a": 1}, {"a": 1, "b": 1}, {"b": 2}]
    assert steps_of(priority(**options), requests, 3) == [{"a": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}]


def test_a_victim_that_was_scheduled_already():
    """5 blocks of 2: 3 are a's, 2 are b's. In step 2 a has its token, and b, more urgent, needs a block.

    b was to have the 3 tokens that a has left of 4, and still has these. The fourth is for those behind b.
    """
    requests = [("a", 4, 6, 1, 0), ("b", 9, 1, 0, 1)]
    scheduler = priority(num_blocks=5, max_num_batched_tokens=4, reserve_full_prompt=False)
    assert steps_of(scheduler, requests, 2) == [{"a": 4}, {"a": 1, "b": 3}]
    output = scheduler.schedule()
    assert (output.preempted, output.num_scheduled_tokens, scheduler.token_budget) == (["a"], {"b": 3}, 1)
    scheduler = chunked(num_blocks=5, max_num_batched_tokens=4, reserve_full_prompt=False)
    assert steps_of(scheduler, requests, 3) == [{"a": 4}, {"a": 1, "b": 3}, {"b": 4}]


def test_the_bound_on_waiting_is_ours():
    """One batch slot, one request that is not urgent, and 70 that are: ours serves it after 64 of them."""
    requests = [("low", 1, 1, 9, 0), *((f"u{number}", 1, 1, 0, 0) for number in range(70))]
    served = [next(iter(step)) for step in steps_of(chunked(max_num_seqs=1), requests, 71)]
    assert served.index("low") == 64
    served = [next(iter(step)) for step in steps_of(priority(max_num_seqs=1), requests, 71)]
    assert served.index("low") == 70


def test_ties_are_served_in_the_order_in_which_they_came():
    """Equal priority, equal time. vLLM compares the ids as strings: "10" is before "9"."""
    served = steps_of(priority(max_num_seqs=1), [("9", 1, 1, 0, 0), ("10", 1, 1, 0, 0)], 2)
    assert served == [{"9": 1}, {"10": 1}]


def test_an_undone_victim_leaves_no_hash():
    """In step 2 a's fourth token would fill its second block, but b preempts it. In vLLM the block keeps that hash."""
    scheduler = priority(num_blocks=3, prefix_caching=True)
    assert steps_of(scheduler, [("a", 2, 9, 1, 0), ("b", 2, 9, 0, 1)], 2) == [{"a": 2}, {"a": 1, "b": 2}]
    output = scheduler.schedule()
    assert (output.preempted, output.num_scheduled_tokens) == (["a"], {"b": 1})
    assert scheduler.waiting["a"].token_ids(0, 4) == [970, 971, 7, 7]
    assert len(scheduler.find_prefix(Request("again", [970, 971, 7, 7, 8], 9))) == 1


def test_an_undone_victim_is_copied_nowhere():
    """6 blocks of 2: a has 2, which its fork shares, and b 3. In step 2 a takes the last one for a copy of its tail.

    Then b, more urgent, needs two. The fork is swapped out, which frees one. What a has computed would be copied in
    this step, too late for a swap: a starts over.
    """
    options = {"num_blocks": 6, "max_num_batched_tokens": 6, "reserve_full_prompt": False}
    scheduler = observe(priority(preemption="swap", num_host_blocks=9, **options), PriorityAuditor())
    assert steps_of(scheduler, [("a", 2, 9, 1, 0), ("b", 10, 1, 0, 1)], 2) == [{"a": 2}, {"a": 1, "b": 5}]
    a, fork = scheduler.running[0], scheduler.fork_request("a", "fork")
    output = scheduler.schedule()
    assert (output.preempted, output.num_scheduled_tokens) == (["fork", "a"], {"b": 5})
    assert (output.blocks_to_copy, list(output.swapped_out)) == ([], ["fork"])
    assert (a.status, fork.status) == (RequestStatus.WAITING, RequestStatus.SWAPPED)


def test_compatibility_holds_with_either():
    scheduler = priority()
    scheduler.add_request(Request("a", [1], 2))
    scheduler.add_request(Request("b", [1], 2, group="image"))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_forks_are_last_in_the_batch():
    scheduler = priority()
    steps_of(scheduler, [("a", 3, 9, 1, 0), ("b", 1, 9, 0, 0)], 1)
    scheduler.fork_request("b", "c")
    assert [request.request_id for request in scheduler.running] == ["b", "a", "c"]


# What the auditor notices


class SparesTheLowest(VllmPriorityScheduler):
    """Preempts the newest of the batch."""

    def make_room(self, request, output):
        while self.blocks_missing(request) > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim, output)
            if victim is request:
                return False
        return True


def test_the_auditor_notices_another_victim():
    scheduler = observe(SparesTheLowest(num_blocks=2, block_size=2), PriorityAuditor())
    with pytest.raises(InvariantError, match="victims: "):
        steps_of(scheduler, [("a", 1, 9, 1, 0), ("b", 1, 9, 0, 1)], 4)
