"""benchmarks/preemption.py: what it counted and modelled is the same on every machine. Nothing is measured."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.preemption import SEEDS, Setting, averaged, modelled, peak_tokens  # noqa: E402

RESULTS = json.loads((ROOT / "benchmarks/results/preemption.json").read_text(encoding="utf-8"))


@cache
def peaks() -> dict[int, int]:
    return {seed: peak_tokens(seed) for seed in SEEDS}


@pytest.mark.parametrize(
    ("found", "setting"),
    [
        (RESULTS["pressure"]["recompute"]["50"], Setting(50)),
        (RESULTS["pressure"]["swap_25"]["70"], Setting(70, "swap", 25)),
        (RESULTS["block_sizes"]["by_layer"]["4"], Setting(50, "swap", 100, 4, packed=False)),
        (RESULTS["watermarks"]["recompute"]["20"], Setting(50, watermark=0.2)),
    ],
)
def test_what_was_counted_is_what_the_scheduler_does(found, setting):
    assert averaged(setting, peaks()) == pytest.approx(found)


def test_both_ways_have_one_schedule():
    for percent, run in RESULTS["pressure"]["recompute"].items():
        for way in ("swap_100", "swap_25", "swap_5"):
            other = RESULTS["pressure"][way][percent]
            assert all(run[key] == other[key] for key in ("preemptions", "steps", "mean_batch"))


def test_the_model_is_what_was_recorded():
    assert RESULTS["modelled"] == json.loads(json.dumps(modelled()))
