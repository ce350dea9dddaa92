"""Steps whose tokens never come, one in three: nobody relies on what they were to fill, says the auditor.

Requests begin alike, have priorities, are forked, aborted, preempted and swapped, and the budget is mostly full.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, FairSharingScheduler, SharingScheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe


def options_of(rng: random.Random, cls: type[SharingScheduler]) -> dict[str, Any]:
    """For requests of at most 33 tokens, which always fit alone."""
    block_size = rng.choice([1, 2, 4])
    options: dict[str, Any] = {"block_size": block_size, "num_blocks": -(-33 // block_size) + rng.choice([0, 1, 3, 20])}
    options |= {"max_num_seqs": rng.choice([2, 4, 8]), "prefix_caching": True}
    if cls is ChunkedPrefillScheduler:
        options |= {"max_num_batched_tokens": rng.choice([3, 7, 12, 30])}
        options |= {"long_prefill_threshold": rng.choice([0, 0, 2, 5])}
    else:
        options |= {"max_num_batched_tokens": rng.choice([24, 40, 200])}
    return options | ({"preemption": "swap", "num_host_blocks": rng.choice([3, 30])} if rng.random() < 0.5 else {})


@pytest.mark.parametrize("seed", [4, 11, 17, 23, 54, 61, 68, 129])
def test_nobody_relies_on_them(seed: int) -> None:
    rng = random.Random(seed)
    stages: list[type[SharingScheduler]] = [SharingScheduler, FairSharingScheduler, *2 * [ChunkedPrefillScheduler]]
    cls = rng.choice(stages)
    scheduler = cls(**options_of(rng, cls))
    forks, lost, aborted = rng.random() < 0.5, rng.choice([0.1, 0.3, 0.6]), rng.choice([0.03, 0.15])
    watched: Any = observe(scheduler, SharingAuditor())
    name, is_lost, num_lost = 0, False, 0
    beginning = [rng.randrange(2) for _ in range(24)]
    for turn in range(400):
        if turn < 80 and rng.random() < 0.5:
            prompt = beginning[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
            watched.add_request(Request(name, prompt, rng.randint(1, 9), priority=rng.choice([0, 0, 1, 2])))
            name += 1
        parents = [each for each in scheduler.running if each.output_token_ids]
        has_seat = scheduler.num_running < scheduler.max_num_seqs
        if forks and parents and not is_lost and turn < 80 and rng.random() < 0.2 and has_seat:
            parent = rng.choice(parents)
            outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
            watched.fork_request(parent.request_id, name, outputs)
            name += 1
        unfinished = [*scheduler.running, *scheduler.waiting.values()]
        if unfinished and rng.random() < aborted:
            watched.abort_request(rng.choice(unfinished).request_id)
        if scheduler.has_unfinished:
            output = watched.schedule()
            scheduler.check()
            is_lost = turn < 300 and rng.random() < lost
            num_lost += is_lost
            if not is_lost:
                watched.update_from_output(output, {each: rng.randrange(2) for each in output.num_scheduled_tokens})
    assert num_lost > 5
    assert not scheduler.has_unfinished
    assert scheduler.pool.num_used == 0
