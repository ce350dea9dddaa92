"""How one token is picked from a row of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pick = Callable[[Tensor], Tensor]
"""Logits `[B, vocab]` → token ids `[B]` int64."""


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row; the lowest id among equals.

    Args:
        logits: `[B, vocab]`.

    Returns:
        `[B]` int64.
    """
    return logits.argmax(dim=-1)


def sampler(temperature: float, seed: int | None = None) -> Pick:
    """A `Pick` that draws from softmax(logits / temperature).

    Args:
        temperature: 0 is greedy; 1 is the model's own distribution.
        seed: makes the draws repeatable; None takes a fresh one.

    Raises:
        ValueError: the temperature is negative or not finite.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive finite number; got {temperature}")
    if temperature == 0:
        return greedy
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        # Drawn on the CPU, so that a seed gives the same tokens whatever device the model runs on.
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(-1).to(logits.device)

    return draw
