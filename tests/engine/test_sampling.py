"""Picking tokens: greedy, and draws that follow the softmax."""

import pytest
import torch

from minicache.sampling import greedy, sampler


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
