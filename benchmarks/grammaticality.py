"""How much of what the shipped MiniGPT says is grammatical?

Samples completions of real prompts at temperature 1, has the grammar's parser read each, and writes the share to
`results/grammaticality.json`. Takes about half a minute.

    python -m benchmarks.grammaticality
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks._record import record
from minicache.engine.grammaticality import PROMPTS, measure_grammaticality
from minicache.model import load_minigpt


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
