"""benchmarks/speculative.py: prompts, counts and cost on a few tokens. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import speculative as benchmark

from minicache.model import load_minigpt


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_PROMPTS", 1)
    monkeypatch.setattr(benchmark, "NUM_NEW", 40)
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    monkeypatch.setattr(benchmark, "NUM_DRAFTS", (0, 4))


def test_what_is_asked_again_is_text_answer_text():
    model = load_minigpt()
    [again], [new] = (benchmark.make_prompts(model, kind) for kind in benchmark.KINDS)
    assert len(again) == len(new) == 120
    assert again[:40] == again[80:] == new[:40]
    assert again[40:80] == benchmark.plain(model, again[:40])


def test_passes_and_tokens_add_up():
    model = load_minigpt()
    found = benchmark.by_num_drafts(model, benchmark.make_prompts(model, "again"), "again")
    none, four = found["points"]
    assert (none["num_drafts"], none["num_passes"], none["tokens_per_pass"], none["acceptance"]) == (0, 40, 1.0, 0.0)
    assert four["tokens_per_pass"] == pytest.approx(40 / four["num_passes"], abs=0.01)
    # Each pass yields one token of the model's own, and the accepted draft tokens.
    accepted = four["acceptance"] * four["drafted_per_pass"]
    assert four["tokens_per_pass"] == pytest.approx(1 + accepted, abs=0.03)
    assert four["num_passes"] < 40
    assert found["best"] in found["points"]


def test_each_token_has_its_time(monkeypatch):
    clock = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(clock))
    assert benchmark.timed(map(torch.tensor, [[4], [2]])) == ([4, 2], [0.5, 2.0])


def test_other_tokens_are_an_error(monkeypatch):
    model = load_minigpt()
    prompts = benchmark.make_prompts(model, "new")
    monkeypatch.setattr(benchmark, "speculated", lambda *_: [0] * 40)
    with pytest.raises(RuntimeError, match="other tokens"):
        benchmark.by_num_drafts(model, prompts, "new")


def test_a_pass_is_timed_behind_the_same_prompt_each_time():
    model = load_minigpt()
    [prompt] = benchmark.make_prompts(model, "new")
    points = benchmark.pass_cost(model, prompt, rounds=2)
    assert [point["num_tokens"] for point in points] == list(benchmark.PASS_TOKENS)
    assert points[0]["over_one"] == 1
    assert all(point["ms"] > 0 for point in points)
