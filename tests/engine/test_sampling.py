"""Picking tokens: greedy, and draws that follow the softmax; top-k and top-p against transformers."""

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from minicache.engine.picking import greedy, sampler
from minicache.engine.sampling import SamplingParams, TokenSampler, keep_top_k, keep_top_p, pick_tokens


def test_greedy_takes_the_likeliest() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 1.0], [5.0, 5.0, 1.0]])).tolist() == [1, 0]


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(7, 11)
    assert torch.equal(sampler(0.0, seed=1)(logits), greedy(logits))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    draws = sampler(temperature, seed=0)(logits.expand(20_000, 4))
    observed = torch.bincount(draws, minlength=4) / 20_000
    expected = (logits / temperature).exp() / (logits / temperature).exp().sum()
    # Four standard errors of a share of 20,000 draws: 4 · √(0.25 / 20,000) = 0.014.
    torch.testing.assert_close(observed, expected, atol=0.014, rtol=0)


def test_a_seed_repeats_and_another_differs() -> None:
    logits = torch.zeros(64, 100)
    assert torch.equal(sampler(1.0, seed=3)(logits), sampler(1.0, seed=3)(logits))
    assert not torch.equal(sampler(1.0, seed=3)(logits), sampler(1.0, seed=4)(logits))
    assert not torch.equal(sampler(1.0)(logits), sampler(1.0)(logits))


@pytest.mark.parametrize("temperature", [-0.1, float("inf"), float("nan")])
def test_nonsense_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        sampler(temperature)


# SamplingParams


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"max_tokens": 2.0}, TypeError, "max_tokens"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "1"}, TypeError, "temperature"),
        ({"top_k": -1}, ValueError, "top_k"),
        ({"top_k": 1.5}, TypeError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"top_p": 1.01}, ValueError, "top_p"),
        ({"top_p": True}, TypeError, "top_p"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"stop": ("a", "")}, ValueError, "empty"),
        ({"stop": (1,)}, TypeError, "stop"),
        ({"stop_token_ids": (-1,)}, ValueError, "stop token"),
        ({"stop_token_ids": ("a",)}, TypeError, "stop token"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos"),
        ({"n": 0}, ValueError, "n must"),
    ],
    ids=str,
)
def test_params_that_are_refused(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_params_are_values() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


# Top-k and top-p, against transformers


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return 3 * torch.randn(200, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("top_k", [1, 2, 5, 36, 37, 100])
def test_top_k_is_that_of_transformers(rows: Tensor, top_k: int) -> None:
    assert torch.equal(keep_top_k(rows, top_k), TopKLogitsWarper(top_k)(None, rows))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999])
def test_top_p_is_that_of_transformers(rows: Tensor, top_p: float) -> None:
    assert torch.equal(keep_top_p(rows, top_p), TopPLogitsWarper(top_p)(None, rows))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_all_three_are_those_of_transformers(rows: Tensor, temperature: float) -> None:
    sampler = TokenSampler(SamplingParams(temperature=temperature, top_k=9, top_p=0.8))
    expected = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(9)(None, TemperatureLogitsWarper(temperature)(None, rows)))
    got = torch.stack([sampler.probabilities(row) for row in rows])
    torch.testing.assert_close(got, expected.softmax(dim=-1))


def test_off_is_off(rows: Tensor) -> None:
    for got in (keep_top_k(rows, 0), keep_top_p(rows, 1.0)):
        assert torch.equal(got, rows)


# Draws


def test_draws_follow_the_probabilities() -> None:
    sampler = TokenSampler(SamplingParams(temperature=0.8, top_k=6, top_p=0.9, seed=0))
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 1.4, 0.0, -3.0, 0.9])
    expected = sampler.probabilities(logits)
    draws = torch.tensor([sampler.draw(logits) for _ in range(3_000)])
    observed = torch.bincount(draws, minlength=8) / 3_000
    assert (observed[expected == 0] == 0).all()
    # Four standard errors of a share of 3,000 draws: 4 · √(0.25 / 3,000) = 0.037.
    torch.testing.assert_close(observed.double(), expected, atol=0.037, rtol=0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_temperatures_next_to_zero_take_the_likeliest(temperature: float) -> None:
    sampler = TokenSampler(SamplingParams(temperature=temperature, seed=0))
    assert [sampler.draw(torch.tensor([1.0, 80.0, 79.0])) for _ in range(20)] == [1] * 20


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    sampler = TokenSampler(SamplingParams(temperature=5.0, top_p=0.99, seed=0))
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0])
    assert {sampler.draw(logits) for _ in range(50)} == {1, 3}


def test_a_batch_is_picked_row_by_row() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(temperature=float(row % 2), seed=row) for row in range(5)]
    expected = [TokenSampler(each).draw(row) for each, row in zip(params, logits, strict=True)]
    assert pick_tokens(logits, [TokenSampler(each) for each in params]) == expected
    assert pick_tokens(logits[:0], []) == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_no_distribution_gives_no_token_and_draws_none(bad: float, dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=1.0, seed=3)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    broken = logits.clone()
    broken[1, 1:] = bad
    broken[1, 0] = torch.nan if bad != bad else -torch.inf
    samplers, fresh = ([TokenSampler(each) for each in (params, params, SamplingParams())] for _ in range(2))
    first, none, greedy_one = pick_tokens(broken, samplers)
    assert none is None
    assert [first, greedy_one] == pick_tokens(logits[[0, 2]], [fresh[0], fresh[2]])
    assert pick_tokens(logits, samplers) == pick_tokens(logits, fresh)
    with pytest.raises(ValueError, match="one for each"):
        pick_tokens(logits, samplers[:1])
