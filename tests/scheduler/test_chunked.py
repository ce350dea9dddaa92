"""Chunked prefill: which options there are, and that an auditor notices a step that computes too little or too much."""

from __future__ import annotations

import pytest

from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe


def chunked(**options):
    return ChunkedPrefillScheduler(**{"num_blocks": 1000} | options)


def test_full_prompts_are_no_matter_where_prompts_are_computed_whole():
    """The option is for chunks: other stages compute a prompt in one step, and take all of its blocks with it."""
    for stage in ("static", "continuous", "paged", "fair"):
        create_scheduler(stage, num_blocks=8, reserve_full_prompt=True)
        with pytest.raises(ValueError, match='take "chunked"'):
            create_scheduler(stage, num_blocks=8, reserve_full_prompt=False)
    for create in (chunked, lambda **options: create_scheduler("chunked", num_blocks=8, **options)):
        with pytest.raises(TypeError, match="reserve_full_prompt"):
            create(reserve_full_prompt=1)


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
