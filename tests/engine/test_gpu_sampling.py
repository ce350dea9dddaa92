"""Tokens picked in batches, with a random number for each: on the CPU, which computes the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from minicache.engine.runners.sampling import GPUSampler, draw
from minicache.engine.sampling import SamplingParams, TokenSampler, pick_tokens

NUM_DRAWS = 4000


def logits_of(num_rows: int, vocab_size: int = 40, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 7, 40])
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_each_token_is_drawn_as_often_as_its_probability_says(temperature: float, top_k: int, top_p: float) -> None:
    """Uniform numbers in equal steps: how often a token comes is its probability, but for one step."""
    (row,) = logits_of(1)
    row[3] = -torch.inf
    row[5] = row[6] = row.sort().values[-7]  # equals: the seventh likeliest, and others with its logit
    uniform = (torch.arange(NUM_DRAWS, dtype=torch.float64) + 0.5) / NUM_DRAWS
    kept = torch.full((NUM_DRAWS,), top_k or 40), torch.full((NUM_DRAWS,), top_p if top_p < 1 else 2.0).double()
    whole = top_k == 0 and top_p == 1
    drawn = draw(row.expand(NUM_DRAWS, -1), torch.full((NUM_DRAWS,), temperature), None if whole else kept, uniform)
    share = drawn.bincount(minlength=40) / NUM_DRAWS
    expected = TokenSampler(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)).probabilities(row)
    torch.testing.assert_close(share.double(), expected, rtol=0, atol=1.5 / NUM_DRAWS)
    assert not share[expected == 0].any()


@pytest.mark.parametrize("uniform", [1e-300, 2**-53, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [40, 3])
def test_a_token_of_probability_0_is_never_drawn(uniform: float, top_k: int) -> None:
    rows = logits_of(200)
    rows[:, [0, 17, 39]] = -torch.inf
    ones = torch.ones(200, dtype=torch.float64)
    drawn = draw(rows, ones, (torch.full((200,), top_k), 2 * ones), uniform * ones)
    assert rows.gather(1, drawn[:, None]).isfinite().all()
    assert not {0, 17, 39} & set(draw(rows, ones, None, uniform * ones).tolist())


def test_rows_without_chance_are_the_likeliest_tokens() -> None:
    """As `pick_tokens`: greedy ones, next to no temperature, one token left; and no token for NaN and infinities."""
    logits = logits_of(9)
    logits[1, 4], logits[3, 4], logits[5] = torch.nan, torch.inf, -torch.inf
    params = [
        *[SamplingParams()] * 4,
        *[SamplingParams(temperature=1e-300), SamplingParams(temperature=1.0)],
        *[SamplingParams(temperature=1.0, top_k=1), SamplingParams(temperature=2.0, top_p=1e-9)],
        SamplingParams(temperature=5.0, top_k=10**9, top_p=1e-9),
    ]
    samplers = [TokenSampler(each) for each in params]
    assert GPUSampler().pick_tokens(logits, range(9), samplers) == pick_tokens(logits, samplers)


def test_rows_that_are_picked() -> None:
    logits = logits_of(5)
    samplers = [TokenSampler(SamplingParams()) for _ in range(2)]
    assert GPUSampler().pick_tokens(logits, [1, 4], samplers) == logits[[1, 4]].argmax(dim=1).tolist()
    assert GPUSampler().pick_tokens(logits, [], []) == []


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    """The n-th draw of a request depends on its seed and its logits, and on nothing else."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
    alone, crowd = GPUSampler(), GPUSampler()
    one, same = TokenSampler(params), TokenSampler(params)
    others = [TokenSampler(SamplingParams(temperature=t, top_k=k)) for t, k in ((0.0, 0), (1.0, 0), (2.0, 5))]
    tokens = []
    for step in range(12):
        logits = logits_of(4, seed=step)
        tokens += alone.pick_tokens(logits, [2], [one])
        at = step % 4
        order = [2, *[row for row in range(4) if row != 2]]
        order[0], order[at] = order[at], order[0]
        samplers = [*others[:at], same, *others[at:]]
        assert crowd.pick_tokens(logits[order], range(4), samplers)[at] == tokens[-1]
    assert len(Counter(tokens)) > 4
