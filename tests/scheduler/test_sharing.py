"""The prefix cache from outside: its counts, its reset, and which stages have one. Phase 8 has the rest."""

from __future__ import annotations

import pytest

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, SharingScheduler, create_scheduler
from minicache.scheduler.drive import drive

each_stage = pytest.mark.parametrize("cls", [SharingScheduler, ChunkedPrefillScheduler], ids=["sharing", "chunked"])


@each_stage
def test_what_is_counted(cls):
    """48 tokens, sent twice, and once with one more. Then all 20 blocks are wanted: 4 are evicted."""
    scheduler = cls(num_blocks=20, prefix_caching=True)
    prompt = list(range(48))
    for request in (Request("a", prompt, 2), Request("b", prompt, 1), Request("c", [*prompt, 99], 1)):
        drive(scheduler, [request])
    stats = scheduler.stats
    assert (stats.num_requests, stats.num_queried_tokens, stats.num_hit_tokens) == (3, 48 + 48 + 49, 32 + 48)
    assert stats.num_evicted_blocks == 0
    drive(scheduler, [Request("d", [1] * 319, 1)])
    assert scheduler.stats.num_evicted_blocks == 4


@each_stage
def test_reset(cls):
    scheduler = cls(num_blocks=20, prefix_caching=True)
    scheduler.add_request(Request("a", [1] * 40, 2))
    scheduler.update_from_output(scheduler.schedule(), {"a": 7})
    with pytest.raises(ValueError, match="in use"):
        scheduler.reset_prefix_cache()
    drive(scheduler)
    scheduler.reset_prefix_cache()
    assert scheduler.find_prefix(Request("b", [1] * 40, 2)) == []
    with pytest.raises(ValueError, match="prefix_caching=True"):
        cls(num_blocks=20).reset_prefix_cache()


def test_only_what_shares_blocks_has_a_prefix_cache():
    for name in ("static", "continuous"):
        with pytest.raises(ValueError, match="shares no blocks"):
            create_scheduler(name, num_blocks=8, prefix_caching=True)
    for name in ("paged", "fair"):
        assert type(create_scheduler(name, num_blocks=8, prefix_caching=True)) is SharingScheduler


@each_stage
def test_the_longest_output_of_a_child_is_told(cls):
    """max_tokens of 3, and one more has to be generated: a child may begin with 2."""
    scheduler = cls(num_blocks=20, block_size=4)
    scheduler.add_request(Request("a", [1] * 6, 3))
    scheduler.update_from_output(scheduler.schedule(), {"a": 7})
    with pytest.raises(ValueError, match="at most 2 tokens of output; got 3"):
        scheduler.fork_request("a", "b", [7, 7, 7])
    assert scheduler.fork_request("a", "b", [7, 7]).num_tokens == 8
