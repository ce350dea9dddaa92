"""benchmarks/speculative.py: prompts, counts and cost on a few tokens. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks import speculative as benchmark

from minicache.model import load_minigpt


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "NUM_PROMPTS", 1)
    monkeypatch.setattr(benchmark, "NUM_NEW", 40)
    monkeypatch.setattr(benchmark, "REPEATS", 2)
    monkeypatch.setattr(benchmark, "NUM_DRAFTS", (1, 4))


@pytest.fixture(scope="module")
def model():
    return load_minigpt()


def test_what_is_asked_again_is_text_answer_text(model):
    [again], [new] = (benchmark.make_prompts(model, kind) for kind in benchmark.KINDS)
    assert len(again) == len(new) == 120
    assert again[:40] == again[80:] == new[:40]
    assert again[40:80] == benchmark.answer(benchmark.engine(model, 0), again[:40]).tokens


def test_steps_and_tokens_add_up(model):
    found = benchmark.by_num_drafts(model, benchmark.make_prompts(model, "again"), "again")
    one, four = found["points"]
    for point in (one, four):
        assert point["tokens_per_step"] == pytest.approx(40 / point["num_steps"], abs=0.01)
        # Each step yields one token of the model's own, and the accepted draft tokens.
        accepted = point["acceptance"] * point["drafted_per_step"]
        assert point["tokens_per_step"] == pytest.approx(1 + accepted, abs=0.03)
    assert four["num_steps"] < one["num_steps"] < 40
    assert found["best"] in found["points"]


def test_each_step_has_its_time(model, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(clock))
    [prompt] = benchmark.make_prompts(model, "new")
    assert benchmark.answer(benchmark.engine(model, 0), prompt).seconds == [1] * 40


def test_other_tokens_are_an_error(model, monkeypatch):
    answers = iter([benchmark.Answer([1], [0.1]), benchmark.Answer([2], [0.1])])
    monkeypatch.setattr(benchmark, "answer", lambda *_: next(answers))
    with pytest.raises(RuntimeError, match="other tokens"):
        benchmark.by_num_drafts(model, [[5, 6]], "new")


def test_a_step_is_timed_with_so_many_tokens(model, monkeypatch):
    monkeypatch.setattr(benchmark, "STEP_TOKENS", (1, 3))
    [prompt] = benchmark.make_prompts(model, "new")
    points = benchmark.step_cost(model, prompt, rounds=1, num_steps=5)
    assert [point["num_tokens"] for point in points] == [1, 3]
    assert points[0]["over_one"] == 1
    assert all(point["ms"] > 0 for point in points)
