"""How phase 1's decode loop picks a token from a row of logits, in the same way for a whole batch.

`minicache.engine.sampling` picks with parameters per request. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # NumPy is seven times as fast
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def sampler(temperature: float, seed: int | None = None) -> Pick:
    """A `Pick` that draws from softmax(logits / temperature).

    Args:
        temperature: 0 is greedy; 1 is the model's own distribution.
        seed: makes the draws repeatable; None takes a fresh one.

    Raises:
        ValueError: the temperature is negative or not finite.
    """
    check_temperature(temperature)
    if temperature == 0:
        return greedy
    generator = new_generator(seed)

    def draw(logits: Tensor) -> Tensor:
        # Drawn on the CPU: a seed gives the same tokens on every device.
        probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        return torch.multinomial(probabilities, num_samples=1, generator=generator).squeeze(-1).to(logits.device)

    return draw


def new_generator(seed: int | None) -> torch.Generator:
    """A random generator on the CPU. The seed makes it repeatable; None takes a fresh one."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def check_temperature(temperature: float) -> None:
    """Raise TypeError unless it is a number, and ValueError unless it is 0 or positive and finite."""
    check_number("temperature", temperature)
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or a positive finite number; got {temperature}")


def check_number(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a number; True is not one."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number; got {value!r}")


_NUMBERS: Final = (int, float)
