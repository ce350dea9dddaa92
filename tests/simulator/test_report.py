"""What a report says of many latencies: the percentiles are NumPy's."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest

from minicache.scheduler import create_scheduler
from minicache.simulator.costs import FixedCost
from minicache.simulator.report import NUM_SAMPLES, RequestTimes, Series, Summary, percentile
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import Arrival


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count):
    rng = Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    for percent in (0, 12.5, 50, 90, 99, 100):
        assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent))
    summary = Summary.of(iter(values))
    assert (summary.mean, summary.max) == (pytest.approx(np.mean(values)), max(values))
    assert (summary.p50, summary.p99) == (
        pytest.approx(np.percentile(values, 50)),
        pytest.approx(np.percentile(values, 99)),
    )


def test_nothing_has_no_percentile_and_an_empty_summary():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert Summary.of([]) == Summary()


def test_times_per_token():
    times = RequestTimes()
    times.add(0.0, first_token=1.0, latency=5.0, num_output_tokens=5)
    times.add(1.0, first_token=2.0, latency=2.0, num_output_tokens=1)
    assert list(times.normalized()) == [1.0, 2.0]
    assert list(times.per_output_token()) == [1.0]  # the second has no second token
    assert len(times) == 2


def test_a_series_thins_itself_out_evenly():
    series, due = Series(seconds=1.0), 0.0
    for time in range(10_000):
        if time >= due:
            due = series.add(float(time), time, 0, 0.0)
    assert NUM_SAMPLES / 2 <= len(series.time) <= NUM_SAMPLES
    gaps = {later - earlier for earlier, later in zip(series.time, series.time[1:], strict=False)}
    assert len(gaps) <= 2
    assert series.num_running == [int(time) for time in series.time]


def test_a_report_is_json():
    report = ServingSimulation(create_scheduler("paged", num_blocks=4), FixedCost(), [Arrival(0, 0.0, 3, 2)]).run()
    told = json.loads(json.dumps(report.to_json()))
    assert told["ttft"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert told["requests_per_second"] == 0.5
    assert told["series"]["num_running"] == report.series.num_running
    assert "times" not in told
