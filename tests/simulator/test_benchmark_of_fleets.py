"""benchmarks/fleet.py, on small loads: what its pages say of routers and prefill replicas. No time is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import fleet as benchmark

pytestmark = pytest.mark.slow


def test_affinity_finds_chats_and_a_bound_keeps_a_hot_prompt_from_one_replica(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_CHATS", 60)
    monkeypatch.setattr(benchmark, "NUM_HOT", 300)
    hits = {name: benchmark.under(name, benchmark.talk)["hit_rate"] for name in benchmark.POLICIES}
    assert hits["prefix_affinity"] > hits["power_of_two"] + 0.2
    assert hits["prefix_affinity"] > hits["round_robin"] + 0.2
    bounded, unbounded = (benchmark.under(name, benchmark.hot_prompt) for name in ("prefix_affinity", "unbounded"))
    assert unbounded["ttft_p99"] > 3 * bounded["ttft_p99"]
    assert min(unbounded["num_sent"]) == 0 < min(bounded["num_sent"])


def test_prefill_replicas_keep_long_prompts_from_those_that_read(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_APART", 300)
    together, apart = benchmark.apart(None), benchmark.apart(100)
    assert (together["num_moved"], together["num_requests"]) == (0, 300)
    assert apart["num_moved"] > 0.08 * 300
    assert apart["tpot_p99"] < 0.8 * together["tpot_p99"]


def test_two_choices_by_old_reports_are_better_than_the_best_of_all(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_STALE", 1200)
    fresh, old = benchmark.stale(0.1), benchmark.stale(5.0)
    assert old["all"]["ttft_p99"] > 2 * old["two"]["ttft_p99"]
    assert old["all"]["ttft_p99"] > fresh["all"]["ttft_p99"]
