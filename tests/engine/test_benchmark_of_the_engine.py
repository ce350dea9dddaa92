"""benchmarks/engine.py: the work that it gives the engines, what they answer, and what it makes of their times.

No time is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package
pytest.importorskip("transformers")

from benchmarks import _contestant as contestants
from benchmarks import engine as benchmark
from benchmarks._contestant import Contestant, Run, Work

from minicache.model import MiniGPTConfig

TINY = MiniGPTConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_seq_len=64,
)
RAGGED = Work([[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3]], [6, 1, 9, 4, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny Llama as the engines read it."""
    path = tmp_path_factory.mktemp("llama")
    llama, _ = benchmark.the_same_model(TINY)
    llama.save_pretrained(path)
    yield path
    contestants._llama.cache_clear()
    contestants._minicache.cache_clear()


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


def test_the_engines_answer_alike(folder: Path) -> None:
    ours = contestants.minicache(str(folder), RAGGED)()
    assert [len(answer) for answer in ours] == RAGGED.num_new
    assert contestants.static(str(folder), RAGGED)() == ours


@pytest.mark.slow
def test_an_engine_in_a_process(folder: Path) -> None:
    """Two requests at once give the answers of five, twice; and if the process dies it says why."""
    with closing(Contestant("minicache", folder)) as engine:
        runs = [engine.serve(RAGGED, 2) for _ in range(2)]
        with pytest.raises(RuntimeError, match="token id 50 is outside"):
            engine.serve(Work([[TINY.vocab_size]], [1]), 2)
    assert [run.token_ids for run in runs] == [contestants.minicache(str(folder), RAGGED)()] * 2
    assert all(run.cpu > 0 for run in runs)


def test_agreement_sees_a_wrong_token(folder: Path) -> None:
    llama, _ = benchmark.the_same_model(TINY)
    work = Work(RAGGED.prompts[:2], [5, 5])
    answers = contestants.minicache(str(folder), work)()
    rows = {"2": benchmark.Row(work, 2)}
    good = benchmark.agreement_of("vllm", llama, runs_of("2", minicache=answers, vllm=answers), rows)
    assert (good["num_answers"], good["num_tokens"], good["num_tokens_that_differ"]) == (2, 10, 0)
    assert good["num_answers_that_differ"] == 0
    wrong = [answers[0], [*answers[1][:4], answers[1][4] ^ 1]]
    agreement = benchmark.agrees(llama, work.prompts, wrong)
    assert agreement["num_tokens_that_differ"] == 1
    assert agreement["share_that_agrees"] == pytest.approx(0.9)
    assert agreement["largest_gap"] > 0
    with pytest.raises(RuntimeError, match="'num_tokens_that_differ': 1"):
        benchmark.agreement_of("vllm", llama, runs_of("2", minicache=answers, vllm=wrong), rows)
    rounded = benchmark.agreement_of("llama_q8_0", llama, runs_of("2", minicache=answers, llama_q8_0=wrong), rows)
    assert rounded["num_answers_that_differ"] == 1


def runs_of(row: str, **answers: list[list[int]]) -> dict[str, dict[str, list[Run]]]:
    """What `take_turns` returns: one run of each engine."""
    return {row: {name: [Run(1, token_ids)] for name, token_ids in answers.items()}}


def test_fewer_tokens_than_wanted_are_refused() -> None:
    with pytest.raises(RuntimeError, match="wanted"):
        contestants.check([5, 4], Work([[1], [1]], [5, 5]))


def test_the_arithmetic() -> None:
    """3,200 tokens in 2 s next to 4 s and 5 s; of a prompt, its own tokens count; llama.cpp was not measured."""
    rows = benchmark.make_rows()
    runs = {
        "minicache": [Run(1.6, []), Run(2.0, []), Run(2.5, [])],
        "vllm": [Run(4.0, []), Run(3.2, []), Run(5.0, [])],
        "minicache_int8": [Run(1.0, [])],
    }
    row = benchmark.results_of(runs, rows["32"])
    assert (row["num_requests"], row["num_tokens"], row["at_once"]) == (32, 3200, 32)
    assert row["tokens_per_second"]["minicache"] == {"fastest": 2000, "median": 1600}
    assert row["tokens_per_second"]["llama_f32"] is None
    assert row["ratio_to"]["vllm"] == {"fastest": pytest.approx(2), "median": pytest.approx(2)}
    assert row["ratio_to"]["llama_f32"] is None
    assert row["ratio_to"]["llama_q8_0"] is None
    runs["llama_q8_0"] = [Run(1.5, [])]
    assert benchmark.results_of(runs, rows["32"])["ratio_to"]["llama_q8_0"]["fastest"] == pytest.approx(1.5)
    assert rows["ragged"].num_tokens == sum(benchmark.make_ragged_work().num_new)
    assert benchmark.Row(Work([[1] * 1500], [1]), 1).num_tokens == 1500
