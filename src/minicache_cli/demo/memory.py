"""The demo's second half: what a paged cache is for. Dense and paged side by side: same tokens, two sizes.

Eight requests start together and each finishes when its text ends, which is not known in advance. The dense caches
reserve the longest text for each. The paged caches share one storage, no larger than they need at once, and take a
block when the last one is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from gettext import gettext as _
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from minicache.errors import MinicacheError
from minicache.palette import color
from minicache.plots import save_plot
from minicache_cli.show import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minicache.cache.dense import KVCache
    from minicache.cache.paged import PagedStorage
    from minicache.grammar import Tokenizer
    from minicache.model import MiniGPT

BLOCK_SIZE = 16
WAYS = {"dense": "wasted", "paged": "generated"}
"""Way of keeping rows → its colour role."""


@dataclass
class Run:
    """All requests decoded over one kind of cache, step by step.

    Attributes:
        token_ids: the new tokens of each request.
        reserved: bytes reserved, from start to end.
        taken: bytes of these that a request has for itself, after each step.
        used: bytes of these that hold a token of a request still running.
    """

    token_ids: list[list[int]]
    reserved: int = 0
    taken: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)


def show(
    model: MiniGPT, tokenizer: Tokenizer, texts: Sequence[str], max_seq_len: int, out: Path, console: Console
) -> None:
    """Complete `texts` over dense and over paged caches, print the memory of both, and save the plot in `out`.

    Raises:
        MinicacheError: the two ways disagree about a token.
    """
    from minicache.cache.dense import KVCache
    from minicache.cache.paged import PagedKVCache, PagedStorage
    from minicache.memory.blocks import BlockPool

    prompts, config = [tokenizer.encode(text) for text in texts], model.config
    sizes = (config.num_layers, 1, config.num_kv_heads, max_seq_len, config.head_dim)
    caches = [KVCache(*sizes) for _ in prompts]
    dense = _decode_all(model, tokenizer, prompts, caches, console)
    dense.reserved = sum(cache.nbytes for cache in caches)
    pool = BlockPool(_most_blocks_at_once(prompts, dense.token_ids), BLOCK_SIZE)
    storage = PagedStorage(pool, config.num_layers, config.num_kv_heads, config.head_dim)
    caches = [PagedKVCache(*sizes, storage=storage) for _ in prompts]
    paged = _decode_all(model, tokenizer, prompts, caches, console)
    paged.reserved = storage.nbytes
    for text, expected, got in zip(texts, dense.token_ids, paged.token_ids, strict=True):
        if expected != got:
            message = _("{text!r}: the paged cache changed the tokens. That is a bug: please report it.")
            raise MinicacheError(message.format(text=text))
    lengths = ", ".join(str(len(token_ids)) for token_ids in paged.token_ids)
    message = _("Sampled until each text ends, {most} tokens at most. New tokens:")
    console.print(message.format(most=max_seq_len))
    console.print(lengths, soft_wrap=True)
    runs = {"dense": dense, "paged": paged}
    console.print(_totals(runs))
    console.print(f"[bold]{verdict(dense.reserved / paged.reserved)}[/]")
    console.print(quantized(storage), soft_wrap=True)
    plot, title = out / "memory.png", "Eight requests: reserved in advance, or block by block"
    save_plot(partial(_plot, dense=dense, paged=paged), title, plot)
    console.print(_("Plot: {file}").format(file=f"[bold]{plot}[/]"), soft_wrap=True)


def _most_blocks_at_once(prompts: list[list[int]], token_ids: list[list[int]]) -> int:
    """The blocks that all running requests hold together when they hold most."""
    from minicache.memory.blocks import blocks_for

    lengths = [(len(prompt), len(new)) for prompt, new in zip(prompts, token_ids, strict=True)]
    steps = range(max(num_new for _, num_new in lengths))
    return max(sum(blocks_for(p + step, BLOCK_SIZE) for p, num_new in lengths if step < num_new) for step in steps)


def _decode_all(
    model: MiniGPT, tokenizer: Tokenizer, prompts: list[list[int]], caches: Sequence[KVCache], console: Console
) -> Run:
    """One token of every unfinished request a step, until all have ended: their tokens, and bytes at each step."""
    import torch

    from minicache.engine.decoding import decode
    from minicache.engine.picking import sampler

    run, max_seq_len = Run([[] for _ in prompts]), caches[0].max_seq_len
    running = {
        index: decode(model, torch.tensor([ids]), max_seq_len - len(ids), cache=cache, pick=sampler(1.0, seed=index))
        for index, (ids, cache) in enumerate(zip(prompts, caches, strict=True))
    }
    for _step in track(range(max_seq_len), description=type(caches[0]).__name__, console=console, transient=True):
        for index, steps in list(running.items()):
            token = next(steps, None)
            if token is not None:
                run.token_ids[index].append(int(token))
            if token is None or int(token) == tokenizer.end_token_id:
                caches[index].reset()
                del running[index]
        if not running:
            break
        run.taken.append(sum(cache.nbytes for cache in caches))
        run.used.append(sum(cache.nbytes_used for cache in caches))
    return run


def verdict(saving: float) -> str:
    """What the totals show: `saving` is the dense caches' memory over that of the paged ones."""
    if round(saving, 1) > 1:
        return _("Same tokens, with {saving:.1f} times less memory reserved.").format(saving=saving)
    message = _("Same tokens, but no memory was saved ({saving:.1f} ×): texts this short do not fill their blocks.")
    return message.format(saving=saving)


def quantized(storage: PagedStorage) -> str:
    """Bytes per token of an int8 storage with scales, counted in its tensors, compared with this one's."""
    from minicache.cache.quantized import QuantizedStorage
    from minicache.memory.blocks import BlockPool

    one = QuantizedStorage(BlockPool(1, 1), storage.num_layers, storage.num_kv_heads, storage.head_dim)
    saving = storage.token_nbytes / one.nbytes
    message = _(
        'With kv_cache_dtype="int8" a token takes {int8:,} bytes instead of {float32:,}, scales included: the same '
        "memory holds {saving:.1f} times as many tokens, rounded to 8 bits."
    )
    return message.format(int8=one.nbytes, float32=storage.token_nbytes, saving=saving)


def _totals(runs: dict[str, Run]) -> Table:
    """Bytes reserved, taken and used, one table row per cache."""
    sizes = (_("KiB reserved"), _("KiB taken"), _("KiB with tokens"))
    headings = ("", *sizes, _("tokens / reserved"), _("tokens / taken"))
    caption = _("means of all steps · taken: unavailable to others · with tokens: of running requests")
    table = figures(*headings, caption=caption)
    names = {"dense": _("dense"), "paged": _("paged")}
    for way, run in runs.items():
        taken, used = fmean(run.taken), fmean(run.used)
        table.add_row(
            Text(names[way], style=color(WAYS[way], "dark")),
            *(f"{nbytes / 1024:,.0f}" for nbytes in (run.reserved, taken, used)),
            f"{100 * used / run.reserved:.1f} %",
            f"{100 * used / taken:.1f} %",
        )
    return table


def _plot(figure: Figure, dense: Run, paged: Run) -> None:
    """Bytes reserved in both ways, and used, after each step."""
    axes = figure.subplots()
    steps = range(len(paged.used))
    taken, used = ([nbytes / 2**20 for nbytes in sizes] for sizes in (paged.taken, paged.used))
    axes.axhline(dense.reserved / 2**20, label="dense: reserved", color=color(WAYS["dense"]))
    axes.axhline(paged.reserved / 2**20, label="paged: reserved", color=color(WAYS["paged"]), linestyle="--")
    axes.step(steps, taken, where="post", label="paged: taken", color=color(WAYS["paged"]))
    axes.fill_between(steps, used, step="post", label="holds a token", color=color("prompt"), alpha=0.7)
    axes.set(xlabel="step", ylabel="MiB of KV cache", ylim=(0, None))
    axes.legend()
