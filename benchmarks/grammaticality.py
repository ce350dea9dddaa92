"""How much of what the shipped MiniGPT says is grammatical?

Samples completions of real prompts at temperature 1, has the grammar's parser read each, and writes the share to
`results/grammaticality.json`. Takes about half a minute.

    python -m benchmarks.grammaticality
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks._record import record
from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.engine.picking import sampler
from minicache.errors import UngrammaticalError
from minicache.grammar import Tokenizer, check_text, join_words, split_words
from minicache.model import MiniGPT, load_minigpt

PROMPTS = (
    "Yesterday I",
    "Tomorrow she",
    "Every day they",
    "Now we",
    "Last week the teacher",
    "Next summer my brother",
    "Every morning Anna",
    "Right now the children",
    "Two days ago you",
    "Did you",
    "Will the doctor",
    "Are they",
    "Does Tom",
    "What did she",
    "The students",
    "He was",
)


@dataclass(frozen=True)
class Completion:
    """One sampled text.

    Attributes:
        text: prompt and completion.
        ended: whether the model ended it; otherwise the token limit cut it off.
        error: None if the text is grammatical (cut off: could still become a grammatical text), else what is wrong.
    """

    text: str
    ended: bool
    error: str | None


@dataclass(frozen=True)
class Report:
    """What the parser said about a sample of completions."""

    completions: tuple[Completion, ...]

    @property
    def share(self) -> float:
        """The grammatical part of all completions, 0 … 1."""
        return sum(completion.error is None for completion in self.completions) / len(self.completions)

    def count(self, *, ended: bool, grammatical: bool) -> int:
        """How many completions ended by themselves (or did not) and are grammatical (or are not)."""
        return sum(c.ended is ended and (c.error is None) is grammatical for c in self.completions)

    @property
    def failures(self) -> list[Completion]:
        """The ungrammatical ones."""
        return [completion for completion in self.completions if completion.error is not None]


def measure_grammaticality(
    model: MiniGPT,
    num_completions: int = 500,
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    prompts: Sequence[str] = PROMPTS,
) -> Report:
    """Sample completions of the prompts in turn and check each whole text, prompt included.

    A completion that reaches the end token has to be a complete grammatical text; one that the limit cuts off has to
    be the beginning of one.

    Args:
        model: the model to measure, fp32 on the CPU.
        num_completions: how many in all, ≥ 1; prompt i gets every len(prompts)-th of them.
        max_new_tokens: where a completion is cut off, ≥ 1.
        temperature: of the sampling; 1 is the model's own distribution.
        seed: makes the sample repeatable.
        prompts: openings of texts in the tokenizer's words.

    Raises:
        ValueError: there is nothing to measure, or the temperature is not positive.
        UnknownWordError: a prompt has a word that the tokenizer lacks.
    """
    if num_completions < 1 or max_new_tokens < 1 or not prompts or not temperature > 0:
        raise ValueError("give at least one completion, one new token, one prompt, and a temperature above 0")
    completions: list[Completion] = []
    for index, prompt in enumerate(prompts):
        batch_size = len(range(index, num_completions, len(prompts)))
        if batch_size:
            completions += _complete(model, prompt, batch_size, max_new_tokens, temperature, seed + index)
    return Report(tuple(completions))


def _complete(
    model: MiniGPT, prompt: str, batch_size: int, max_new_tokens: int, temperature: float, seed: int
) -> list[Completion]:
    """Sample one prompt several times at once. A batch runs until all its texts have ended, or to the limit."""
    tokenizer, config = Tokenizer(), model.config
    prompt_ids = torch.tensor([tokenizer.encode(prompt)]).repeat(batch_size, 1)
    max_seq_len = prompt_ids.shape[1] + max_new_tokens
    cache = KVCache(config.num_layers, batch_size, config.num_kv_heads, max_seq_len, config.head_dim)
    ended = torch.zeros(batch_size, dtype=torch.bool)
    columns: list[torch.Tensor] = []
    for tokens in decode(model, prompt_ids, max_new_tokens, cache=cache, pick=sampler(temperature, seed)):
        columns.append(tokens)
        ended |= tokens == tokenizer.end_token_id
        if ended.all():
            break
    rows = torch.stack(columns, dim=1).tolist()
    return [judge(prompt, row, tokenizer) for row in rows]


def judge(prompt: str, new_ids: list[int], tokenizer: Tokenizer) -> Completion:
    """Cut an answer at its end token and have the parser read it.

    Args:
        prompt: its opening, in the tokenizer's words.
        new_ids: its tokens, up to the end token or a limit, or beyond.
        tokenizer: MiniGPT's.
    """
    ended = tokenizer.end_token_id in new_ids
    if ended:
        new_ids = new_ids[: new_ids.index(tokenizer.end_token_id)]
    words = split_words(prompt) + tokenizer.decode_words(new_ids)
    try:
        check_text(words, unfinished=not ended)
    except UngrammaticalError as error:
        return Completion(join_words(words), ended, str(error))
    return Completion(join_words(words), ended, None)


def main(
    completions: Annotated[int, typer.Option(min=1, help="How many completions.")] = 500,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=500, help="Where a completion is cut off.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 1 is the model's own distribution.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Makes the sample repeatable.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Another checkpoint than the shipped one.")] = None,
) -> None:
    torch.set_num_threads(1)  # steps this small are slower on two
    report = measure_grammaticality(
        load_minigpt(checkpoint), completions, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    path = record(
        "grammaticality",
        {
            "completions": len(report.completions),
            "share": report.share,
            "ended_grammatical": report.count(ended=True, grammatical=True),
            "ended_ungrammatical": report.count(ended=True, grammatical=False),
            "cut_grammatical": report.count(ended=False, grammatical=True),
            "cut_ungrammatical": report.count(ended=False, grammatical=False),
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "prompts": list(PROMPTS),
            "failures": [failure.error for failure in report.failures],
        },
    )
    for failure in report.failures:
        print(f"{failure.text}\n    {failure.error}")
    print(f"{report.share:.1%} of {len(report.completions)} completions are grammatical → {path}")


if __name__ == "__main__":
    typer.run(main)
