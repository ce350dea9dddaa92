"""How the shipped checkpoints were made: MiniGPT, and a smaller one that drafts for it, trained on the grammar's texts.

No text is seen twice: the corpus is a stream, fixed by a seed. Two steps in three look at short rows, which are cheap
and teach agreement and tense; the third at rows as long as the context, so every position is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from minicache.grammar import Tokenizer, sample_text
from minicache.model.config import MiniGPTConfig
from minicache.model.minigpt import MiniGPT

STEPS = 3000
SEED = 0
TOKENS_PER_STEP = 2048
ROW_LENGTHS = (128, 128, 512)  # of one step after the other
PEAK_LEARNING_RATE = 4e-3
WARMUP_STEPS = 100
LOSS_TEMPERATURE = 1.8


def draft_config() -> MiniGPTConfig:
    """The shape of the shipped draft model: one layer, a fourteenth of MiniGPT's parameters."""
    return MiniGPTConfig(
        vocab_size=Tokenizer().vocab_size,
        hidden_size=64,
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=128,
    )


@dataclass(frozen=True)
class TrainingRun:
    """What a training run gives back.

    Attributes:
        model: the trained model, in evaluation mode.
        losses: mean cross-entropy of each step, in nats a token.
    """

    model: MiniGPT
    losses: list[float]


def train(
    steps: int = STEPS, seed: int = SEED, *, config: MiniGPTConfig | None = None, console: Console | None = None
) -> TrainingRun:
    """Train a MiniGPT from scratch on the CPU.

    AdamW (Loshchilov and Hutter 2019) with a linear warm-up and a cosine decay to zero, gradients clipped to norm 1.

    The loss is cross-entropy at temperature 1.8: there the model copies the corpus's frequencies, and at 1.0 it is
    surer than the corpus. After minutes of training some probability is still left on words that cannot stand there;
    at 1.0 that becomes rare enough for texts of a hundred words.

    A seed fixes every text of the corpus on any machine, and the initial weights for a torch release. With the same
    torch release, kind of CPU and number of threads (`torch.get_num_threads()`) the whole run repeats bit for bit.
    Where one of them differs, sums round differently and the weights drift apart; loss and grammaticality come out
    alike.

    Args:
        steps: optimiser steps, ≥ 1, of 2,048 tokens each. The default is what the shipped checkpoint took.
        seed: fixes initial weights and corpus.
        config: the model's shape; None takes the shipped model's. Its vocabulary has to be the tokenizer's.
        console: where to show progress; None shows none.

    Returns:
        The trained model and the loss of every step.

    Raises:
        ValueError: `steps` is below 1, or the config's vocabulary is not the tokenizer's.
    """
    tokenizer = Tokenizer()
    config = config or MiniGPTConfig(vocab_size=tokenizer.vocab_size)
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if config.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the config {config.vocab_size}")
    with torch.random.fork_rng(devices=[]):  # the constructor draws too; what it draws is not used
        model = MiniGPT(config)
    initialise(model, seed)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    corpus = Corpus(seed, tokenizer)
    losses: list[float] = []
    with _progress(console) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = learning_rate(step, steps)
            row_length = min(ROW_LENGTHS[step % len(ROW_LENGTHS)], config.max_seq_len)
            losses.append(_step(model, optimiser, corpus.batch(row_length)))
            progress.update(task, advance=1, loss=sum(losses[-50:]) / len(losses[-50:]))
    return TrainingRun(model.eval(), losses)


def initialise(model: MiniGPT, seed: int) -> None:
    """Draw initial weights: N(0, 0.2²) for the embedding, N(0, 1/fan_in) for the matrices, ones for the norms.

    The two matrices that write to the residual stream are scaled down by √(2L), so the stream's variance does not
    grow with depth (Radford et al. 2019). The embedding is large because it is also the output layer: with the usual
    0.02, logits would need hundreds of steps to become far enough apart to rule a word out.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            nn.init.ones_(parameter)
            continue
        std = 0.2 if name.startswith("embed_tokens") else parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * model.config.num_layers)
        nn.init.normal_(parameter, std=std, generator=generator)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up to the peak, then a half cosine down to zero."""
    warmup = min(WARMUP_STEPS, steps // 10)
    if step < warmup:
        return PEAK_LEARNING_RATE * (step + 1) / warmup
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class Corpus:
    """An endless stream of grammatical texts, cut into rows of token ids."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self.rng = Random(seed)
        self.tokenizer = tokenizer

    def batch(self, row_length: int) -> Tensor:
        """Draw the rows of one step: `[TOKENS_PER_STEP // row_length, row_length + 1]` int64.

        The extra column is there because inputs and targets are the same tokens, one apart.
        """
        num_rows = max(1, TOKENS_PER_STEP // row_length)
        return torch.tensor([self._row(row_length + 1) for _ in range(num_rows)])

    def _row(self, length: int) -> list[int]:
        """A row begins with a text, as a prompt does, and is filled up with further texts; the last is cut off."""
        row: list[int] = []
        while len(row) < length:
            text = sample_text(self.rng, length - len(row), cut=True)
            row += [*self.tokenizer.encode_words(text), self.tokenizer.end_token_id]
        return row[:length]


def _step(model: MiniGPT, optimiser: torch.optim.Optimizer, rows: Tensor) -> float:
    """One optimiser step; returns the loss before it."""
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1) / LOSS_TEMPERATURE, rows[:, 1:].flatten())
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def _progress(console: Console | None) -> Progress:
    """A progress bar with the mean loss of the last 50 steps."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
