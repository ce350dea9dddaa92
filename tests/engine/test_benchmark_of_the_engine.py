"""benchmarks/engine.py: the work that it gives the engines, and what it makes of their times. No time is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package
pytest.importorskip("transformers")

from benchmarks import engine as benchmark


def test_the_work() -> None:
    """32 requests, 2,415 prompt tokens in all, 100 new tokens each; parts of it are its beginning."""
    work = benchmark.make_work()
    assert len(work.prompts) == len(work.num_new) == 32
    assert sum(map(len, work.prompts)) == 2415
    assert set(work.num_new) == {100}
    assert max(token for prompt in work.prompts for token in prompt) < benchmark.SHAPE.vocab_size
    assert benchmark.make_work(4).prompts == work.prompts[:4]
    ragged = benchmark.make_ragged_work()
    assert len(ragged.prompts) == len(ragged.num_new) == 64
    assert max(len(prompt) + num for prompt, num in zip(*ragged, strict=True)) <= benchmark.SHAPE.max_seq_len


def test_both_models_are_one() -> None:
    llama, model = benchmark.the_same_model()
    token_ids = torch.tensor([benchmark.make_work(1).prompts[0]])
    with torch.inference_mode():
        torch.testing.assert_close(model(token_ids), llama(token_ids).logits, atol=1e-4, rtol=1e-4)


def test_agreement_sees_a_wrong_token() -> None:
    llama, model = benchmark.the_same_model()
    work = benchmark.Work(benchmark.make_work(2).prompts, [5, 5])
    params = benchmark.SamplingParams(max_tokens=5, ignore_eos=True)
    answers = [each.token_ids for each in benchmark.LLM(model).generate(work.prompts, params)]
    agreement = benchmark.agrees(llama, work, answers)
    assert (agreement["num_tokens"], agreement["num_tokens_that_differ"]) == (10, 0)
    answers[1][4] ^= 1
    agreement = benchmark.agrees(llama, work, answers)
    assert agreement["num_tokens_that_differ"] == 1
    assert agreement["share_that_agrees"] == pytest.approx(0.9)
    assert agreement["largest_gap"] > 0


def test_fewer_tokens_than_wanted_are_refused() -> None:
    with pytest.raises(RuntimeError, match="wanted"):
        benchmark.check([5, 4], benchmark.Work([[1], [1]], [5, 5]))


def test_the_arithmetic() -> None:
    """3,200 tokens in 2 s beside 4 s and 5 s; 10 ms of linear layers a step, 510 ms for the prompts."""
    _, model = benchmark.the_same_model()
    seconds = {
        "minicache": [2.0, 3.0, 2.5],
        "static": [5.0],
        "continuous": [4.0],
        "minicache_ragged": [1.0],
        "static_ragged": [3.0],
        "linear_1": [0.002],
        "linear_8": [0.004],
        "linear_32": [0.010],
        "laid_out_1": [0.001],
        "laid_out_8": [0.002],
        "laid_out_32": [0.008],
        "linear_prompts": [0.510],
    }
    got = benchmark.results(model, seconds, {"_ragged": benchmark.make_ragged_work()})
    assert got["num_prompt_tokens"] == 2415
    assert got["tokens_per_second"]["minicache"] == 1600
    assert got["median_tokens_per_second"]["minicache"] == 1280
    assert got["best_peer"] == "continuous"
    assert got["ratio_to_best_peer"] == pytest.approx(2)
    assert got["ratio_to_static"] == pytest.approx(2.5)
    assert got["ratio_to_static_ragged"] == pytest.approx(3)
    assert got["linear_tokens_per_second"] == {"1": 500, "8": 2000, "32": 3200}
    assert got["share_of_ceiling"] == pytest.approx(0.5)
    assert got["laid_out_tokens_per_second"] == {"1": 1000, "8": 4000, "32": 4000}
    assert got["share_of_laid_out_ceiling"] == pytest.approx(0.4)
    assert got["linear_whole_tokens_per_second"] == pytest.approx(3200 / 1.5)
    assert got["share_of_whole_ceiling"] == pytest.approx(0.75)
