"""Timelines of a CPU and a GPU: who waits for whom, and what overlapping gains."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from minicache.simulator.overlap import Span, overlap_gain, timeline


def test_in_turn():
    assert timeline([4.0, 4.0], 1.0, 2.0, overlaps=False) == [
        Span("schedule", 0, 0.0, 1.0),
        Span("compute", 0, 1.0, 5.0),
        Span("commit", 0, 5.0, 7.0),
        Span("schedule", 1, 7.0, 8.0),
        Span("compute", 1, 8.0, 12.0),
        Span("commit", 1, 12.0, 14.0),
    ]


def test_overlapped():
    """Step 1 is scheduled while step 0 is computed, so the GPU has no gap; nor behind it."""
    assert timeline([4.0, 4.0, 4.0], 1.0, 2.0, overlaps=True) == [
        Span("schedule", 0, 0.0, 1.0),
        Span("compute", 0, 1.0, 5.0),
        Span("schedule", 1, 1.0, 2.0),
        Span("compute", 1, 5.0, 9.0),
        Span("commit", 0, 5.0, 7.0),
        Span("schedule", 2, 7.0, 8.0),
        Span("compute", 2, 9.0, 13.0),
        Span("commit", 1, 9.0, 11.0),
        Span("commit", 2, 13.0, 15.0),
    ]


@pytest.mark.parametrize("overlaps", [False, True])
def test_no_work_before_its_time(overlaps):
    for seed in range(50):
        rng = random.Random(seed)
        gpu_seconds = [rng.uniform(0.1, 5) for _ in range(rng.randint(1, 12))]
        spans = timeline(gpu_seconds, rng.uniform(0.1, 3), rng.uniform(0.1, 3), overlaps=overlaps)
        at = {(span.work, span.step): span for span in spans}
        assert len(at) == len(spans) == 3 * len(gpu_seconds)
        for lane in ({"schedule", "commit"}, {"compute"}):
            for before, after in pairwise(span for span in spans if span.work in lane):
                assert before.ends <= after.begins
        for step, seconds in enumerate(gpu_seconds):
            computed = at["compute", step]
            assert computed.ends - computed.begins == pytest.approx(seconds)
            assert at["schedule", step].ends <= computed.begins
            assert computed.ends <= at["commit", step].begins
            if (committed := at.get(("commit", step - 1 - overlaps))) is not None:
                assert committed.ends <= at["schedule", step].begins


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 3.0])
def test_the_gain_is_that_of_a_long_run(ratio):
    ends = [
        max(span.ends for span in timeline([1.0] * 2000, ratio / 3, ratio * 2 / 3, overlaps=overlaps))
        for overlaps in (False, True)
    ]
    assert ends[0] / ends[1] == pytest.approx(overlap_gain(ratio), rel=2e-3)


def test_the_most_is_twice():
    assert (overlap_gain(1.0), overlap_gain(0.25), overlap_gain(4.0)) == (2.0, 1.25, 1.25)


@pytest.mark.parametrize("times", [([0.0], 1.0, 1.0), ([1.0], 0.0, 1.0), ([1.0], 1.0, -1.0)])
def test_times_are_positive(times):
    with pytest.raises(ValueError, match="seconds"):
        timeline(*times, overlaps=True)
    with pytest.raises(ValueError, match="cpu_over_gpu"):
        overlap_gain(0.0)
