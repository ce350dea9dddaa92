"""benchmarks/chunked.py: its clocks, counts and capacities, on small loads. No time is measured."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import chunked as benchmark

from minicache.simulator.costs import FixedCost
from minicache.simulator.workload import Arrival


def point(rate, gap, ttft):
    return {"rate": rate, "gap_p99_ms": gap, "ttft_p99_ms": ttft}


SLO = benchmark.Slo("gap_p99_ms", 100.0, 512)


def test_gaps_are_counted_from_token_to_token(monkeypatch):
    """One second a step. Two prompts of 4 in chunks of 5: A has its token after step 0, B after step 1."""
    monkeypatch.setattr(benchmark, "COST", FixedCost(1.0))
    gaps = benchmark.Gaps("A", "B")
    come = iter([Arrival("A", 0.0, 4, 3), Arrival("B", 0.0, 4, 2)])
    report = benchmark.simulate(benchmark.scheduler("chunked", 5), come, gaps)
    assert gaps.times == {"A": [1.0, 2.0, 3.0], "B": [2.0, 3.0]}
    assert gaps.gaps == [1.0, 1.0, 1.0]
    assert report.ttft.max == 2.0


def test_the_stall_is_the_whole_prompt_and_chunks_are_bounded():
    found = benchmark.stall_simulated()
    whole = found["fair"]["longest_gap_ms"]
    assert whole == pytest.approx(found["phased"]["longest_gap_ms"], rel=0.05)
    assert found["ratio"] == pytest.approx(whole / found["chunked"]["longest_gap_ms"], abs=0.01)
    assert found["ratio"] > 5
    assert 1 < found["ttft_ratio"] < 1.3
    assert found["fair"]["num_longer"] == 1
    assert found["chunked"]["num_longer"] == -(-8000 // (512 - 32))


def test_chunks_of_a_prompt():
    assert benchmark.chunks_of(10, 4) == [(0, 4), (4, 4), (8, 2)]
    assert benchmark.chunk_point(10, 4, {4: 3.0, 10: 2.0}) == {
        "budget": 4,
        "num_chunks": 3,
        "ms": 3000.0,
        "over_whole": 1.5,
        "rows_reread": 12,
    }


def test_the_highest_rate_is_where_the_first_limit_is_reached():
    points = [point(1, 50, 1000), point(2, 200, 2000), point(4, 800, 50_000)]
    assert benchmark.highest(points, SLO) == pytest.approx(2**0.5, abs=0.001)
    assert benchmark.highest(points, replace(SLO, limit=5000.0)) == pytest.approx(
        2 * 2 ** (log(2.5) / log(25)), abs=0.001
    )


def test_no_rate_is_told_where_none_was_found():
    assert benchmark.highest([point(1, 150, 1000), point(2, 200, 9000)], SLO) is None
    assert benchmark.highest([point(1, 50, 1000), point(2, 60, 2000)], SLO) is None


@pytest.mark.parametrize("way", ["fair", "phased", "chunked"])
def test_a_small_load_is_served_whole(way):
    load = replace(benchmark.LOADS["conversation"], seconds=10.0)
    found = benchmark.at_rate(way, load, 2.0, benchmark.BUDGET if way == "chunked" else benchmark.WHOLE)
    assert found["gap_p50_ms"] <= found["gap_p99_ms"] <= found["gap_max_ms"]
    assert found["ttft_p50_ms"] <= found["ttft_p99_ms"]
    if way == "chunked":
        assert found["gap_max_ms"] < 100
