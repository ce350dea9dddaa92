"""benchmarks/prefix_cache.py: its counting and its arithmetic, on small loads. No time is measured."""

from __future__ import annotations

import sys
from math import isnan
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import prefix_cache as benchmark

from minicache.scheduler import create_scheduler


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_REQUESTS", 40)
    monkeypatch.setattr(benchmark, "CHAT_SECONDS", 30.0)


@pytest.mark.parametrize(("num_shared", "num_found"), [(80, 80), (341, 336)])
def test_all_but_the_first_find_the_full_blocks_of_the_system_prompt(num_shared, num_found):
    found = benchmark.behind(num_shared, 20)
    assert found["prefill_without"] == found["prompt_tokens"]
    assert found["prefill_with"] == found["prompt_tokens"] - 39 * num_found
    assert found["saved_percent"] == pytest.approx(100 * 39 * num_found / found["prompt_tokens"], abs=0.01)
    assert found["with_over_without"] > 1
    assert found["with_over_oracle"] > 1


def test_with_memory_for_all_chats_reach_the_ceiling():
    scheduler = create_scheduler("paged", num_blocks=50_000, prefix_caching=True)
    requests, _ = benchmark.talked(scheduler, 1.0)
    found, total = benchmark.counted(requests)
    assert benchmark.ceiling_percent(requests) == pytest.approx(100 * found / total, abs=0.01)
    assert max(request.arrival_time for request in requests) < 30


def test_where_a_curve_crosses_a_level():
    assert benchmark.crossing([(1, 100), (2, 1000), (4, 4000)], 2000) == pytest.approx(8**0.5, abs=0.001)
    assert isnan(benchmark.crossing([(1, 100), (2, 200)], 2000))


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_in_a_window_every_request_fills_one_block(prefix_caching, monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_WINDOWS", 2)
    scheduler = benchmark.decoding("fair", 20, prefix_caching=prefix_caching)
    before = {request.request_id: request.num_computed_tokens // 16 for request in scheduler.running}
    assert benchmark.window_seconds(scheduler) > 0
    assert {each.request_id: each.num_computed_tokens // 16 - 1 for each in scheduler.running} == before
    benchmark.window_seconds(scheduler)
    assert scheduler.num_running == 20
