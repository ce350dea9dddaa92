"""`minicache generate` and `minicache train`: the model speaks, and the model is made."""

from __future__ import annotations

import time
from gettext import gettext as _
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from minicache.engine.options import EngineOptions
from minicache.palette import color
from minicache_cli.labs import Mine, use_labs
from minicache_cli.options import with_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from minicache.cache.dense import KVCache
    from minicache.engine.kv import ModelConfig
    from minicache.engine.stopping import Tokenizer

app = typer.Typer()

CacheKind = Literal["none", "dense", "paged"]


@app.command()
@with_options(EngineOptions, only=("model",))
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt, such as "Yesterday I".')],
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 48,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: greedy decoding; 1: sample from the model's distribution.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed for reproducible sampling.")] = None,
    cache: Annotated[CacheKind, typer.Option(help="The KV cache; none recomputes everything.")] = "dense",
    mine: Mine = False,
    **engine: Any,
) -> None:
    """Complete PROMPT with MiniGPT or another model, token by token."""
    console = Console(highlight=False)
    if mine:
        use_labs(Console(stderr=True))
    import torch

    from minicache.engine.decoding import decode
    from minicache.engine.loading import find_model, load_model, load_tokenizer
    from minicache.engine.picking import sampler
    from minicache.grammar import Tokenizer as MiniGPTTokenizer

    found = find_model(engine["model"])
    model, tokenizer = load_model(found, None, None), load_tokenizer(found)
    if tokenizer is None:
        raise typer.BadParameter(f"{found} has no tokenizer, so it takes no text")
    if isinstance(tokenizer, MiniGPTTokenizer):
        torch.set_num_threads(1)  # steps this small are slower on two
    prompt_ids = tokenizer.encode(prompt)
    room = model.config.max_seq_len - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise typer.BadParameter(f"the prompt must have 1 … {model.config.max_seq_len - 1} tokens")
    max_tokens = min(max_tokens, room)
    kv_cache = _make_cache(cache, model.config, num_rows=len(prompt_ids) + max_tokens)
    start = time.perf_counter()
    steps = decode(model, torch.tensor([prompt_ids]), max_tokens, cache=kv_cache, pick=sampler(temperature, seed))
    num_tokens = _stream(console, tokenizer, prompt_ids, steps)
    seconds = time.perf_counter() - start
    used = _("no KV cache")
    if kv_cache is not None:
        used = _("{count:,} bytes of KV cache used").format(count=kv_cache.nbytes_used)
    summary = f"{num_tokens} tokens, {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s, {used}"
    console.print(summary, style="dim", soft_wrap=True)


@app.command(rich_help_panel="For teachers and authors")
def train(
    out: Annotated[Path | None, typer.Option(help="Checkpoint file; default: the shipped one's name, in out/.")] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="Train the small draft model for speculative decoding.")
    ] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; default: the shipped model's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for weights and corpus; default: the shipped model's.")] = None,
) -> None:
    """Train MiniGPT from scratch: the same seed reproduces the shipped checkpoint."""
    from minicache.model import save_minigpt
    from minicache.model.checkpoint import SHIPPED, SHIPPED_DRAFT
    from minicache.model.training import SEED, STEPS, draft_config, train

    console = Console(highlight=False)
    start = time.perf_counter()
    out = Path("out") / (SHIPPED_DRAFT if draft else SHIPPED).name if out is None else out
    config = draft_config() if draft else None
    run = train(STEPS if steps is None else steps, SEED if seed is None else seed, config=config, console=console)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_minigpt(run.model, out)
    last = run.losses[-50:]
    console.print(
        f"{out}: loss {sum(last) / len(last):.3f} after {len(run.losses)} steps and "
        f"{time.perf_counter() - start:.0f} s. Try it: minicache generate 'Yesterday I' --model {out}",
        soft_wrap=True,
    )


def _make_cache(kind: CacheKind, config: ModelConfig, num_rows: int) -> KVCache | None:
    """An empty cache of `num_rows` rows for one sequence, or None."""
    if kind == "none":
        return None
    from minicache.cache.dense import KVCache
    from minicache.cache.paged import PagedKVCache

    cache_class = PagedKVCache if kind == "paged" else KVCache
    return cache_class(config.num_layers, 1, config.num_kv_heads, num_rows, config.head_dim)


def _stream(console: Console, tokenizer: Tokenizer, prompt_ids: list[int], steps: Iterable[Tensor]) -> int:
    """Print the prompt, then the text of each token as it comes, until it ends; the number of tokens generated."""
    from minicache.engine.stopping import TextStream, end_token_ids

    def show(text: str, role: str) -> None:
        console.print(Text(text, style=color(role, "dark")), end="", soft_wrap=True)

    show(tokenizer.decode(prompt_ids), "prompt")
    text, ends, num_tokens = TextStream(tokenizer, prompt_ids), end_token_ids(tokenizer), 0
    for step in steps:
        token_id, num_tokens = int(step), num_tokens + 1
        if token_id in ends:
            break
        show(text.push(token_id), "generated")
    show(text.finish(), "generated")
    if num_tokens and token_id in ends:
        show(" ■", "end")
    console.print()
    return num_tokens
