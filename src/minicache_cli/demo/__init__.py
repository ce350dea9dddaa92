"""`minicache demo`: what the engine's parts are for, on the shipped model, and then a real one, in about a minute.

Each part ends with a sentence that is made from what was measured, whatever that was.
"""

from __future__ import annotations

from gettext import gettext as _
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from minicache_cli.folders import make_folder
from minicache_cli.labs import Mine, use_labs

PROMPTS = (
    "Yesterday I",
    "Tomorrow she",
    "Every day they",
    "Now we",
    "Last week the teacher",
    "Next year you",
    "Did he",
    "Will the children",
)

NUM_TIMED = 3
"""Of these, the prompts of the first part: computing everything anew for each token takes its time."""

app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("out/demo"),
    max_seq_len: Annotated[int, typer.Option(min=16, max=512, help="Length of prompt + text, in tokens.")] = 400,
    mine: Mine = False,
) -> None:
    """A KV cache's speed, a paged cache's memory, a burst of requests through two schedulers; and a real model."""
    console = Console()
    make_folder(out)
    if mine:
        use_labs(console)
    import torch

    from minicache.grammar import Tokenizer
    from minicache.model import load_minigpt
    from minicache_cli.demo import burst, memory, questions, speed

    torch.set_num_threads(1)  # a second thread makes steps this small slower and their times noisy
    model, tokenizer = load_minigpt(), Tokenizer()
    console.rule(_("1 of 4: what a KV cache saves"), align="left")
    speed.show(model, tokenizer, PROMPTS[:NUM_TIMED], max_seq_len, out, console)
    console.rule(_("2 of 4: what a paged KV cache saves"), align="left")
    memory.show(model, tokenizer, PROMPTS, max_seq_len, out, console)
    console.rule(_("3 of 4: what continuous batching saves"), align="left")
    burst.show(model, tokenizer, PROMPTS, out, console)
    console.rule(_("4 of 4: a real model; with 135 million parameters it is often wrong"), align="left")
    questions.show(questions.MODEL, console)
    console.print(_("Next: minicache grade 0, the first lab"))
