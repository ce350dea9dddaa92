"""For the tests of the engine: the shipped model, prompts, and their tokens by a way that has no engine in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from minicache.engine.decoding import decode
from minicache.engine.sampling import TokenSampler
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT, load_minigpt
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.observe import Observer

PROMPTS = (
    "Yesterday I",
    "She",
    "Did the children read the book yesterday? Yes, they",
    "The",
    "Later my sister",
    "Tomorrow the boy will",
    "What did she do last summer? She",
    "They are",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(scope="session")
def model() -> MiniGPT:
    return load_minigpt()


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in PROMPTS]


Alone = Callable[..., list[int]]


@pytest.fixture(scope="session")
def alone(model: MiniGPT) -> Alone:
    """`alone(prompt, num_tokens, params=None)`: a request's tokens by full recomputation, no one else being there.

    Greedy tokens are taken only where no second token is near, so rounding cannot decide a test.
    """

    @cache
    def tokens(prompt: tuple[int, ...], num_tokens: int, params: object) -> tuple[int, ...]:
        sampler = None if params is None else TokenSampler(params)  # type: ignore[arg-type]

        def pick(logits: torch.Tensor) -> torch.Tensor:
            if sampler is not None:
                return torch.tensor([sampler.draw(logits[0])])
            best, second = logits[0].topk(2).values.tolist()
            assert best - second > 1e-4, "a near tie: take another prompt"
            return logits.argmax(dim=-1)

        return tuple(int(token) for token in decode(model, torch.tensor([prompt]), num_tokens, pick=pick))

    return lambda prompt, num_tokens, params=None: list(tokens(tuple(prompt), num_tokens, params))


class Watch(Observer):
    """Counts what a test has to be sure of, and checks the scheduler's books after every step."""

    def __init__(self) -> None:
        self.batches: list[dict[object, int]] = []
        self.num_preempted = 0
        self.num_swapped_in = 0

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        self.batches.append(dict(output.num_scheduled_tokens))
        self.num_preempted += len(output.preempted)
        self.num_swapped_in += len(output.swapped_in)
        scheduler.check()

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: object) -> None:
        scheduler.check()


@pytest.fixture
def watch() -> Watch:
    return Watch()
